"""Machines made ahead of need. Hot: a template's guest, loaded, rehearsed with one command and stopped; warm:
a QEMU that waits on the right memory base.

`take` gives the best there is; a thread makes up for what was taken.
"""

import contextlib
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

from perilune.sandbox.errors import SandboxError
from perilune.sandbox.live import Launcher, Spare
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.vmm.driver import Shape

Kind = tuple[str, Shape]


@dataclass
class _Want:
    snapshot: Snapshot
    hot: int
    warm: int


@dataclass
class Pool:
    """Spares by snapshot (hot) and by memory base and shape (warm). `follow` warm ones are kept on each of the two
    bases that were used last, unasked."""

    launcher: Launcher
    follow: int = 0
    _recent: list[Kind] = field(default_factory=list)
    _wants: dict[str, _Want] = field(default_factory=dict)
    _hot: dict[str, deque[Spare]] = field(default_factory=lambda: defaultdict(deque))
    _warm: dict[Kind, deque[Spare]] = field(default_factory=lambda: defaultdict(deque))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _closed: bool = False

    def want(self, snapshot: Snapshot, hot: int = 0, warm: int = 0) -> None:
        """From now on keep so many spares for what is made from `snapshot`."""
        with self._changed:
            self._wants[snapshot.id] = _Want(snapshot, hot, warm)
            self._begin()

    def _begin(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._fill, daemon=True, name="pool")
            self._thread.start()
        self._changed.notify_all()

    def take(self, snapshot: Snapshot) -> Spare:
        """A machine that holds `snapshot`'s guest, stopped: hot, else warm, else cold."""
        with self._changed:
            spare = self._pop(self._hot[snapshot.id])
            waiting = None if spare else self._pop(self._warm[snapshot.base, snapshot.shape])
            leaving = self._remember((snapshot.base, snapshot.shape)) if self.follow else []
            self._begin()
        for old in leaving:
            old.discard()
        if spare:
            return spare
        base = self.launcher.store.memory / snapshot.base
        return self.launcher.load(waiting or self.launcher.spawn(base, snapshot.shape), snapshot)

    def _remember(self, kind: Kind) -> list[Spare]:
        """`kind` was used just now; returns the spares of the one that nobody uses any more."""
        self._recent = [kind, *(k for k in self._recent if k != kind)]
        for old in self._recent[2:]:
            self._recent.remove(old)
            if not any((w.snapshot.base, w.snapshot.shape) == old for w in self._wants.values()):
                return list(self._warm.pop(old, ()))
        return []

    @staticmethod
    def _pop(spares: deque[Spare]) -> Spare | None:
        while spares:
            spare = spares.popleft()
            if spare.machine.state != "gone":
                return spare
            spare.discard()
        return None

    def ready(self, timeout_s: float = 60.0) -> bool:
        """Wait until every want is met."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next() is None, timeout_s)

    def _next(self) -> tuple[Kind, Snapshot | None] | None:
        """What to make: a kind, and for a hot one its snapshot."""
        short: dict[Kind, int] = {}
        for want in self._wants.values():
            kind = (want.snapshot.base, want.snapshot.shape)
            if len(self._hot[want.snapshot.id]) < want.hot:
                return kind, want.snapshot
            short[kind] = max(want.warm, short.get(kind, 0))
        for kind in self._recent:
            if (self.launcher.store.memory / kind[0]).exists():
                short[kind] = max(self.follow, short.get(kind, 0))
        return next(((kind, None) for kind, count in short.items() if len(self._warm[kind]) < count), None)

    def _fill(self) -> None:
        while not self._closed:
            with self._changed:
                todo = self._next()
                if todo is None:
                    self._changed.notify_all()
                    self._changed.wait(5.0)
                    continue
            try:
                self._make(*todo)
            except (SandboxError, OSError):  # no room or no QEMU: the caller who needs a machine hears of it
                with self._changed:
                    self._changed.wait(1.0)

    def _make(self, kind: Kind, snapshot: Snapshot | None) -> None:
        spare = self.launcher.spawn(self.launcher.store.memory / kind[0], kind[1])
        if snapshot:
            self.launcher.rehearse(self.launcher.load(spare, snapshot))
        else:
            _ = spare.machine.qmp  # connected, so that whoever takes it need not wait
            spare.group.added()
        with self._changed:
            if not self._closed and (snapshot is None or snapshot.id in self._wants):
                (self._hot[snapshot.id] if snapshot else self._warm[kind]).append(spare)
                return
        spare.discard()

    def drop(self, snapshot: str) -> None:
        """The snapshot goes: so do its spares."""
        with self._changed:
            want = self._wants.pop(snapshot, None)
            spares = list(self._hot.pop(snapshot, ()))
            if want:
                spares += self._warm.pop((want.snapshot.base, want.snapshot.shape), ())
        for spare in spares:
            spare.discard()

    def forget(self) -> None:
        """End the warm spares that were made unasked."""
        with self._changed:
            wanted = {(w.snapshot.base, w.snapshot.shape) for w in self._wants.values()}
            spares = [s for kind in self._recent if kind not in wanted for s in self._warm.pop(kind, ())]
            self._recent = []
        for spare in spares:
            spare.discard()

    def bases(self) -> set[Path]:
        """Memory bases and layers that spares hold."""
        with self._changed:
            spares = [s for group in (*self._hot.values(), *self._warm.values()) for s in group]
        return {s.base for s in spares} | {s.top for s in spares if s.top}

    def folders(self) -> set[str]:
        """Machine folders of spares."""
        with self._changed:
            spares = [s for group in (*self._hot.values(), *self._warm.values()) for s in group]
        return {s.machine.agent_socket.parent.name for s in spares}

    def close(self) -> None:
        """End every spare."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(10.0)
        for snapshot in list(self._wants):
            self.drop(snapshot)
        with contextlib.suppress(KeyError):
            for spares in (*self._hot.values(), *self._warm.values()):
                for spare in spares:
                    spare.discard()
