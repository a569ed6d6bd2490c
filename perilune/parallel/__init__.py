"""Balanced expert exchange and context parallelism: a leaf usable in any MoE.

plan(counts)                   which rank executes how many rows of which expert
Exchange(fabric, E, K)(...)    one MoE layer over ranks: `Collective` (gloo, NCCL) or `symmetric.Symmetric` (NVLink)
kda_parallel(..., piece=...)   KDA on one rank's piece of a packed sequence; `shards` has what else crosses borders
"""

from perilune.parallel.exchange import Exchange
from perilune.parallel.experts import Experts
from perilune.parallel.fabric import Collective, FabricError
from perilune.parallel.planner import plan
from perilune.parallel.routes import Route, route, segments
from perilune.parallel.scan import kda_parallel
from perilune.parallel.shards import Shard, shard
from perilune.parallel.tables import Plan, Segments

__all__ = [
    "Collective",
    "Exchange",
    "Experts",
    "FabricError",
    "Plan",
    "Route",
    "Segments",
    "Shard",
    "kda_parallel",
    "plan",
    "route",
    "segments",
    "shard",
]
