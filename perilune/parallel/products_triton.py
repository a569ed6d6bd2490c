"""Products of borrowed groups, filled into what torch's grouped product left (see `products`).

Groups are few and their rows known only on the device. A fixed number of programs, one or two a multiprocessor, walks
the tiles that there are: the borders of the B groups fit in one vector, and its prefix sums say which group a tile
number falls in. Slots without rows cost nothing, however many there are.
Legend: N rows, D and F widths, B slots (BP a power of two); borders int32 [B + 1]; EVEN: widths are whole tiles.
"""

# Kernel arguments are pointers and constants of the Triton language.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sizes(borders, B: tl.constexpr, BP: tl.constexpr):
    """First row and end of every group."""
    b = tl.arange(0, BP)
    return b, tl.load(borders + b, b < B, 0), tl.load(borders + b + 1, b < B, 0)


@triton.jit
def _at(x, b, group):
    return tl.sum(tl.where(b == group, x, 0), 0)


@triton.jit
def product_kernel(
    out, x, weights, borders, D, F, out_row, x_row, w_group, w_row, w_col,
    B: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """out = x W_g by tiles [BM, BN]; neighbouring programs share columns of weights."""
    b, start, end = _sizes(borders, B, BP)
    tiles = tl.cdiv(end - start, BM)
    columns = tl.cdiv(F, BN)
    upto = tl.cumsum(tiles, 0) * columns
    k = tl.arange(0, BK)
    for tile in range(tl.program_id(0), tl.max(upto, 0), tl.num_programs(0)):
        group = tl.sum(((upto <= tile) & (b < B)).to(tl.int32), 0)
        high, last = _at(tiles, b, group), _at(end, b, group)
        within = tile - (_at(upto, b, group) - high * columns)
        m = _at(start, b, group) + within % high * BM + tl.arange(0, BM)
        n = within // high * BN + tl.arange(0, BN)
        row = tl.minimum(m, last - 1).to(tl.int64)  # rows past the group's are read again and not stored
        left = x + row[:, None] * x_row + k[None, :]
        right = weights + group.to(tl.int64) * w_group + k[:, None] * w_row + n[None, :] * w_col
        total = tl.zeros((BM, BN), WIDE)
        for at in range(0, D, BK):
            if EVEN:
                p, q = tl.load(left), tl.load(right)
            else:
                p = tl.load(left, k[None, :] + at < D, 0)
                q = tl.load(right, (k[:, None] + at < D) & (n[None, :] < F), 0)
            total = tl.dot(p, q, total, input_precision="ieee")
            left += BK
            right += BK * w_row
        where = out + m[:, None].to(tl.int64) * out_row + n[None, :]
        tl.store(where, total.to(out.dtype.element_ty), (m[:, None] < last) & (n[None, :] < F))


@triton.jit
def gradient_kernel(
    grad, x, dy, borders, D, F, g_group, g_row, g_col, x_row, dy_row,
    B: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """grad_g = Σ x[n]ᵀ dy[n] over the rows of every group that has some, by tiles [BM, BN]."""
    b, start, end = _sizes(borders, B, BP)
    used = tl.cumsum((start < end).to(tl.int32), 0)
    high, columns = tl.cdiv(D, BM), tl.cdiv(F, BN)
    k = tl.arange(0, BK)
    for tile in range(tl.program_id(0), tl.max(used, 0) * high * columns, tl.num_programs(0)):
        group = tl.sum(((used <= tile // (high * columns)) & (b < B)).to(tl.int32), 0)
        first, last = _at(start, b, group), _at(end, b, group)
        within = tile % (high * columns)
        d = within % high * BM + tl.arange(0, BM)
        f = within // high * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), WIDE)
        for at in range(first, last, BK):
            row = (at + k).to(tl.int64)
            inside = row < last
            if EVEN:
                left = tl.load(x + row[None, :] * x_row + d[:, None], inside[None, :], 0)
                right = tl.load(dy + row[:, None] * dy_row + f[None, :], inside[:, None], 0)
            else:
                left = tl.load(x + row[None, :] * x_row + d[:, None], inside[None, :] & (d[:, None] < D), 0)
                right = tl.load(dy + row[:, None] * dy_row + f[None, :], inside[:, None] & (f[None, :] < F), 0)
            total = tl.dot(left, right, total, input_precision="ieee")
        where = grad + group.to(tl.int64) * g_group + d[:, None] * g_row + f[None, :] * g_col
        tl.store(where, total.to(grad.dtype.element_ty), (d[:, None] < D) & (f[None, :] < F))


Tile = tuple[int, int, int, int, int]
"""BM, BN, BK, warps, stages"""


def _tile(x: Tensor) -> Tile:
    if x.dtype.itemsize > 2:
        return 64, 64, 32, 4, 2
    roomy = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] in (9, 10)  # 144 KiB of shared memory
    return (128, 256, 64, 8, 3) if roomy else (128, 128, 32, 8, 3)


def _programs(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3


def lent_product(out_NF: Tensor, x_ND: Tensor, lent_BDF: Tensor, borders: Tensor, tile: Tile | None = None) -> None:
    """out[n] = x[n] lent[b] for rows of borrowed groups; rows of x and out contiguous."""
    (B, D, F), (BM, BN, BK, warps, stages) = lent_BDF.shape, tile or _tile(x_ND)
    product_kernel[(_programs(x_ND),)](
        out_NF, x_ND, lent_BDF, borders, D, F, out_NF.stride(0), x_ND.stride(0), *lent_BDF.stride(),
        B=B, BP=triton.next_power_of_2(B), BM=BM, BN=BN, BK=BK, EVEN=D % BK == 0 and F % BN == 0, WIDE=tl.float32,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def lent_gradients(grad_BDF: Tensor, x_ND: Tensor, dy_NF: Tensor, borders: Tensor, tile: Tile | None = None) -> None:
    """grad[b] = Σ x[n]ᵀ dy[n] over the rows of borrowed group b; idle slots are not written."""
    (B, D, F), (BM, BN, BK, warps, stages) = grad_BDF.shape, tile or _tile(x_ND)
    gradient_kernel[(_programs(x_ND),)](
        grad_BDF, x_ND, dy_NF, borders, D, F, *grad_BDF.stride(), x_ND.stride(0), dy_NF.stride(0),
        B=B, BP=triton.next_power_of_2(B), BM=BM, BN=BN, BK=BK, EVEN=D % BM == 0 and F % BN == 0, WIDE=tl.float32,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
