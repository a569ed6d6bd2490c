"""Ranks of a symmetric fabric that are one process on one card, for `bench/exchange.py --ranks R`.

Every buffer exists R times on the card, so rank 0's kernels do what they do among R cards, by the same addresses, with
two differences: what would cross NVLink stays in the card's memory, and a barrier waits for nobody. What is timed is
therefore the device's own work for one rank of R; the wire and the waiting are missing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.parallel.exchange import Exchange
from perilune.parallel.symmetric import PHASES, Shared, Symmetric
from perilune.parallel.symmetric_triton import barrier_kernel


class TwinHeap:
    """Rank `rank`'s view of allocations that all ranks make in the same order; the first to come makes everyone's."""

    def __init__(self, rank: int, size: int, made: list[list[Tensor]]) -> None:
        self.rank, self.size, self.made, self.taken = rank, size, made, 0

    def shared(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        if self.taken == len(self.made):
            self.made.append([torch.zeros(*shape, dtype=dtype, device="cuda") for _ in range(self.size)])
        all_ranks = self.made[self.taken]
        self.taken += 1
        where = torch.tensor([t.data_ptr() for t in all_ranks], dtype=torch.int64, device="cuda")
        return Shared(all_ranks[self.rank], where)


class Twin(Symmetric):
    """One of R ranks on this card; its barriers wait for itself."""

    def __init__(self, rank: int, size: int, made: list[list[Tensor]]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._start(rank, size, TwinHeap(rank, size, made), device, 1 << 24)

    def _barrier(self, phase: str, *reading: str) -> None:
        self._reading, self._lent = set(reading), ()
        barrier_kernel[(1,)](
            self._pads.peers[self.rank :], self._pads.mine, self._epoch, self._status, 0, PHASES.index(phase),
            R=1, RP=1, LIMIT=self.patience, num_warps=1,
        )  # fmt: skip


class Twins:
    """The exchanges of R ranks on one card; `first` is rank 0's."""

    def __init__(self, size: int, experts: int, top_k: int, tokens: int) -> None:
        made = list[list[Tensor]]()
        self.all = [Exchange(Twin(rank, size, made), experts, top_k, tokens=tokens) for rank in range(size)]
        self.first = self.all[0]

    def send(self, x_SH: Tensor, routes: Sequence[Tensor]) -> None:
        """Fill the buffers with what each rank sends when its tokens `x` go to experts routes[rank] [S, K]."""
        for _ in range(2):  # nobody waits, so the first round plans from counts that are not all there
            traffics = [one.route(ids.to(x_SH.device)) for one, ids in zip(self.all, routes, strict=True)]
        for one, traffic in zip(self.all, traffics, strict=True):
            weights = torch.full(traffic.host.shape, 1 / one.top_k, device=x_SH.device)
            one.fabric.push(x_SH, weights, traffic)
