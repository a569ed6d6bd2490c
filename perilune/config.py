"""ModelConfig: every architectural choice of a K3-family model, frozen and checked.

Field names are the released config.json's where it has one. Two differences: layer lists are 0-based here
(`mla_layers`), 1-based in the file; and the three ablation switches at the end exist only here.
Presets: `preset("tiny" | "mini" | "small" | "kimi_linear" | "k3")`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self


class ConfigError(ValueError):
    """A configuration no model can be built from; the message is one sentence naming the key."""


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 and its projector: the keys of the released `vision_config` that carry shape."""

    vt_hidden_size: int = 1024
    vt_num_hidden_layers: int = 27
    vt_num_attention_heads: int = 12
    qkv_hidden_size: int = 1536
    vt_intermediate_size: int = 4096
    mm_hidden_size: int = 1024
    patch_size: int = 14
    merge_kernel_size: tuple[int, int] = (2, 2)
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    text_hidden_size: int = 7168
    projector_ln_eps: float = 1e-5


@dataclass(frozen=True)
class ModelConfig:
    """Shape and rules of one model. Widths are in features, ids are token ids, layer indices count from 0."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    mla_layers: tuple[int, ...]  # the other layers are KDA

    # KDA (report §2.1.1, eq. 1-6)
    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0  # None: Kimi Linear's unbounded softplus decay
    use_full_rank_gate: bool = True  # False: output gate through a head_dim-wide bottleneck

    # Gated MLA without positions (§2.1.2, eq. 7)
    num_attention_heads: int = 4
    q_lora_rank: int | None = None
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16  # scored but never rotated
    v_head_dim: int = 32
    mla_use_output_gate: bool = True
    lora_norm_eps: float = 1e-6  # the released code's class default, unlike rms_norm_eps

    # Residuals over depth (§2.2, eq. 8-10): layers per block; None is the ordinary residual
    attn_res_block_size: int | None = None

    # Feed-forward: dense for the first layers, then Stable LatentMoE (§2.3, eq. 11-14)
    intermediate_size: int = 512
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 0
    num_experts_per_token: int = 1
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None  # None: experts read the full width
    latent_moe_use_norm: bool = True
    moe_router_activation_func: Literal["sigmoid", "softmax"] = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    hidden_act: Literal["situ", "silu"] = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0

    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096
    num_nextn_predict_layers: int = 0  # MTP
    tie_word_embeddings: bool = False
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 0
    expert_format: Literal["bfloat16", "mxfp4"] = "bfloat16"  # how a release stores routed experts
    vision: VisionConfig | None = None

    # Ablations, never in a released file
    kda_decay: Literal["channel", "head"] = "channel"  # "head": one scalar decay, Gated DeltaNet
    kda_delta: bool = True  # False: no delta term, gated linear attention in Mamba-2's manner
    kda_output_gate: bool = True
    attn_res_full: bool = False  # every sublayer output is a source, instead of block sums

    def __post_init__(self) -> None:
        for check, message in _checks(self):
            if not check:
                raise ConfigError(message)

    # --- what kind of layer ---------------------------------------------------------------------------------

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if not self.is_mla(layer))

    # --- derived widths -------------------------------------------------------------------------------------

    @property
    def kda_width(self) -> int:
        """Features of q, k, v and the output gate of a KDA layer: heads x head size."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values the MLA cache holds a token: normalised latent and shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_width(self) -> int:
        """Hidden width of the fused shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


_POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "kda_num_heads", "kda_head_dim"),
    *("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "intermediate_size", "moe_layer_freq"),
    *("rms_norm_eps", "lora_norm_eps", "max_position_embeddings"),
)
_COUNTS = ("qk_rope_head_dim", "first_k_dense_replace", "num_experts", "num_shared_experts", "initializer_range")


def _checks(c: ModelConfig) -> list[tuple[bool, str]]:
    grouped = c.num_experts % c.num_expert_group == 0 if c.num_expert_group > 0 else False
    reach = c.num_experts // max(1, c.num_expert_group) * c.topk_group
    return [
        *((getattr(c, name) > 0, f"{name} must be positive, not {getattr(c, name)}.") for name in _POSITIVE),
        *((getattr(c, name) >= 0, f"{name} must not be negative, but is {getattr(c, name)}.") for name in _COUNTS),
        (c.short_conv_kernel_size > 1, f"short_conv_kernel_size must be at least 2, not {c.short_conv_kernel_size}."),
        (c.q_lora_rank is None or c.q_lora_rank > 0, f"q_lora_rank must be positive or absent, not {c.q_lora_rank}."),
        (
            c.routed_expert_hidden_size is None or c.routed_expert_hidden_size > 0,
            f"routed_expert_hidden_size must be positive or absent, not {c.routed_expert_hidden_size}.",
        ),
        (
            all(0 <= layer < c.num_hidden_layers for layer in c.mla_layers),
            f"mla_layers {c.mla_layers} must lie within 0..{c.num_hidden_layers - 1}.",
        ),
        (len(set(c.mla_layers)) == len(c.mla_layers), f"mla_layers {c.mla_layers} names a layer twice."),
        (
            c.gate_lower_bound is None or -5.5 <= c.gate_lower_bound < 0,
            f"gate_lower_bound must lie in [-5.5, 0): 16 tokens must stay within fp32, not {c.gate_lower_bound}.",
        ),
        (
            c.num_experts == 0 or 0 < c.num_experts_per_token <= c.num_experts,
            f"num_experts_per_token must lie in 1..{c.num_experts}, not {c.num_experts_per_token}.",
        ),
        (c.num_experts == 0 or c.moe_intermediate_size > 0, "moe_intermediate_size must be positive with experts."),
        (grouped, f"num_expert_group {c.num_expert_group} must divide num_experts {c.num_experts}."),
        (
            0 < c.topk_group <= c.num_expert_group,
            f"topk_group must lie in 1..{c.num_expert_group}, not {c.topk_group}.",
        ),
        (
            c.num_experts == 0 or c.num_experts_per_token <= reach,
            f"num_experts_per_token {c.num_experts_per_token} is more than the {reach} experts of topk_group "
            f"{c.topk_group} groups.",
        ),
        (
            c.attn_res_block_size is None or c.attn_res_block_size > 0,
            f"attn_res_block_size must be positive or absent, not {c.attn_res_block_size}.",
        ),
        (
            not c.attn_res_full or c.attn_res_block_size is not None,
            "attn_res_full needs attn_res_block_size (its value is then unused).",
        ),
        (
            c.num_nextn_predict_layers in (0, 1),
            f"num_nextn_predict_layers must be 0 or 1, not {c.num_nextn_predict_layers}.",
        ),
        (
            c.expert_format == "bfloat16" or (c.expert_width % 32 == 0 and c.moe_intermediate_size % 32 == 0),
            f"MXFP4 experts need widths that are multiples of 32, not {c.expert_width} and {c.moe_intermediate_size}.",
        ),
    ]


def three_to_one(num_layers: int, period: int = 4) -> tuple[int, ...]:
    """MLA every `period`-th layer, and the last layer always (93 layers: 3, 7, ..., 91 and 92)."""
    return tuple(sorted({*range(period - 1, num_layers, period), num_layers - 1}))


_K3 = ModelConfig(
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=93,
    mla_layers=three_to_one(93),
    kda_num_heads=96,
    kda_head_dim=128,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    attn_res_block_size=12,
    intermediate_size=33792,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    max_position_embeddings=1048576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
    expert_format="mxfp4",
    vision=VisionConfig(),
)

_KIMI_LINEAR = ModelConfig(
    vocab_size=163840,
    hidden_size=2304,
    num_hidden_layers=27,
    mla_layers=three_to_one(27),
    kda_num_heads=32,
    kda_head_dim=128,
    gate_lower_bound=None,
    use_full_rank_gate=False,
    num_attention_heads=32,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_use_output_gate=False,
    intermediate_size=9216,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    latent_moe_use_norm=False,
    routed_scaling_factor=2.446,
    hidden_act="silu",
    max_position_embeddings=1048576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)

# Four layers on two cores: three KDA and the closing MLA.
_TINY = ModelConfig(
    vocab_size=2048,
    hidden_size=96,
    num_hidden_layers=4,
    mla_layers=three_to_one(4),
    kda_num_heads=2,
    kda_head_dim=32,
    num_attention_heads=2,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=32,
    attn_res_block_size=2,
    intermediate_size=256,
    num_experts=16,
    num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=32,
    routed_expert_hidden_size=64,
    max_position_embeddings=2048,
)

_MINI = ModelConfig(
    vocab_size=16384,
    hidden_size=512,
    num_hidden_layers=13,
    mla_layers=three_to_one(13),
    kda_num_heads=4,
    kda_head_dim=128,
    num_attention_heads=4,
    q_lora_rank=256,
    kv_lora_rank=128,
    qk_nope_head_dim=96,
    qk_rope_head_dim=32,
    v_head_dim=128,
    attn_res_block_size=4,
    intermediate_size=1536,
    num_experts=128,
    num_experts_per_token=6,
    num_shared_experts=2,
    moe_intermediate_size=192,
    routed_expert_hidden_size=256,
    max_position_embeddings=32768,
    num_nextn_predict_layers=1,
)

_SMALL = ModelConfig(
    vocab_size=32768,
    hidden_size=2048,
    num_hidden_layers=17,
    mla_layers=three_to_one(17),
    kda_num_heads=16,
    kda_head_dim=128,
    num_attention_heads=16,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    attn_res_block_size=4,
    intermediate_size=4096,
    num_experts=128,
    num_experts_per_token=6,
    num_shared_experts=2,
    moe_intermediate_size=384,
    routed_expert_hidden_size=1024,
    max_position_embeddings=131072,
    num_nextn_predict_layers=1,
)

PRESETS: dict[str, ModelConfig] = {
    "tiny": _TINY,
    "mini": _MINI,
    "small": _SMALL,
    "kimi_linear": _KIMI_LINEAR,
    "k3": _K3,
}


def preset(name: str) -> ModelConfig:
    """The named preset. Raises ConfigError naming the known ones."""
    if name not in PRESETS:
        raise ConfigError(f"Unknown preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]
