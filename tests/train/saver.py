"""Saves checkpoints in forked processes that are killed at random instants, and checks what is left after each.

Run by test_checkpoint.py in an interpreter of its own (it forks): python saver.py DIRECTORY ROUNDS SEED
"""

import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import load_file, save_file

from perilune.train.checkpoint import Checkpoints, latest, load, steps


def write_weights(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    for name, t in tensors.items():
        save_file({name: t}, directory / f"{name}.safetensors")


def save_for_ever(directory: Path, done: int, background: bool) -> None:
    """A training run whose whole state is its step; reports each step that is surely on disk."""
    with Checkpoints(directory, keep=2, background=background) as checkpoints:
        found = latest(directory)
        step = load(found).step if found else 0
        reported = step
        while True:
            step += 1
            state = {n: torch.full((300, 100), float(step)) for n in ("a", "b")}
            checkpoints.save(step, state, write_weights, state, {"position": 10 * step})
            surely = step - 1 if background else step
            if surely > reported:
                os.write(done, surely.to_bytes(8, "little"))
                reported = surely


def check(directory: Path, reported: int) -> None:
    path = latest(directory)
    if path is None:
        assert reported == 0
        return
    checkpoint = load(path)  # every file's hash
    weights = load_file(checkpoint.weights / "a.safetensors") | load_file(checkpoint.weights / "b.safetensors")
    for name, t in [*weights.items(), *checkpoint.optimizer().items()]:
        assert (t == checkpoint.step).all(), name
    assert checkpoint.trainer == {"position": 10 * checkpoint.step}
    assert checkpoint.step >= reported, "a checkpoint that was reported saved is gone"
    for step in steps(directory)[:-1]:
        load(directory / f"step-{step:08d}")


def start(directory: Path, background: bool) -> tuple[int, BinaryIO]:
    """A saving process and the pipe of its reports."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(directory, write, background)
        finally:
            os._exit(1)
    os.close(write)
    return child, os.fdopen(read, "rb", buffering=0)


def kill(child: int, pipe: BinaryIO) -> int:
    """The last step that the process reported before it was killed, or 0."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the saving process failed by itself"
    with pipe:
        reports = pipe.read()
    return int.from_bytes(reports[-8:], "little")


def main(directory: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    child, pipe = start(directory, background=False)
    began = time.perf_counter()
    reported = [int.from_bytes(pipe.read(8), "little") for _ in range(4)][-1]
    span = time.perf_counter() - began  # about four saves on this machine as it is now
    reported = max(reported, kill(child, pipe))
    for trial in range(rounds):
        child, pipe = start(directory, background=trial % 2 == 0)
        time.sleep(rng.uniform(0.0, span))
        reported = max(reported, kill(child, pipe))
        check(directory, reported)
    with Checkpoints(directory):
        pass
    left = {p.name for p in directory.iterdir()} - {".lock"}
    assert left == {f"step-{step:08d}" for step in steps(directory)}, left
    print(f"{rounds} kills, {steps(directory)[-1]} checkpoints")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
