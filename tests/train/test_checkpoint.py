"""Checkpoints: exact, whole or absent under kill -9, a full disk and damage; random state comes back."""

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import perilune
from perilune.train import checkpoint as module
from perilune.train.checkpoint import (
    CheckpointError,
    Checkpoints,
    latest,
    load,
    rng_state,
    set_rng_state,
    steps,
)


def write_weights(tensors: Mapping[str, Tensor], directory: Path) -> None:
    save_file(dict(tensors), directory / "model.safetensors")


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(7, 5, generator=generator), "tall": torch.randn(4, 9, generator=generator).mT}


def save(checkpoints: Checkpoints, step: int, recipe: dict | None = None) -> None:
    checkpoints.save(step, state(step), write_weights, state(step + 1), {"position": step, "recipe": recipe or {}})


@pytest.mark.parametrize("background", [True, False])
def test_what_was_saved_is_loaded_exactly(tmp_path: Path, background: bool) -> None:
    with Checkpoints(tmp_path, background=background) as checkpoints:
        save(checkpoints, 12)
    path = latest(tmp_path)
    assert path == tmp_path / "step-00000012"
    found = load(path)
    assert found.step == 12 and found.trainer == {"position": 12, "recipe": {}}
    assert all(torch.equal(load_file(found.weights / "model.safetensors")[n], t) for n, t in state(12).items())
    assert all(torch.equal(found.optimizer()[n], t) for n, t in state(13).items())


def test_a_background_save_writes_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    asked, go = state(1), threading.Event()

    def slow(tensors: Mapping[str, Tensor], directory: Path) -> None:
        assert go.wait(10)
        write_weights(tensors, directory)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, asked, slow, asked, {})
        for t in asked.values():
            t.zero_()  # training goes on
        assert latest(tmp_path) is None
        go.set()
    found = load(tmp_path / "step-00000001")
    assert all(torch.equal(found.optimizer()[n], t) for n, t in state(1).items())
    assert all(torch.equal(load_file(found.weights / "model.safetensors")[n], t) for n, t in state(1).items())


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 100_000_000, 20):
            save(checkpoints, step)
    assert steps(tmp_path) == [20, 100_000_000]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for recipe in ({"run": 1}, {"run": 2}):
            save(checkpoints, 5, recipe)
    assert load(tmp_path / "step-00000005").trainer["recipe"] == {"run": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000005"]


def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 5)
    (tmp_path / "step-00000005").rename(tmp_path / ".old-step-00000005")
    (tmp_path / ".new-step-00000005" / "weights").mkdir(parents=True)
    (tmp_path / ".trash-step-00000004").mkdir()
    assert latest(tmp_path) is None
    with Checkpoints(tmp_path):
        assert load(latest(tmp_path) or Path()).step == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000005"]


@pytest.mark.parametrize(("rounds", "seed"), [(12, 0), pytest.param(150, 1, marks=pytest.mark.slow)])
def test_killed_at_random_instants_the_newest_checkpoint_is_whole(tmp_path: Path, rounds: int, seed: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("saver.py")), str(tmp_path), str(rounds), str(seed)]
    environment = os.environ | {"PYTHONPATH": str(Path(perilune.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{rounds} kills") and int(done.stdout.split()[2]) > 4


def fill_disk(tensors: Mapping[str, Tensor], directory: Path) -> None:
    write_weights(tensors, directory)
    with Path("/dev/full").open("wb") as full:
        full.write(b"x" * 100_000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_a_full_disk_is_one_sentence_and_the_older_checkpoints_stay(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:  # the words of safetensors on a full file system
        raise SafetensorError(f"I/O error: No space left on device (os error {errno.ENOSPC})")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            if where == "optimizer":
                patch.setattr(module, "save_file", full)
            checkpoints.save(2, state(2), fill_disk if where == "weights" else write_weights, state(2), {})
            with pytest.raises(CheckpointError, match="disk is full: step 2"):
                checkpoints.wait()
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]
        assert load(tmp_path / "step-00000001").step == 1
        save(checkpoints, 3)
    assert steps(tmp_path) == [3]


def test_an_error_in_the_background_surfaces_at_the_next_save(tmp_path: Path) -> None:
    def broken(_tensors: Mapping[str, Tensor], _directory: Path) -> None:
        raise KeyError("layers.3")

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(1), broken, state(1), {})
        with pytest.raises(KeyError, match=r"layers\.3"):
            save(checkpoints, 2)
        save(checkpoints, 2)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("name", ["weights/model.safetensors", "optimizer.safetensors", "trainer.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_damage_is_named(tmp_path: Path, name: str, harm: str) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1)
    file = tmp_path / "step-00000001" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    if harm == "delete":
        file.unlink()
    else:
        file.write_bytes(content if harm == "flip" else content[:-20])
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / "step-00000001")


def test_two_processes_do_not_train_into_one_directory(tmp_path: Path) -> None:
    with Checkpoints(tmp_path), pytest.raises(CheckpointError, match="Another process"):
        Checkpoints(tmp_path)
    Checkpoints(tmp_path).close()


def test_another_recipe_is_refused_by_its_key(tmp_path: Path) -> None:
    recipe = {"model": {"layers": 5, "mla": (3, 4)}, "train": {"lr": 0.01}}
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1, recipe)
    found = load(tmp_path / "step-00000001")
    found.expect_recipe(recipe)
    with pytest.raises(CheckpointError, match=r"model\.layers = 5, this run has 7"):
        found.expect_recipe({"model": {"layers": 7, "mla": (3, 4)}, "train": {"lr": 0.01}})
    with pytest.raises(CheckpointError, match=r"no train\.seed, this run has 1"):
        found.expect_recipe({"model": {"layers": 5, "mla": (3, 4)}, "train": {"lr": 0.01, "seed": 1}})


def test_what_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="JSON"):
        checkpoints.save(1, {}, write_weights, {}, {"loss": float("nan")})
    assert steps(tmp_path) == []


def draw() -> list[float]:
    legacy = np.random.standard_normal(3)  # the global generator is what is saved
    return [random.gauss(0, 1), random.random(), *legacy, *torch.randn(3).tolist()]


def test_random_state_comes_back_through_json(tmp_path: Path) -> None:
    draw()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {}, write_weights, {"x": torch.zeros(1)}, {"rng": rng_state()})
    expected = draw()
    draw()
    set_rng_state(load(tmp_path / "step-00000001").trainer["rng"])
    assert draw() == expected
