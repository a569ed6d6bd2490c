"""Products of borrowed groups, filled into what torch's grouped product left (see `products`).

Groups are few and their rows known only on the device, so every program finds its own tile: the borders of the B groups
fit in one vector, its prefix sum of tiles says which group a tile number falls in, and programs past the last tile
return.
Legend: N rows, D and F widths, B slots (BP a power of two); borders int32 [B + 1].
"""

# Kernel arguments are pointers and constants of the Triton language.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tile(borders, tile, B: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr):
    """Group, first row and end of the group for a tile number; group B: past the last tile."""
    b = tl.arange(0, BP)
    start = tl.load(borders + b, b < B, 0)
    end = tl.load(borders + b + 1, b < B, 0)
    tiles = tl.cdiv(end - start, BM)
    upto = tl.cumsum(tiles, 0)
    group = tl.sum(((upto <= tile) & (b < B)).to(tl.int32), 0)
    within = tile - tl.sum(tl.where(b < group, tiles, 0), 0)
    first = tl.sum(tl.where(b == group, start, 0), 0) + within * BM
    return group, first, tl.sum(tl.where(b == group, end, 0), 0)


@triton.jit
def product_kernel(
    out, x, weights, borders, D, F, out_row, x_row, w_group, w_row, w_col,
    B: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of out = x W_g."""
    group, first, end = _tile(borders, tl.program_id(0), B, BP, BM)
    if group < B:
        m = first + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        a = x + m[:, None].to(tl.int64) * x_row + k[None, :]
        b = weights + group.to(tl.int64) * w_group + k[:, None] * w_row + n[None, :] * w_col
        total = tl.zeros((BM, BN), WIDE)
        for at in range(0, D, BK):
            left = tl.load(a + at, (m[:, None] < end) & (k[None, :] + at < D), 0)
            right = tl.load(b + at * w_row, (k[:, None] + at < D) & (n[None, :] < F), 0)
            total = tl.dot(left, right, total, input_precision="ieee")
        where = out + m[:, None].to(tl.int64) * out_row + n[None, :]
        tl.store(where, total.to(out.dtype.element_ty), (m[:, None] < end) & (n[None, :] < F))


@triton.jit
def gradient_kernel(
    grad, x, dy, borders, D, F, g_group, g_row, g_col, x_row, dy_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of grad_g = Σ x[n]ᵀ dy[n] over the group's rows; nothing where there are none."""
    group = tl.program_id(2)
    start, end = tl.load(borders + group), tl.load(borders + group + 1)
    if start < end:
        d = tl.program_id(0) * BM + tl.arange(0, BM)
        f = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        total = tl.zeros((BM, BN), WIDE)
        for at in range(start, end, BK):
            row = (at + k).to(tl.int64)
            left = tl.load(x + row[None, :] * x_row + d[:, None], (row[None, :] < end) & (d[:, None] < D), 0)
            right = tl.load(dy + row[:, None] * dy_row + f[None, :], (row[:, None] < end) & (f[None, :] < F), 0)
            total = tl.dot(left, right, total, input_precision="ieee")
        where = grad + group.to(tl.int64) * g_group + d[:, None] * g_row + f[None, :] * g_col
        tl.store(where, total.to(grad.dtype.element_ty), (d[:, None] < D) & (f[None, :] < F))


def lent_product(
    out_NF: Tensor, x_ND: Tensor, lent_BDF: Tensor, borders: Tensor, tile: tuple[int, ...] | None = None
) -> None:
    """out[n] = x[n] lent[b] for rows of borrowed groups; rows of x and out contiguous. tile: (BM, BN, BK)."""
    (N, D), (B, _, F) = x_ND.shape, lent_BDF.shape
    BM, BN, BK = tile or (128, 128, 64)
    product_kernel[(triton.cdiv(N, BM) + B, triton.cdiv(F, BN))](
        out_NF, x_ND, lent_BDF, borders, D, F, out_NF.stride(0), x_ND.stride(0), *lent_BDF.stride(),
        B=B, BP=triton.next_power_of_2(B), BM=BM, BN=BN, BK=BK, WIDE=tl.float32, num_warps=8, num_stages=3,
    )  # fmt: skip


def lent_gradients(
    grad_BDF: Tensor, x_ND: Tensor, dy_NF: Tensor, borders: Tensor, tile: tuple[int, ...] | None = None
) -> None:
    """grad[b] = Σ x[n]ᵀ dy[n] over the rows of borrowed group b; idle slots are not written. tile: (BM, BN, BK)."""
    D, F, B = x_ND.shape[1], dy_NF.shape[1], grad_BDF.shape[0]
    BM, BN, BK = tile or (128, 128, 64)
    gradient_kernel[(triton.cdiv(D, BM), triton.cdiv(F, BN), B)](
        grad_BDF, x_ND, dy_NF, borders, D, F, *grad_BDF.stride(), x_ND.stride(0), dy_NF.stride(0),
        BM=BM, BN=BN, BK=BK, WIDE=tl.float32, num_warps=8, num_stages=3,
    )  # fmt: skip
