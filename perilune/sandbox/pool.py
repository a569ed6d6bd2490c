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


@dataclass
class _Want:
    snapshot: Snapshot
    hot: int
    warm: int


@dataclass
class Pool:
    """Spares by snapshot (hot) and by base and shape (warm)."""

    launcher: Launcher
    _wants: dict[str, _Want] = field(default_factory=dict)
    _hot: dict[str, deque[Spare]] = field(default_factory=lambda: defaultdict(deque))
    _warm: dict[tuple[str, Shape], deque[Spare]] = field(default_factory=lambda: defaultdict(deque))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _closed: bool = False

    def want(self, snapshot: Snapshot, hot: int = 0, warm: int = 0) -> None:
        """From now on keep so many spares for what is made from `snapshot`."""
        with self._changed:
            self._wants[snapshot.id] = _Want(snapshot, hot, warm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._fill, daemon=True, name="pool")
                self._thread.start()
            self._changed.notify_all()

    def take(self, snapshot: Snapshot) -> Spare:
        """A machine that holds `snapshot`'s guest, stopped: hot, else warm, else cold."""
        with self._changed:
            spare = self._pop(self._hot[snapshot.id])
            waiting = None if spare else self._pop(self._warm[snapshot.base, snapshot.shape])
            self._changed.notify_all()
        if spare:
            return spare
        base = self.launcher.store.memory / snapshot.base
        return self.launcher.load(waiting or self.launcher.spawn(base, snapshot.shape), snapshot)

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

    def _next(self) -> tuple[_Want, bool] | None:
        for want in self._wants.values():
            if len(self._hot[want.snapshot.id]) < want.hot:
                return want, True
            if len(self._warm[want.snapshot.base, want.snapshot.shape]) < want.warm:
                return want, False
        return None

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

    def _make(self, want: _Want, hot: bool) -> None:
        snapshot = want.snapshot
        spare = self.launcher.spawn(self.launcher.store.memory / snapshot.base, snapshot.shape)
        if hot:
            self.launcher.rehearse(self.launcher.load(spare, snapshot))
        else:
            _ = spare.machine.qmp  # connected, so that whoever takes it need not wait
        with self._changed:
            if self._closed or self._wants.get(snapshot.id) is not want:
                spare.discard()
            elif hot:
                self._hot[snapshot.id].append(spare)
            else:
                self._warm[snapshot.base, snapshot.shape].append(spare)

    def drop(self, snapshot: str) -> None:
        """The snapshot goes: so do its spares."""
        with self._changed:
            want = self._wants.pop(snapshot, None)
            spares = list(self._hot.pop(snapshot, ()))
            if want:
                spares += self._warm.pop((want.snapshot.base, want.snapshot.shape), ())
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
