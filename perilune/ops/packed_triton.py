# mypy: allow-untyped-defs
"""Routed experts of a decoding step straight from packed MXFP4: `ops.packed` holds the equations.

Bound by the bytes of the weights, so each byte is read once for up to BM rows of its expert. Rows come sorted by
expert; the program of an expert's first row does the work, the others leave at once, so that the grid depends on
shapes alone and a CUDA graph holds. A byte holds two neighbouring columns: even and odd columns are two products.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.situ_triton import glu

_BN, _BK = 32, 64  # outputs of a program; bytes of a row at a time (two columns each)


@triton.jit
def e2m1(code):
    """Values of 4-bit codes: their exponent and mantissa bits, moved to fp32's, are the values times 2^-126."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def columns(packed, scale, n, j, inside, K: tl.constexpr):
    """(even, odd) columns [BN,BK] fp32 of the bytes j in rows n of one matrix [N,K]."""
    byte = tl.load(packed + n[:, None] * (K // 2) + j[None, :], mask=inside, other=0).to(tl.int32)
    power = tl.load(scale + n[:, None] * (K // 32) + j[None, :] // 16, mask=inside, other=127).to(tl.int32)
    factor = (power << 23).to(tl.float32, bitcast=True)  # 2^(power − 127); 2^-127 becomes zero
    factor = tl.where(power == 255, float("nan"), factor)
    return e2m1(byte & 15) * factor, e2m1(byte >> 4) * factor


@triton.jit
def product(x, row, fits, packed, scale, n, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x [row] times the transposed rows n of one packed matrix: [BM,BN] fp32."""
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K // 2, BK):
        j = first + tl.arange(0, BK)
        both = 2 * first + tl.arange(0, 2 * BK)
        here = tl.load(x + row[:, None] * K + both[None, :], mask=fits[:, None] & (both < K)[None, :], other=0.0)
        even, odd = tl.split(tl.reshape(here, (BM, BK, 2)))
        w0, w1 = columns(packed, scale, n, j, (n < N)[:, None] & (j < K // 2)[None, :], K)
        acc = tl.dot(even, tl.trans(w0.to(x.dtype.element_ty)), acc, input_precision="ieee")
        acc = tl.dot(odd, tl.trans(w1.to(x.dtype.element_ty)), acc, input_precision="ieee")
    return acc


@triton.jit
def gate_up_kernel(
    z, source, expert, ends, weight, packed, scale, a, E, k, beta, linear_beta,
    N: tl.constexpr, L: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    mine = tl.load(expert + first).to(tl.int64)
    if first > 0 and tl.load(expert + first - 1).to(tl.int64) == mine:
        return
    if mine >= E:  # nobody's rows
        return
    last = tl.load(ends + mine)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    packed += mine * (2 * N) * (L // 2)
    scale += mine * (2 * N) * (L // 32)
    for begin in range(first, last, BM):
        r = (begin + tl.arange(0, BM)).to(tl.int64)  # rows times width may pass 2^31
        fits = r < last
        choice = tl.load(source + r, mask=fits, other=0)
        token = choice // k
        g = product(z, token, fits, packed, scale, n, N, L, BM, BN, BK)
        u = product(z, token, fits, packed + N * (L // 2), scale + N * (L // 32), n, N, L, BM, BN, BK)
        p = tl.load(weight + choice, mask=fits, other=0.0).to(tl.float32)
        # Rounded as the separate product would be.
        g, u = g.to(a.dtype.element_ty).to(tl.float32), u.to(a.dtype.element_ty).to(tl.float32)
        y = glu(g, u, beta, linear_beta, KIND) * p[:, None]
        tl.store(a + r[:, None] * N + n[None, :], y.to(a.dtype.element_ty), mask=fits[:, None] & (n < N)[None, :])


@triton.jit
def down_kernel(
    a, expert, ends, packed, scale, y, E,
    N: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    mine = tl.load(expert + first).to(tl.int64)
    if first > 0 and tl.load(expert + first - 1).to(tl.int64) == mine:
        return
    if mine >= E:  # nobody's rows
        return
    last = tl.load(ends + mine)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    packed += mine * L * (N // 2)
    scale += mine * L * (N // 32)
    for begin in range(first, last, BM):
        r = (begin + tl.arange(0, BM)).to(tl.int64)  # rows times width may pass 2^31
        fits = r < last
        out = product(a, r, fits, packed, scale, n, L, N, BM, BN, BK)
        tl.store(y + r[:, None] * L + n[None, :], out.to(y.dtype.element_ty), mask=fits[:, None] & (n < L)[None, :])


def rows(
    z: Tensor, source: Tensor, expert: Tensor, ends: Tensor, weight: Tensor, gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor], k: int, partial: bool, beta: float, linear_beta: float, kind: int,
    then: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Weighted expert outputs [R,L] of the sorted rows; z [T,L] contiguous, expert [R] each sorted row's expert.

    then: applied to the activations before they are weighted.
    """
    R, L = len(source), z.shape[1]
    E, N = len(ends), gate_up[0].shape[1] // 2
    a, y = z.new_empty(R, N), (z.new_zeros if partial else z.new_empty)(R, L)
    tile = {"BM": 16, "BN": _BN, "BK": _BK}
    if then is not None and partial:
        a.zero_()  # nobody's rows: they would be rounded too
    applied = weight if then is None else torch.ones_like(weight)
    gate_up_kernel[R, triton.cdiv(N, _BN)](
        z, source, expert, ends, applied, *gate_up, a, E, k, beta, linear_beta, N=N, L=L, KIND=kind, **tile
    )
    if then is not None:
        a = (then(a) * weight[source].unsqueeze(1)).to(a.dtype)
    down_kernel[R, triton.cdiv(L, _BN)](a, expert, ends, *down, y, E, N=N, L=L, **tile)
    return y
