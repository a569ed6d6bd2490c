"""Gated MLA without positions (report §2.1.2, eq. 7): low-rank queries, one latent for keys and values, a sigmoid gate.

    q = W_qb RMSNorm(W_qa x) = [q_nope | q_rope];   [c | r] = W_kva x;   [k_nope | v] = W_kvb RMSNorm(c)
    y = W_o [ softmax(q·[k_nope | r] / √d_qk) v · σ(W_g x) ]

r is shared by the heads and neither normalised nor rotated. The cache holds [RMSNorm(c) | r]; a short query reads it
absorbed (q_nope W_UK scores latents directly), a long one expands keys and values.
"""

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.attention import causal_after_past
from perilune.model.cache import Book, Cache
from perilune.model.layout import Layout
from perilune.model.linear import Linear, project, settle
from perilune.model.norm import RMSNorm
from perilune.model.taps import Taps
from perilune.ops.attention import attention
from perilune.ops.norm import sigmoid_gate

# Absorbed scores cost R instead of d_qk a key but skip the expansion of the whole past: right for few queries.
_ABSORB_UP_TO = 16


class MLA(nn.Module):
    """Multi-head latent attention over a packed batch. Parameter names are the release's."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c, h, heads = config, config.hidden_size, config.num_attention_heads
        self.config, self.layer = config, layer
        if c.q_lora_rank is None:
            self.q_proj = Linear(h, heads * c.qk_head_dim)
        else:
            self.q_a_proj, self.q_b_proj = Linear(h, c.q_lora_rank), Linear(c.q_lora_rank, heads * c.qk_head_dim)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.lora_norm_eps)
        self.kv_a_proj_with_mqa = Linear(h, c.latent_width)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.lora_norm_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        if c.mla_use_output_gate:
            self.g_proj = Linear(h, heads * c.v_head_dim)
        self.o_proj = Linear(heads * c.v_head_dim, h)

    def forward(self, x: Tensor, layout: Layout, cache: Cache | None = None, taps: Taps | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        q, latents, gate = self._inputs(x)
        context = cache.extend_mla(self.layer, layout, latents) if cache is not None else None
        if isinstance(context, Book):
            o = self._paged(q, context, layout)
        elif context is None or layout.fresh:
            k, v = self._expand(latents)
            if taps is not None:
                taps.max_logit(self.layer, q, k, layout, self._scale)
            o = attention(q, k, v, layout.lengths, self._scale)
        elif max(layout.lengths) <= _ABSORB_UP_TO:
            o = self._absorbed(q, context, layout)
        else:
            k, v = self._expand(context.flatten(0, 1))
            shape = (*context.shape[:2], self.config.num_attention_heads, -1)
            o = causal_after_past(q, k.reshape(shape), v.reshape(shape), layout, self._scale)
        return self._output(o, gate)

    @property
    def _scale(self) -> float:
        return self.config.qk_head_dim**-0.5

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(q [T, heads, d_qk], latents [T, R] as cached, output gate [T, heads·d_v] or None)."""
        c = self.config
        q, kv, *gate = project(x, *self._first)
        if c.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        latent, shared = kv.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latents = torch.cat([self.kv_a_layernorm(latent), shared], -1)
        return q.unflatten(-1, (c.num_attention_heads, -1)), latents, gate[0] if gate else None

    @property
    def _first(self) -> list[Linear]:
        """What reads x."""
        c = self.config
        query = self.q_proj if c.q_lora_rank is None else self.q_a_proj
        return [query, self.kv_a_proj_with_mqa, *([self.g_proj] if c.mla_use_output_gate else [])]

    def settle(self) -> None:
        settle(*self._first)

    def _expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [L, R] -> keys [L, heads, d_qk], values [L, heads, d_v]."""
        c = self.config
        latent, shared = latents.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(latent).unflatten(-1, (c.num_attention_heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        shared = shared.unsqueeze(1).expand(-1, c.num_attention_heads, -1)
        return torch.cat([k_nope, shared], -1), v

    def _absorbed(self, q: Tensor, context: Tensor, layout: Layout) -> Tensor:
        """Attention in latent space: q_nope W_UK against latents, values read back through W_UV."""
        q_latent, w_uv = self._absorb(q)
        k = context.unsqueeze(2)
        v = k[..., : self.config.kv_lora_rank]
        return torch.einsum("thr,hdr->thd", causal_after_past(q_latent, k, v, layout, self._scale), w_uv)

    def _paged(self, q: Tensor, book: Book, layout: Layout) -> Tensor:
        """The same for a window, on the storage's own pages."""
        q_latent, w_uv = self._absorb(q)
        windows = q_latent.unflatten(0, (layout.sequences, -1))
        o = book.attend(windows, self.config.kv_lora_rank, self._scale)
        return torch.einsum("thr,hdr->thd", o.flatten(0, 1), w_uv)

    def _absorb(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(q in latent space [T, heads, R], W_UV [heads, d_v, kv_lora_rank])."""
        c = self.config
        w = self.kv_b_proj.weight.unflatten(0, (c.num_attention_heads, -1))
        w_uk, w_uv = w.split([c.qk_nope_head_dim, c.v_head_dim], 1)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        return torch.cat([torch.einsum("thd,hdr->thr", q_nope, w_uk), q_rope], -1), w_uv

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """The gate multiplies in fp32, as which training's attention output arrives; one cast before W_o."""
        o = o.flatten(1)
        return self.o_proj(o.to(self.o_proj.weight.dtype) if gate is None else sigmoid_gate(o, gate))
