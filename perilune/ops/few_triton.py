# mypy: allow-untyped-defs
"""Experts and gated MLPs of few rows, as decoding has them: `ops.experts` holds the equations.

Bound by the bytes of the weights, so each is read once for up to BM rows of its expert, gate and up rows in one program
that applies the activation. Nothing waits for the host and grids depend on shapes alone, so that a CUDA graph holds:
a program finds its rows by a row (it works for the first of an expert) or by an expert, whichever are fewer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.situ_triton import glu

BY_ROW, BY_EXPERT, DENSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ORDER = 16  # rows or experts of an ordering program


@triton.jit
def order_kernel(idx, source, place, expert, ends, R, E, row_blocks, BR: tl.constexpr, BC: tl.constexpr):
    """A row's place is the number of choices before it: of lower experts, or of its own and earlier."""
    block = tl.program_id(0)
    by_row = block < row_blocks
    first = (block if by_row else block - row_blocks) * BR
    x = first + tl.arange(0, BR)
    mine = tl.load(idx + x, mask=by_row & (x < R), other=0).to(tl.int32)
    mine = tl.where(by_row, mine, x)
    before = tl.zeros((BR,), tl.int32)
    for begin in range(0, R, BC):
        c = begin + tl.arange(0, BC)
        other = tl.load(idx + c, mask=c < R, other=1 << 30).to(tl.int32)
        earlier = (c[None, :] < x[:, None]) | (not by_row)  # by expert: the end counts its own rows
        less = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & earlier)
        before += tl.sum(less.to(tl.int32), 1)
    tl.store(place + x, before.to(tl.int64), mask=by_row & (x < R))
    tl.store(source + before, x.to(tl.int64), mask=by_row & (x < R))
    tl.store(expert + before, mine, mask=by_row & (x < R))
    tl.store(ends + x, before, mask=(not by_row) & (x < E))


@triton.jit
def span(expert, ends, rows, E, MODE: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end of its rows) of a program; an empty span has no work."""
    i = tl.program_id(0)
    mine, first, last = i, i * BM, rows
    if MODE == DENSE:
        mine, last = 0, tl.minimum(i * BM + BM, rows)
    if MODE == BY_ROW:
        mine, first = tl.load(expert + i), i
        before = tl.load(expert + tl.maximum(i - 1, 0))
        idle = ((i > 0) & (before == mine)) | (mine >= E)  # an earlier program's, or nobody's
        last = tl.where(idle, i, tl.load(ends + tl.minimum(mine, E - 1)))
    if MODE == BY_EXPERT:
        first = tl.where(i > 0, tl.load(ends + tl.maximum(i - 1, 0)), 0)
        last = tl.load(ends + i)
    return mine.to(tl.int64) if MODE != DENSE else tl.full((), 0, tl.int64), first, last


@triton.jit
def gate_up_kernel(
    z, source, expert, ends, weight, w, a, rows, E, z_row, k, beta, linear_beta,
    N: tl.constexpr, L: tl.constexpr, KIND: tl.constexpr, MODE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    mine, first, last = span(expert, ends, rows, E, MODE, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    gate = w + mine * (2 * N * L) + n[:, None] * L
    for begin in range(first, last, BM):
        r = begin + tl.arange(0, BM)
        fits = r < last
        token, choice = r, r
        if MODE != DENSE:
            choice = tl.load(source + r, mask=fits, other=0)
            token = choice // k
        g, u = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for start in range(0, L, BK):
            c = start + tl.arange(0, BK)
            x = tl.load(z + token[:, None] * z_row + c[None, :], mask=fits[:, None] & (c < L)[None, :], other=0.0)
            inside = (n < N)[:, None] & (c < L)[None, :]
            wg = tl.load(gate + c[None, :], mask=inside, other=0.0)
            wu = tl.load(gate + (N * L + c)[None, :], mask=inside, other=0.0)
            g = tl.dot(x, tl.trans(wg), g, input_precision="ieee")
            u = tl.dot(x, tl.trans(wu), u, input_precision="ieee")
        # Rounded as the separate product would be.
        g, u = g.to(a.dtype.element_ty).to(tl.float32), u.to(a.dtype.element_ty).to(tl.float32)
        y = glu(g, u, beta, linear_beta, KIND)
        if MODE != DENSE:
            y *= tl.load(weight + choice, mask=fits, other=0.0).to(tl.float32)[:, None]
        tl.store(a + r[:, None] * N + n[None, :], y.to(a.dtype.element_ty), mask=fits[:, None] & (n < N)[None, :])


@triton.jit
def down_kernel(
    a, expert, ends, w, y, rows, E,
    N: tl.constexpr, L: tl.constexpr, MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    mine, first, last = span(expert, ends, rows, E, MODE, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    down = w + mine * (L * N) + n[:, None] * N
    for begin in range(first, last, BM):
        r = begin + tl.arange(0, BM)
        fits = r < last
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, N, BK):
            c = start + tl.arange(0, BK)
            x = tl.load(a + r[:, None] * N + c[None, :], mask=fits[:, None] & (c < N)[None, :], other=0.0)
            wd = tl.load(down + c[None, :], mask=(n < L)[:, None] & (c < N)[None, :], other=0.0)
            acc = tl.dot(x, tl.trans(wd), acc, input_precision="ieee")
        tl.store(y + r[:, None] * L + n[None, :], acc.to(y.dtype.element_ty), mask=fits[:, None] & (n < L)[None, :])


def order(idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ops.experts.Order` of idx [T,k] in one launch, and each sorted row's expert [R] int32."""
    R, idx = idx.numel(), idx.contiguous()
    source, place = (torch.empty(R, dtype=torch.int64, device=idx.device) for _ in "sp")
    expert = torch.empty(R, dtype=torch.int32, device=idx.device)
    ends = torch.empty(experts, dtype=torch.int32, device=idx.device)
    blocks = triton.cdiv(R, _ORDER)
    columns = max(16, min(256, triton.next_power_of_2(R)))
    order_kernel[(blocks + triton.cdiv(experts, _ORDER),)](
        idx, source, place, expert, ends, R, experts, blocks, BR=_ORDER, BC=columns
    )
    return source, place, ends, expert


def tile(outputs: int, programs: int, itemsize: int) -> dict[str, int]:
    """Narrow tiles where a wider one would leave processors idle."""
    bn = 32 if programs * triton.cdiv(outputs, 32) >= 132 else 16
    return {"BM": 16, "BN": bn, "BK": 256 // itemsize, "num_warps": 4, "num_stages": 4}


def rows(
    z: Tensor, source: Tensor, expert: Tensor, ends: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, k: int,
    partial: bool, beta: float, linear_beta: float, kind: int,
) -> Tensor:  # fmt: skip
    """Weighted outputs [R,L] of rows in `order`; z [T,L], weight [R] by choice, gate_up [E,2I,L], down [E,L,I].

    partial: there are rows of expert E, which is none; they are zero.
    """
    R, (E, L, N) = len(source), down.shape
    mode = BY_ROW if R <= E else BY_EXPERT
    a, y = z.new_empty(R, N), (z.new_zeros if partial else z.new_empty)(R, L)
    count = min(R, E)
    shape = tile(N, count, z.element_size())
    gate_up_kernel[count, triton.cdiv(N, shape["BN"])](
        z, source, expert, ends, weight, gate_up, a, R, E, z.stride(0), k, beta, linear_beta,
        N=N, L=L, KIND=kind, MODE=mode.value, **shape,
    )  # fmt: skip
    shape = tile(L, count, z.element_size())
    down_kernel[count, triton.cdiv(L, shape["BN"])](a, expert, ends, down, y, R, E, N=N, L=L, MODE=mode.value, **shape)
    return y


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, beta: float, linear_beta: float, kind: int) -> Tensor:
    """x [T,L] through gate_up [2I,L] and down [O,I] -> [T,O]."""
    T, N, (L, inner) = len(x), x.shape[1], down.shape
    a, y = x.new_empty(T, inner), x.new_empty(T, L)
    shape = tile(inner, 1, x.element_size())
    blocks = triton.cdiv(T, shape["BM"])
    unused = (x,) * 4  # what only experts have
    rule = {"N": inner, "L": N, "KIND": kind, "MODE": DENSE.value} | shape
    gate_up_kernel[blocks, triton.cdiv(inner, shape["BN"])](
        x, *unused, gate_up, a, T, 1, x.stride(0), 1, beta, linear_beta, **rule
    )
    shape = tile(L, 1, x.element_size())
    down_kernel[blocks, triton.cdiv(L, shape["BN"])](a, x, x, down, y, T, 1, N=inner, L=L, MODE=DENSE.value, **shape)
    return y
