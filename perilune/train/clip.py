"""QK-Clip: no head's attention logits grow past τ (report §3.3 keeps the mechanism of Kimi K2).

    γ_h = min(1, τ / S_h),   S_h the largest logit of head h in the step just seen,   τ = 100
    q_nope, k_nope rows of head h <- √γ_h,   q_rope rows <- γ_h,   the shared key stays

Only MLA needs it: KDA normalises q and k. Logits are bilinear in those weights, so all of head h's scale by γ_h.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor


class MLADims(Protocol):
    """What QK-Clip reads of a ModelConfig."""

    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


@torch.no_grad()
def qk_clip(
    q_weight: Tensor, kv_b_weight: Tensor, max_logits_H: Tensor, *, nope: int, rope: int, v: int, tau: float = 100.0
) -> Tensor:
    """Rescales one MLA layer in place so that no head's logits exceed `tau` on the step just seen (K2; report §3.3).

    `q_weight` [H·(nope+rope), *] (q_b_proj, or q_proj without a bottleneck), `kv_b_weight` [H·(nope+v), *],
    `max_logits_H`: each head's largest scaled logit. Returns γ [H] = min(1, τ / S_max): the nope rows of q and k are
    multiplied by √γ, the rope rows of q by γ because the key they meet is shared by all heads and stays.
    """
    S_H = max_logits_H.to(q_weight.device, torch.float32)
    gamma_H = torch.where(S_H.gt(tau), tau / S_H, 1.0)  # exactly 1 below τ: quiet heads must not drift
    gamma_H11 = gamma_H.to(q_weight.dtype).view(-1, 1, 1)
    H = S_H.numel()
    q_HDC = q_weight.view(H, nope + rope, -1)
    q_HDC[:, :nope].mul_(gamma_H11.sqrt())
    q_HDC[:, nope:].mul_(gamma_H11)
    kv_b_weight.view(H, nope + v, -1)[:, :nope].mul_(gamma_H11.sqrt())
    return gamma_H


def qk_clip_model(
    parameters: Iterable[tuple[str, Tensor]], max_logits: Mapping[int, Tensor], config: MLADims, tau: float = 100.0
) -> None:
    """`qk_clip` for every layer in `max_logits` (layer index -> [H]); names follow the released layout."""
    weights = {}
    for name, p in parameters:
        found = re.search(r"layers\.(\d+)\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.weight$", name)
        if found and int(found[1]) in max_logits:
            weights[int(found[1]), "kv" if found[2] == "kv_b_proj" else "q"] = p
    for layer, logits_H in max_logits.items():
        dims = {"nope": config.qk_nope_head_dim, "rope": config.qk_rope_head_dim, "v": config.v_head_dim}
        qk_clip(weights[layer, "q"], weights[layer, "kv"], logits_H, **dims, tau=tau)
