"""The expert exchange of one MoE layer: dispatch, prefetch, compute, combine, reduce (report §5.2.1, §5.2.2).

    y_s = Σ_k w_{s,k} · E_{e(s,k)}(x_s)

                                                                             backward
    route    count rows, gather the counts, plan, find every address         nothing
    enter    tokens -> rows sorted by expert, one weight a row;              sum rows to tokens (pull),
             experts -> slots                                                gradients of slots to their homes
    compute  rows, weights, own and lent experts -> weighted outputs         fetches the lent experts again if needed
    leave    rows -> tokens, summed in fp32 (pull)                           tokens -> rows (push)

`Exchange` is balanced, or classic: no replicas, one row per entry, buffers as large as the routing makes them (the
standard dropless all-to-all). Both have the same interface and the same results.
Legend: S tokens here, H width, K routes a token, N rows of the receive buffer, L = E/R own experts, B slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.dispatch import readable
from perilune.parallel.fabric import Fabric, Terms, Traffic
from perilune.parallel.loans import Loan, PackedLoan, Pools, packed
from perilune.parallel.routes import capacity


@dataclass
class Exchange:
    """Routes the tokens of all ranks to the experts of all ranks.

    experts      E, over all ranks; expert e is at home on rank e // (E/R).
    top_k        routes a token.
    tokens       the most a rank brings; fixes the receive buffer's shape. None: the host sizes it for each routing.
    num_slots    remote experts a rank may hold; tolerance: rows it may execute above its share (see `plan`).
    align        rows that a segment is padded to.
    balanced     False is the classic exchange.
    mxfp4        experts lie on the MXFP4 grid and travel packed.
    """

    fabric: Fabric
    experts: int
    top_k: int
    tokens: int | None = None
    num_slots: int | None = None
    tolerance: int = 0
    align: int = 1
    balanced: bool = True
    mxfp4: bool = False

    def __post_init__(self) -> None:
        if self.experts % self.fabric.size:
            raise ValueError(f"exchange: {self.experts} experts cannot be divided over {self.fabric.size} ranks")
        if not self.balanced:
            self.num_slots, self.tolerance = 0, 0
        self.slots = self.experts // self.fabric.size if self.num_slots is None else self.num_slots
        self._pools = Pools(self.fabric, self.slots)

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
        if readable(experts_SK) and experts_SK.numel() and int(experts_SK.max()) >= self.experts:
            raise ValueError(f"exchange: expert {int(experts_SK.max())} is not one of {self.experts}")
        if self.tokens is not None and experts_SK.shape[0] > self.tokens:
            raise ValueError(
                f"exchange: rank {self.fabric.rank} brings {len(experts_SK)} tokens, at most {self.tokens}"
            )
        terms = Terms(self.experts, self.slots, self.tolerance, self.align, self.rows, chained=self.balanced)
        return self.fabric.route(experts_SK, terms)

    def loan(self, traffic: Traffic, *own: Tensor) -> Loan:
        """The right to borrow: `own` [E/R, ...] are this rank's experts, every rank's of the same shape."""
        pools = self._pools.of("slots", own)
        if not self.mxfp4:
            return Loan(self.fabric, traffic, own, pools)
        parts = packed(own)
        return PackedLoan(self.fabric, traffic, own, pools, self._pools.of("wires", parts), parts)

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

        `loan.traffic.ends` are the groups of the rows: the first L of own experts, the other B of lent ones.
        """
        local = self.experts // self.fabric.size
        if x_SH.dim() != 2 or len(x_SH) != len(experts_SK) or weights_SK.shape != experts_SK.shape:
            raise ValueError(
                f"exchange: need x [S, H], experts and weights [S, {self.top_k}]; got {[*x_SH.shape]}, "
                f"{[*experts_SK.shape]} and {[*weights_SK.shape]}"
            )
        if any(len(w) != local for w in own):
            raise ValueError(f"exchange: a rank owns {local} experts, got tensors of {[len(w) for w in own]}")
        traffic = self.route(experts_SK)
        loan = self.loan(traffic, *own)
        return self.leave(compute(*self.enter(x_SH, weights_SK, loan), loan), traffic)


class _Enter(torch.autograd.Function):
    """Dispatch and prefetch; one node, so that the transfers of its backward have one order on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, loan: Loan, *own: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.loan = loan
        sent = loan.fetch()
        rows, row_weights = loan.fabric.push(x, weights, loan.traffic)
        if sent:
            loan.arrived()
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
