# mypy: allow-untyped-defs
"""RMSNorm and the gated output norm, one kernel each way: `ops.norm` holds the equations.

A program takes whole rows: BR of them, BD (a power of two, at least D) wide. The backward's programs walk many row
blocks and leave one partial weight gradient each, summed in a fixed order afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.chain_triton import chain, start, wait

FORWARD, BACKWARD, LATENCY = 32, 16, 8  # values a thread holds: registers against loads in flight, against waiting
_FEW = 132  # rows up to which each has a processor to itself
_WARPS = 132 * 16


@triton.jit
def normalise(v, D, eps):
    """rsqrt(mean v² + eps) of each row of a tile whose columns past D are zero."""
    return tl.rsqrt(tl.sum(v * v, 1) / D + eps)


@triton.jit
def norm_gradient(g, xhat, rstd, D):
    """d/dx of x·rstd under the cotangent g of x·rstd."""
    dot = tl.sum(g * xhat, 1) / D
    return (g - xhat * dot[:, None]) * rstd[:, None]


@triton.jit
def norm_kernel(
    x, gate, w, y, rows, D, H, eps, x_row, gate_row, GATED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    CHAIN: tl.constexpr = False,
):  # fmt: skip
    start(CHAIN)
    wait(CHAIN)
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BD)
    inside = (r < rows)[:, None] & (c < D)[None, :]
    v = tl.load(x + r[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = normalise(v, D, eps)
    weight = tl.load(w + c, mask=c < D, other=0.0)
    if GATED:
        # Row r is head r % H of token r // H; the gates of a token lie side by side.
        at = (r // H) * gate_row + (r % H) * D
        z = tl.load(gate + at[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
        out = v * rstd[:, None] * weight.to(tl.float32)[None, :] * tl.sigmoid(z)
    else:
        # Rounded before the weight, as the release does it.
        xhat = (v * rstd[:, None]).to(y.dtype.element_ty).to(tl.float32)
        out = xhat * weight.to(y.dtype.element_ty).to(tl.float32)[None, :]
    tl.store(y + r[:, None] * D + c[None, :], out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_kernel(
    x, added, w, y, total, rows, D, eps, x_row, added_row, BR: tl.constexpr, BD: tl.constexpr,
    CHAIN: tl.constexpr = False,
):  # fmt: skip
    start(CHAIN)
    weight = tl.load(w + tl.arange(0, BD), mask=tl.arange(0, BD) < D, other=0.0)
    wait(CHAIN)
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BD)
    inside = (r < rows)[:, None] & (c < D)[None, :]
    v = tl.load(x + r[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
    v += tl.load(added + r[:, None] * added_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
    v = v.to(y.dtype.element_ty)
    at = r[:, None] * D + c[None, :]
    tl.store(total + at, v, mask=inside)
    v = v.to(tl.float32)
    xhat = (v * normalise(v, D, eps)[:, None]).to(y.dtype.element_ty).to(tl.float32)
    weight = weight.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (xhat * weight[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    x, gate, w, dy, dx, dgate, dw, rows, D, H, eps, x_row, gate_row, dy_row, blocks,
    GATED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BD)
    weight = tl.load(w + c, mask=c < D, other=0.0)
    weight = (weight if GATED else weight.to(x.dtype.element_ty)).to(tl.float32)
    total = tl.zeros((BD,), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = (block * BR + tl.arange(0, BR)).to(tl.int64)
        inside = (r < rows)[:, None] & (c < D)[None, :]
        v = tl.load(x + r[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + r[:, None] * dy_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = normalise(v, D, eps)
        xhat = v * rstd[:, None]
        if GATED:
            at = ((r // H) * gate_row + (r % H) * D)[:, None] + c[None, :]
            sigma = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
            slope = d * sigma * (1.0 - sigma) * xhat * weight[None, :]
            tl.store(dgate + r[:, None] * D + c[None, :], slope.to(dgate.dtype.element_ty), mask=inside)
            d = d * sigma
        total += tl.sum(d * xhat, 0)
        out = norm_gradient(d * weight[None, :], xhat, rstd, D)
        tl.store(dx + r[:, None] * D + c[None, :], out.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + tl.program_id(0) * D + c, total, mask=c < D)


def tile(width: int, held: int, least: int) -> dict[str, int]:
    """Rows and columns of a program whose threads hold about `held` values of each tensor, and its warps.

    `least` warps; with one, a row of up to 32·held values is reduced without leaving its warp.
    """
    bd = max(16, triton.next_power_of_2(width))
    warps = min(16, max(least, bd // (32 * held)))
    return {"BR": max(1, 32 * warps * held // bd), "BD": bd, "num_warps": warps}


def programs(blocks: int, warps: int) -> int:
    """Programs of a backward, each leaving partial sums: 16 warps a processor of an H200, whatever `warps`."""
    return max(1, min(blocks, _WARPS // warps))


def forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, heads: int = 1) -> Tensor:
    """x [R,D]; gate [R/heads, heads·D] or None; weight [D] -> [R,D] in x's dtype. Last axes contiguous."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    shape = tile(width, FORWARD if rows > _FEW else LATENCY, 4)
    norm_kernel[(triton.cdiv(rows, shape["BR"]),)](
        x, x if gate is None else gate, weight, y, rows, width, heads, eps,
        x.stride(0), 0 if gate is None else gate.stride(0), GATED=gate is not None, **shape, **chain(),
    )  # fmt: skip
    return y


def add_forward(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + added, x + added) [R,D] in x's dtype."""
    rows, width = x.shape
    y, total = (torch.empty(rows, width, dtype=x.dtype, device=x.device) for _ in range(2))
    shape = tile(width, FORWARD if rows > _FEW else LATENCY, 4)
    add_norm_kernel[(triton.cdiv(rows, shape["BR"]),)](
        x, added, weight, y, total, rows, width, eps, x.stride(0), added.stride(0), **shape, **chain()
    )
    return y, total


def backward(
    x: Tensor, gate: Tensor | None, weight: Tensor, dy: Tensor, eps: float, heads: int = 1
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx [R,D], dgate like gate or None, dweight [D] fp32)."""
    rows, width = x.shape
    shape = tile(width, BACKWARD, 1)
    blocks = triton.cdiv(rows, shape["BR"])
    dx = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    dw = torch.empty(programs(blocks, shape["num_warps"]), width, dtype=torch.float32, device=x.device)
    norm_backward_kernel[(dw.shape[0],)](
        x, x if gate is None else gate, weight, dy, dx, dx if dgate is None else dgate, dw, rows, width, heads, eps,
        x.stride(0), 0 if gate is None else gate.stride(0), dy.stride(0), blocks, GATED=gate is not None, **shape,
    )  # fmt: skip
    return dx, dgate, dw.sum(0)
