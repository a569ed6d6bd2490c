"""Training checkpoints: a directory that exists whole or not at all.

    RUN/checkpoints/step-00001234/
      weights/                the released layout, which everyone reads
      optimizer.safetensors   whole tensors by parameter name: exact, readable at any world size
      trainer.json            step, position, RNG, balancer, recipe, versions, and each file's size and SHA-256

Writing goes to `.new-step-…`, every file and directory is fsynced, and one rename makes it real; a directory whose name
starts with a dot is never read. So at any instant the newest `step-…` is complete, whatever kills the process.
"""

import base64
import errno
import fcntl
import hashlib
import json
import platform
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from perilune import __version__
from perilune.model.shards import sync

_STEP = re.compile(r"step-(\d{8,})")
_NEW, _OLD, _TRASH = ".new-", ".old-", ".trash-"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

WriteWeights = Callable[[Mapping[str, Tensor], Path], None]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message is one sentence naming the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. `trainer` is what `save` was given."""

    path: Path
    step: int
    trainer: dict[str, Any]

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    def optimizer(self) -> dict[str, Tensor]:
        return load_file(self.path / "optimizer.safetensors")

    def expect_recipe(self, recipe: Mapping[str, Any], free: Collection[str] = ()) -> None:
        """Raises CheckpointError naming the first key in which this checkpoint's recipe differs; `free`: keys, or
        sections, that may."""
        ours, theirs = dict(_leaves(recipe)), dict(_leaves(self.trainer.get("recipe", {})))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key) and key not in free and key.split(".")[0] not in free:
                before = f"no {key}" if theirs.get(key) is None else f"{key} = {theirs[key]!r}"
                now = "none" if ours.get(key) is None else repr(ours[key])
                raise CheckpointError(f"{self.path} was trained with {before}, this run has {now}.")


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, list(tree) if isinstance(tree, tuple) else tree


# --- reading ------------------------------------------------------------------------------------------------------


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(found[1]) for p in directory.iterdir() if (found := _STEP.fullmatch(p.name)))


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None. Only reads, so it may run beside a training process."""
    found = steps(directory)
    return directory / _name(found[-1]) if found else None


def load(path: Path) -> Checkpoint:
    """Opens one checkpoint after checking every file's size and SHA-256. Raises CheckpointError."""
    try:
        document = json.loads((path / "trainer.json").read_text())
        files, trainer, step = document["files"], document["trainer"], document["step"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / 'trainer.json'} cannot be read: {error}.") from None
    for name, (size, wanted) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size or digest(file) != wanted:
            raise CheckpointError(f"{file} is damaged or missing; delete {path} to continue from the one before it.")
    return Checkpoint(path, step, trainer)


# --- writing ------------------------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one training run, held by one process at a time; `close` it, or use it as a context.

    Opening takes the directory's lock and removes what a killed process left behind. With `background`, tensors are
    copied and written by a thread while training goes on; the next `save` or `close` waits for it and raises its error.
    """

    def __init__(self, directory: Path, keep: int = 3, background: bool = True):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}.")
        self.directory, self.keep, self.background = directory, keep, background
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._copies: dict[str, Tensor] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory)
        _recover(directory)

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        write_weights: WriteWeights,
        optimizer: Mapping[str, Tensor],
        trainer: Mapping[str, Any],
    ) -> None:
        """Saves step `step` (steps taken so far), then removes all but the newest `keep`.

        `write_weights(copies, directory)` writes the released layout from copies of `weights`; `trainer` is JSON.
        Raises CheckpointError, at the latest at the next call, with the older checkpoints untouched.
        """
        self.wait()
        document = json.loads(json.dumps(dict(trainer), allow_nan=False))  # a copy, and an error here if not JSON
        copies = self._copy({f"w.{n}": t for n, t in weights.items()} | {f"o.{n}": t for n, t in optimizer.items()})
        self._thread = threading.Thread(target=self._run, args=(step, copies, write_weights, document))
        self._thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint being written is on disk; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._lock.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory, reusing the buffers of the save before (which has been waited for)."""
        for name, t in tensors.items():
            old = self._copies.get(name)
            if old is None or old.shape != t.shape or old.dtype != t.dtype:
                self._copies[name] = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
            self._copies[name].copy_(t.detach(), non_blocking=True)
        if any(t.is_cuda for t in tensors.values()):
            torch.cuda.synchronize()
        return {name: self._copies[name] for name in tensors}

    def publish(self, new: Path, step: int) -> None:
        """A directory that was filled and synced under a hidden name becomes step `step`; then the oldest go."""
        _publish(new, self.directory / _name(step))
        for old in steps(self.directory)[: -self.keep]:
            _remove(self.directory / _name(old))

    def _run(self, step: int, copies: Mapping[str, Tensor], write_weights: WriteWeights, trainer: dict) -> None:
        new = self.directory / f"{_NEW}{_name(step)}"
        try:
            _fill(new, step, copies, write_weights, trainer)
            self.publish(new, step)
        except Exception as error:
            shutil.rmtree(new, ignore_errors=True)
            self._error = _explain(error, self.directory, step)


def _fill(new: Path, step: int, copies: Mapping[str, Tensor], write_weights: WriteWeights, trainer: dict) -> None:
    """Everything of one checkpoint, on disk, under a name that nobody reads."""
    shutil.rmtree(new, ignore_errors=True)
    (new / "weights").mkdir(parents=True)
    write_weights({n[2:]: t for n, t in copies.items() if n.startswith("w.")}, new / "weights")
    save_file({n[2:]: t for n, t in copies.items() if n.startswith("o.")}, new / "optimizer.safetensors")
    paths = sorted(p for p in new.rglob("*") if p.is_file())
    files = {str(p.relative_to(new)): (p.stat().st_size, digest(p)) for p in paths}
    document = {"step": step, "trainer": trainer, "versions": versions(), "files": files}
    (new / "trainer.json").write_text(json.dumps(document, indent=1))
    for path in [*new.rglob("*"), new]:
        sync(path)


def _publish(new: Path, final: Path) -> None:
    """The rename. An older checkpoint of this step steps aside first; `_recover` puts it back after a kill between."""
    aside = final.with_name(_OLD + final.name)
    if final.exists():
        final.rename(aside)
    new.rename(final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(path: Path) -> None:
    """Out of sight in one rename, then deleted."""
    trash = path.with_name(_TRASH + path.name)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _recover(directory: Path) -> None:
    """Finishes or undoes what a killed process was doing."""
    for path in list(directory.iterdir()):
        if path.name.startswith(_OLD) and not (final := directory / path.name.removeprefix(_OLD)).exists():
            path.rename(final)
        elif path.name.startswith((_NEW, _OLD, _TRASH)):
            shutil.rmtree(path, ignore_errors=True)


def _lock(directory: Path) -> IO[str]:
    handle = (directory / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise CheckpointError(f"Another process is training into {directory}.") from None
    return handle


def _explain(error: Exception, directory: Path, step: int) -> Exception:
    """A sentence for what a user can do something about; anything else as it is."""
    full = isinstance(error, OSError) and error.errno in _DISK_FULL
    if isinstance(error, safetensors.SafetensorError):  # carries the number in its text only
        full = any(f"os error {number}" in str(error) for number in _DISK_FULL)
    if full:
        return CheckpointError(
            f"The disk is full: step {step} could not be saved in {directory}; the checkpoints before it are untouched."
        )
    if isinstance(error, OSError | safetensors.SafetensorError):
        return CheckpointError(f"Step {step} could not be saved in {directory}: {error}.")
    return error


def _name(step: int) -> str:
    return f"step-{step:08d}"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- what else decides the future ---------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {
        "perilune": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def rng_state() -> dict[str, Any]:
    """The generators of Python, NumPy, torch and every CUDA device, as JSON."""
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, _text(torch.from_numpy(np.asarray(keys).view(np.uint8).copy())), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts the generators where `rng_state` found them; CUDA devices beyond those saved keep theirs."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, _bytes(keys).numpy().view(np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(_bytes(text), device)


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
