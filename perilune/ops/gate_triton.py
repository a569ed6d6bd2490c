# mypy: allow-untyped-defs
"""MLA's output gate, y = x · σ(gate), in one pass over memory each way: `ops.norm` holds the equation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BR, _BC = 16, 128


@triton.jit
def gate_kernel(x, gate, y, rows, cols, x_row, gate_row, BR: tl.constexpr, BC: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = (r < rows) & (c < cols)
    v = tl.load(x + r * x_row + c, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + r * gate_row + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + r * cols + c, (v * tl.sigmoid(z)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward_kernel(
    x, gate, dy, dx, dgate, rows, cols, x_row, gate_row, dy_row, BR: tl.constexpr, BC: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = (r < rows) & (c < cols)
    v = tl.load(x + r * x_row + c, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(tl.load(gate + r * gate_row + c, mask=inside, other=0.0).to(tl.float32))
    d = tl.load(dy + r * dy_row + c, mask=inside, other=0.0).to(tl.float32) * sigma
    tl.store(dx + r * cols + c, d.to(dx.dtype.element_ty), mask=inside)
    tl.store(dgate + r * cols + c, (d * v * (1.0 - sigma)).to(dgate.dtype.element_ty), mask=inside)


def forward(x: Tensor, gate: Tensor) -> Tensor:
    """x, gate [R,C] with contiguous last axes -> [R,C] in gate's dtype."""
    rows, cols = x.shape
    y = torch.empty(rows, cols, dtype=gate.dtype, device=x.device)
    gate_kernel[_grid(rows, cols)](x, gate, y, rows, cols, x.stride(0), gate.stride(0), BR=_BR, BC=_BC)
    return y


def backward(x: Tensor, gate: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    dx, dgate = (torch.empty(rows, cols, dtype=t.dtype, device=x.device) for t in (x, gate))
    strides = x.stride(0), gate.stride(0), dy.stride(0)
    gate_backward_kernel[_grid(rows, cols)](x, gate, dy, dx, dgate, rows, cols, *strides, BR=_BR, BC=_BC)
    return dx, dgate


def _grid(rows: int, cols: int) -> tuple[int, int]:
    return triton.cdiv(rows, _BR), triton.cdiv(cols, _BC)
