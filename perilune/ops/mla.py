"""Absorbed MLA over pages of latents: decoding windows attend without expanding keys or values (report §2.1.2, §5.4.2).

    o_w = Σ_{t ≤ past + w} softmax_t(scale · ⟨q_w, c_t⟩) c_t[:values]

q is already in latent space (q_nope W_UK beside q_rope), so every head reads the same latents c: one read of the pages
serves all heads. On an NVIDIA GPU two kernels (`mla_triton`) read them where they lie.
A context that lies in several places is attended to in parts: each gives (o_r, l_r = log Σ exp scores), and

    o = Σ_r exp(l_r − l) o_r,   l = log Σ_r exp l_r                      (`mla_part`, `merge_parts`)

N sequences, W tokens a window, H heads, R width of a latent, P tokens a page, J pages a row.
"""

import torch
from torch import Tensor

from perilune.ops.dispatch import fused, kernels, readable
from perilune.ops.precision import own_precision


@torch.no_grad()
@own_precision
def mla_decode(
    q: Tensor, latents: Tensor, table: Tensor, lengths: Tensor, *, values: int, scale: float, impl: str = "auto"
) -> Tensor:
    """Attention of windows to their sequences' paged pasts and to themselves.

    Args:
        q: [N,W,H,R].
        latents: [pages,P,R] of q's dtype, any stride on the first axis; the window's own are already written.
        table: [N,J] integers, the pages of each sequence in order; what lies beyond its length must be finite.
        lengths: [N] integers, tokens of each sequence, its window included: W at least, J·P at most.
        values: how many of the R are the value, the first ones.
        scale: of the scores.
    Returns:
        [N,W,H,values] in q's dtype; softmax and sums are fp32 (fp64 for fp64).
    Raises:
        ValueError: one sentence that names the argument.
    """
    _check(q, latents, table, lengths, values)
    if fused("mla_decode", impl, q):
        out: Tensor = kernels("mla_triton").decode(q.contiguous(), latents, table, lengths, values, scale)
        return out
    N, W, H, _ = q.shape
    context = latents[table].flatten(1, 2)
    last = (lengths - W).unsqueeze(1) + torch.arange(W, device=q.device)
    weight = _scores(q, context, last, scale).softmax(-1)
    return (weight.to(q.dtype).flatten(1, 2) @ context[..., :values]).view(N, W, H, values)


def _scores(q: Tensor, context: Tensor, last: Tensor, scale: float) -> Tensor:
    """[N,W,H,L] of q against latents [N,L,R], −inf beyond last [N,W]."""
    scores = (q.flatten(1, 2) @ context.mT).unflatten(1, q.shape[1:3])
    position = torch.arange(context.shape[1], device=q.device)
    hidden = position > last.unsqueeze(-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (scores.to(wide) * scale).masked_fill(hidden.unsqueeze(2), -torch.inf)


@torch.no_grad()
def mla_part(
    q: Tensor, latents: Tensor, table: Tensor, seen: Tensor, *, values: int, scale: float, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention of single queries to a part of their contexts, for `merge_parts`.

    Args:
        q: [N,H,R]. latents, table, values, scale: as `mla_decode`'s.
        seen: [N] integers, how many tokens of the part each query attends to; may be 0.
    Returns:
        o [N,H,values] and the log-sum-exp of its scores [N,H], fp32 (fp64 for fp64); 0 and −inf where
            nothing is seen.
    Raises:
        ValueError: one sentence that names the argument.
    """
    nothing = (seen == 0).unsqueeze(-1)
    seen = seen + (seen == 0)
    _check(q.unsqueeze(1), latents, table, seen, values)
    if fused("mla_decode", impl, q):
        o, lse = kernels("mla_triton").part(q.contiguous(), latents, table, seen, values, scale)
    else:
        context = latents[table].flatten(1, 2)
        scores = _scores(q.unsqueeze(1), context, (seen - 1).unsqueeze(1), scale).squeeze(1)
        lse = scores.logsumexp(-1)
        o = ((scores - lse.unsqueeze(-1)).exp().to(q.dtype) @ context[..., :values]).to(scores.dtype)
    return o.masked_fill(nothing.unsqueeze(-1), 0), lse.masked_fill(nothing, -torch.inf)


def merge_parts(o: Tensor, lse: Tensor) -> Tensor:
    """Parts o [parts,...,values] with their lse [parts,...] -> attention to all of them [...,values]."""
    return (lse.softmax(0).unsqueeze(-1) * o).sum(0)


def _check(q: Tensor, latents: Tensor, table: Tensor, lengths: Tensor, values: int) -> None:
    if q.dim() != 4 or latents.dim() != 3 or q.shape[3] != latents.shape[2]:
        raise ValueError(f"mla_decode: q must be [N,W,H,R], latents [pages,P,R]; got {[*q.shape]}, {[*latents.shape]}.")
    if latents.stride()[1:] != (q.shape[3], 1) or latents.dtype != q.dtype:
        raise ValueError(
            f"mla_decode: a page must lie together and be {q.dtype}, got {latents.stride()} {latents.dtype}."
        )
    if table.dim() != 2 or table.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(f"mla_decode: table must be [{q.shape[0]},J] and lengths [{q.shape[0]}].")
    if any(x.dtype not in (torch.int32, torch.int64) for x in (table, lengths)):
        raise ValueError(f"mla_decode: table and lengths must be integers, got {table.dtype} and {lengths.dtype}.")
    N, W, room = *q.shape[:2], table.shape[1] * latents.shape[1]
    if readable(lengths) and N and not W <= int(lengths.min()) <= int(lengths.max()) <= room:
        raise ValueError(
            f"mla_decode: lengths must lie in {W}..{room}, from a window to full pages; got {lengths.tolist()}."
        )
    if not 0 < values <= q.shape[3]:
        raise ValueError(f"mla_decode: values must lie in 1..{q.shape[3]}, not {values}.")
