# mypy: allow-untyped-defs
"""Muon's passes over memory for a whole stack of blocks at once: `train.optim` holds the equations.

    momentum:  M <- μ M + s G,  X <- bf16(s G + μ M),  and a partial ‖·‖² a program
    scale:     X <- X / ‖X‖
    update:    W <- (1 − η λ) W − η u X

Gradients and weights stay in their own tensors: a table names the address of each block's first number (0: none; its
momentum decays and its weight stays). Tensors start on 16-byte borders, as torch allocates them. `s` is what clipping
asks for, so that no pass is spent on it. Blocks are N, each of `size` numbers in its parameter's own orientation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def tensor_at(address, ALIGNED: tl.constexpr):
    here = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(here, 16) if ALIGNED else here


@triton.jit
def momentum_kernel(
    table, momentum, X, squares, size, scale, MU: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(table + n)
    grad = tensor_at(address, ALIGNED)
    here = n * size + i
    g = scale * tl.load(grad + i, mask=(i < size) & (address != 0), other=0.0)
    m = MU * tl.load(momentum + here, mask=i < size, other=0.0) + g
    u = g + MU * m
    tl.store(momentum + here, m, mask=i < size)
    tl.store(X + here, u.to(X.dtype.element_ty), mask=i < size)
    tl.store(squares + n * tl.num_programs(1) + tl.program_id(1), tl.sum(u * u, 0))


@triton.jit
def scale_kernel(X, factor, size, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + n * size + i, mask=i < size, other=0.0).to(tl.float32) * tl.load(factor + n)
    tl.store(X + n * size + i, x.to(X.dtype.element_ty), mask=i < size)


@triton.jit
def update_kernel(table, X, size, keep, rate, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(table + n)
    weight = tensor_at(address, ALIGNED)
    inside = (i < size) & (address != 0)
    x = tl.load(X + n * size + i, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(weight + i, keep * w - rate * x, mask=inside)


def momentum(table: Tensor, M: Tensor, X: Tensor, scale: float, mu: float, smallest: float) -> None:
    """M [N,...] fp32 and X [N,...], contiguous; table int64 [N] of the gradients' addresses (fp32, 16-byte aligned)."""
    N, size = M.shape[0], M[0].numel()
    grid = N, triton.cdiv(size, _BLOCK)
    squares = torch.empty(grid, dtype=torch.float32, device=M.device)
    momentum_kernel[grid](table, M, X, squares, size, scale, MU=mu, ALIGNED=size % 4 == 0, BLOCK=_BLOCK, num_warps=8)
    factor = squares.sum(1).sqrt_().clamp_min_(smallest).reciprocal_()
    scale_kernel[grid](X, factor, size, BLOCK=_BLOCK, num_warps=8)


def update(table: Tensor, X: Tensor, keep: float, rate: float) -> None:
    """X [N,...] contiguous; table int64 [N] of the weights' addresses."""
    N, size = X.shape[0], X[0].numel()
    grid = N, triton.cdiv(size, _BLOCK)
    update_kernel[grid](table, X, size, keep, rate, ALIGNED=size % 4 == 0, BLOCK=_BLOCK, num_warps=8)
