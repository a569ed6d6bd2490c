"""Many servers as one: sessions stay where their prefix is cached, and no class of requests starves another.

session -> (primary, secondary) by rendezvous hashing      placement
cost = new tokens, context, restore -> class -> budget     admission
secondary only, before the first token only                failover
"""

from perilune.serve.router.admission import Budget, Class, Cost, Refused
from perilune.serve.router.app import create_router, route
from perilune.serve.router.placement import placed

__all__ = ["Budget", "Class", "Cost", "Refused", "create_router", "placed", "route"]
