"""Released layout both ways: bit-exact, streamed, and every misfit named."""

import errno
import json
import shutil

import pytest
import torch
from golden import golden
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from perilune.config import ConfigError, preset
from perilune.model.net import K3
from perilune.model.shards import WeightsError, read_shards, shard_files
from perilune.model.weights import load_model, save
from perilune.release import from_json, read_config, to_json
from perilune.tensors import tensors


@pytest.fixture
def checkpoint(tmp_path):
    """A writable copy of a released checkpoint: (directory, its tensors)."""
    source = golden("tiny-text")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path / name)
        (tmp_path / name).chmod(0o644)
    return tmp_path, load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["tiny-text", "tiny-kimi-linear"])
def test_model_round_trip_is_bit_exact(name: str, tmp_path) -> None:
    source = golden(name)
    _, raw = read_config(source)
    save(load_model(source), tmp_path / "out", base=raw, shard_bytes=200_000)
    assert len(shard_files(tmp_path / "out")) > 1
    before = load_file(source / "model.safetensors")
    after = {s.name: s.read() for s in read_shards(tmp_path / "out")}
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and torch.equal(value, after[key]), key
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in before.values())
    assert set(index["weight_map"]) == set(before)


def test_fp32_storage_keeps_every_bit(tmp_path) -> None:
    torch.manual_seed(0)
    model = K3(preset("tiny").replace(num_nextn_predict_layers=1, kda_decay="head"))
    model.reset_parameters()
    save(model, tmp_path / "w", dtype="F32")
    again = load_model(tmp_path / "w")
    assert again.config == model.config
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items()):
        assert torch.equal(a, b), name


def test_written_names_and_dtypes_are_the_table(tmp_path) -> None:
    config = preset("tiny").replace(expert_format="mxfp4", num_nextn_predict_layers=1)
    model = K3(config)
    model.reset_parameters()
    save(model, tmp_path / "w")
    written = {s.name: (s.shape, s.dtype) for s in read_shards(tmp_path / "w")}
    assert written == {name: (row.shape, row.dtype) for row in tensors(config) for name in row.names()}


def test_prefix_is_optional(checkpoint) -> None:
    directory, values = checkpoint
    bare = {k.removeprefix("language_model."): v for k, v in values.items()}
    save_file(bare, directory / "model.safetensors")
    model = load_model(directory)
    assert torch.equal(model.lm_head.weight.bfloat16(), values["language_model.lm_head.weight"])


NAME = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight"


def edit(values, kind: str) -> str:
    """Break one tensor; returns words the error must hold."""
    a_log = "language_model.model.layers.0.self_attn.A_log"
    if kind == "missing":
        del values[NAME]
        return f"lacks the tensor {NAME.removeprefix('language_model.')}"
    if kind == "extra":
        values["language_model.model.layers.0.surprise.weight"] = torch.zeros(3)
        return "surprise.weight is not part of this config"
    if kind == "misshapen":
        values[NAME] = values[NAME][:-1].contiguous()
        return rf"{NAME} is \[23, 24\], but the config asks for \[24, 24\]"
    if kind == "integers":
        values[NAME] = values[NAME].to(torch.uint8)
        return "stored as U8"
    if kind == "short A_log":
        values[a_log] = values[a_log][:2].contiguous()
        return "holds 2 heads"
    values[a_log] = torch.ones_like(values[a_log])
    return "non-zero values past its 3 heads"


@pytest.mark.parametrize("kind", ["missing", "extra", "misshapen", "integers", "short A_log", "dirty padding"])
def test_misfits_are_named(checkpoint, kind: str) -> None:
    directory, values = checkpoint
    words = edit(values, kind)
    save_file(values, directory / "model.safetensors")
    with pytest.raises(WeightsError, match=words):
        load_model(directory)


def test_damaged_files_are_named(checkpoint, tmp_path) -> None:
    directory, _ = checkpoint
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors is not a readable safetensors file"):
        load_model(directory)
    path.unlink()
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors"):
        load_model(directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"lacks the shard gone\.safetensors"):
        load_model(directory)
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(tmp_path / "nowhere")


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch) -> None:
    model = K3(preset("tiny"))
    model.reset_parameters()
    save(model, tmp_path / "w")
    before = {p.name: p.read_bytes() for p in (tmp_path / "w").iterdir()}

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perilune.model.shards.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(model, tmp_path / "w")
    assert {p.name: p.read_bytes() for p in (tmp_path / "w").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


def test_loading_holds_one_tensor_at_a_time(tmp_path) -> None:
    """Peak memory above the model itself stays near one tensor, far below the checkpoint."""
    model = K3(preset("tiny"))
    model.reset_parameters()
    save(model, tmp_path / "w", shard_bytes=10**6)
    held: list[int] = []
    for stored in read_shards(tmp_path / "w"):
        held.append(stored.read().nbytes)
    assert max(held) < sum(held) / 4
    with safe_open(shard_files(tmp_path / "w")[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_replaced_checkpoint_is_read_anew(tmp_path) -> None:
    """Weights re-exported under one name must not be served from a handle on the file that was there before."""
    model = K3(preset("tiny"))
    for fill in (1.0, 2.0):
        torch.nn.init.constant_(model.norm.weight, fill)
        save(model, tmp_path / "w")
        assert load_model(tmp_path / "w").norm.weight.unique().tolist() == [fill]


BROKEN = {
    "a missing list": (lambda text: text["linear_attn_config"].pop("full_attn_layers"), "full_attn_layers"),
    "a string for a number": (lambda text: text.update(num_hidden_layers="5"), "num_hidden_layers"),
    "an unknown key of ours": (lambda text: text.update(perilune={"kda_dekay": "head"}), "kda_dekay"),
    "a list for an object": (lambda text: text.update(linear_attn_config=[3]), "linear_attn_config"),
    "an activation nobody knows": (lambda text: text.update(hidden_act="gelu"), "hidden_act"),
    "a word for the quantisation": (lambda text: text.update(quantization_config="fp8"), "quantization_config"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_names_its_key(name: str) -> None:
    raw = to_json(preset("tiny"))
    spoil, key = BROKEN[name]
    spoil(raw["text_config"])
    with pytest.raises(ConfigError, match=key):
        from_json(raw)


def test_a_tied_head_is_the_embedding_after_loading(tmp_path) -> None:
    model = K3(preset("tiny").replace(tie_word_embeddings=True))
    model.reset_parameters()
    save(model, tmp_path, dtype="F32")
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.embed_tokens.weight)


def test_a_full_disk_is_the_system_error_it_was(tmp_path, monkeypatch) -> None:
    """safetensors hides the number in its text; the command line tells a full disk by it."""

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("perilune.model.shards.save_file", full)
    with pytest.raises(OSError, match=r"w\.partial") as caught:
        save(K3(preset("tiny")), tmp_path / "w")
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


@pytest.mark.parametrize("index", ["[]", "null", '{"weight_map": {"x": 5}}', "{"])
def test_an_index_that_is_none_is_named(tmp_path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json is not a safetensors index"):
        shard_files(tmp_path)
