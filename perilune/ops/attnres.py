"""Block Attention Residuals: a softmax over depth, one token at a time (technical report §2.2, eq. 8-10).

    score_i = Σ_d w_d v_{i,d} · rsqrt(mean_d v_i² + ε)        w = γ ⊙ (projection row), ε = 1e-5
    out     = Σ_i softmax_i(score) v_i                          raw values, no 1/√d, no bias

Sources are the finished blocks and the running sum (`partial`), which always comes last. All in fp32 (fp64 for fp64
inputs), cast once. With no finished block the result is the partial sum itself. What follows a read in K3 is an
RMSNorm; with `norm` it is part of the read. On an NVIDIA GPU each direction is one kernel (`attnres_triton`).
Shapes: T tokens (any leading axes), D width, N finished blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.dispatch import fused, kernels
from perilune.ops.norm import rms_norm, rms_norm_reference
from perilune.ops.precision import own_precision

EPS = 1e-5


@own_precision
def rms_scale(source: Tensor, eps: float = EPS) -> Tensor:
    """rsqrt(mean v² + ε) [..., 1] of one source, without gradient.

    A finished block is read by many sublayers: compute this once when the block closes and hand it to `mix`.
    """
    with torch.no_grad():
        wide = _widen(source)
        return torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(source.shape[-1]).add_(eps)).unsqueeze(-1)


def block_scale(source: Tensor, eps: float = EPS, *, impl: str = "auto") -> Tensor:
    """`rms_scale` where `mix` will use it; empty where its kernels make it in passing."""
    return source.new_empty(0) if fused("mix", impl, source) else rms_scale(source, eps)


def mix(
    blocks: Sequence[Tensor],
    partial: Tensor,
    weight: Tensor,
    *,
    scales: Sequence[Tensor] | None = None,
    eps: float = EPS,
    norm: Tensor | None = None,
    norm_eps: float = EPS,
    impl: str = "auto",
) -> Tensor:
    """Attention Residuals of blocks (each [...,D]) and partial [...,D] with weight [D] = γ·w.

    scales: `block_scale` of each block, if already known; gradients flow to the block as if computed here.
    norm: the weight [D] of an RMSNorm taken of the result.
    Returns [...,D] in partial's dtype.
    """
    _check(blocks, partial, weight, scales, norm)
    alike = all(b.dtype == partial.dtype for b in blocks)
    if fused("mix", impl, partial, None if alike else "blocks and the partial sum differ in dtype") and blocks:
        return _FusedMix.apply(weight, norm, eps, norm_eps, *blocks, partial)
    h = partial if not blocks else _eager(blocks, partial, weight, scales, eps)
    return h if norm is None else rms_norm(h, norm, norm_eps, impl=impl)


def _eager(
    blocks: Sequence[Tensor], partial: Tensor, weight: Tensor, scales: Sequence[Tensor] | None, eps: float
) -> Tensor:
    known = [rms_scale(b, eps) for b in blocks] if scales is None else list(scales)
    return _Mix.apply(weight, *known, rms_scale(partial, eps), *blocks, partial)


class Ahead(NamedTuple):
    """What Q reads share before the running sum is known: of each query the mixture [Q,...,D] of the finished blocks
    and the log of their summed exponentials [Q,...] fp32."""

    mixed: Tensor
    lse: Tensor


@torch.no_grad()
@own_precision
def mix_ahead(blocks: Sequence[Tensor], weights: Tensor, *, eps: float = EPS, impl: str = "auto") -> Ahead:
    """The first of inference's two phases (§5.4.2): every query of the coming block at once, each source read once.

    blocks: at least one, [...,D] each. weights [Q,D]: folded queries of the reads until the next border. No gradient.
    """
    if weights.dim() != 2 or not blocks or weights.shape[1] != blocks[0].shape[-1]:
        raise ValueError(f"mix_ahead: weights must be [Q,D] beside blocks of width D, got {tuple(weights.shape)}.")
    shape = blocks[0].shape
    for i, block in enumerate(blocks):
        if block.shape != shape or block.dtype != blocks[0].dtype:
            raise ValueError(f"mix_ahead: block {i} is {tuple(block.shape)} {block.dtype}, block 0 {tuple(shape)}.")
    if fused("mix_ahead", impl, blocks[0]):
        mixed, lse = kernels("attnres_triton").ahead([_flat(b) for b in blocks], weights.contiguous(), eps)
        return Ahead(mixed.view(-1, *shape), lse.view(-1, *shape[:-1]))
    v = torch.stack([_widen(b) for b in blocks])
    scale = torch.rsqrt(v.square().mean(-1) + eps)
    score = torch.einsum("s...d,qd->qs...", v, _widen(weights).to(v.dtype)) * scale
    mixed = torch.einsum("qs...,s...d->q...d", torch.softmax(score, 1), v)
    return Ahead(mixed.to(blocks[0].dtype), torch.logsumexp(score, 1))


@torch.no_grad()
@own_precision
def merge(
    ahead: Ahead,
    read: int,
    running: Tensor,
    weight: Tensor,
    *,
    added: Tensor | None = None,
    eps: float = EPS,
    norm: Tensor | None = None,
    norm_eps: float = EPS,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The second phase: read number `read` of the block, with the running sum folded in by an online softmax.

    added: what the last sublayer adds to the running sum first. norm: the weight [D] of the RMSNorm that follows.
    Returns (what `mix` gives, the new running sum), both [...,D]. No gradient.
    """
    if not 0 <= read < len(ahead.mixed):
        raise ValueError(f"merge: read {read} is not one of the {len(ahead.mixed)} computed ahead.")
    mixed, lse = ahead.mixed[read], ahead.lse[read]
    _check([mixed], running, weight, None, norm, "merge")
    if added is not None and added.shape != running.shape:
        raise ValueError(f"merge: added is {tuple(added.shape)}, the running sum {tuple(running.shape)}.")
    if fused("merge", impl, running):
        flat = [_flat(mixed), lse.reshape(-1), _flat(running), None if added is None else _flat(added)]
        y, total = kernels("attnres_triton").merge(*flat, weight, norm, eps, norm_eps)
        return y.view(running.shape), total.view(running.shape)
    total = running if added is None else running + added
    wide, h = _widen(total), _widen(mixed)
    score = (wide @ _widen(weight).to(wide.dtype)) * rms_scale(total, eps).squeeze(-1)
    h = torch.lerp(h, wide, torch.sigmoid(score - lse).unsqueeze(-1)).to(total.dtype)
    return (h if norm is None else rms_norm(h, norm, norm_eps, impl=impl)), total


def mix_reference(
    blocks: Sequence[Tensor],
    partial: Tensor,
    weight: Tensor,
    *,
    eps: float = EPS,
    norm: Tensor | None = None,
    norm_eps: float = EPS,
) -> Tensor:
    """The equation, by autograd."""
    v = torch.stack([_widen(x) for x in (*blocks, partial)])
    score = (v * _widen(weight)).sum(-1) * torch.rsqrt(v.square().mean(-1) + eps)
    h = (torch.softmax(score, 0).unsqueeze(-1) * v).sum(0).to(partial.dtype)
    return h if norm is None else rms_norm_reference(h, norm, norm_eps)


@own_precision
def probabilities(blocks: Sequence[Tensor], partial: Tensor, weight: Tensor, *, eps: float = EPS) -> Tensor:
    """The softmax weights [N+1, ...], the partial sum's last: what a report draws over depth."""
    with torch.no_grad():
        sources = [*blocks, partial]
        return _softmax(sources, [rms_scale(x, eps) for x in sources], weight).squeeze(-1)


def _softmax(sources: Sequence[Tensor], scales: Sequence[Tensor], weight: Tensor) -> Tensor:
    w = _widen(weight)
    scores = [(_widen(v) @ w.to(_widen(v).dtype)).unsqueeze(-1) * r for v, r in zip(sources, scales, strict=True)]
    return torch.softmax(torch.stack(scores), 0)


class _Mix(torch.autograd.Function):
    """Saves the sources (alive anyway), their scales and the probabilities: two numbers a source and token."""

    @staticmethod
    @own_precision
    def forward(ctx: Any, weight: Tensor, *scales_and_sources: Tensor) -> Tensor:  # type: ignore[override]
        half = len(scales_and_sources) // 2
        scales, sources = scales_and_sources[:half], scales_and_sources[half:]
        p = _softmax(sources, scales, weight)
        out = _widen(sources[0]) * p[0]
        for i in range(1, half):
            out.addcmul_(_widen(sources[i]), p[i])
        ctx.save_for_backward(weight, p, *scales_and_sources)
        return out.to(sources[-1].dtype)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, p, *rest = ctx.saved_tensors
        half = len(rest) // 2
        scales, sources = rest[:half], rest[half:]
        w = _widen(weight).to(p.dtype)
        dout = dout.to(p.dtype)
        dp = torch.stack([torch.linalg.vecdot(dout, v.to(p.dtype)).unsqueeze(-1) for v in sources])
        ds = p * (dp - (p * dp).sum(0, keepdim=True))
        dw, dsources = torch.zeros_like(w), []
        for i, (source, r) in enumerate(zip(sources, scales, strict=True)):
            v, along = source.to(p.dtype), ds[i] * r
            dw += along.flatten() @ v.flatten(0, -2)
            # s = r (v·w) and r depends on v: ∂s/∂v = r w − s r² v / D
            shrink = along * r.square() * (v @ w).unsqueeze(-1) / v.shape[-1]
            dv = (dout * p[i]).addcmul_(v, shrink, value=-1.0).addcmul_(along, w)
            dsources.append(dv.to(source.dtype))
        return dw.to(weight.dtype), *[None] * half, *dsources


class _FusedMix(torch.autograd.Function):
    """Keeps the sources, which are alive anyway, and a score and a half a source and token."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, weight: Tensor, norm: Tensor | None, eps: float, norm_eps: float, *sources: Tensor
    ) -> Tensor:
        flat = [_flat(v) for v in sources]
        keep = any(ctx.needs_input_grad)
        y, scores, lse = kernels("attnres_triton").mix(flat, weight, norm, eps, norm_eps, keep)
        if keep:
            ctx.save_for_backward(weight, norm, scores, lse, *sources)
        ctx.eps = eps, norm_eps
        return y.view(sources[-1].shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, norm, scores, lse, *sources = ctx.saved_tensors
        flat = [_flat(v) for v in sources]
        dv, dw, dnorm = kernels("attnres_triton").mix_backward(flat, weight, norm, _flat(dy), scores, lse, *ctx.eps)
        dnorm = None if norm is None else dnorm.to(norm.dtype)
        return dw.to(weight.dtype), dnorm, None, None, *(d.view(v.shape) for d, v in zip(dv, sources, strict=True))


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check(
    blocks: Sequence[Tensor], partial: Tensor, weight: Tensor, scales: Sequence[Tensor] | None, norm: Tensor | None,
    op: str = "mix",
) -> None:  # fmt: skip
    for name, x in (("weight", weight), ("norm", norm)):
        if x is not None and x.shape != partial.shape[-1:]:
            raise ValueError(f"{op}: {name} must be [{partial.shape[-1]}], got {tuple(x.shape)}.")
    for i, block in enumerate(blocks):
        if block.shape != partial.shape:
            raise ValueError(f"{op}: block {i} is {tuple(block.shape)}, the partial sum {tuple(partial.shape)}.")
    if scales is not None and len(scales) != len(blocks):
        raise ValueError(f"mix: {len(scales)} scales for {len(blocks)} blocks.")
