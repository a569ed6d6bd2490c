"""The released config.json, in and out (docs/architecture.md, "config.json" and "Kimi Linear").

The file nests the text model under `text_config` (K3) or is the text model (Kimi Linear). Layer lists count from 1.
Keys we do not use survive a round trip: `to_json(config, base)` overlays ours on the file that was read.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from perilune.config import ConfigError, ModelConfig, VisionConfig
from perilune.recipe import RecipeError, build, to_table

# Kept in our files under one key of our own, so that a stage directory reloads.
_OURS = ("kda_decay", "kda_delta", "kda_output_gate", "attn_res_full", "lora_norm_eps")
# Nested in linear_attn_config.
_LINEAR = ("short_conv_kernel_size", "gate_lower_bound", "use_full_rank_gate")
# Fields stored under the same name in the file: all the others.
_PLAIN: tuple[str, ...] = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in (*_OURS, *_LINEAR, "mla_layers", "kda_num_heads", "kda_head_dim", "expert_format", "vision")
)
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "linear_attn_config")
# What the released class assumes when a key is absent (Kimi Linear's file lacks these).
_ABSENT: dict[str, Any] = {
    "mla_use_output_gate": False,
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "q_lora_rank": None,
    "hidden_act": "silu",
    "num_nextn_predict_layers": 0,
    "num_experts": 0,
}

_MXFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "actorder": None,
                "block_structure": None,
                "zp_dtype": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def from_json(data: dict[str, Any]) -> ModelConfig:
    """ModelConfig from a parsed config.json. Raises ConfigError naming the first key that is missing or wrong."""
    text = data.get("text_config", data)
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config must be an object, not {text!r}.")
    for key in _REQUIRED:
        if text.get(key) is None:
            raise ConfigError(f"config.json lacks {key!r}.")
    fields: dict[str, Any] = dict(_ABSENT)
    fields |= {key: text[key] for key in _PLAIN if key in text}
    if "max_position_embeddings" not in text and "model_max_length" in text:
        fields["max_position_embeddings"] = text["model_max_length"]
    fields["num_experts"] = fields["num_experts"] or 0
    for key in ("num_shared_experts", "moe_intermediate_size", "num_nextn_predict_layers"):
        fields[key] = fields.get(key) or 0
    fields["num_expert_group"] = fields.get("num_expert_group") or 1
    fields["topk_group"] = fields.get("topk_group") or 1
    fields |= _linear_attention(text["linear_attn_config"], text["num_hidden_layers"])
    if text.get("mla_use_nope") is False:
        raise ConfigError("mla_use_nope is false, but this architecture has no rotary embedding.")
    quantised = text.get("quantization_config") or data.get("quantization_config")
    fields["expert_format"] = "mxfp4" if quantised else "bfloat16"
    found = quantised.get("format") if isinstance(quantised, dict) else quantised
    if quantised and found != "mxfp4-pack-quantized":
        raise ConfigError(f"quantization_config.format {found!r} is not mxfp4-pack-quantized.")
    fields |= _our_own(text.get("perilune", {}))
    vision = _vision(data["vision_config"]) if data.get("vision_config") else None
    try:
        config = build(ModelConfig, to_table(fields), "config.json: ")  # checks every key's type
    except RecipeError as error:
        raise ConfigError(str(error)) from error
    return config.replace(vision=vision)


def _our_own(keys: dict[str, Any]) -> dict[str, Any]:
    for key in keys:
        if key not in _OURS:
            raise ConfigError(f"config.json: perilune.{key} is unknown; the keys are {', '.join(_OURS)}.")
    return keys


def _linear_attention(linear: Any, layers: Any) -> dict[str, Any]:
    if not isinstance(linear, dict):
        raise ConfigError(f"config.json: linear_attn_config must be an object, not {linear!r}.")
    for key in ("num_heads", "head_dim", "short_conv_kernel_size", "full_attn_layers", "kda_layers"):
        if key not in linear:
            raise ConfigError(f"config.json: linear_attn_config lacks {key!r}.")
    if not isinstance(layers, int):
        raise ConfigError(f"config.json: num_hidden_layers must be of type int, not {layers!r}.")
    full = tuple(layer - 1 for layer in linear["full_attn_layers"])
    kda = tuple(layer - 1 for layer in linear["kda_layers"])
    if sorted(full + kda) != list(range(layers)):
        raise ConfigError("linear_attn_config must name every layer exactly once in full_attn_layers or kda_layers.")
    return {
        "mla_layers": tuple(sorted(full)),
        "kda_num_heads": linear["num_heads"],
        "kda_head_dim": linear["head_dim"],
        "short_conv_kernel_size": linear["short_conv_kernel_size"],
        "gate_lower_bound": linear.get("gate_lower_bound"),
        "use_full_rank_gate": linear.get("use_full_rank_gate", False),
    }


def _vision(vision: dict[str, Any]) -> VisionConfig:
    known = {k: v for k, v in vision.items() if k in VisionConfig.__dataclass_fields__}
    if "merge_kernel_size" in known:
        known["merge_kernel_size"] = tuple(known["merge_kernel_size"])
    return VisionConfig(**known)


def to_json(config: ModelConfig, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """The released schema for `config`, overlaid on `base` (the file it came from) so that foreign keys survive."""
    data = copy.deepcopy(base) if base else _empty(config)
    text = data.get("text_config", data)
    text |= {key: getattr(config, key) for key in _PLAIN if key in text or not base}
    linear = text.setdefault("linear_attn_config", {})
    linear |= {
        "num_heads": config.kda_num_heads,
        "head_dim": config.kda_head_dim,
        "short_conv_kernel_size": config.short_conv_kernel_size,
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        "kda_layers": [layer + 1 for layer in config.kda_layers],
    }
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
    if config.use_full_rank_gate:
        linear["use_full_rank_gate"] = True
    _set_quantisation(text, data, config)
    ours = {k: getattr(config, k) for k in _OURS if getattr(config, k) != ModelConfig.__dataclass_fields__[k].default}
    text.pop("perilune", None)
    if ours:
        text["perilune"] = ours
    return data


def _set_quantisation(text: dict[str, Any], data: dict[str, Any], config: ModelConfig) -> None:
    if config.expert_format == "mxfp4":
        text.setdefault("quantization_config", _MXFP4)
    else:
        text.pop("quantization_config", None)
        data.pop("quantization_config", None)


def _empty(config: ModelConfig) -> dict[str, Any]:
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "mla_use_nope": True,
        "num_key_value_heads": config.num_attention_heads,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "use_cache": True,
    }
    if config.vision is None and config.attn_res_block_size is None:
        return text
    data: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": text,
    }
    if config.vision is not None:
        data["vision_config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config.vision).items()}
    return data


def read_config(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """`config.json` of a checkpoint directory: the config and the raw file. Raises ConfigError in one sentence."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a checkpoint directory holds config.json and *.safetensors.")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}, not an object.")
    return from_json(raw), raw
