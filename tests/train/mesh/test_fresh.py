"""Weights made a tensor at a time: those of a whole model, bit for bit, in a fraction of its memory."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from train.mesh.world import MODEL, OPTIONS, data, single

from perilune.config import ModelConfig
from perilune.model.net import K3
from perilune.train.mesh.boxes import Sizes, as_matrix, whole
from perilune.train.mesh.config import MeshConfig
from perilune.train.mesh.fresh import fill, skeleton
from perilune.train.mesh.trainer import MeshTrainer

TIED = MODEL.replace(tie_word_embeddings=True, num_nextn_predict_layers=0)


def whole_model(config: ModelConfig) -> K3:
    torch.manual_seed(5)
    model = K3(config)
    model.reset_parameters()
    return model


@pytest.mark.parametrize("config", [MODEL, TIED])
def test_values_and_generator_are_those_of_a_whole_model(config: ModelConfig) -> None:
    model = whole_model(config)
    after, got = torch.get_rng_state(), dict[str, torch.Tensor]()
    torch.manual_seed(5)
    fill(skeleton(config), lambda name, values: got.update({name: values.clone()}))
    want = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert torch.equal(torch.get_rng_state(), after)


def test_a_parameter_without_values_is_named() -> None:
    model = skeleton(MODEL)
    model.norm.extra = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"norm\.extra has no values"):
        fill(model, dict[str, torch.Tensor]().__setitem__)


LARGE = MODEL.replace(
    hidden_size=128, moe_intermediate_size=128, routed_expert_hidden_size=128, num_experts=32, num_hidden_layers=10,
    mla_layers=(3, 7), vocab_size=512,
)  # fmt: skip


def share(config: ModelConfig) -> dict[str, torch.Tensor]:
    """What rank 3 of 8 keeps."""
    sizes, kept = Sizes(1, 8, 8), dict[str, torch.Tensor]()
    shapes = {n: tuple(p.shape) for n, p in skeleton(config).named_parameters()}

    def take(name: str, values: torch.Tensor) -> None:
        if name in shapes:
            box = sizes.boxes(name, shapes[name])[3]
            kept[name] = box.of(whole(shapes[name]), as_matrix(values)).clone()

    fill(skeleton(config), take)
    return kept


def tell_high_water(part: Callable[[ModelConfig], object]) -> None:
    """Print the bytes that this process needs for the large model beyond what it has after a small one: code is read
    in by then."""
    part(MODEL)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now
    before = _status("VmRSS")
    kept = part(LARGE)
    print(_status("VmHWM") - before)
    del kept


def high_water(part: str) -> int:
    code = f"from train.mesh import test_fresh as t; t.tell_high_water(t.{part})"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return int(subprocess.check_output([sys.executable, "-c", code], env=os.environ | paths, timeout=120))


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_a_rank_of_eight_needs_a_fraction_of_the_memory() -> None:
    sizes = [4 * p.numel() for p in skeleton(LARGE).parameters()]
    assert high_water("whole_model") > 0.9 * sum(sizes)  # the measure sees a whole model
    assert high_water("share") < sum(sizes) / 8 + 3 * max(sizes) + 2**23


@pytest.mark.parametrize("model", [MODEL, TIED])
def test_a_mesh_of_one_begins_and_goes_on_as_one_process(model: ModelConfig, tmp_path: Path) -> None:
    """Through FSDP on the meta device and back, tied weights too."""
    options = replace(OPTIONS, steps=2)
    trainer = single(tmp_path, model, options)
    want = {n: t.detach().clone() for n, t in (*trainer.model.named_parameters(), *trainer.model.named_buffers())}
    losses = [trainer.train_step().loss for _ in range(2)]
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = MeshTrainer(model, options, data(), tmp_path, {}, MeshConfig(forced_routing=True))
        got = {h.name: h.values.clone() for h in mesh.part.held(reading=True)}
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], as_matrix(value)) for name, value in want.items())
        assert torch.allclose(torch.tensor([mesh.train_step().loss for _ in range(2)]), torch.tensor(losses), rtol=1e-4)
        del mesh
    finally:
        dist.destroy_process_group()
