"""Causal softmax attention over packed sequences, through PyTorch's SDPA without a mask where there is no past.

Ragged sequences are sorted into buckets of similar length, each bucket one square causal SDPA call: at most half of
a bucket is padding, no mask is built, and the fused kernels apply.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.model.layout import Layout

_SMALLEST = 16  # shorter sequences share one bucket


def causal(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """q, k [T, heads, d_qk], v [T, heads, d_v] of whole sequences -> [T, heads, d_v]."""
    lengths = set(layout.lengths) - {0}
    if len(lengths) <= 1:  # equal lengths: a view, not a gather
        n = max(lengths, default=0)
        q, k, v = (x.unflatten(0, (-1, n)) if n else x.unsqueeze(0) for x in (q, k, v))
        return _square(q, k, v, scale).flatten(0, 1)
    out = v.new_empty(v.shape)
    for index, rows in _buckets(layout):
        o = _square(q[index], k[index], v[index], scale)
        out = out.index_put((index[rows],), o[rows])
    return out


def _buckets(layout: Layout) -> "list[tuple[Tensor, Tensor]]":
    """(token index [n, L], which of them are real [n, L]) for sequences whose lengths share a power of two."""
    groups: dict[int, list[int]] = {}
    for sequence, length in enumerate(layout.lengths):
        if length:
            groups.setdefault(max(length, _SMALLEST - 1).bit_length(), []).append(sequence)
    buckets = []
    for members in groups.values():
        longest = max(layout.lengths[s] for s in members)
        starts = torch.tensor([layout.starts[s] for s in members])
        lengths = torch.tensor([layout.lengths[s] for s in members])
        offset = torch.arange(longest)
        real = offset < lengths[:, None]
        # Padding repeats the last token: it comes after every real query, so causality hides it.
        index = starts[:, None] + torch.minimum(offset, lengths[:, None] - 1)
        buckets.append((index.to(layout.device), real.to(layout.device)))
    return buckets


def _square(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[n, L, heads, d] each -> [n, L, heads, d_v]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    width = v.shape[-1]
    if q.device.type == "cpu" and width < q.shape[-1]:
        # The CPU's fused kernel wants equal head sizes; without it SDPA writes the whole score matrix.
        v = F.pad(v, (0, q.shape[-1] - width))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return o[..., :width].transpose(1, 2)


def causal_after_past(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """New queries q [T, heads, d] against whole contexts k [N, L, heads or 1, d], v [N, L, heads or 1, d_v].

    Query i of a sequence sees its past and the new tokens up to itself. -> [T, heads, d_v].
    """
    longest = max(layout.lengths)
    index, _ = _padded(layout, longest)
    past = torch.tensor(layout.past, device=q.device)
    seen = past[:, None] + torch.arange(longest, device=q.device)
    mask = torch.arange(k.shape[1], device=q.device) <= seen[..., None]
    queries, keys, values = q[index].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    heads = queries.shape[1]
    keys, values = (x.expand(-1, heads, -1, -1) for x in (keys, values))
    o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[:, None], scale=scale)
    return o.transpose(1, 2)[layout.sequence_of, layout.position_of - past[layout.sequence_of]]


def _padded(layout: Layout, longest: int) -> tuple[Tensor, Tensor]:
    """(token index [N, longest], lengths [N]); padding repeats a valid token and is never read back."""
    starts = layout.cu_seqlens[:-1]
    lengths = torch.diff(layout.cu_seqlens)
    offset = torch.arange(longest, device=layout.device)
    index = starts[:, None] + torch.minimum(offset, (lengths[:, None] - 1).clamp(min=0))
    return index.clamp(max=layout.tokens - 1), lengths
