"""Sums of indexed rows in one pass, for collectives on a GPU (see `fabric`).

    out[p] = Σ_k x[index[p, k]] in ascending k

Legend: P sums, K rows at most in each, H width. index int64 [P, K], −1: no row.
"""

# Kernel arguments are pointers and constants of the Triton language.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sum_kernel(x, index, out, H, K: tl.constexpr, BH: tl.constexpr):
    """One sum: fp32, rounded once."""
    p, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = part * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for k in range(K):
        row = tl.load(index + p * K + k)
        if row >= 0:
            total += tl.load(x + row * H + col, col < H, 0).to(tl.float32)
    tl.store(out + p * H + col, total.to(out.dtype.element_ty), col < H)


def sum_in_order(x_NH: Tensor, index_PK: Tensor) -> Tensor:
    """[P, H] in the dtype of x, which is not fp64."""
    (P, K), H = index_PK.shape, x_NH.shape[1]
    out = torch.empty(P, H, dtype=x_NH.dtype, device=x_NH.device)
    BH = min(triton.next_power_of_2(H), 1024)
    if P:
        sum_kernel[(P, triton.cdiv(H, BH))](x_NH.contiguous(), index_PK.contiguous(), out, H, K=K, BH=BH)
    return out
