"""Checkpoints of many ranks: the same directory as one process writes, filled by all while training goes on.

    copy      each rank its own boxes, to host memory            (training waits for this alone)
    prepare   rank 0 makes the files      fill    every rank      digest    every rank some files      publish    rank 0

The steps run in one thread a rank, over a group of their own; each begins when all ranks have ended the one before.
"""

import json
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from perilune.config import ModelConfig
from perilune.model.shards import sync
from perilune.train.checkpoint import CheckpointError, Checkpoints, digest, versions
from perilune.train.mesh.places import Held, create, create_weights, state_places, weight_places, write_boxes


class MeshCheckpoints:
    """`train.checkpoint.Checkpoints` for all ranks: one copy on each, then a thread writes while training goes on.

    group: gloo, used by that thread alone. Errors of any rank are raised on all, at the latest at the next call.
    """

    def __init__(self, directory: Path, keep: int, group: dist.ProcessGroup, background: bool = True) -> None:
        self.directory, self.group, self.background = directory, group, background
        self.first = dist.get_rank(group) == 0
        self._owner = Checkpoints(directory, keep) if self.first else None  # locks, recovers, publishes
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        dist.barrier(group)

    def save(
        self, step: int, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], weights: Iterable[Held],
        states: Mapping[str, tuple[tuple[int, ...], str]], state: Iterable[Held], trainer: Mapping[str, Any],
        finish: Any,
    ) -> None:  # fmt: skip
        """weights, state: what this rank holds, copied before this returns. states: all state tensors of all ranks'
        stages. finish(weights directory): what else rank 0 puts there."""
        self.wait()
        mine = [
            [Held(h.name, h.box, h.values.detach().to("cpu", copy=True)) for h in part] for part in (weights, state)
        ]
        document = json.loads(json.dumps(dict(trainer), allow_nan=False))
        args = (step, config, shapes, states, mine, document, finish)
        self._thread = threading.Thread(target=self._run, args=args)
        self._thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(
        self, step: int, config: ModelConfig, shapes: Any, states: Any, mine: Any, document: Any, finish: Any
    ) -> None:
        new = self.directory / f".new-step-{step:08d}"
        try:
            self._together(lambda: self._prepare(new, config, shapes, states, finish))
            self._together(lambda: self._fill(new, config, shapes, states, mine))
            digests = self._together(lambda: self._digests(new))
            self._together(lambda: self._publish(new, step, document, dict(d for part in digests for d in part)))
        except Exception as error:
            self._error = error

    def _together(self, part: Any) -> list[Any]:
        """Run a part on every rank, then learn of everyone's result or first error."""
        try:
            mine: Any = (part(), None)
        except Exception as error:
            mine = (None, f"rank {dist.get_rank()}: {error}")
        seen: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(seen, mine, self.group)
        if errors := [error for _, error in seen if error]:
            raise CheckpointError(f"The checkpoint in {self.directory} could not be saved: {errors[0]}.")
        return [value for value, _ in seen]

    def _prepare(self, new: Path, config: ModelConfig, shapes: Any, states: Any, finish: Any) -> None:
        if self.first:
            shutil.rmtree(new, ignore_errors=True)
            create_weights(new / "weights", config, shapes)
            create(new, state_places(states))
            finish(new / "weights")

    def _fill(self, new: Path, config: ModelConfig, shapes: Any, states: Any, mine: Any) -> None:
        write_boxes(new / "weights", [p for file in weight_places(config, shapes) for p in file], mine[0])
        write_boxes(new, state_places(states), mine[1])

    def _digests(self, new: Path) -> list[tuple[str, tuple[int, str]]]:
        """Every rank hashes its share of the files."""
        paths = sorted(p for p in new.rglob("*") if p.is_file())
        share = paths[dist.get_rank(self.group) :: dist.get_world_size(self.group)]
        return [(str(p.relative_to(new)), (p.stat().st_size, digest(p))) for p in share]

    def _publish(self, new: Path, step: int, trainer: Any, files: dict[str, tuple[int, str]]) -> None:
        if self._owner is not None:
            document = {"step": step, "trainer": trainer, "versions": versions(), "files": dict(sorted(files.items()))}
            (new / "trainer.json").write_text(json.dumps(document, indent=1))
            for path in [*new.rglob("*"), new]:
                sync(path)
            self._owner.publish(new, step)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._owner is not None:
                self._owner.close()

    def __enter__(self) -> "MeshCheckpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
