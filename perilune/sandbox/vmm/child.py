"""A process that may or may not be our child: signalled, awaited and recognised without reusing a stranger's id."""

import contextlib
import os
import select
import signal
import threading
from pathlib import Path


def started_at(pid: int) -> int | None:
    """The start time of a live process in clock ticks since boot, or None; with the id it names a process for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Child:
    """A handle that stays right when the id is reused (a pidfd)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._fd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = 0.0) -> bool:
        """True when it has ended; reaps it when it is our child."""
        with self._lock:
            if self._fd < 0:
                return True
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return False
            self._reap()
            return True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._fd)
        self._fd = -1

    def kill(self) -> None:
        """SIGKILL, then wait."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            self.wait(None)

    def release(self) -> None:
        """Let go of it without ending it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def alive(pid: int, started: int) -> bool:
    """Whether the process that `started_at` named is there still."""
    return bool(pid) and started_at(pid) == started
