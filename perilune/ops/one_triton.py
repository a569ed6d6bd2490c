# mypy: allow-untyped-defs
"""Decoding one token, or a few with experts of their own: products of a matrix and a vector.

    y = W x;   a_i = p_i · act(gate_{e(i)} x, up_{e(i)} x);   y = Σ_i down_{e(i)} a_i

Bound by the bytes of the weights and by how soon they are asked for: a thread has many loads of 16 bytes under way,
and a processor many programs, so that one's arithmetic hides behind another's loads. No rows are sorted or summed
afterwards: a program knows its expert from its choice, and those of the down product walk all choices of their token,
shared experts among them, in a fixed order. Under `dispatch.chained` a kernel starts while the one before it runs, and
asks for weights that it knows before it waits for the vector.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.chain_triton import chain, start, wait
from perilune.ops.situ_triton import glu

_SUM = tl.constexpr(8)  # neighbours that a thread adds up: 16 bytes of bf16
_NARROW = 1024  # outputs up to which a program takes whole rows at once
_ROWS = 8192  # outputs from which a warp walks its rows alone


@triton.jit
def fetch(w, n, c, N: tl.constexpr, K: tl.constexpr, row, BN: tl.constexpr, BK: tl.constexpr):
    """Tile [BN,BK] of rows n of w, whose rows lie `row` apart; zero outside [N,K]."""
    at = w + n[:, None] * row + c[None, :]
    if N % BN == 0 and K % BK == 0:
        return tl.load(at)
    return tl.load(at, mask=(n < N)[:, None] & (c < K)[None, :], other=0.0)


@triton.jit
def along(x, c, K: tl.constexpr, BK: tl.constexpr):
    """Columns c [BK] of a vector, fp32."""
    if K % BK == 0:
        return tl.load(x + c).to(tl.float32)
    return tl.load(x + c, mask=c < K, other=0.0).to(tl.float32)


@triton.jit
def added(acc, w, x, BN: tl.constexpr, BK: tl.constexpr):
    """acc [BN,BK/8] + the products of w [BN,BK] and x [BK], neighbours summed."""
    each = tl.reshape(w.to(tl.float32) * x[None, :], (BN, BK // _SUM, _SUM))
    return acc + tl.sum(each, 2)


@triton.jit
def gate_up_kernel(
    z, idx, weight, gate_up, shared, a, z_row, beta, linear_beta,
    N: tl.constexpr, L: tl.constexpr, K: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, CHAIN: tl.constexpr = False,
):  # fmt: skip
    i, t = tl.program_id(0) % (K + S), tl.program_id(0) // (K + S)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    start(CHAIN)
    wait(CHAIN)
    p = 1.0
    gate = shared + (i - K) * (N * L)
    up = gate + S * N * L
    if i < K:
        p = tl.load(weight + t * K + i).to(tl.float32)
        gate = gate_up + tl.load(idx + t * K + i).to(tl.int64) * (2 * N * L)
        up = gate + N * L
    x = z + t * z_row
    g, u = tl.zeros((BN, BK // _SUM), tl.float32), tl.zeros((BN, BK // _SUM), tl.float32)
    for first in range(0, L, BK):
        c = first + tl.arange(0, BK)
        xc = along(x, c, L, BK)
        wg = fetch(gate, n, c, N, L, L, BN, BK)
        wu = fetch(up, n, c, N, L, L, BN, BK)
        g, u = added(g, wg, xc, BN, BK), added(u, wu, xc, BN, BK)
    # Rounded as the separate product would be.
    g = tl.sum(g, 1).to(a.dtype.element_ty).to(tl.float32)
    u = tl.sum(u, 1).to(a.dtype.element_ty).to(tl.float32)
    y = glu(g, u, beta, linear_beta, KIND) * p
    tl.store(a + tl.program_id(0) * N + n, y.to(a.dtype.element_ty), mask=n < N)


@triton.jit
def down_kernel(
    a, idx, down, shared, y,
    N: tl.constexpr, L: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    CHAIN: tl.constexpr = False,
):  # fmt: skip
    t = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    start(CHAIN)
    wait(CHAIN)
    acc = tl.zeros((BN, BK // _SUM), tl.float32)
    chunks: tl.constexpr = (N + BK - 1) // BK
    for step in range(0, K * chunks):
        i, c = step // chunks, step % chunks * BK + tl.arange(0, BK)
        mine = down + tl.load(idx + t * K + i).to(tl.int64) * (L * N)
        x = along(a + (t * (K + S) + i) * N, c, N, BK)
        acc = added(acc, fetch(mine, n, c, L, N, N, BN, BK), x, BN, BK)
    for step in range(0, S * chunks):
        i, c = step // chunks, step % chunks * BK + tl.arange(0, BK)
        x = along(a + (t * (K + S) + K + i) * N, c, N, BK)
        acc = added(acc, fetch(shared + i * N, n, c, L, N, S * N, BN, BK), x, BN, BK)
    tl.store(y + t * L + n, tl.sum(acc, 1).to(y.dtype.element_ty), mask=n < L)


@triton.jit
def linear_kernel(
    x, w, y, x2, w2, y2, N, N2, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHAIN: tl.constexpr = False
):
    # A second product of the same depth may come along, of other numbers altogether.
    if tl.program_id(1) == 1:
        x, w, y, N = x2, w2, y2, N2
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = w + n.to(tl.int64)[:, None] * K
    start(CHAIN)
    c = tl.arange(0, BK)
    inside = (n < N)[:, None]
    wc = tl.load(rows + c[None, :], mask=inside & (c < K)[None, :], other=0.0)
    wait(CHAIN)
    acc = added(tl.zeros((BN, BK // _SUM), tl.float32), wc, along(x, c, K, BK), BN, BK)
    for begin in range(BK, K, BK):
        c = begin + tl.arange(0, BK)
        if K % BK == 0:
            wc = tl.load(rows + c[None, :], mask=inside, other=0.0)
        else:
            wc = tl.load(rows + c[None, :], mask=inside & (c < K)[None, :], other=0.0)
        acc = added(acc, wc, along(x, c, K, BK), BN, BK)
    tl.store(y + n, tl.sum(acc, 1).to(y.dtype.element_ty), mask=n < N)


def across(depth: int, outputs: int) -> int:
    """Warps that share a row, 256 columns each: one where there are rows enough to fill the chip with loads."""
    want = 1 if outputs >= _ROWS else 4
    return max(1, min(want, triton.next_power_of_2(triton.cdiv(depth, 256))))


def linear(
    x: Tensor, w: Tensor, dtype: torch.dtype | None = None, also: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """x [1,K] through w [N,K] -> [1,N] in `dtype`, and `also` (another x and w of the same K)."""
    N, K = w.shape
    x2, w2 = also or (x, w)
    y = x.new_empty(1, N, dtype=dtype)
    y2 = x.new_empty(1, len(w2), dtype=dtype) if also else y
    most = max(N, len(w2))
    shape = linear_shape(most, K)
    linear_kernel[triton.cdiv(most, shape["BN"]), 2 if also else 1](
        x, w, y, x2, w2, y2, N, len(w2), K=K, **shape, **chain()
    )
    return y, y2


def linear_shape(outputs: int, depth: int) -> dict[str, int]:
    if outputs <= _NARROW and depth > 256:  # all of a row at once
        warps = min(8, triton.next_power_of_2(triton.cdiv(depth, 256)))
        return {"BN": 2, "BK": triton.next_power_of_2(depth), "num_warps": warps}
    warps = across(depth, outputs)
    tile = min(256 * warps, max(16, triton.next_power_of_2(depth)))
    return {"BN": 4 if warps > 1 else 8, "BK": tile, "num_warps": warps}


def rows(
    z: Tensor, idx: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, shared: tuple[Tensor, Tensor] | None,
    beta: float, linear_beta: float, kind: int,
) -> Tensor:  # fmt: skip
    """[T,O]: the weighted experts of z [T,L], and `shared`, an MLP ([2·S·I,L], [O,S·I]) that everybody takes.

    idx, weight [T,K] contiguous, gate_up [E,2I,L], down [E,O,I].
    """
    (T, K), (_, L, N) = idx.shape, down.shape
    up, back = shared or (gate_up, down)
    S = back.shape[1] // N if shared else 0
    a, y = z.new_empty(T, K + S, N), z.new_empty(T, L)
    shape = gate_up_shape()
    gate_up_kernel[T * (K + S), triton.cdiv(N, shape["BN"])](
        z, idx, weight, gate_up, up, a, z.stride(0), beta, linear_beta,
        N=N, L=gate_up.shape[2], K=K, S=S, KIND=kind, **shape, **chain(),
    )  # fmt: skip
    shape = down_shape(N)
    down_kernel[T, triton.cdiv(L, shape["BN"])](a, idx, down, back, y, N=N, L=L, K=K, S=S, **shape, **chain())
    return y


def gate_up_shape() -> dict[str, int]:
    """A warp a program: of four gates and four ups, eight loads a thread."""
    return {"BN": 4, "BK": 256, "num_warps": 1}


def down_shape(depth: int) -> dict[str, int]:
    warps = max(1, min(4, triton.next_power_of_2(triton.cdiv(depth, 256))))
    return {"BN": 4, "BK": 256 * warps, "num_warps": warps}


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, beta: float, linear_beta: float, kind: int) -> Tensor:
    """x [T,L] through gate_up [2I,L] and down [O,I] -> [T,O]."""
    T, (L, N) = len(x), down.shape
    a, y = x.new_empty(T, N), x.new_empty(T, L)
    shape = gate_up_shape()
    gate_up_kernel[T, triton.cdiv(N, shape["BN"])](
        x, x, x, gate_up, gate_up, a, x.stride(0), beta, linear_beta,
        N=N, L=x.shape[1], K=0, S=1, KIND=kind, **shape, **chain(),
    )  # fmt: skip
    shape = down_shape(N)
    down_kernel[T, triton.cdiv(L, shape["BN"])](a, x, down, down, y, N=N, L=L, K=0, S=1, **shape, **chain())
    return y
