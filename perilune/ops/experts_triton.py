# mypy: allow-untyped-defs
"""What surrounds the grouped products of routed experts: `ops.experts` holds the equations.

Gathering tokens into rows sorted by expert, the weighted activation and its gradients (the routing weight's among them,
which needs no expert output), and the sum over a token's k rows. Each reads and writes its tensors once; `source` maps
a sorted row to its token·k + slot and may be absent where rows carry their own weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.situ_triton import glu, glu_gradients


@triton.jit
def gather_kernel(z, source, rows, R, L, k, z_row, BR: tl.constexpr, BC: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < L)[None, :]
    token = tl.load(source + r, mask=r < R, other=0) // k
    v = tl.load(z + token[:, None] * z_row + c[None, :], mask=inside)
    tl.store(rows + r[:, None] * L + c[None, :], v, mask=inside)


@triton.jit
def combine_kernel(y, place, out, T, L, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (t < T)[:, None] & (c < L)[None, :]
    acc = tl.zeros((BT, BC), tl.float32)
    for i in tl.static_range(K):
        r = tl.load(place + t * K + i, mask=t < T, other=0)
        acc += tl.load(y + r[:, None] * L + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t[:, None] * L + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate_kernel(
    h, weight, source, a, R, N, beta, linear_beta,
    KIND: tl.constexpr, SORTED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < N)[None, :]
    at = r if SORTED else tl.load(source + r, mask=r < R, other=0)
    p = tl.load(weight + at, mask=r < R, other=0.0).to(tl.float32)[:, None]
    gate = h + r[:, None] * (2 * N) + c[None, :]
    g = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate + N, mask=inside, other=0.0).to(tl.float32)
    y = glu(g, u, beta, linear_beta, KIND) * p
    tl.store(a + r[:, None] * N + c[None, :], y.to(a.dtype.element_ty), mask=inside)


@triton.jit
def activate_backward_kernel(
    h, da, weight, source, dh, a, dweight, R, N, beta, linear_beta,
    KIND: tl.constexpr, SORTED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    at = r if SORTED else tl.load(source + r, mask=r < R, other=0)
    p = tl.load(weight + at, mask=r < R, other=0.0).to(tl.float32)[:, None]
    dp = tl.zeros((BR,), tl.float32)
    for first in range(0, N, BC):
        c = first + tl.arange(0, BC)
        inside = (r < R)[:, None] & (c < N)[None, :]
        gate = r[:, None] * (2 * N) + c[None, :]
        g = tl.load(h + gate, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(h + gate + N, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(da + r[:, None] * N + c[None, :], mask=inside, other=0.0).to(tl.float32)
        y, dg, du = glu_gradients(g, u, d * p, beta, linear_beta, KIND)
        dp += tl.sum(y * d, 1)
        tl.store(dh + gate, dg.to(dh.dtype.element_ty), mask=inside)
        tl.store(dh + gate + N, du.to(dh.dtype.element_ty), mask=inside)
        tl.store(a + r[:, None] * N + c[None, :], (y * p).to(a.dtype.element_ty), mask=inside)
    tl.store(dweight + at, dp, mask=r < R)


def gather(z: Tensor, source: Tensor, k: int) -> Tensor:
    """Rows [R,L] of z [T,L] (last axis contiguous), row r that of token source[r] // k."""
    R, L = len(source), z.shape[1]
    rows = torch.empty(R, L, dtype=z.dtype, device=z.device)
    grid, tile = _tiles(R, L)
    gather_kernel[grid](z, source, rows, R, L, k, z.stride(0), **tile)
    return rows


def combine(y: Tensor, place: Tensor, k: int) -> Tensor:
    """[T,L]: the fp32 sum of each token's k rows of y [R,L]."""
    T, L = len(place) // k, y.shape[1]
    out = torch.empty(T, L, dtype=y.dtype, device=y.device)
    bc = min(256, triton.next_power_of_2(L))
    bt = 1024 // bc
    combine_kernel[(triton.cdiv(T, bt), triton.cdiv(L, bc))](y, place, out, T, L, K=k, BT=bt, BC=bc)
    return out


def activate(h: Tensor, weight: Tensor, source: Tensor | None, beta: float, linear_beta: float, kind: int) -> Tensor:
    """weight · act(gate, up) [R,I] of h [R,2I] = [gate | up], in h's dtype."""
    R, inner = h.shape[0], h.shape[1] // 2
    a = torch.empty(R, inner, dtype=h.dtype, device=h.device)
    grid, tile = _tiles(R, inner)
    activate_kernel[grid](
        h, weight, weight if source is None else source, a, R, inner, beta, linear_beta,
        KIND=kind, SORTED=source is None, **tile,
    )  # fmt: skip
    return a


def activate_backward(
    h: Tensor, da: Tensor, weight: Tensor, source: Tensor | None, beta: float, linear_beta: float, kind: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh [R,2I], weight · act [R,I], d weight in weight's order, fp32)."""
    R, inner = da.shape
    dh, a = torch.empty_like(h), torch.empty_like(da)
    dweight = torch.empty(weight.shape, dtype=torch.float32, device=h.device)
    bc = min(64, triton.next_power_of_2(inner))
    br = 1024 // bc
    activate_backward_kernel[(triton.cdiv(R, br),)](
        h, da, weight, weight if source is None else source, dh, a, dweight, R, inner, beta, linear_beta,
        KIND=kind, SORTED=source is None, BR=br, BC=bc,
    )  # fmt: skip
    return dh, a, dweight


def _tiles(rows: int, cols: int) -> tuple[tuple[int, int], dict[str, int]]:
    bc = min(128, triton.next_power_of_2(cols))
    br = 2048 // bc
    return (triton.cdiv(rows, br), triton.cdiv(cols, bc)), {"BR": br, "BC": bc}
