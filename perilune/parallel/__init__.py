"""Balanced expert exchange and context parallelism: a leaf usable in any MoE."""
