# mypy: allow-untyped-defs
"""Paged absorbed MLA decode: `ops.mla` holds the equation. Bound by the bytes of the latents, each read once a program.

A program takes BM (window, head) rows of one sequence and a split of its context; a latent serves as key and value of
every row from one load. Splits are as many as fill the chip, known from shapes alone, and share the context by the
lengths they find on the device, so that a CUDA graph holds. Each leaves an unnormalised sum, its largest score and its
mass; a second kernel merges them. One split writes the result itself.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.chain_triton import chain, start, wait

_PROGRAMS = 264  # two for each processor of an H200
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_of(length, BT: tl.constexpr, SPLITS: tl.constexpr):
    """Tokens of a split: whole tiles."""
    return tl.cdiv(tl.cdiv(length, SPLITS), BT) * BT


@triton.jit
def attend_kernel(
    q, latents, table, lengths, out, part, stats, M, H, W, P, scale, page_stride, table_row,
    R: tl.constexpr, VALUES: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
    BV: tl.constexpr, BR: tl.constexpr, CHAIN: tl.constexpr = False,
):  # fmt: skip
    start(CHAIN)
    wait(CHAIN)
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = m < M
    length = tl.load(lengths + n).to(tl.int32)
    size = split_of(length, BT, SPLITS)
    first = split * size
    last = tl.minimum(first + size, length)
    seen = length - W + m // H  # the last token that a row attends to
    v, r = tl.arange(0, BV), VALUES + tl.arange(0, BR)
    at = q + (n * M + m)[:, None] * R
    qv = tl.load(at + v[None, :], mask=row[:, None] & (v < VALUES)[None, :], other=0.0)
    if R > VALUES:
        qr = tl.load(at + r[None, :], mask=row[:, None] & (r < R)[None, :], other=0.0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    for begin in range(first, last, BT):
        t = begin + tl.arange(0, BT)
        here = t < last
        page = tl.load(table + n * table_row + t // P, mask=here, other=0).to(tl.int64)
        token = latents + (page * page_stride + (t % P) * R)[:, None]
        c = tl.load(token + v[None, :], mask=here[:, None] & (v < VALUES)[None, :], other=0.0)
        s = tl.dot(qv, tl.trans(c), input_precision="ieee")
        if R > VALUES:
            shared = tl.load(token + r[None, :], mask=here[:, None] & (r < R)[None, :], other=0.0)
            s = tl.dot(qr, tl.trans(shared), s, input_precision="ieee")
        s = tl.where(here[None, :] & (t[None, :] <= seen[:, None]), s * (scale * LOG2E), float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)  # nothing visible so far: no −inf − −inf
        fade, p = tl.exp2(top - level), tl.exp2(s - level[:, None])
        mass = mass * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * fade[:, None], input_precision="ieee")
        top = highest
    kept = row[:, None] & (v < VALUES)[None, :]
    if SPLITS == 1:
        o = (acc / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + (n * M + m)[:, None] * VALUES + v[None, :], o, mask=kept)
    else:
        at = (n * SPLITS + split) * M + m
        tl.store(stats + 2 * at, top, mask=row)
        tl.store(stats + 2 * at + 1, mass, mask=row)
        if first < length:
            tl.store(part + at[:, None] * VALUES + v[None, :], acc, mask=kept)


@triton.jit
def merge_kernel(
    part, stats, lengths, out, M, VALUES: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BA: tl.constexpr,
    BS: tl.constexpr, BV: tl.constexpr, CHAIN: tl.constexpr = False,
):  # fmt: skip
    start(CHAIN)
    wait(CHAIN)
    n, m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, v = tl.arange(0, BS), tl.program_id(2) * BV + tl.arange(0, BV)
    length = tl.load(lengths + n).to(tl.int32)
    used = tl.cdiv(length, split_of(length, BT, SPLITS))
    a = tl.arange(0, BA)
    highest = tl.max(tl.load(stats + 2 * ((n * SPLITS + a) * M + m), mask=a < used, other=float("-inf")), 0)
    total = 0.0
    acc = tl.zeros((BV,), tl.float32)
    for first in tl.static_range(0, SPLITS, BS):
        here = first + s < used
        one = (n * SPLITS + first + s) * M + m
        weight = tl.exp2(tl.load(stats + 2 * one, mask=here, other=float("-inf")) - highest)
        total += tl.sum(weight * tl.load(stats + 2 * one + 1, mask=here, other=0.0), 0)
        kept = here[:, None] & (v < VALUES)[None, :]
        acc += tl.sum(weight[:, None] * tl.load(part + one[:, None] * VALUES + v[None, :], mask=kept, other=0.0), 0)
    tl.store(out + (n * M + m) * VALUES + v, (acc / total).to(out.dtype.element_ty), mask=v < VALUES)


def tiles(rows: int, width: int, values: int, itemsize: int) -> dict[str, int]:
    """Shape of an `attend_kernel` program for this many (window, head) rows of a sequence."""
    bm = min(64, max(16, triton.next_power_of_2(rows)))
    bv = max(16, triton.next_power_of_2(values))
    bt = 64 if itemsize == 2 else 16
    br = max(16, triton.next_power_of_2(width - values))
    return {"BM": bm, "BT": bt, "BV": bv, "BR": br, "num_warps": 8 if bm * bv >= 8192 else 4, "num_stages": 2}


def splits(sequences: int, blocks: int, tokens: int, bt: int) -> int:
    """How many share a context: enough programs for the chip, of at least a tile each in the longest."""
    return max(1, min(triton.cdiv(_PROGRAMS, sequences * blocks), triton.cdiv(tokens, bt), 128))


def decode(q: Tensor, latents: Tensor, table: Tensor, lengths: Tensor, values: int, scale: float) -> Tensor:
    """q [N,W,H,R] contiguous, latents [pages,P,R] contiguous in a page -> [N,W,H,values]."""
    shape = tiles(q.shape[1] * q.shape[2], q.shape[3], values, q.element_size())
    count = _count(q, table, latents.shape[1], shape)
    return _run(q, latents, table, lengths, scale, q.new_empty(*q.shape[:3], values), count, shape)[0]


def part(
    q: Tensor, latents: Tensor, table: Tensor, lengths: Tensor, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """q [N,H,R], lengths at least 1 -> (o [N,H,values], log-sum-exp of the scores [N,H]), fp32."""
    q = q.unsqueeze(1)
    shape = tiles(q.shape[2], q.shape[3], values, q.element_size())
    count = max(2, _count(q, table, latents.shape[1], shape))  # one split alone leaves no statistics
    out = q.new_empty(*q.shape[:3], values, dtype=torch.float32)
    o, stats = _run(q, latents, table, lengths, scale, out, count, shape)
    top, mass = stats.unbind(-1)  # [N,splits,H], logarithms to base 2
    highest = top.amax(1)
    total = (mass * torch.exp2(top - highest.unsqueeze(1))).sum(1)
    return o.squeeze(1), (highest + total.log2()) * math.log(2)


def _count(q: Tensor, table: Tensor, tokens: int, shape: dict[str, int]) -> int:
    blocks = triton.cdiv(q.shape[1] * q.shape[2], shape["BM"])
    return splits(q.shape[0], blocks, table.shape[1] * tokens, shape["BT"])


def _run(
    q: Tensor, latents: Tensor, table: Tensor, lengths: Tensor, scale: float, out: Tensor, count: int,
    shape: dict[str, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [N,W,H,values], filled; of each split and row the largest score and the mass, where there are splits)."""
    N, W, H, R = q.shape
    table, values = table.contiguous(), out.shape[-1]
    P, M = latents.shape[1], W * H
    blocks = triton.cdiv(M, shape["BM"])
    part = q.new_empty(N, count, M, values, dtype=torch.float32) if count > 1 else out
    stats = q.new_empty(N, count, M, 2, dtype=torch.float32) if count > 1 else out
    attend_kernel[N, blocks, count](
        q, latents, table, lengths, out, part, stats, M, H, W, P, scale, latents.stride(0), table.stride(0),
        R=R, VALUES=values, SPLITS=count, **shape, **chain(),
    )  # fmt: skip
    if count > 1:
        up = triton.next_power_of_2
        few, bv = min(16, up(count)), min(128, shape["BV"])
        merge_kernel[N, M, triton.cdiv(values, bv)](
            part, stats, lengths, out, M, VALUES=values, SPLITS=count, BT=shape["BT"], BA=up(count), BS=few, BV=bv,
            **chain(),
        )  # fmt: skip
    return out, stats
