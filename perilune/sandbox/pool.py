"""Machines made ahead of need. Each holds a snapshot's guest, rehearsed with one command and stopped: ready at once for
that snapshot (hot), and after an exchange of memory and devices for any other on the same memory base (warm).

`take` gives the best there is; a thread makes up for what was taken. A machine in a jail cannot take a second guest:
there a spare waits on the base for its first.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from perilune.sandbox.diff import Stored
from perilune.sandbox.errors import SandboxError
from perilune.sandbox.launcher import Launcher
from perilune.sandbox.live import Spare
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.vmm.driver import Shape

Kind = tuple[str, Shape]
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


def kind_of(snapshot: Snapshot) -> Kind:
    """What a machine must have to hold its guest: the memory base and the shape."""
    return snapshot.base, snapshot.shape


@dataclass
class Pool:
    """Spares by kind. `follow` are kept for each of the two kinds that were used last, unasked."""

    launcher: Launcher
    follow: int = 0
    _recent: list[Snapshot] = field(default_factory=list)
    _wants: dict[str, tuple[Snapshot, int]] = field(default_factory=dict)
    _spares: dict[Kind, deque[Spare]] = field(default_factory=lambda: defaultdict(deque))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _taken: float = 0.0
    _thread: threading.Thread | None = None
    _closed: bool = False

    def want(self, snapshot: Snapshot, count: int) -> None:
        """From now on keep so many spares that hold `snapshot`'s guest."""
        with self._changed:
            self._wants[snapshot.id] = (snapshot, count)
            self._begin()

    def _begin(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._fill, daemon=True, name="pool")
            self._thread.start()
        self._changed.notify_all()

    def take(self, snapshot: Snapshot, stored: Stored | None = None) -> Spare:
        """A machine that holds `snapshot`'s guest, stopped; `stored` is its memory when that was opened already."""
        with self._changed:
            spare, self._taken = self._pop(snapshot), time.monotonic()
            leaving = self._remember(snapshot) if self.follow else []
            self._begin()
        for old in leaving:
            old.discard()
        if spare and spare.snapshot == snapshot.id:
            return spare
        if spare:
            try:
                return self.launcher.load(spare, snapshot, stored)
            except (SandboxError, OSError) as error:  # a new one says whether the snapshot is at fault
                _log.warning("a spare could not take a second guest: %s", error)
        return self.launcher.load(self._spawn(snapshot), snapshot, stored)

    def _spawn(self, snapshot: Snapshot) -> Spare:
        return self.launcher.spawn(self.launcher.store.memory / snapshot.base, snapshot.shape)

    def _pop(self, snapshot: Snapshot) -> Spare | None:
        spares = self._spares[kind_of(snapshot)]
        for spare in sorted(spares, key=lambda s: s.snapshot != snapshot.id):
            spares.remove(spare)
            if spare.machine.state != "gone":
                return spare
            spare.discard()
        return None

    def _remember(self, snapshot: Snapshot) -> list[Spare]:
        """It was used just now; returns the spares of the kind that nobody uses any more. An older snapshot of the same
        kind stays the one that spares are made from: a fork's or a pause's is soon gone."""
        kind = kind_of(snapshot)
        known = [s for s in self._recent if kind_of(s) == kind and self._exists(s)]
        self._recent = [*(known or [snapshot]), *(s for s in self._recent if kind_of(s) != kind)]
        gone, self._recent = self._recent[2:], self._recent[:2]
        return [spare for old in gone for spare in self._unneeded(kind_of(old))]

    def _unneeded(self, kind: Kind) -> list[Spare]:
        wanted = {kind_of(snapshot) for snapshot, _ in self._wants.values()}
        return [] if kind in wanted else list(self._spares.pop(kind, ()))

    def ready(self, timeout_s: float = 60.0) -> bool:
        """Wait until every want is met."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next() is None, timeout_s)

    def _next(self) -> Snapshot | None:
        """For what to make a spare."""
        for snapshot, count in self._wants.values():
            spares = self._spares[kind_of(snapshot)]
            if self.launcher.qemu.jail:  # none holds a guest yet: each serves whoever comes first
                held, count = len(spares), sum(c for s, c in self._wants.values() if kind_of(s) == kind_of(snapshot))
            else:
                held = sum(spare.snapshot == snapshot.id for spare in spares)
            if held < count:
                return snapshot
        for snapshot in self._recent:
            if len(self._spares[kind_of(snapshot)]) < self.follow and self._exists(snapshot):
                return snapshot
        return None

    def _exists(self, snapshot: Snapshot) -> bool:
        store = self.launcher.store
        return store.path(snapshot.id).is_dir() and (store.memory / snapshot.base).exists()

    def _fill(self) -> None:
        while not self._closed:
            with self._changed:
                snapshot = self._next()
                if snapshot is None:
                    self._changed.notify_all()
                    self._changed.wait(5.0)
                    continue
                if time.monotonic() < self._taken + _PAUSE_S:  # whoever took one still needs the processor
                    self._changed.wait(_PAUSE_S)
                    continue
            try:
                self._make(snapshot)
            except Exception as error:
                if not isinstance(error, (SandboxError, OSError)):  # no room or no QEMU: whoever needs one hears of it
                    _log.exception("a spare could not be made")
                with self._changed:
                    self._changed.wait(1.0)

    def _make(self, snapshot: Snapshot) -> None:
        spare = self._spawn(snapshot)
        if self.launcher.qemu.jail:
            _ = spare.machine.qmp  # connected, so that whoever takes it need not wait
            spare.group.added()
        else:
            self.launcher.rehearse(self.launcher.load(spare, snapshot))
        with self._changed:
            if not self._closed and kind_of(snapshot) in map(kind_of, self._sought()):
                self._spares[kind_of(snapshot)].append(spare)
                return
        spare.discard()

    def _sought(self) -> list[Snapshot]:
        return [*self._recent, *(snapshot for snapshot, _ in self._wants.values())]

    def drop(self, snapshot: str) -> None:
        """The snapshot goes: so do its spares."""
        with self._changed:
            wanted, _ = self._wants.pop(snapshot, (None, 0))
            recent = [s for s in self._recent if s.id == snapshot]
            self._recent = [s for s in self._recent if s.id != snapshot]
            spares = [s for one in {kind_of(s) for s in (wanted, *recent) if s} for s in self._unneeded(one)]
        for spare in spares:
            spare.discard()

    def forget(self) -> None:
        """End the spares that were made unasked."""
        for snapshot in list(self._recent):
            self.drop(snapshot.id)

    def close(self) -> None:
        """End every spare."""
        with self._changed:
            self._closed = True
            self._wants, self._recent = {}, []
            spares = [s for group in self._spares.values() for s in group]
            self._spares.clear()
            self._changed.notify_all()
        for spare in spares:
            spare.discard()
        if self._thread:
            self._thread.join(10.0)
