"""Context parallelism of the attention layers (report §5.1.2): each rank has a contiguous piece of every micro-batch.

    KDA   the conv takes the W − 1 inputs before the piece from its neighbour, the state crosses by one all-gather
    MLA   latents of all tokens (576 numbers each) are gathered; a rank attends for all queries of H/cp heads

KDA's work is linear in tokens and pieces are equal; MLA's is quadratic in a document's length, and equal by heads
whatever the documents. Both respect document borders, wherever they fall.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.model.kda import KDA
from perilune.model.mla import MLA
from perilune.model.taps import Taps
from perilune.ops.attention import attention
from perilune.ops.conv import short_conv
from perilune.ops.norm import gated_rms_norm
from perilune.parallel import Collective, kda_parallel
from perilune.parallel.shards import by_heads, by_tokens, gather_tokens, tail
from perilune.train.mesh.tokens import Slice


def spread_sequence(module: KDA | MLA, fabric: Collective) -> None:
    """From now on the module takes its rank's piece of the sequence, and a `Slice` as layout."""
    forward: Any = kda_forward if isinstance(module, KDA) else mla_forward
    module.forward = partial(forward, module, fabric)  # type: ignore[method-assign]


def use_documents(module: KDA | MLA) -> None:
    """Without context parallelism: the model's own code, on the documents of a `Slice`."""
    inner: Any = module.forward

    def forward(x: Tensor, layout: Slice, cache: None = None, taps: Taps | None = None) -> Tensor:
        assert layout.documents is not None
        y: Tensor = inner(x, layout.documents, cache, taps)
        return y

    module.forward = forward  # type: ignore[method-assign, assignment]


def kda_forward(
    module: KDA, fabric: Collective, x: Tensor, layout: Slice, cache: None = None, taps: Taps | None = None
) -> Tensor:
    """KDA.forward on this rank's piece: x [T, hidden] -> [T, hidden]. `taps` sees the piece alone."""
    c, piece, tokens = module.config, layout.piece, x.shape[0]
    assert piece is not None and cache is None
    qkv, z, beta, gate = module._inputs(x)
    weight = torch.cat([module.q_conv1d.weight, module.k_conv1d.weight, module.v_conv1d.weight])
    before = tail(qkv.unsqueeze(0), weight.shape[-1] - 1, fabric, piece)
    qkv, _ = short_conv(qkv.unsqueeze(0), weight, tail=before, lengths=piece.lengths)
    q, k, v = (y.reshape(1, tokens, c.kda_num_heads, c.kda_head_dim) for y in qkv.chunk(3, -1))
    z = z.reshape(1, tokens, c.kda_num_heads, -1)
    if taps is not None:
        taps.decay(module.layer, z, module.A_log, module.dt_bias, c.gate_lower_bound)
    o, _ = kda_parallel(
        q, k, v, z, beta.unsqueeze(0), A_log=module.A_log, dt_bias=module.dt_bias, lower_bound=c.gate_lower_bound,
        delta=c.kda_delta, fabric=fabric, piece=piece,
    )  # fmt: skip
    gate = None if gate is None else gate.reshape(o.shape)
    return module.o_proj(gated_rms_norm(o, gate, module.o_norm.weight, c.rms_norm_eps).reshape(tokens, -1))


def mla_forward(
    module: MLA, fabric: Collective, x: Tensor, layout: Slice, cache: None = None, taps: Taps | None = None
) -> Tensor:
    """MLA.forward: all tokens' latents here, all queries of H/cp heads here, then back to this rank's tokens."""
    piece, everyone = layout.piece, layout.all
    assert piece is not None and everyone is not None and cache is None
    q, latents, gate = module._inputs(x)
    q = by_heads(q, fabric, piece)
    k, v = _expand(module, gather_tokens(latents, fabric, piece), fabric)
    if taps is not None:
        taps.max_logit(module.layer, q, k, everyone, module._scale)
    o = attention(q, k, v, everyone.lengths, module._scale)
    return module._output(by_tokens(o, fabric, piece), gate)


def _expand(module: MLA, latents: Tensor, fabric: Collective) -> tuple[Tensor, Tensor]:
    """Keys [L, H/cp, d_qk] and values [L, H/cp, d_v] of this rank's heads."""
    c, heads = module.config, module.config.num_attention_heads // fabric.size
    latent, shared = latents.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
    kv = F.linear(latent, module.kv_b_proj.weight.chunk(fabric.size)[fabric.rank]).unflatten(-1, (heads, -1))
    k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
    return torch.cat([k_nope, shared.unsqueeze(1).expand(-1, heads, -1)], -1), v
