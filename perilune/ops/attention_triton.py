# mypy: allow-untyped-defs
"""Causal attention over packed documents whose output never leaves fp32: `ops.attention` holds the equation.

    forward   o_i = Σ_j P_ij v_j / Σ_j P_ij,   P_ij = 2^(s_ij − m_i),   lse_i = m_i + log2 Σ_j P_ij
    backward  δ_i = ⟨do_i, o_i⟩,   dS_ij = P_ij (⟨do_i, v_j⟩ − δ_i),   dq = dS k,   dk = dSᵀ q,   dv = Pᵀ do

A program takes BM queries (or BN keys) of one head wherever the documents lie: token t sees first[t] … t, and is seen
by t … end[t] − 1. Both grow with t, so the tiles on neither a border nor the diagonal are one range without a mask.
16-bit P would put a rounded output into fp32, so P·v is two products, of P's high half and of what is left.
Scores are in powers of two. Head widths are cut into a power of two and a rest: 192 = 128 + 64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
# Queries, keys, warps and stages of a program, chosen on an H200 at 192/128 (docs/log.md).
FORWARD = {"SPLIT": True, "BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
QUERIES = {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2}
KEYS = {"BM": 64, "BN": 128, "num_warps": 8, "num_stages": 2}


@triton.jit
def tile(x, start, T, row, D: tl.constexpr, C0: tl.constexpr, W: tl.constexpr, N: tl.constexpr, EDGE: tl.constexpr):
    """[N,W]: N rows from `start`, columns from C0; zeros past T rows (EDGE) and past D columns."""
    r = tl.arange(0, N)[:, None]
    c = C0 + tl.arange(0, W)[None, :]
    at = x + tl.cast(start, tl.int64) * row + r * row + c
    if EDGE:
        return tl.load(at, mask=(r < T - start) & (c < D), other=0.0)
    elif C0 + W > D:
        return tl.load(at, mask=(r >= 0) & (c < D), other=0.0)
    else:
        return tl.load(at)


@triton.jit
def put(x, value, start, T, row, D: tl.constexpr, C0: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    r = tl.arange(0, N)[:, None]
    c = C0 + tl.arange(0, W)[None, :]
    at = x + tl.cast(start, tl.int64) * row + r * row + c
    tl.store(at, value.to(x.dtype.element_ty), mask=(r < T - start) & (c < D))


@triton.jit
def dot(a, b, acc=None):
    return tl.dot(a, b, acc, input_precision="ieee")  # of fp32 inputs; 16-bit ones know no other


@triton.jit
def forward_kernel(
    q, k, v, o, lse, first, T, H, q_row, q_head, k_row, k_head, v_row, v_head, scale,
    DK: tl.constexpr, DV: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, VA: tl.constexpr,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # The last queries have the most keys, so they start first.
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1).to(tl.int64)
    q, k, v = q + head * q_head, k + head * k_head, v + head * v_head
    i = i0 + tl.arange(0, BM)
    begin = tl.load(first + i, mask=i < T, other=0)
    qa = tile(q, i0, T, q_row, DK, 0, KA, BM, True)
    qb = tile(q, i0, T, q_row, DK, KA, KB, BM, True) if KB > 0 else qa
    acc = tl.zeros((BM, VA), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    m = tl.full((BM,), -1e30, tl.float32)  # finite: a tile may hide all its keys from a query
    low, clear = key_range(first, i0, T, BM, BN)
    for part in tl.static_range(3):
        start = low if part == 0 else clear if part == 1 else i0
        stop = clear if part == 0 else i0 if part == 1 else tl.minimum(i0 + BM, T)
        for j0 in tl.range(start, stop, BN):
            s = dot(qa, tl.trans(tile(k, j0, T, k_row, DK, 0, KA, BN, part != 1)))
            if KB > 0:
                s = dot(qb, tl.trans(tile(k, j0, T, k_row, DK, KA, KB, BN, part != 1)), s)
            s = s * scale
            if part != 1:
                j = j0 + tl.arange(0, BN)[None, :]
                s = tl.where((j >= begin[:, None]) & (j <= i[:, None]), s, -float("inf"))
            top = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - top[:, None])
            fade = tl.exp2(m - top)
            total = total * fade + tl.sum(p, 1)
            vs = tile(v, j0, T, v_row, DV, 0, VA, BN, part != 1)
            high = p.to(vs.dtype)
            acc = dot(high, vs, acc * fade[:, None])
            if SPLIT and vs.dtype != tl.float32:
                acc = dot((p - high.to(tl.float32)).to(vs.dtype), vs, acc)
            m = top
    put(o + head * DV, acc / total[:, None], i0, T, H * DV, DV, 0, VA, BM)
    tl.store(lse + head * T + i, m + tl.log2(total), mask=i < T)


@triton.jit
def key_range(first, i0, T, BM: tl.constexpr, BN: tl.constexpr):
    """(first tile of keys any of BM queries sees, first tile all of them see), both at most i0."""
    low = tl.load(first + i0) // BN * BN
    clear = tl.cdiv(tl.load(first + tl.minimum(i0 + BM, T) - 1), BN) * BN
    return low, tl.minimum(clear, i0)


@triton.jit
def delta_kernel(o, do, low, delta, T, H, do_row, do_head, DV: tl.constexpr, VA: tl.constexpr, BM: tl.constexpr):
    """do in the products' dtype, and δ of that: a row of P(⟨do, v⟩ − δ) then still sums to nothing."""
    i0 = tl.program_id(0) * BM
    head = tl.program_id(1).to(tl.int64)
    i = i0 + tl.arange(0, BM)
    rounded = tile(do + head * do_head, i0, T, do_row, DV, 0, VA, BM, True).to(low.dtype.element_ty)
    put(low + head * DV, rounded, i0, T, H * DV, DV, 0, VA, BM)
    out = tile(o + head * DV, i0, T, H * DV, DV, 0, VA, BM, True)
    tl.store(delta + head * T + i, tl.sum(rounded.to(tl.float32) * out, 1), mask=i < T)


@triton.jit
def query_gradient_kernel(
    q, k, v, do, lse, delta, dq, first, T, H, q_row, q_head, k_row, k_head, v_row, v_head, scale, factor,
    DK: tl.constexpr, DV: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, VA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1).to(tl.int64)
    q, k, v, dq = q + head * q_head, k + head * k_head, v + head * v_head, dq + head * DK
    i = i0 + tl.arange(0, BM)
    begin = tl.load(first + i, mask=i < T, other=0)
    qa = tile(q, i0, T, q_row, DK, 0, KA, BM, True)
    qb = tile(q, i0, T, q_row, DK, KA, KB, BM, True) if KB > 0 else qa
    d = tile(do + head * DV, i0, T, H * DV, DV, 0, VA, BM, True)
    peak = tl.load(lse + head * T + i, mask=i < T, other=0.0)
    mean = tl.load(delta + head * T + i, mask=i < T, other=0.0)
    da = tl.zeros((BM, KA), tl.float32)
    db = tl.zeros((BM, KB), tl.float32) if KB > 0 else da
    low, clear = key_range(first, i0, T, BM, BN)
    for part in tl.static_range(3):
        start = low if part == 0 else clear if part == 1 else i0
        stop = clear if part == 0 else i0 if part == 1 else tl.minimum(i0 + BM, T)
        for j0 in tl.range(start, stop, BN):
            ka = tile(k, j0, T, k_row, DK, 0, KA, BN, part != 1)
            kb = tile(k, j0, T, k_row, DK, KA, KB, BN, part != 1) if KB > 0 else ka
            s = dot(qa, tl.trans(ka))
            if KB > 0:
                s = dot(qb, tl.trans(kb), s)
            p = tl.exp2(s * scale - peak[:, None])
            if part != 1:
                j = j0 + tl.arange(0, BN)[None, :]
                p = tl.where((j >= begin[:, None]) & (j <= i[:, None]), p, 0.0)
            dp = dot(d, tl.trans(tile(v, j0, T, v_row, DV, 0, VA, BN, part != 1)))
            ds = (p * (dp - mean[:, None])).to(ka.dtype)
            da = dot(ds, ka, da)
            if KB > 0:
                db = dot(ds, kb, db)
    put(dq, da * factor, i0, T, H * DK, DK, 0, KA, BM)
    if KB > 0:
        put(dq, db * factor, i0, T, H * DK, DK, KA, KB, BM)


@triton.jit
def key_gradient_kernel(
    q, k, v, do, lse, delta, dk, dv, end, T, H, q_row, q_head, k_row, k_head, v_row, v_head, scale, factor,
    DK: tl.constexpr, DV: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, VA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    j0 = tl.program_id(0) * BN
    head = tl.program_id(1).to(tl.int64)
    q, k, v, dk, dv = q + head * q_head, k + head * k_head, v + head * v_head, dk + head * DK, dv + head * DV
    do, lse, delta = do + head * DV, lse + head * T, delta + head * T
    j = j0 + tl.arange(0, BN)
    until = tl.load(end + j, mask=j < T, other=0)
    ka = tile(k, j0, T, k_row, DK, 0, KA, BN, True)
    kb = tile(k, j0, T, k_row, DK, KA, KB, BN, True) if KB > 0 else ka
    vs = tile(v, j0, T, v_row, DV, 0, VA, BN, True)
    da = tl.zeros((BN, KA), tl.float32)
    db = tl.zeros((BN, KB), tl.float32) if KB > 0 else da
    dvs = tl.zeros((BN, VA), tl.float32)
    # Queries from the diagonal on: those after the tile, up to the first document's end, see every key of it.
    start = j0 // BM * BM
    after = start + max(BM, BN)
    last = tl.load(end + tl.minimum(j0 + BN, T) - 1)
    clear = tl.maximum(after, after + (tl.load(end + j0) - after) // BM * BM)
    for part in tl.static_range(3):
        begin = start if part == 0 else after if part == 1 else clear
        stop = tl.minimum(after, last) if part == 0 else clear if part == 1 else last
        for i0 in tl.range(begin, stop, BM):
            i = i0 + tl.arange(0, BM)
            qa = tile(q, i0, T, q_row, DK, 0, KA, BM, part != 1)
            qb = tile(q, i0, T, q_row, DK, KA, KB, BM, part != 1) if KB > 0 else qa
            s = dot(ka, tl.trans(qa))
            if KB > 0:
                s = dot(kb, tl.trans(qb), s)
            peak = tl.load(lse + i, mask=i < T, other=0.0)
            p = tl.exp2(s * scale - peak[None, :])
            if part != 1:
                p = tl.where((i[None, :] >= j[:, None]) & (i[None, :] < until[:, None]), p, 0.0)
            d = tile(do, i0, T, H * DV, DV, 0, VA, BM, part != 1)
            dvs = dot(p.to(d.dtype), d, dvs)
            dp = dot(vs, tl.trans(d))
            mean = tl.load(delta + i, mask=i < T, other=0.0)
            ds = (p * (dp - mean[None, :])).to(qa.dtype)
            da = dot(ds, qa, da)
            if KB > 0:
                db = dot(ds, qb, db)
    put(dk, da * factor, j0, T, H * DK, DK, 0, KA, BN)
    if KB > 0:
        put(dk, db * factor, j0, T, H * DK, DK, KA, KB, BN)
    put(dv, dvs, j0, T, H * DV, DV, 0, VA, BN)


def _widths(q: Tensor, v: Tensor) -> dict[str, int]:
    """Head sizes, and the powers of two (at least 16, a product's least) that hold their parts."""
    DK, DV = q.shape[2], v.shape[2]
    KA = max(16, triton.next_power_of_2(DK + 1) // 2)
    KB = max(16, triton.next_power_of_2(DK - KA)) if DK > KA else 0
    return {"DK": DK, "DV": DV, "KA": KA, "KB": KB, "VA": max(16, triton.next_power_of_2(DV))}


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:2])


def forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q, k [T,H,DK], v [T,H,DV] with contiguous last axes, first [T] int32 -> (o [T,H,DV] fp32, lse [H,T] fp32)."""
    T, H, _ = q.shape
    o = torch.empty(v.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    grid = triton.cdiv(T, FORWARD["BM"]), H
    forward_kernel[grid](q, k, v, o, lse, first, T, H, *_strides(q, k, v), scale * LOG2E, **_widths(q, v), **FORWARD)
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, first: Tensor, end: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in their dtypes. do [T,H,DV] in any, with a contiguous last axis."""
    T, H, _ = q.shape
    widths, strides = _widths(q, v), _strides(q, k, v)
    low = torch.empty(v.shape, dtype=v.dtype, device=q.device)
    delta = torch.empty_like(lse)
    part = {"DV": widths["DV"], "VA": widths["VA"], "BM": 64}
    delta_kernel[(triton.cdiv(T, 64), H)](o, do, low, delta, T, H, *_strides(do), **part)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    query_gradient_kernel[(triton.cdiv(T, QUERIES["BM"]), H)](
        q, k, v, low, lse, delta, dq, first, T, H, *strides, scale * LOG2E, scale, **widths, **QUERIES
    )
    key_gradient_kernel[(triton.cdiv(T, KEYS["BN"]), H)](
        q, k, v, low, lse, delta, dk, dv, end, T, H, *strides, scale * LOG2E, scale, **widths, **KEYS
    )
    return dq, dk, dv
