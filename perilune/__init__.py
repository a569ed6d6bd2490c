"""Perilune: the whole Kimi K3 system as software one engineer can run, read and change."""

__version__ = "0.1.0"
