"""Snapshots on disk: a folder with a manifest, the device state and the memory diff; layers and bases lie beside it.

A snapshot appears by one rename, so it is there whole or not at all, also after kill -9. It is synced to the device
in the background. The manifest names every file with its size, and checksums of what a torn write could spoil.
"""

import contextlib
import hashlib
import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perilune.sandbox import diff as diffs
from perilune.sandbox import disk
from perilune.sandbox.diff import NOTHING, Diff, Stored
from perilune.sandbox.errors import NotFound, SnapshotCorrupt, SnapshotIncompatible
from perilune.sandbox.files import sync, temporary
from perilune.sandbox.vmm.driver import Platform, Shape


@dataclass(frozen=True)
class Defaults:
    """What an image says about commands: user, working directory, environment."""

    user: str = "root"
    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict)
    start: str = ""  # a command that runs from the template's build on


@dataclass(frozen=True)
class Snapshot:
    """A guest at one instant. `mode` full: memory, processes and disk; disk: the file system only (resuming
    reboots)."""

    id: str
    mode: str
    platform: Platform
    shape: Shape
    layers: tuple[tuple[str, int], ...]  # (name in layers/, size) from the top to the raw base
    defaults: Defaults = field(default_factory=Defaults)
    base: str = ""  # name in memory/
    diff: Diff | None = None
    state_sha256: str = ""
    template: str = ""
    created: float = field(default_factory=time.time)

    @property
    def top(self) -> str:
        """The uppermost disk layer."""
        return self.layers[0][0]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def dump(snapshot: Snapshot) -> bytes:
    """The manifest's bytes."""
    body = json.loads(json.dumps(vars(snapshot), default=vars))
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def parse(raw: bytes, name: str) -> Snapshot:
    """The inverse; SnapshotCorrupt when a single byte differs."""
    try:
        body = json.loads(raw)
        claimed = body.pop("sha256")
        if claimed != _digest(body):
            raise ValueError("its checksum differs")
        body["platform"], body["shape"] = Platform(**body["platform"]), Shape(**body["shape"])
        body["defaults"] = Defaults(**body["defaults"])
        body["diff"] = Diff(**body["diff"]) if body["diff"] else None
        body["layers"] = tuple((layer, size) for layer, size in body["layers"])
        return Snapshot(**body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotCorrupt(f"the manifest of snapshot {name} is damaged: {error}") from None


@dataclass(frozen=True)
class Store:
    """The folders of one home."""

    home: Path

    @property
    def layers(self) -> Path:
        """Raw bases and qcow2 overlays."""
        return self.home / "layers"

    @property
    def memory(self) -> Path:
        """Memory bases."""
        return self.home / "memory"

    @property
    def snapshots(self) -> Path:
        """One folder a snapshot."""
        return self.home / "snapshots"

    @property
    def run(self) -> Path:
        """One folder a running machine."""
        return self.home / "run"

    def make(self) -> "Store":
        """Create the folders."""
        for folder in (self.layers, self.memory, self.snapshots, self.run):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    def path(self, identity: str) -> Path:
        """A snapshot's folder; NotFound for a name that is none."""
        if not identity or not identity.replace("-", "").isalnum():
            raise NotFound(f"no snapshot {identity!r}")
        return self.snapshots / identity

    def ids(self) -> list[str]:
        """Every snapshot."""
        return [path.name for path in self.snapshots.iterdir() if not path.name.startswith(".")]

    def read(self, identity: str) -> Snapshot:
        """The manifest; NotFound or SnapshotCorrupt."""
        folder = self.path(identity)
        if not folder.is_dir():
            raise NotFound(f"no snapshot {identity!r}")
        try:
            raw = (folder / "manifest.json").read_bytes()
        except OSError as error:
            raise SnapshotCorrupt(f"snapshot {identity}: manifest.json: {error.strerror}") from None
        return parse(raw, identity)

    def measure(self, top: Path) -> tuple[tuple[str, int], ...]:
        """The chain under `top` as a manifest records it."""
        return tuple((file.name, file.stat().st_size) for file in disk.chain(top))

    def commit(self, snapshot: Snapshot, parts: Path) -> None:
        """Add the manifest to `parts` (state and memory lie there already) and give the folder its name."""
        (parts / "manifest.json").write_bytes(dump(snapshot))
        parts.rename(self.path(snapshot.id))

    def link(self, identity: str, name: str) -> Snapshot:
        """A second name for a snapshot: its files are immutable, so they are shared."""
        made, parts = replace(self.read(identity), id=name), self.snapshots / f".{name}.tmp"
        parts.mkdir()
        for file in self.path(identity).iterdir():
            if file.name != "manifest.json":
                os.link(file, parts / file.name)
        self.commit(made, parts)
        return made

    def amend(self, snapshot: Snapshot) -> None:
        """Replace a manifest (after flattening)."""
        with temporary(self.path(snapshot.id) / "manifest.json") as temp:
            temp.write_bytes(dump(snapshot))
            sync(temp)

    def make_durable(self, snapshot: Snapshot) -> None:
        """Everything a snapshot needs, to the device."""
        folder = self.path(snapshot.id)
        files = [self.layers / name for name, _ in snapshot.layers] + list(folder.iterdir())
        for file in [*files, folder, self.snapshots, self.layers]:
            sync(file)

    def check(self, snapshot: Snapshot, here: Platform) -> None:
        """Refuse, in one sentence, what this host cannot resume or what is not as it was written (memory:
        `open_memory`)."""
        for name, size in snapshot.layers:
            path = self.layers / name
            found = path.stat().st_size if path.exists() else None
            if found != size:
                raise SnapshotCorrupt(f"snapshot {snapshot.id}: disk layer {name} has {found} bytes instead of {size}")
        if snapshot.mode == "disk":
            return
        difference = snapshot.platform.difference(here)
        if difference:
            raise SnapshotIncompatible(f"snapshot {snapshot.id} was taken with {difference}")
        state = self.path(snapshot.id) / "state"
        if not state.exists() or hashlib.sha256(state.read_bytes()).hexdigest() != snapshot.state_sha256:
            raise SnapshotCorrupt(f"snapshot {snapshot.id}: the device state is not what was saved")
        base = self.memory / snapshot.base
        if not base.exists() or base.stat().st_size != snapshot.shape.memory_mb << 20:
            raise SnapshotCorrupt(f"snapshot {snapshot.id}: memory base {snapshot.base} is missing or has another size")

    def open_memory(self, snapshot: Snapshot) -> Stored:
        """The verified memory diff; empty when the base alone is the memory."""
        return diffs.read(self.path(snapshot.id) / "memory", snapshot.diff) if snapshot.diff else NOTHING

    def flatten_memory(self, snapshot: Snapshot) -> Snapshot:
        """Make the diff part of a base of its own, which siblings can share."""
        if snapshot.diff is None:
            return snapshot
        stored, name = self.open_memory(snapshot), f"{snapshot.id}.base"
        diffs.flatten(self.memory / snapshot.base, stored, self.memory / name)
        flat = replace(snapshot, base=name, diff=None)
        self.amend(flat)
        (self.path(snapshot.id) / "memory").unlink(missing_ok=True)
        return flat

    def flatten_disk(self, snapshot: Snapshot) -> Snapshot:
        """Merge what the top layer stands on into one layer, also under a sandbox that runs on already: it opens the
        shorter chain the next time."""
        top, *below, _ = (self.layers / name for name, _ in snapshot.layers)
        target = self.layers / f"{snapshot.id}-flat.qcow2"
        disk.flatten(below[0], target)
        sync(target)
        sync(self.layers)
        disk.rebase(top, target)
        for layer in below:  # somebody may be opening the chain right now: `collect` spares what is young
            with contextlib.suppress(OSError):
                os.utime(layer)
        flat = replace(snapshot, layers=self.measure(top))
        self.amend(flat)
        return flat
