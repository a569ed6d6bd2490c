"""Grouped products whose rows are known only on the device (see `products`).

A fixed number of programs, one a multiprocessor, walks the tiles that there are. Groups without rows cost next to
nothing, however many there are.

    grouped_kernel    all groups, own and lent, in one walk, through Hopper's tensor descriptors: many groups of few
                      rows, where torch's grouped product slows down with their skew
    product_kernel    the borrowed groups alone, on any device, beside torch's grouped product
    gradient_kernel   their gradients

Legend: N rows, D and F widths, L own groups, B slots (BP a power of two); ends int32 [L + B]; borders int32 [B + 1];
EVEN: widths are whole tiles; KMAJOR: weights lie as [F, D].
"""

# Kernel arguments are pointers and constants of the Triton language.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


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


@triton.jit
def _block(
    x, weights, out, first_row, m, n, last, D, F, out_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KMAJOR: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN]. Rows past the group's are multiplied by its weights too, and not stored."""
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        left = x.load([m, k])
        if KMAJOR:
            right = weights.load([first_row + n, k]).T
        else:
            right = weights.load([first_row + k, n])
        total = tl.dot(left, right, total)
    row, col = m + tl.arange(0, BM)[:, None], n + tl.arange(0, BN)[None, :]
    where = out + row.to(tl.int64) * out_row + col
    tl.store(where, total.to(out.dtype.element_ty), (row < last) & (col < F))


@triton.jit
def _walk(
    x, weights, out, ends, tile, done, D, F, out_row,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KMAJOR: tl.constexpr,
):  # fmt: skip
    """This program's tiles of groups FIRST to LAST; `done` tiles lie before them. Neighbours share columns."""
    columns = tl.cdiv(F, BN)
    for g in range(FIRST, LAST):
        first, last = tl.load(ends + g - 1, g > 0, 0), tl.load(ends + g)
        high = tl.cdiv(last - first, BM)
        upto = done + high * columns
        while tile < upto:
            within = tile - done
            m, n = first + within % high * BM, within // high * BN
            _block(x, weights, out, (g - FIRST) * (F if KMAJOR else D), m, n, last, D, F, out_row, BM, BN, BK, KMAJOR)
            tile += tl.num_programs(0)
        done = upto
    return tile, done


@triton.jit
def grouped_kernel(
    x, own, lent, out, ends, D, F, out_row, L: tl.constexpr, B: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KMAJOR: tl.constexpr,
):  # fmt: skip
    """out = x W_g for all groups. x, own, lent: descriptors of [N, D] and of the weights as matrices."""
    none = tl.full((), 0, tl.int32)
    tile, done = _walk(x, own, out, ends, tl.program_id(0), none, D, F, out_row, 0, L, BM, BN, BK, KMAJOR)
    _walk(x, lent, out, ends, tile, done, D, F, out_row, L, L + B, BM, BN, BK, KMAJOR)


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


def described(x_ND: Tensor, own_LDF: Tensor, lent_BDF: Tensor) -> bool:
    """Whether `grouped` can: 16-bit values on a Hopper GPU, dense weights, widths that descriptors can take."""
    D = x_ND.shape[1]
    hopper = x_ND.is_cuda and torch.cuda.get_device_capability(x_ND.device)[0] == 9
    dense = all(_flat(w) is not None for w in (own_LDF, lent_BDF)) and x_ND.stride(1) == 1
    return hopper and dense and x_ND.dtype.itemsize == 2 and D % 64 == 0 and own_LDF.shape[2] % 8 == 0


def _flat(weights: Tensor) -> Tensor | None:
    """Dense weights [G, D, F] as one matrix, as they lie: [G·F, D] or [G·D, F]."""
    if weights.mT.is_contiguous():
        return weights.mT.flatten(0, 1)
    return weights.flatten(0, 1) if weights.is_contiguous() else None


def grouped(
    x_ND: Tensor, own_LDF: Tensor, lent_BDF: Tensor, ends_G: Tensor, tile: Tile = (128, 256, 64, 8, 3)
) -> Tensor:
    """The product of all groups [N, F]; see `described`. B may not be 0, own and lent lie alike."""
    (L, D, F), (BM, BN, BK, warps, stages) = own_LDF.shape, tile
    kmajor = own_LDF.mT.is_contiguous()
    assert lent_BDF.mT.is_contiguous() == kmajor
    out = x_ND.new_empty(x_ND.shape[0], F)
    block = [BN, BK] if kmajor else [BK, BN]
    own, lent = (TensorDescriptor.from_tensor(_flat(w), block) for w in (own_LDF, lent_BDF))
    grouped_kernel[(_programs(x_ND),)](
        TensorDescriptor.from_tensor(x_ND, [BM, BK]), own, lent, out, ends_G, D, F, out.stride(0),
        L=L, B=lent_BDF.shape[0], BM=BM, BN=BN, BK=BK, KMAJOR=kmajor, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
