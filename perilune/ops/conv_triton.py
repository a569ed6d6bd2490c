# mypy: allow-untyped-defs
"""The short convolution with SiLU over packed sequences: `ops.conv` holds the equation. Backward takes two kernels,
because a tile in registers cannot be shifted by a token; between them lies the gradient before SiLU, in x's dtype.

`position` [T] int32 counts a token's predecessors within its sequence, `sequence` [T] int32 names it: a tap that
would reach past the first token reads the sequence's tail, or zero. Output columns may lie in three tensors (q, k, v);
a block of channels belongs to one of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BT, _BC = 32, 64  # tokens and channels of a program
_BACK = 16  # tokens at a time of a backward
_WALKERS = 64  # programs along the tokens of a backward; each leaves one partial weight gradient


@triton.jit
def tap(x, tail, t, c, position, sequence, inside, x_row, C, back: tl.constexpr, W: tl.constexpr, TAIL: tl.constexpr):
    """x at `back` tokens before t [BT, BC] fp32; from the tail [N,C,W−1], or zero, before the sequence's start."""
    here = (position >= back)[:, None] & inside
    v = tl.load(x + (t - back)[:, None] * x_row + c[None, :], mask=here, other=0.0).to(tl.float32)
    if TAIL:
        before = (position < back)[:, None] & inside
        at = (sequence.to(tl.int64)[:, None] * C + c[None, :]) * (W - 1) + (W - 1 + position - back)[:, None]
        v += tl.load(tail + at, mask=before, other=0.0).to(tl.float32)
    return v


@triton.jit
def conv_kernel(
    x, w, tail, y0, y1, y2, position, sequence, T, C, part, x_row, y_row,
    W: tl.constexpr, TAIL: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (c < C)[None, :]
    pos = tl.load(position + t, mask=t < T, other=0)
    seq = tl.load(sequence + t, mask=t < T, other=0)
    acc = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(W):
        weight = tl.load(w + (W - 1 - j) * C + c, mask=c < C, other=0.0).to(tl.float32)
        acc += tap(x, tail, t, c, pos, seq, inside, x_row, C, j, W, TAIL) * weight[None, :]
    if SILU:
        acc = acc * tl.sigmoid(acc)
    which = tl.program_id(1) * BC // part
    y = tl.where(which == 0, y0, tl.where(which == 1, y1, y2))
    tl.store(y + t[:, None] * y_row + (c - which * part)[None, :], acc.to(y0.dtype.element_ty), mask=inside)


@triton.jit
def conv_backward_kernel(
    x, w, tail, d0, d1, d2, dpre, dw, position, sequence, T, C, part, x_row, d_row, blocks,
    W: tl.constexpr, WP: tl.constexpr, TAIL: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient before SiLU, whose pre-activation is made again, and a partial one of the weights."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    which = tl.program_id(1) * BC // part
    dy = tl.where(which == 0, d0, tl.where(which == 1, d1, d2))
    taps = tl.arange(0, WP)
    dweight = tl.zeros((WP, BT, BC), tl.float32)  # tokens are summed once, at the end
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        t = (block * BT + tl.arange(0, BT)).to(tl.int64)
        inside = (t < T)[:, None] & (c < C)[None, :]
        pos = tl.load(position + t, mask=t < T, other=0)
        seq = tl.load(sequence + t, mask=t < T, other=0)
        d = tl.load(dy + t[:, None] * d_row + (c - which * part)[None, :], mask=inside, other=0.0).to(tl.float32)
        if SILU:
            pre = tl.zeros((BT, BC), tl.float32)
            for i in tl.static_range(W):
                weight = tl.load(w + (W - 1 - i) * C + c, mask=c < C, other=0.0).to(tl.float32)
                pre += tap(x, tail, t, c, pos, seq, inside, x_row, C, i, W, TAIL) * weight[None, :]
            sigma = tl.sigmoid(pre)
            d *= sigma + pre * sigma * (1.0 - sigma)
        tl.store(dpre + t[:, None] * C + c[None, :], d.to(dpre.dtype.element_ty), mask=inside)
        for i in tl.static_range(W):
            one = d * tap(x, tail, t, c, pos, seq, inside, x_row, C, i, W, TAIL)
            dweight += tl.where(taps[:, None, None] == W - 1 - i, one[None, :, :], 0.0)
    at = dw + (tl.program_id(0) * W + taps)[:, None] * C + c[None, :]
    tl.store(at, tl.sum(dweight, 1), mask=(taps < W)[:, None] & (c < C)[None, :])


@triton.jit
def conv_input_kernel(
    dpre, w, dx, position, T, C, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """dx_t gathers from the tokens t + j that read it: those of its own sequence."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(W):
        pos = tl.load(position + t + j, mask=t + j < T, other=-1)
        reads = (pos >= j)[:, None] & (c < C)[None, :]
        weight = tl.load(w + (W - 1 - j) * C + c, mask=c < C, other=0.0).to(tl.float32)
        d = tl.load(dpre + (t + j)[:, None] * C + c[None, :], mask=reads, other=0.0).to(tl.float32)
        acc += d * weight[None, :]
    inside = (t < T)[:, None] & (c < C)[None, :]
    tl.store(dx + t[:, None] * C + c[None, :], acc.to(dx.dtype.element_ty), mask=inside)


def forward(
    x: Tensor, w: Tensor, tail: Tensor | None, position: Tensor, sequence: Tensor, parts: int, silu: bool
) -> tuple[Tensor, ...]:
    """x [T,C] (last axis contiguous), w [W,C] contiguous, tail [N,C,W−1] contiguous or None -> `parts` (1 or 3) tensors
    [T,C/parts] in x's dtype."""
    T, C = x.shape
    part = C // parts
    ys = tuple(torch.empty(T, part, dtype=x.dtype, device=x.device) for _ in range(parts))
    block = _channels(part)
    conv_kernel[(triton.cdiv(T, _BT), triton.cdiv(C, block))](
        x, w, x if tail is None else tail, ys[0], ys[-2 if parts == 3 else 0], ys[-1], position, sequence, T, C, part,
        x.stride(0), part, W=len(w), TAIL=tail is not None, SILU=silu, BT=_BT, BC=block,
    )  # fmt: skip
    return ys


def backward(
    x: Tensor, w: Tensor, tail: Tensor | None, position: Tensor, sequence: Tensor, dys: tuple[Tensor, ...], silu: bool
) -> tuple[Tensor, Tensor]:
    """(dx [T,C], dw [W,C] fp32); the gradients dys share one row stride."""
    (T, C), W = x.shape, len(w)
    part, block, blocks = C // len(dys), _channels(C // len(dys)), triton.cdiv(T, _BACK)
    dx, dpre = (torch.empty(T, C, dtype=x.dtype, device=x.device) for _ in range(2))
    dw = torch.empty(max(1, min(blocks, _WALKERS)), W, C, dtype=torch.float32, device=x.device)
    conv_backward_kernel[(dw.shape[0], triton.cdiv(C, block))](
        x, w, x if tail is None else tail, dys[0], dys[-2 if len(dys) == 3 else 0], dys[-1], dpre, dw,
        position, sequence, T, C, part, x.stride(0), dys[0].stride(0), blocks,
        W=W, WP=triton.next_power_of_2(W), TAIL=tail is not None, SILU=silu, BT=_BACK, BC=block,
    )  # fmt: skip
    conv_input_kernel[(triton.cdiv(T, _BT), triton.cdiv(C, block))](dpre, w, dx, position, T, C, W=W, BT=_BT, BC=block)
    return dx, dw.sum(0)


def _channels(part: int) -> int:
    """Channels of a block: a power of two that divides a part, so that no block straddles two."""
    block = part & -part
    return min(_BC, block)
