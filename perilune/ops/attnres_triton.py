# mypy: allow-untyped-defs
"""Block Attention Residuals and the norm that follows, every source read once: `ops.attnres` holds the equations.

Forward keeps, a token, the score of each source and the log of their summed exponentials; the mixture is made again.
With h = Σ p_i v_i the softmax needs no sum over sources in the backward: Σ_i p_i (dh·v_i) = dh·h.
Programs take BR whole tokens, BD >= D wide. Sources come as a tuple of pointers, the running sum last.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.chain_triton import chain, start, wait
from perilune.ops.norm_triton import norm_gradient, normalise, programs, tile

FORWARD = 16  # values a thread holds of a tile


@triton.jit
def mix_kernel(
    sources, w, norm, y, scores, lse, rows, D, eps, norm_eps,
    NORM: tl.constexpr, KEEP: tl.constexpr, QUERIES: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    CHAIN: tl.constexpr = False,
):  # fmt: skip
    start(CHAIN)
    wait(CHAIN)
    # With several queries the programs of one row block are neighbours: its sources come from memory once.
    q = (tl.program_id(0) % QUERIES).to(tl.int64)
    w, y, scores, lse = w + q * D, y + q * rows * D, scores + q * len(sources) * rows, lse + q * rows
    r = (tl.program_id(0) // QUERIES).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BD)
    row = r < rows
    inside = row[:, None] & (c < D)[None, :]
    at = r[:, None] * D + c[None, :]
    query = tl.load(w + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    top = tl.full((BR,), float("-inf"), tl.float32)
    mass = tl.zeros((BR,), tl.float32)
    h = tl.zeros((BR, BD), tl.float32)
    for i in tl.static_range(len(sources)):
        v = tl.load(sources[i] + at, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(v * query, 1) * normalise(v, D, eps)
        if KEEP:
            tl.store(scores + i * rows + r, score, mask=row)
        highest = tl.maximum(top, score)
        fade, share = tl.exp(top - highest), tl.exp(score - highest)
        mass = mass * fade + share
        h = h * fade[:, None] + v * share[:, None]
        top = highest
    if KEEP:
        tl.store(lse + r, top + tl.log(mass), mask=row)
    h = (h / mass[:, None]).to(y.dtype.element_ty)
    if NORM:
        wide = h.to(tl.float32)
        gain = tl.load(norm + c, mask=c < D, other=0.0).to(y.dtype.element_ty).to(tl.float32)[None, :]
        xhat = (wide * normalise(wide, D, norm_eps)[:, None]).to(y.dtype.element_ty)
        h = (xhat.to(tl.float32) * gain).to(y.dtype.element_ty)
    tl.store(y + at, h, mask=inside)


@triton.jit
def merge_kernel(
    mixed, lse, running, added, total, w, norm, y, rows, D, eps, norm_eps,
    NORM: tl.constexpr, ADD: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, CHAIN: tl.constexpr = False,
):  # fmt: skip
    start(CHAIN)
    wait(CHAIN)
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BD)
    row = r < rows
    inside = row[:, None] & (c < D)[None, :]
    at = r[:, None] * D + c[None, :]
    v = tl.load(running + at, mask=inside, other=0.0)
    if ADD:
        v = (v.to(tl.float32) + tl.load(added + at, mask=inside, other=0.0).to(tl.float32)).to(y.dtype.element_ty)
        tl.store(total + at, v, mask=inside)
    v = v.to(tl.float32)
    query = tl.load(w + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    score = tl.sum(v * query, 1) * normalise(v, D, eps)
    share = tl.sigmoid(score - tl.load(lse + r, mask=row, other=0.0))[:, None]  # e^s / (e^s + Σ e^{s_i})
    h = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    h = (h + share * (v - h)).to(y.dtype.element_ty)
    if NORM:
        wide = h.to(tl.float32)
        gain = tl.load(norm + c, mask=c < D, other=0.0).to(y.dtype.element_ty).to(tl.float32)[None, :]
        xhat = (wide * normalise(wide, D, norm_eps)[:, None]).to(y.dtype.element_ty)
        h = (xhat.to(tl.float32) * gain).to(y.dtype.element_ty)
    tl.store(y + at, h, mask=inside)


@triton.jit
def mix_backward_kernel(
    sources, grads, w, norm, dy, scores, lse, dw, dnorm, rows, D, eps, norm_eps, blocks,
    NORM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BD)
    query = tl.load(w + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    if NORM:
        gain = tl.load(norm + c, mask=c < D, other=0.0).to(dy.dtype.element_ty).to(tl.float32)[None, :]
        dgain = tl.zeros((BD,), tl.float32)
    dquery = tl.zeros((BD,), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        r = (block * BR + tl.arange(0, BR)).to(tl.int64)
        row = r < rows
        inside = row[:, None] & (c < D)[None, :]
        at = r[:, None] * D + c[None, :]
        total = tl.load(lse + r, mask=row, other=0.0)
        h = tl.zeros((BR, BD), tl.float32)
        for i in tl.static_range(len(sources)):
            v = tl.load(sources[i] + at, mask=inside, other=0.0).to(tl.float32)
            p = tl.exp(tl.load(scores + i * rows + r, mask=row, other=0.0) - total)
            h += v * p[:, None]
        dh = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            wide = h.to(dy.dtype.element_ty).to(tl.float32)
            rstd = normalise(wide, D, norm_eps)
            xhat = wide * rstd[:, None]
            dgain += tl.sum(dh * xhat, 0)
            dh = norm_gradient(dh * gain, xhat, rstd, D)
        along = tl.sum(dh * h, 1)
        for i in tl.static_range(len(sources)):
            v = tl.load(sources[i] + at, mask=inside, other=0.0).to(tl.float32)
            score = tl.load(scores + i * rows + r, mask=row, other=0.0)
            p = tl.where(row, tl.exp(score - total), 0.0)
            rs = normalise(v, D, eps)
            ds = p * (tl.sum(dh * v, 1) - along)
            # s = r (v·w) and r depends on v: ∂s/∂v = r w − s r² v / D
            turn = ds * rs
            dv = p[:, None] * dh + turn[:, None] * query - (ds * score * rs * rs / D)[:, None] * v
            dquery += tl.sum(turn[:, None] * v, 0)
            tl.store(grads[i] + at, dv.to(grads[i].dtype.element_ty), mask=inside)
    tl.store(dw + tl.program_id(0) * D + c, dquery, mask=c < D)
    if NORM:
        tl.store(dnorm + tl.program_id(0) * D + c, dgain, mask=c < D)


def mix(
    sources: Sequence[Tensor], w: Tensor, norm: Tensor | None, eps: float, norm_eps: float, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """sources [R,D] each, contiguous -> (y [R,D], scores [S,R], log of the summed exponentials [R]); the last two
    only if `keep`."""
    rows, width = sources[-1].shape
    y = torch.empty_like(sources[-1])
    scores = y.new_empty(len(sources), rows, dtype=torch.float32) if keep else None
    lse = y.new_empty(rows, dtype=torch.float32) if keep else None
    shape = tile(width, FORWARD, 4)
    mix_kernel[(triton.cdiv(rows, shape["BR"]),)](
        tuple(sources), w, w if norm is None else norm, y, y if scores is None else scores, y if lse is None else lse,
        rows, width, eps, norm_eps, NORM=norm is not None, KEEP=keep, QUERIES=1, **shape, **chain(),
    )  # fmt: skip
    return y, scores, lse


def ahead(sources: Sequence[Tensor], w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """sources [R,D] each, contiguous, and queries w [Q,D] -> (mixtures [Q,R,D], logs of summed exponentials [Q,R])."""
    (rows, width), queries = sources[0].shape, len(w)
    y = sources[0].new_empty(queries, rows, width)
    scores = y.new_empty(queries, len(sources), rows, dtype=torch.float32)
    lse = y.new_empty(queries, rows, dtype=torch.float32)
    shape = tile(width, FORWARD, 4)
    mix_kernel[(triton.cdiv(rows, shape["BR"]) * queries,)](
        tuple(sources), w, w, y, scores, lse, rows, width, eps, eps,
        NORM=False, KEEP=True, QUERIES=queries, **shape, **chain(),
    )  # fmt: skip
    return y, lse


def merge(
    mixed: Tensor, lse: Tensor, running: Tensor, added: Tensor | None, w: Tensor, norm: Tensor | None, eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(normed mixture [R,D], running + added [R,D]) of one query's part of `ahead` and the running sum."""
    rows, width = running.shape
    y, total = torch.empty_like(running), running if added is None else torch.empty_like(running)
    shape = tile(width, FORWARD, 4)
    merge_kernel[(triton.cdiv(rows, shape["BR"]),)](
        mixed, lse, running, running if added is None else added, total, w, w if norm is None else norm, y,
        rows, width, eps, norm_eps, NORM=norm is not None, ADD=added is not None, **shape, **chain(),
    )  # fmt: skip
    return y, total


def backward_tile(width: int) -> dict[str, int]:
    """A row in one warp where it fits; else few values a thread, because mixture, source and gradient live at once."""
    return tile(width, 16 if width <= 512 else 8, 1)


def mix_backward(
    sources: Sequence[Tensor], w: Tensor, norm: Tensor | None, dy: Tensor, scores: Tensor, lse: Tensor, eps: float,
    norm_eps: float,
) -> tuple[list[Tensor], Tensor, Tensor | None]:  # fmt: skip
    """(gradient of each source, of w [D] fp32, of norm [D] fp32 or None)."""
    rows, width = dy.shape
    shape = backward_tile(width)
    blocks = triton.cdiv(rows, shape["BR"])
    grads = [torch.empty_like(v) for v in sources]
    dw = dy.new_empty(programs(blocks, shape["num_warps"]), width, dtype=torch.float32)
    dnorm = None if norm is None else torch.empty_like(dw)
    mix_backward_kernel[(dw.shape[0],)](
        tuple(sources), tuple(grads), w, w if norm is None else norm, dy, scores, lse, dw,
        dw if dnorm is None else dnorm, rows, width, eps, norm_eps, blocks, NORM=norm is not None, **shape,
    )  # fmt: skip
    return grads, dw.sum(0), None if dnorm is None else dnorm.sum(0)
