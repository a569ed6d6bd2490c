"""Optimiser, loop, checkpoints, report."""
