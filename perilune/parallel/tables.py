"""What the planner, the addresses and the kernels hand to each other: a plan, and where its segments lie.

Legend: R ranks, E experts, B slots, G = E/R + B groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Who executes what. All tensors int64, on the device of `counts`, the same on every rank.

    counts [R, E]    rows that source rank r routes to expert e (the input).
    assigned [R, E]  rows of expert e executed on rank r: `assigned.sum(0) == counts.sum(0)`.
    replicas [R, B]  global ids of the remote experts with rows on rank r, ascending; −1 idle.
    rows [R]         rows executed on rank r: `assigned.sum(1)`.
    quotas [R, R]    rows of experts at home on rank h that are executed on rank u (zero on the diagonal).
    """

    counts: Tensor
    assigned: Tensor
    replicas: Tensor
    rows: Tensor
    quotas: Tensor

    @property
    def ranks(self) -> int:
        return self.counts.shape[0]

    @property
    def experts(self) -> int:
        return self.counts.shape[1]

    @property
    def local(self) -> int:
        """Experts at home on each rank, E/R."""
        return self.experts // self.ranks

    @property
    def slots(self) -> int:
        """Remote experts each rank has room for, B."""
        return self.replicas.shape[1]


@dataclass(frozen=True)
class Segments:
    """Row ranges of every expert on every rank. int64.

    starts [R, E]  first row of expert e on rank r; −1 where r neither owns nor borrows e.
    ends [R, G]    padded end of each group: what a grouped matmul takes as offsets.
    rows [R, G]    rows in use of each group.
    """

    starts: Tensor
    ends: Tensor
    rows: Tensor


def occurrence(values: Tensor) -> Tensor:
    """For every element, how many equal ones come before it."""
    order = torch.argsort(values, stable=True)
    ascending = values[order]
    count = torch.empty_like(values)
    count[order] = torch.arange(values.numel(), device=values.device) - torch.searchsorted(ascending, ascending)
    return count
