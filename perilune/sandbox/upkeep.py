"""What is done beside the calls: checkpoints reach the device, deep chains and large diffs are flattened, files that
nothing needs go, and what a killed process left is put in order."""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from perilune.sandbox.catalogue import Catalogue, Phase
from perilune.sandbox.errors import NotFound, SandboxError, SnapshotCorrupt
from perilune.sandbox.files import remove
from perilune.sandbox.limits import Group
from perilune.sandbox.network import namespaces, prefix
from perilune.sandbox.network import remove as remove_namespace
from perilune.sandbox.snapshot import Store
from perilune.sandbox.vmm.child import Child, alive

_FLATTEN_MEMORY = 64 << 20  # bytes of diff from which a base of its own pays
_FLATTEN_DISK = 8  # overlays


@dataclass
class Upkeep:
    """Works one piece after another on a thread of its own. `lock` gives a sandbox's lock."""

    store: Store
    catalogue: Catalogue
    lock: Callable[[str], AbstractContextManager[object]]
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "perilune-upkeep"))

    def later(self, work: Callable[[], object]) -> None:
        """Do it in the background; nothing depends on its success."""

        def quietly() -> None:
            with contextlib.suppress(SandboxError, OSError):  # what it is about may be gone by now
                work()

        with contextlib.suppress(RuntimeError):  # closed
            self._thread.submit(quietly)

    def settle(self) -> None:
        """Wait for the work that is queued."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what is queued and take no more."""
        self._thread.shutdown(wait=True)

    # ---- snapshots ----

    def keep(self, identity: str, previous: str = "") -> None:
        """After a checkpoint: to the device; drop the pause before it; flatten what has grown deep or large."""
        snapshot = self.store.read(identity)
        self.store.make_durable(snapshot)
        if previous:
            remove(self.store.path(previous))
        if len(snapshot.layers) > _FLATTEN_DISK:
            snapshot = self.store.flatten_disk(snapshot)
        if snapshot.diff and snapshot.diff.size > _FLATTEN_MEMORY:
            owner = next((r.id for r in self.catalogue.all() if r.snapshot == identity), identity)
            with self.lock(owner):  # nobody resumes from it meanwhile
                self.store.flatten_memory(self.store.read(identity))
        self.collect()

    def shared(self, layer: Path) -> bool:
        """Whether a snapshot still stands on this layer."""
        return any(layer.name in self._needs(identity) for identity in self.store.ids())

    def _needs(self, identity: str) -> set[str]:
        """The layers and the memory base of a snapshot."""
        try:
            snapshot = self.store.read(identity)
        except (SnapshotCorrupt, NotFound):
            return set()
        return {name for name, _ in snapshot.layers} | {snapshot.base}

    def _chain(self, top: str) -> set[str]:
        try:
            return {name for name, _ in self.store.measure(self.store.layers / top)} if top else set()
        except (SnapshotCorrupt, OSError):
            return {top}

    def collect(self, grace_s: float = 60.0) -> int:
        """Remove layers, bases and snapshots that nothing needs; files younger than the grace are left. Returns how
        many."""
        records, old = self.catalogue.all(), time.time() - grace_s
        kept = {identity for identity, *_ in self.catalogue.kept()} | {r.snapshot for r in records}
        gone = [p for p in self.store.snapshots.iterdir() if p.name not in kept and _older(p, old)]
        held = [(r.base, r.top) for r in records] + [_held(folder) for folder in self.store.run.iterdir()]
        needed: set[str] = set().union(*({base} | self._chain(top) for base, top in held))
        needed = needed.union(*(self._needs(i) for i in set(self.store.ids()) - {path.name for path in gone}))
        for folder in (self.store.layers, self.store.memory):
            spare = (p for p in folder.iterdir() if p.name not in needed and not p.name.startswith("zero-"))
            gone += [path for path in spare if _older(path, old)]
        for path in gone:
            remove(path)
        self._end_orphans()
        return len(gone)

    # ---- crashes ----

    def recover(self) -> None:
        """What a killed process left: half-made snapshots go, dead machines are told as lost, machines of nobody
        end."""
        for record in self.catalogue.all():
            if alive(record.owner, record.owner_started) and record.owner != os.getpid():
                continue
            if record.phase in (Phase.CREATING, Phase.KILLED):
                self.catalogue.drop(record.id)
            elif record.phase is Phase.RESUMING:  # its pause is whole as long as it has not run again
                record.phase = Phase.PAUSED
                self.catalogue.put(record)
            elif record.phase is not Phase.PAUSED and not alive(record.pid, record.pid_started):
                record.phase, record.fault = Phase.LOST, "its machine ended while no runtime watched it"
                self.catalogue.put(record)
        self._end_orphans()
        ours = prefix(str(self.store.home))
        used = {f"{ours}{r.slot}" for r in self.catalogue.all() if r.phase is Phase.RUNNING}
        for namespace in set(namespaces(ours)) - used:
            remove_namespace(namespace)

    def _end_orphans(self) -> None:
        """Machines of a process that died before it had recorded them."""
        known = {r.folder for r in self.catalogue.all() if r.phase is Phase.RUNNING}
        for folder in self.store.run.iterdir():
            if folder.name not in known and not _owned(folder):
                _end_machine(folder)


def _owned(folder: Path) -> bool:
    """Whether the process that started this machine still lives; who has just started one had no time to say so."""
    try:
        pid, started = (folder / "owner").read_text().split()
        return alive(int(pid), int(started))
    except (OSError, ValueError):
        return not _older(folder, time.time() - 5)


def _held(folder: Path) -> tuple[str, str]:
    """(memory base, disk layer) of a machine, whichever process drives it."""
    try:
        base, top = (folder / "holds").read_text().split()
    except (OSError, ValueError):
        return "", ""
    return base, top


def _older(path: Path, than: float) -> bool:
    try:
        return path.stat().st_mtime < than
    except OSError:
        return False


def _end_machine(folder: Path) -> None:
    """A machine that no record knows: end it by its id, and remove its folder. Forked as it was, it has no command line
    of its own; its output goes to its folder. Its cgroup bears the folder's name."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(process / "fd" / "1").startswith(f"{folder}/"):  # noqa: PTH115
                    Child(int(process.name)).kill()
    Group(folder.name).dissolve(folder)
