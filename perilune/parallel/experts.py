"""The experts' compute between `enter` and `leave`: own and borrowed weights, neither copied nor kept (report §5.2.2).

    out_n = weight_n · down_g · act(gate_g rows_n, up_g rows_n),    g the group of row n

The groups at home take the parameters themselves, the borrowed ones the shared slots, in two grouped products. Backward
keeps the rows and the gate-up product; it asks the loan for the borrowed weights, which other layers have overwritten
since. Weights in the released orientation: gate_up [E,2I,H] (gate first), down [E,H,I]. Rows N, width H, expert width
I.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.experts import Activation, grouped_mm
from perilune.parallel.exchange import Loan


class Experts:
    """`compute` of an `Exchange` whose `own` is (gate_up [E/R,2I,H], down [E/R,H,I])."""

    def __init__(self, activation: Activation | None = None) -> None:
        self.activation = activation or Activation()

    def __call__(
        self, rows_NH: Tensor, weights_N: Tensor, own: tuple[Tensor, ...], lent: tuple[Tensor, ...], loan: Loan
    ) -> Tensor:
        ends, split, local = loan.traffic.ends, loan.traffic.split, own[0].shape[0]
        if split is None:  # waits for the device: torch's grouped product takes one base address of weights
            split = int(ends[local - 1])
        sizes = [split, rows_NH.shape[0] - split]
        home_rows, lent_rows = rows_NH.split(sizes)
        home_weights, lent_weights = weights_N.split(sizes)
        home = _Mlp.apply(home_rows, home_weights, ends[:local], *own, self.activation, None)
        if lent[0].shape[0] == 0:
            return home
        return torch.cat(
            [home, _Mlp.apply(lent_rows, lent_weights, ends[local:] - split, *lent, self.activation, loan)]
        )


class _Mlp(torch.autograd.Function):
    """One grouped MLP. With a loan, weights are fetched for the backward instead of saved."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        ends: Tensor,
        gate_up: Tensor,
        down: Tensor,
        act: Activation,
        loan: Loan | None,
    ) -> Tensor:
        h = grouped_mm(rows, gate_up.transpose(1, 2), ends)
        a = act.forward(*h.chunk(2, -1)).mul_(weight.unsqueeze(-1))
        ctx.save_for_backward(rows, weight, ends, h, *(() if loan else (gate_up, down)))
        ctx.act, ctx.loan = act, loan
        return grouped_mm(a.to(rows.dtype), down.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, ends, h, *kept = ctx.saved_tensors
        gate_up, down = ctx.loan.slots() if ctx.loan else kept
        dy = dy.to(rows.dtype).contiguous()
        gate, up = h.chunk(2, -1)
        da = grouped_mm(dy, down, ends)
        a = ctx.act.forward(gate, up)
        wide = da.to(a.dtype)
        per_row = weight.unsqueeze(-1).to(a.dtype)
        dgate, dup = ctx.act.backward(gate, up, wide * per_row)
        dweight = torch.linalg.vecdot(a, wide).to(weight.dtype)
        ddown = grouped_mm(dy.t(), a.mul_(per_row).to(rows.dtype), ends)
        dh = torch.cat([dgate, dup], -1).to(rows.dtype)
        dgate_up = grouped_mm(dh.t(), rows, ends)
        return grouped_mm(dh, gate_up, ends), dweight, None, dgate_up, ddown, None, None
