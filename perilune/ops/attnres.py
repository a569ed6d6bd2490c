"""Block Attention Residuals: a softmax over depth, one token at a time (technical report §2.2, eq. 8-10).

    score_i = Σ_d w_d v_{i,d} · rsqrt(mean_d v_i² + ε)        w = γ ⊙ (projection row), ε = 1e-5
    out     = Σ_i softmax_i(score) v_i                          raw values, no 1/√d, no bias

Sources are the finished blocks and the running sum (`partial`), which always comes last. All in fp32 (fp64 for fp64
inputs), cast once. With no finished block the result is the partial sum itself.
Shapes: T tokens (any leading axes), D width, N finished blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def mix(
    blocks: Sequence[Tensor],
    partial: Tensor,
    weight: Tensor,
    *,
    scales: Sequence[Tensor] | None = None,
    eps: float = EPS,
) -> Tensor:
    """Attention Residuals of blocks (each [...,D]) and partial [...,D] with weight [D] = γ·w.

    scales: `rms_scale` of each block, if already known; gradients flow to the block as if computed here.
    Returns [...,D] in partial's dtype.
    """
    _check(blocks, partial, weight, scales)
    if not blocks:
        return partial
    known = [rms_scale(b, eps) for b in blocks] if scales is None else list(scales)
    return _Mix.apply(weight, *known, rms_scale(partial, eps), *blocks, partial)


def mix_reference(blocks: Sequence[Tensor], partial: Tensor, weight: Tensor, *, eps: float = EPS) -> Tensor:
    """The equation, by autograd."""
    v = torch.stack([_widen(x) for x in (*blocks, partial)])
    score = (v * _widen(weight)).sum(-1) * torch.rsqrt(v.square().mean(-1) + eps)
    return (torch.softmax(score, 0).unsqueeze(-1) * v).sum(0).to(partial.dtype)


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


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check(blocks: Sequence[Tensor], partial: Tensor, weight: Tensor, scales: Sequence[Tensor] | None) -> None:
    if weight.shape != partial.shape[-1:]:
        raise ValueError(f"mix: weight must be [{partial.shape[-1]}], got {tuple(weight.shape)}.")
    for i, block in enumerate(blocks):
        if block.shape != partial.shape:
            raise ValueError(f"mix: block {i} is {tuple(block.shape)}, the partial sum {tuple(partial.shape)}.")
    if scales is not None and len(scales) != len(blocks):
        raise ValueError(f"mix: {len(scales)} scales for {len(blocks)} blocks.")
