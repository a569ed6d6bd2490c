"""Machines made ahead of need. For a memory base in use one is kept, the stem, that holds a snapshot's guest, has run
one command and stands still: machines are forked from it, loaded and translated as it is. Spares are such forks made
before somebody asks: ready at once for the snapshot that they hold (hot), and after an exchange of memory and devices
for any other on the same base (warm).

`take` gives the best there is; a thread makes up for what was taken. A machine in a jail or under KVM cannot be forked
(nor can a jailed one take a second guest): there a spare waits on the base for its first.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

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
    """Stems and spares by kind. For each of the two kinds that were used last a stem is kept unasked, and `follow`
    spares; not `unasked`: only what is wanted."""

    launcher: Launcher
    follow: int = 0
    unasked: bool = True
    _recent: list[Snapshot] = field(default_factory=list)
    _wants: dict[str, tuple[Snapshot, int]] = field(default_factory=dict)
    _spares: dict[Kind, deque[Spare]] = field(default_factory=lambda: defaultdict(deque))
    _stems: dict[Kind, Spare] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _taken: float = 0.0
    _thread: threading.Thread | None = None
    _making: bool = False
    _closed: bool = False

    @property
    def _forks(self) -> bool:
        return self.launcher.qemu.forks

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

    def take(self, snapshot: Snapshot) -> Spare:
        """A machine that holds `snapshot`'s guest, stopped."""
        with self._changed:
            spare, self._taken = self._pop(snapshot), time.monotonic()
            stem = self.stem(snapshot)
            leaving = self._remember(snapshot) if self.unasked else []
            self._begin()
        for old in leaving:
            old.discard()
        if spare and spare.snapshot == snapshot.id:
            return spare
        try:
            if spare:
                return self.launcher.load(spare, snapshot)
            if stem:
                return self.launcher.fork(stem, snapshot)
        except (SandboxError, OSError) as error:  # a new one says whether the snapshot is at fault
            _log.warning("a machine that has run a guest could not take another: %s", error)
        return self.launcher.load(self._spawn(snapshot), snapshot)

    def _spawn(self, snapshot: Snapshot, stem: bool = False) -> Spare:
        return self.launcher.spawn(self.launcher.store.memory / snapshot.base, snapshot.shape, stem=stem)

    def _pop(self, snapshot: Snapshot) -> Spare | None:
        spares = self._spares[kind_of(snapshot)]
        fit = [s for s in spares if s.snapshot in ("", snapshot.id) or s.own]
        for spare in sorted(fit, key=lambda s: s.snapshot != snapshot.id):
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
        return self._unneeded() if gone else []

    def _unneeded(self) -> list[Spare]:
        """Takes out what nobody seeks any more."""
        wants, recent = list(self._wants.values()), set(map(kind_of, self._recent))
        gone = []
        for kind in [*self._spares, *self._stems]:
            wanted = [count for snapshot, count in wants if kind_of(snapshot) == kind]
            spares, most = self._spares[kind], max(sum(wanted), self.follow if kind in recent else 0)
            gone += [spares.pop() for _ in range(len(spares) - most)]
            if not wanted and kind not in recent and kind in self._stems:
                gone.append(self._stems.pop(kind))
        return gone

    def ready(self, timeout_s: float = 60.0) -> bool:
        """Wait until every want is met, and what nobody wants any more has gone."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._making and self._next() is None, timeout_s)

    def _next(self) -> Snapshot | None:
        """For what to make a spare."""
        for snapshot, count in self._wants.values():
            spares = self._spares[kind_of(snapshot)]
            if not self._forks:  # none holds a guest yet: each serves whoever comes first
                held, count = len(spares), sum(c for s, c in self._wants.values() if kind_of(s) == kind_of(snapshot))
            else:
                held = sum(spare.snapshot == snapshot.id for spare in spares)
            if held < count or (self._forks and not self.stem(snapshot)):
                return snapshot
        for snapshot in self._recent:
            short = len(self._spares[kind_of(snapshot)]) < self.follow or (self._forks and not self.stem(snapshot))
            if short and self._exists(snapshot):
                return snapshot
        return None

    def stem(self, snapshot: Snapshot) -> Spare | None:
        """The machine from which those of its kind are forked, if there is one."""
        stem = self._stems.get(kind_of(snapshot))
        if stem and stem.machine.state == "gone":
            self._stems.pop(kind_of(snapshot)).discard()
            return None
        return stem

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
                self._making = True
            try:
                self._make(snapshot)
            except Exception as error:
                if not isinstance(error, (SandboxError, OSError)):  # no room or no QEMU: whoever needs one hears of it
                    _log.exception("a spare could not be made")
                with self._changed:
                    self._changed.wait(1.0)
            finally:
                self._making = False

    def _make(self, snapshot: Snapshot) -> None:
        with self._changed:
            kind, stem = kind_of(snapshot), self.stem(snapshot)
        if stem:
            made = self.launcher.fork(stem, snapshot)
        else:
            made = self._spawn(snapshot, stem=self._forks)
            if made.stem:
                self.launcher.rehearse(self.launcher.load(made, snapshot))
        _ = made.machine.qmp  # connected, so that whoever takes it need not wait
        if not made.stem:  # from its group all that are forked would have to move
            made.group.add_soon(made.machine.pid)
        with self._changed:
            if not self._closed and kind in map(kind_of, self._sought()):
                if made.stem:
                    self._stems[kind] = made
                else:
                    self._spares[kind].append(made)
                return
        made.discard()  # nobody needs it any more

    def _sought(self) -> list[Snapshot]:
        return [*self._recent, *(snapshot for snapshot, _ in self._wants.values())]

    def drop(self, snapshot: str) -> None:
        """The snapshot goes: so do its spares."""
        with self._changed:
            self._wants.pop(snapshot, None)
            self._recent = [s for s in self._recent if s.id != snapshot]
            gone = self._unneeded()
        for spare in gone:
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
            spares = [s for group in self._spares.values() for s in group] + list(self._stems.values())
            self._spares.clear()
            self._stems.clear()
            self._changed.notify_all()
        for spare in spares:
            spare.discard()
        if self._thread:
            self._thread.join(10.0)
