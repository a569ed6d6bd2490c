"""The experts' compute between `enter` and `leave`: own and borrowed weights, neither copied nor kept (report §5.2.2).

    out_n = weight_n · down_g · act(gate_g rows_n, up_g rows_n),    g the group of row n

Backward keeps the rows and the gate-up product and recomputes the rest; it asks the loan for the borrowed weights,
which other layers have overwritten since, and writes their gradients where their homes will fetch them.
On an NVIDIA GPU what surrounds the products is a kernel each (`ops.experts_triton`).
Weights in the released orientation: gate_up [E,2I,H] (gate first), down [E,H,I]. Rows N, width H, expert width I.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.dispatch import fused, kernels
from perilune.ops.experts import Activation
from perilune.parallel.loans import Loan
from perilune.parallel.products import product, weight_gradients


class Experts:
    """`compute` of an `Exchange` whose `own` is (gate_up [E/R,2I,H], down [E/R,H,I])."""

    def __init__(self, activation: Activation | None = None) -> None:
        self.activation = activation or Activation()

    def __call__(
        self, rows_NH: Tensor, weights_N: Tensor, own: tuple[Tensor, ...], lent: tuple[Tensor, ...], loan: Loan
    ) -> Tensor:
        return _Mlp.apply(rows_NH, weights_N, *own, *lent, loan, self.activation)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        lent_gate_up: Tensor,
        lent_down: Tensor,
        loan: Loan,
        act: Activation,
    ) -> Tensor:
        ends = loan.traffic.ends
        h = product(rows, gate_up.mT, lent_gate_up.mT, ends)
        a = _activate(h, weight, act)
        ctx.save_for_backward(rows, weight, ends, h, gate_up, down)
        ctx.loan, ctx.act = loan, act
        return product(a, down.mT, lent_down.mT, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, ends, h, gate_up, down = ctx.saved_tensors
        local = gate_up.shape[0]
        lent_gate_up, lent_down = ctx.loan.slots()
        dlent_gate_up, dlent_down = ctx.loan.gradient_slots()
        dy = dy.to(rows.dtype).contiguous()  # grouped products refuse expanded cotangents
        da = product(dy, down, lent_down, ends)
        dh, a, dweight = _activate_backward(h, da, weight, ctx.act)
        ddown = weight_gradients(dy, a, dlent_down, ends, local)
        dgate_up = weight_gradients(dh, rows, dlent_gate_up, ends, local)
        drows = product(dh, gate_up, lent_gate_up, ends)
        return drows, dweight, dgate_up, ddown, dlent_gate_up, dlent_down, None, None


def _activate(h: Tensor, weight: Tensor, act: Activation) -> Tensor:
    """weight · act(gate, up) [N, I] of h [N, 2I], in h's dtype."""
    if fused("exchanged experts", "auto", h):
        a: Tensor = kernels("experts_triton").activate(h, weight, None, *act.rules)
        return a
    return act.forward(*h.chunk(2, -1)).mul_(weight.unsqueeze(-1)).to(h.dtype)


def _activate_backward(h: Tensor, da: Tensor, weight: Tensor, act: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """(dh [N, 2I], weight · act [N, I], both in h's dtype, d weight [N]) from da, the gradient of weight · act."""
    if fused("exchanged experts", "auto", h):
        dh, a, dweight = kernels("experts_triton").activate_backward(h, da, weight, None, *act.rules)
        return dh, a, dweight.to(weight.dtype)
    wide = da.to(torch.promote_types(da.dtype, torch.float32))
    per_row = weight.unsqueeze(-1).to(wide.dtype)
    gate, up = h.chunk(2, -1)
    a, dgate, dup = act.gradients(gate, up, wide * per_row)
    dweight = torch.linalg.vecdot(a, wide).to(weight.dtype)
    return torch.cat([dgate, dup], -1).to(h.dtype), a.mul_(per_row).to(h.dtype), dweight
