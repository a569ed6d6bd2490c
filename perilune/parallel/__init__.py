"""Balanced expert exchange and context parallelism: a leaf usable in any MoE."""

from perilune.parallel.planner import Plan, plan
from perilune.parallel.routes import Route, Segments, route, segments

__all__ = ["Plan", "Route", "Segments", "plan", "route", "segments"]
