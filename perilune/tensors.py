"""Every tensor of the released checkpoint, computed from the config (docs/architecture.md, "The checkpoint").

One table serves the parameter counts, the byte counts, import validation and export: a row is a name, a shape and a
storage dtype. Routed experts are one row with `copies` instead of 896.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from perilune.config import ModelConfig, VisionConfig

BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class Tensor:
    """One stored tensor. `name` holds `{}` where `copies` > 1 (the expert index); `size` counts logical parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: str
    copies: int = 1
    size: int = 0

    @property
    def parameters(self) -> int:
        return self.size * self.copies

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype] * self.copies

    def names(self) -> Iterator[str]:
        if self.copies == 1 and "{}" not in self.name:
            yield self.name
        else:
            yield from (self.name.format(e) for e in range(self.copies))


def _tensor(part: str, name: str, *shape: int, dtype: str = "BF16") -> Tensor:
    return Tensor(name, shape, dtype, part, size=prod(shape))


def padded_heads(heads: int) -> int:
    """Rows of a stored A_log: the next power of two above the head count (96 -> 128, 4 -> 8); the rest is zero."""
    return 1 << heads.bit_length()


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """All rows, in the release's shard order: layers, then the model's own, then vision. Names carry the prefix."""
    prefix = "" if is_kimi_linear(config) else "language_model."
    model = prefix + "model."
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, f"{model}layers.{layer}.", layer)
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        yield from _mtp(config, f"{model}layers.{layer}.")
    h = config.hidden_size
    yield _tensor("embedding", model + "embed_tokens.weight", config.vocab_size, h)
    if not config.tie_word_embeddings:
        yield _tensor("lm_head", prefix + "lm_head.weight", config.vocab_size, h)
    yield _tensor("norms", model + "norm.weight", h)
    if config.attn_res_block_size is not None:
        yield _tensor("attn_res", model + "output_attn_res_norm.weight", h)
        yield _tensor("attn_res", model + "output_attn_res_proj.weight", 1, h)
    if config.vision is not None:
        yield from _vision(config.vision)


def is_kimi_linear(config: ModelConfig) -> bool:
    """Kimi Linear's files carry no `language_model.` prefix and store A_log as [1, 1, H, 1]."""
    return config.attn_res_block_size is None and config.vision is None


def _layer(c: ModelConfig, p: str, layer: int) -> Iterator[Tensor]:
    yield from _mla(c, p + "self_attn.") if c.is_mla(layer) else _kda(c, p + "self_attn.")
    yield from _ffn(c, p, c.is_moe(layer))
    yield _tensor("norms", p + "input_layernorm.weight", c.hidden_size)
    yield _tensor("norms", p + "post_attention_layernorm.weight", c.hidden_size)
    if c.attn_res_block_size is not None:
        for name in ("self_attention_res", "mlp_res"):
            yield _tensor("attn_res", f"{p}{name}_norm.weight", c.hidden_size)
            yield _tensor("attn_res", f"{p}{name}_proj.weight", 1, c.hidden_size)


def _kda(c: ModelConfig, p: str) -> Iterator[Tensor]:
    h, width, dim, heads = c.hidden_size, c.kda_width, c.kda_head_dim, c.kda_num_heads
    decays = width if c.kda_decay == "channel" else heads
    for name in ("q", "k", "v"):
        yield _tensor("kda", f"{p}{name}_proj.weight", width, h)
        yield _tensor("kda", f"{p}{name}_conv1d.weight", width, 1, c.short_conv_kernel_size, dtype="F32")
    yield _tensor("kda", p + "f_a_proj.weight", dim, h)
    yield _tensor("kda", p + "f_b_proj.weight", decays, dim)
    yield _tensor("kda", p + "b_proj.weight", heads, h)
    if is_kimi_linear(c):
        yield _tensor("kda", p + "A_log", 1, 1, heads, 1, dtype="F32")
    else:
        yield _tensor("kda", p + "A_log", padded_heads(heads), dtype="F32")
    yield _tensor("kda", p + "dt_bias", decays, dtype="F32")
    if c.kda_output_gate and c.use_full_rank_gate:
        yield _tensor("kda", p + "g_proj.weight", width, h)
    elif c.kda_output_gate:
        yield _tensor("kda", p + "g_a_proj.weight", dim, h)
        yield _tensor("kda", p + "g_b_proj.weight", width, dim)
    yield _tensor("kda", p + "o_norm.weight", dim, dtype="F32")
    yield _tensor("kda", p + "o_proj.weight", h, width)


def _mla(c: ModelConfig, p: str) -> Iterator[Tensor]:
    h, heads = c.hidden_size, c.num_attention_heads
    if c.q_lora_rank is None:
        yield _tensor("mla", p + "q_proj.weight", heads * c.qk_head_dim, h)
    else:
        yield _tensor("mla", p + "q_a_proj.weight", c.q_lora_rank, h)
        yield _tensor("mla", p + "q_a_layernorm.weight", c.q_lora_rank)
        yield _tensor("mla", p + "q_b_proj.weight", heads * c.qk_head_dim, c.q_lora_rank)
    yield _tensor("mla", p + "kv_a_proj_with_mqa.weight", c.latent_width, h)
    yield _tensor("mla", p + "kv_a_layernorm.weight", c.kv_lora_rank)
    yield _tensor("mla", p + "kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    if c.mla_use_output_gate:
        yield _tensor("mla", p + "g_proj.weight", heads * c.v_head_dim, h)
    yield _tensor("mla", p + "o_proj.weight", h, heads * c.v_head_dim)


def _ffn(c: ModelConfig, p: str, moe: bool) -> Iterator[Tensor]:
    if not moe:
        yield from _mlp("dense_ffn", p + "mlp.", c.hidden_size, c.intermediate_size)
        return
    p += "block_sparse_moe."
    yield _tensor("router", p + "gate.weight", c.num_experts, c.hidden_size)
    yield _tensor("router", p + "gate.e_score_correction_bias", c.num_experts, dtype="F32")
    if c.routed_expert_hidden_size is not None:
        yield _tensor("latent", p + "routed_expert_down_proj.weight", c.expert_width, c.hidden_size)
        yield _tensor("latent", p + "routed_expert_up_proj.weight", c.hidden_size, c.expert_width)
        if c.latent_moe_use_norm:
            yield _tensor("latent", p + "routed_expert_norm.weight", c.expert_width)
    for name, out, width in (
        ("w1", c.moe_intermediate_size, c.expert_width),
        ("w2", c.expert_width, c.moe_intermediate_size),
        ("w3", c.moe_intermediate_size, c.expert_width),
    ):
        yield from _expert(c, f"{p}experts.{{}}.{name}", out, width)
    if c.num_shared_experts:
        yield from _mlp("shared_experts", p + "shared_experts.", c.hidden_size, c.shared_width)


def _expert(c: ModelConfig, name: str, out: int, width: int) -> Iterator[Tensor]:
    if c.expert_format == "bfloat16":
        yield Tensor(name + ".weight", (out, width), "BF16", "experts", c.num_experts, out * width)
    else:  # two 4-bit codes a byte, one scale per 32 inputs; scales are storage, not parameters
        yield Tensor(name + ".weight_packed", (out, width // 2), "U8", "experts", c.num_experts, out * width)
        yield Tensor(name + ".weight_scale", (out, width // 32), "U8", "experts", c.num_experts, 0)


def _mlp(part: str, p: str, width: int, hidden: int) -> Iterator[Tensor]:
    yield _tensor(part, p + "gate_proj.weight", hidden, width)
    yield _tensor(part, p + "up_proj.weight", hidden, width)
    yield _tensor(part, p + "down_proj.weight", width, hidden)


def _mtp(c: ModelConfig, p: str) -> Iterator[Tensor]:
    """One multi-token-prediction layer: Gated MLA and MoE, plain residuals; it shares embedding and head."""
    for name in ("enorm", "hnorm"):
        yield _tensor("mtp", f"{p}{name}.weight", c.hidden_size)
    yield _tensor("mtp", p + "eh_proj.weight", c.hidden_size, 2 * c.hidden_size)
    yield from _relabel(_mla(c, p + "self_attn."))
    yield from _relabel(_ffn(c, p, c.num_experts > 0))
    for name in ("input_layernorm", "post_attention_layernorm", "shared_head.norm"):
        yield _tensor("mtp", f"{p}{name}.weight", c.hidden_size)


def _relabel(rows: Iterator[Tensor]) -> Iterator[Tensor]:
    return (Tensor(t.name, t.shape, t.dtype, "mtp", t.copies, t.size) for t in rows)


def _vision(v: VisionConfig) -> Iterator[Tensor]:
    d, merged = v.vt_hidden_size, v.vt_hidden_size * v.merge_kernel_size[0] * v.merge_kernel_size[1]
    tower = "vision_tower."
    yield _tensor("vision", tower + "patch_embed.proj.weight", d, 3, v.patch_size, v.patch_size)
    yield _tensor("vision", tower + "patch_embed.pos_emb.weight", v.init_pos_emb_height, v.init_pos_emb_width, d)
    for block in range(v.vt_num_hidden_layers):
        p = f"{tower}encoder.blocks.{block}."
        for name in ("norm0", "norm1"):
            yield _tensor("vision", f"{p}{name}.weight", d)
        yield _tensor("vision", p + "wqkv.weight", 3 * v.qkv_hidden_size, d)
        yield _tensor("vision", p + "wo.weight", d, v.qkv_hidden_size)
        yield _tensor("vision", p + "mlp.fc0.weight", v.vt_intermediate_size, d)
        yield _tensor("vision", p + "mlp.fc1.weight", d, v.vt_intermediate_size)
    yield _tensor("vision", tower + "encoder.final_layernorm.weight", d)
    yield _tensor("projector", "mm_projector.proj.0.weight", merged, merged)
    yield _tensor("projector", "mm_projector.proj.2.weight", v.text_hidden_size, merged)
    yield _tensor("projector", "mm_projector.post_norm.weight", v.text_hidden_size)
