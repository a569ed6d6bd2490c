"""The expert exchange of one MoE layer: dispatch, prefetch, compute, combine, reduce (report §5.2.1, §5.2.2).

    y_s = Σ_k w_{s,k} · E_{e(s,k)}(x_s)

    route    count rows, gather the counts, plan, find every entry's address           nothing differentiable
    enter    x -> rows sorted by expert; w -> one weight a row; experts -> slots       backward: pull, give_back
    compute  rows, weights, ends, own experts, lent experts -> weighted outputs        backward: prefetch again if
    needed leave    rows -> y, summed in fp32                                                 backward: push

`Exchange` is balanced, or classic: no replicas, one row per entry, buffers as large as the routing makes them (the
standard dropless all-to-all). Both have the same interface and the same results.
Slots are shared by all layers, so the weights a layer borrowed are gone when its backward runs; a `Loan` fetches them
again.
Legend: S tokens here, H width, K routes a token, N rows of the receive buffer, L = E/R own experts, B slots, G = L + B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.parallel.fabric import Fabric, Terms, Traffic
from perilune.parallel.routes import capacity


@dataclass
class Pool:
    """Slots [B, ...] for one kind of expert tensor, and the loan that filled them last."""

    slots: Tensor
    holder: Loan | None = None


@dataclass(eq=False)
class Loan:
    """The experts one layer borrows: fetched into the shared pools, and again whenever another layer has used them."""

    fabric: Fabric
    traffic: Traffic
    own: tuple[Tensor, ...]
    pools: tuple[Pool, ...]

    def fetch(self) -> bool:
        """Send for the borrowed experts unless the slots hold them still; True where something is under way."""
        if all(pool.holder is self for pool in self.pools):
            return False
        self.fabric.lend(self.own, [pool.slots for pool in self.pools], self.traffic)
        for pool in self.pools:
            pool.holder = self
        return True

    def slots(self) -> tuple[Tensor, ...]:
        """The borrowed experts, [B, ...] each; a collective call, by all ranks, where they must be fetched."""
        self.fabric.settle(self.fetch())
        return tuple(pool.slots for pool in self.pools)

    def gradient_slots(self) -> tuple[Tensor, ...]:
        """Where to write the gradients of used slots, [B, ...] each; contents undefined. Returned by backward as they
        are.
        """
        return tuple(self.fabric.gradient_slots([pool.slots for pool in self.pools]))


@dataclass
class Exchange:
    """Routes the tokens of all ranks to the experts of all ranks.

    experts: E, over all ranks; expert e is at home on rank e // (E/R). tokens: the most a rank brings; fixes the shape
    of the receive buffer (None: as many rows as each routing needs, known to the host). num_slots, tolerance: of the
    planner.
    align: rows a segment is padded to. balanced: False is the classic exchange.
    """

    fabric: Fabric
    experts: int
    top_k: int
    tokens: int | None = None
    num_slots: int | None = None
    tolerance: int = 0
    align: int = 1
    balanced: bool = True
    _pools: dict[Any, Pool] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.experts % self.fabric.size:
            raise ValueError(f"exchange: {self.experts} experts cannot be divided over {self.fabric.size} ranks")
        if not self.balanced:
            self.num_slots, self.tolerance = 0, 0
        self.slots = self.experts // self.fabric.size if self.num_slots is None else self.num_slots

    @property
    def rows(self) -> int | None:
        """Rows of the receive buffer where they are fixed: exact balance makes them so."""
        if self.tokens is None or self.slots < self.experts // self.fabric.size:
            return None
        most = self.tokens * self.top_k + self.tolerance
        return capacity(most, self.experts // self.fabric.size, self.slots, self.align)

    def route(self, experts_SK: Tensor) -> Traffic:
        """Plan this routing. experts_SK: integer [S, K], −1 for no entry; S may differ by rank, 0 included."""
        if experts_SK.dim() != 2 or experts_SK.shape[1] != self.top_k:
            raise ValueError(f"exchange: experts must be [tokens, {self.top_k}], got {tuple(experts_SK.shape)}")
        if self.tokens is not None and experts_SK.shape[0] > self.tokens:
            raise ValueError(
                f"exchange: rank {self.fabric.rank} brings {len(experts_SK)} tokens, at most {self.tokens}"
            )
        terms = Terms(self.experts, self.slots, self.tolerance, self.align, self.rows, chained=self.balanced)
        return self.fabric.route(experts_SK, terms)

    def loan(self, traffic: Traffic, *own: Tensor) -> Loan:
        """The right to borrow: `own` [E/R, ...] are this rank's experts, every rank's of the same shape."""
        pools = []
        for i, weights in enumerate(own):
            key = (i, weights.shape[1:], weights.dtype, weights.device)
            if key not in self._pools:
                self._pools[key] = Pool(self.fabric.slots(weights, self.slots))
            pools.append(self._pools[key])
        return Loan(self.fabric, traffic, own, tuple(pools))

    def enter(
        self, x_SH: Tensor, weights_SK: Tensor, loan: Loan
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Rows [N, H], one weight a row [N], own experts [E/R, ...] each, borrowed ones [B, ...] each.

        Use these `own`, not the parameters: the gradients that borrowers send are added to theirs.
        """
        rows_NH, weights_N, *tensors = _Enter.apply(x_SH, weights_SK, loan, *loan.own)
        return rows_NH, weights_N, tuple(tensors[: len(loan.own)]), tuple(tensors[len(loan.own) :])

    def leave(self, rows_NH: Tensor, traffic: Traffic) -> Tensor:
        """The sum of each token's rows, [S, H] in the dtype of the rows."""
        return _Leave.apply(rows_NH, self.fabric, traffic)

    def __call__(
        self,
        x_SH: Tensor,
        experts_SK: Tensor,
        weights_SK: Tensor,
        own: Sequence[Tensor],
        compute: Callable[..., Tensor],
    ) -> Tensor:
        """One MoE layer. compute(rows [N, H], weights [N], own, lent, loan) -> weighted rows [N, H].

        `loan.traffic.ends` are the groups of the rows; own and lent are the weights of the first L groups and the other
        B.
        """
        traffic = self.route(experts_SK)
        loan = self.loan(traffic, *own)
        return self.leave(compute(*self.enter(x_SH, weights_SK, loan), loan), traffic)


class _Enter(torch.autograd.Function):
    """Dispatch and prefetch; one node, so that the transfers of its backward have one order on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, loan: Loan, *own: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.loan = loan
        loan.fetch()
        rows, row_weights = loan.fabric.push(x, weights, loan.traffic)
        return rows, row_weights, *(w.view_as(w) for w in own), *(pool.slots.detach() for pool in loan.pools)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor, dweights: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        fabric, traffic, count = ctx.loan.fabric, ctx.loan.traffic, len(ctx.loan.own)
        down = [grad.contiguous() for grad in grads[:count]]  # made for these views alone, so they may be added to
        fabric.give_back(grads[count:], down, traffic)
        dx, dweights_SK = fabric.pull(drows, dweights, traffic)
        return dx, dweights_SK, None, *down


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, fabric: Fabric, traffic: Traffic) -> Tensor:  # type: ignore[override]
        ctx.fabric, ctx.traffic = fabric, traffic
        return fabric.pull(rows, None, traffic)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.fabric.push(dy, None, ctx.traffic)[0], None, None
