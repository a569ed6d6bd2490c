"""Import and export from file to file: bit-exact round trips, checked conversions, nothing half-written."""

import json

import pytest
import torch
from golden import golden
from safetensors.torch import load_file, save_file

from perilune.config import ConfigError
from perilune.model.shards import WeightsError, read_shards, shard_files
from perilune.model.transfer import convert, import_checkpoint
from perilune.model.weights import load_model
from perilune.ops.mx import unpack_mxfp4


def tensors_of(directory) -> dict[str, torch.Tensor]:
    return {s.name: s.read() for s in read_shards(directory)}


@pytest.mark.parametrize("name", ["tiny-text", "tiny-text-mxfp4", "tiny-kimi-linear", "tiny-vision"])
def test_import_then_export_is_bit_exact(name: str, tmp_path) -> None:
    source = golden(name)
    import_checkpoint(source, tmp_path / "in", shard_bytes=100_000)
    convert(tmp_path / "in", tmp_path / "out", shard_bytes=50_000)
    assert len(shard_files(tmp_path / "out")) > len(shard_files(tmp_path / "in")) > 1
    before, after = load_file(source / "model.safetensors"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and torch.equal(value, after[key]), key
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_unpacking_and_packing_experts(tmp_path) -> None:
    source = golden("tiny-text-mxfp4")
    convert(source, tmp_path / "bf16", experts="bfloat16")
    packed, plain = load_file(source / "model.safetensors"), tensors_of(tmp_path / "bf16")
    base = "language_model.model.layers.2.block_sparse_moe.experts.1.w1.weight"
    expected = unpack_mxfp4(packed[base + "_packed"], packed[base + "_scale"], torch.bfloat16)
    assert torch.equal(plain[base], expected)
    assert base + "_packed" not in plain
    for (name, a), (_, b) in zip(
        load_model(source).state_dict().items(), load_model(tmp_path / "bf16").state_dict().items()
    ):
        assert torch.equal(a, b), name
    convert(tmp_path / "bf16", tmp_path / "again", experts="mxfp4")
    again = load_model(tmp_path / "again")
    assert again.config.expert_format == "mxfp4"
    for (name, a), (_, b) in zip(load_model(source).state_dict().items(), again.state_dict().items()):
        torch.testing.assert_close(a, b, atol=0, rtol=0, msg=name)  # already on the grid: packing loses nothing


def test_a_misfit_writes_nothing(tmp_path) -> None:
    values = load_file(golden("tiny-text") / "model.safetensors")
    values.pop("language_model.model.norm.weight")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((golden("tiny-text") / "config.json").read_text())
    save_file(values, bad / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lacks the tensor model\.norm\.weight"):
        import_checkpoint(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="is the source itself"):
        import_checkpoint(bad, bad)


def test_import_holds_one_shard(tmp_path) -> None:
    """The peak of resident memory during an import grows with the shard, not with the checkpoint."""
    import subprocess
    import sys

    from perilune.config import preset
    from perilune.model.net import K3
    from perilune.model.weights import save

    def peak(experts: int) -> int:
        config = preset("tiny").replace(num_experts=experts, moe_intermediate_size=256, routed_expert_hidden_size=256)
        model = K3(config)
        save(model, tmp_path / f"src{experts}", dtype="F32", shard_bytes=4_000_000)
        code = (
            "import sys; from pathlib import Path; from perilune.model.transfer import import_checkpoint;"
            "import_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), 4_000_000);"
            "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
        )
        args = [sys.executable, "-c", code, str(tmp_path / f"src{experts}"), str(tmp_path / f"dst{experts}")]
        return int(subprocess.run(args, capture_output=True, check=True, text=True).stdout) * 1024

    small, large = peak(8), peak(64)
    grown = 56 * 3 * 256 * 256 * 4 * 4  # bytes of experts in four layers that only the large one has
    assert grown > 150_000_000
    assert large - small < grown / 4
