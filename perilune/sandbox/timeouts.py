"""What happens to sandboxes by the clock: timeouts, machines that linger, guests that met a full host disk."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from perilune.sandbox.catalogue import Phase
from perilune.sandbox.errors import MachineLost, SandboxError
from perilune.sandbox.guard import free_mb
from perilune.sandbox.live import Live
from perilune.sandbox.roster import Roster

_EVERY_S = 0.25
_log = logging.getLogger(__name__)


class Keeper(Protocol):
    """What a timeout does to a sandbox."""

    def kill(self, identity: str) -> None:
        """End it."""

    def pause(self, identity: str, mode: str) -> object:
        """Keep it."""


class Clock:
    """A thread; `more` is done at every tick."""

    def __init__(self, roster: Roster, keeper: Keeper, floor_mb: int, more: Callable[[], object]) -> None:
        self._roster, self._keeper, self._floor_mb, self._more = roster, keeper, floor_mb, more
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="timeouts")
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._try(self._watch_disk)
            self._try(self._more)
            for live in list(self._roster.lives.values()):
                self._try(lambda live=live: self._look(live))  # type: ignore[misc]

    @staticmethod
    def _try(work: Callable[[], object]) -> None:
        """Whatever goes wrong with one sandbox, the next one's timeout must strike."""
        try:
            work()
        except (SandboxError, OSError):
            pass
        except Exception:
            _log.exception("the clock went on after a failure")

    def _look(self, live: Live) -> None:
        live.machine.trim()
        if live.record.phase is Phase.RUNNING and live.record.end is not None and live.record.end <= time.time():
            self._expire(live.record.id)

    def _watch_disk(self) -> None:
        """A guest that writes to a full host disk is stopped by QEMU, in the middle of what it does. It goes on when
        there is room."""
        full = free_mb(self._roster.store.home) < self._floor_mb
        for live in list(self._roster.lives.values()):
            if full or live.stalled:
                with contextlib.suppress(SandboxError):
                    before, live.stalled = live.stalled, live.machine.stalled()
                    if live.stalled and not full:
                        live.machine.run()
                    elif live.stalled and not before:
                        live.agent.interrupt(live.still)

    def _expire(self, identity: str) -> None:
        with self._roster.lock(identity):
            record = self._roster.record(identity)
            if record.phase is not Phase.RUNNING or record.end is None or record.end > time.time():
                return
            if record.on_timeout == "kill":
                self._keeper.kill(identity)
                return
            try:
                self._keeper.pause(identity, record.pause_mode)
            except MachineLost:
                raise
            except SandboxError:  # no room to keep it: try again in a while rather than lose it
                record.end = time.time() + 30
                raise
