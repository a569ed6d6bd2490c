"""Config, tensor table and accounting against the release's own figures."""

import dataclasses
import json

import pytest
from golden import golden
from hypothesis import given
from hypothesis import strategies as st

from perilune.accounting import account, flops_per_token, non_embedding_active
from perilune.config import PRESETS, ConfigError, ModelConfig, preset, three_to_one
from perilune.release import from_json, read_config, to_json
from perilune.stages import model_config
from perilune.tensors import padded_heads, tensors


def test_k3_sums_to_the_release() -> None:
    k3 = account(preset("k3"))
    assert k3.total == sum(k3.parts.values()) == 2_779_931_837_184
    assert k3.padding == 2208
    assert k3.active == 104_189_612_640
    assert k3.checkpoint_bytes == 1_560_860_324_864
    assert k3.mla_bytes_per_token == 27_648
    assert k3.kda_state_bytes == 414 * 2**20
    assert (k3.kda_state_bytes + k3.conv_state_bytes) / 2**20 == pytest.approx(428.55, abs=0.01)
    assert sum(t.copies for t in tensors(preset("k3"))) == 497_220


def test_k3_parts_by_hand() -> None:
    parts = account(preset("k3")).parts
    assert parts["kda"] == 69 * 443_740_384
    assert parts["mla"] == 24 * 232_196_096
    assert parts["experts"] == 92 * 896 * 33_030_144
    assert parts["vision"] == 401_214_464
    assert parts["projector"] == 46_144_512


def test_k3_layers_and_flops() -> None:
    k3 = preset("k3")
    assert len(k3.kda_layers) == 69
    assert k3.mla_layers[-2:] == (91, 92)
    # The serving report's arithmetic: 400K tokens of context add 0.59 TFLOP, 3.8x a short-context token.
    extra = flops_per_token(k3, 400_000) - flops_per_token(k3, 0)
    assert extra == pytest.approx(0.59e12, rel=0.01)


def test_presets_are_the_sizes_they_promise() -> None:
    assert account(preset("kimi_linear")).total == pytest.approx(49.12e9, rel=1e-3)
    assert account(preset("kimi_linear")).active == pytest.approx(3.11e9, rel=1e-3)
    assert account(preset("mini")).total == pytest.approx(300e6, rel=0.05)
    assert non_embedding_active(preset("mini")) == pytest.approx(40e6, rel=0.05)
    assert account(preset("small")).total == pytest.approx(3.2e9, rel=0.05)
    assert non_embedding_active(preset("small")) == pytest.approx(0.6e9, rel=0.05)


@pytest.mark.parametrize("heads, rows", [(96, 128), (3, 4), (4, 8), (2, 4), (128, 256)])
def test_stored_a_log_rows(heads: int, rows: int) -> None:
    assert padded_heads(heads) == rows


@pytest.mark.parametrize("name", ["tiny-text", "tiny-text-mxfp4", "tiny-kimi-linear", "tiny-vision"])
def test_released_config_round_trips(name: str) -> None:
    config, raw = read_config(golden(name))
    assert to_json(config, raw) == raw
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize("name", PRESETS)
def test_preset_round_trips_through_json(name: str) -> None:
    config = preset(name)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config
    odd = config.replace(kda_decay="head", kda_delta=False)
    assert from_json(to_json(odd)) == odd


@pytest.mark.parametrize(
    "change, word",
    [
        ({"num_experts_per_token": 17}, "num_experts_per_token"),
        ({"gate_lower_bound": -6.0}, "gate_lower_bound"),
        ({"mla_layers": (5,)}, "mla_layers"),
        ({"num_expert_group": 3}, "num_expert_group"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
        ({"moe_intermediate_size": 48, "expert_format": "mxfp4"}, "multiples of 32"),
    ],
)
def test_impossible_config_names_the_key(change: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as error:
        dataclasses.replace(preset("tiny"), **change)
    assert str(error.value).count(".") >= 1


def test_unknown_preset_names_the_known() -> None:
    with pytest.raises(ConfigError, match="tiny, mini"):
        preset("huge")


def test_broken_config_file(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="lacks 'vocab_size'"):
        read_config(tmp_path)


@given(st.integers(1, 200))
def test_last_layer_is_always_global(layers: int) -> None:
    pattern = three_to_one(layers)
    assert pattern[-1] == layers - 1
    assert all(b - a <= 4 for a, b in zip((-1, *pattern), pattern))


def test_config_is_frozen() -> None:
    config: ModelConfig = preset("tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "key", ["hidden_size", "kda_num_heads", "kda_head_dim", "num_attention_heads", "moe_layer_freq"]
)
def test_sizes_are_positive(key) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be positive"):
        preset("tiny").replace(**{key: 0})


def test_a_run_trains_text_in_full_precision() -> None:
    """A released preset's packed experts would cost a checkpoint its precision, its images are not in the model."""
    config = model_config({"preset": "k3", "num_hidden_layers": 4})
    assert config.expert_format == "bfloat16" and config.vision is None
