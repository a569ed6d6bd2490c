"""Kernels and their references: a leaf, installable alone."""
