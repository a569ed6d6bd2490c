"""Machines of paused sandboxes that stay, stopped, for some seconds after the pause was written: a sandbox that is
resumed soon, as between two thoughts of a model, goes on where QEMU has everything loaded and translated.

The pause is complete without them: they are ended when time is up, when memory is short, and with their process.
"""

import threading
import time
from dataclasses import dataclass, field

from perilune.sandbox.live import Live


@dataclass
class Lingering:
    """By sandbox. `seconds` 0 keeps none."""

    seconds: float = 0.0
    _kept: dict[str, tuple[float, Live]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, live: Live) -> bool:
        """Hold on to a machine that was paused just now; False when none is to be kept."""
        if self.seconds <= 0:
            return False
        live.agent.hold()
        with self._lock:
            self._kept[live.record.id] = (time.monotonic() + self.seconds, live)
        return True

    def take(self, identity: str) -> Live | None:
        """The machine, if it is still there; it is the caller's now."""
        with self._lock:
            _, live = self._kept.pop(identity, (0.0, None))
        if live and live.machine.state == "gone":
            end(live)
            return None
        return live

    def expire(self, everything: bool = False) -> int:
        """End those whose time is up, or all; returns how many."""
        now = time.monotonic()
        with self._lock:
            old = [identity for identity, (until, _) in self._kept.items() if everything or until < now]
            gone = [self._kept.pop(identity)[1] for identity in old]
        for live in gone:
            end(live)
        return len(gone)


def end(live: Live) -> None:
    """A paused machine is not needed any more; its agent's streams wait for the resume."""
    live.agent.detach()
    live.machine.kill()
    live.unplug()
