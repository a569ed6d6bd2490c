# mypy: allow-untyped-defs
"""SiTU-GLU and SwiGLU in one pass over memory each way: `ops.situ` holds the equations.

Kinds: 0 SwiGLU, 1 SiTU-GLU with both caps, 2 SiTU-GLU with an uncapped up. fp32 inside, one rounding on the way out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SWIGLU, CAPPED, UNCAPPED = 0, 1, 2


@triton.jit
def tanh(x):
    """To 1e-6 relative, small values included: a quotient of exponentials, and its series below 1/4."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    s = x * x
    near = x * (1.0 + s * (-0.33333333 + s * (0.13333333 + s * -0.05396825)))
    return tl.where(s < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def glu(g, u, beta, linear_beta, KIND: tl.constexpr):
    sigma = tl.sigmoid(g)
    if KIND == 0:
        return g * sigma * u
    capped = beta * tanh(g / beta) * sigma
    if KIND == 1:
        return capped * (linear_beta * tanh(u / linear_beta))
    return capped * u


@triton.jit
def glu_gradients(g, u, d, beta, linear_beta, KIND: tl.constexpr):
    """(value, d gate, d up) under the cotangent d."""
    sigma = tl.sigmoid(g)
    if KIND == 0:
        silu = g * sigma
        return silu * u, d * u * (sigma + silu * (1.0 - sigma)), d * silu
    t = tanh(g / beta)
    capped = beta * t * sigma
    slope = sigma * (1.0 - t * t) + capped * (1.0 - sigma)
    if KIND == 1:
        tu = tanh(u / linear_beta)
        up = linear_beta * tu
        return capped * up, d * slope * up, d * capped * (1.0 - tu * tu)
    return capped * u, d * slope * u, d * capped


@triton.jit
def glu_kernel(
    gate, up, out, rows, cols, gate_row, up_row, out_row, beta, linear_beta,
    KIND: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = (r < rows) & (c < cols)
    g = tl.load(gate + r * gate_row + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + r * up_row + c, mask=inside, other=0.0).to(tl.float32)
    y = glu(g, u, beta, linear_beta, KIND)
    tl.store(out + r * out_row + c, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward_kernel(
    gate, up, dout, dgate, dup, rows, cols, gate_row, up_row, dout_row, dgate_row, dup_row, beta, linear_beta,
    KIND: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = (r < rows) & (c < cols)
    g = tl.load(gate + r * gate_row + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + r * up_row + c, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dout + r * dout_row + c, mask=inside, other=0.0).to(tl.float32)
    _, dg, du = glu_gradients(g, u, d, beta, linear_beta, KIND)
    tl.store(dgate + r * dgate_row + c, dg.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + r * dup_row + c, du.to(dup.dtype.element_ty), mask=inside)


def kind_of(swiglu: bool, linear_beta: float | None) -> int:
    if swiglu:
        return SWIGLU
    return UNCAPPED if linear_beta is None else CAPPED


def forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, swiglu: bool) -> Tensor:
    """gate, up [R,C] with contiguous last axes -> [R,C]."""
    rows, cols = gate.shape
    out = torch.empty(rows, cols, dtype=gate.dtype, device=gate.device)
    grid, tile = _tiles(rows, cols)
    glu_kernel[grid](
        gate, up, out, rows, cols, gate.stride(0), up.stride(0), out.stride(0), beta, linear_beta or 1.0,
        KIND=kind_of(swiglu, linear_beta), **tile,
    )  # fmt: skip
    return out


def backward(
    gate: Tensor, up: Tensor, dout: Tensor, dgate: Tensor, dup: Tensor, beta: float, linear_beta: float | None,
    swiglu: bool,
) -> None:  # fmt: skip
    """Writes dgate and dup [R,C]; every last axis is contiguous."""
    rows, cols = gate.shape
    grid, tile = _tiles(rows, cols)
    glu_backward_kernel[grid](
        gate, up, dout, dgate, dup, rows, cols,
        *(x.stride(0) for x in (gate, up, dout, dgate, dup)), beta, linear_beta or 1.0,
        KIND=kind_of(swiglu, linear_beta), **tile,
    )  # fmt: skip


def _tiles(rows: int, cols: int) -> tuple[tuple[int, int], dict[str, int]]:
    bc = min(128, triton.next_power_of_2(cols))
    br = 2048 // bc
    return (triton.cdiv(rows, br), triton.cdiv(cols, bc)), {"BR": br, "BC": bc}
