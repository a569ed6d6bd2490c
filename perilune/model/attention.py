"""Softmax attention of new tokens over what a dense cache holds, through SDPA with a mask."""

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.model.layout import Layout


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
