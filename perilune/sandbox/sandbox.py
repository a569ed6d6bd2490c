"""`Sandbox`: the synchronous interface to one microVM. Everything blocks; errors are `perilune.sandbox.errors`."""

import contextlib
import os
import socket
import threading
from pathlib import Path

from perilune.sandbox.agent.stream import Inbox, Stream
from perilune.sandbox.agent.wire import Type
from perilune.sandbox.catalogue import Network, Record
from perilune.sandbox.commands import Commands, Process
from perilune.sandbox.errors import InvalidRequest, NotFound, SandboxError
from perilune.sandbox.filesystem import Files
from perilune.sandbox.live import Live
from perilune.sandbox.request import Request
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.vmm.driver import Rates

_DEEPEST = 256  # directories within directories
_lock = threading.Lock()
_default: Runtime | None = None


def default_runtime() -> Runtime:
    """The runtime of this process over the default home, opened on first use."""
    global _default
    with _lock:
        if _default is None:
            _default = Runtime()
        return _default


class Sandbox:
    """One microVM. Made by `create` or `connect`; a context manager that kills it."""

    def __init__(self, runtime: Runtime, identity: str) -> None:
        self.runtime, self.id = runtime, identity
        self.commands, self.files = Commands(self), Files(self)

    @classmethod
    def create(
        cls,
        template: str = "base",
        *,
        runtime: Runtime | None = None,
        timeout: float | None = 300.0,
        on_timeout: str = "pause",
        pause_mode: str = "full",
        auto_resume: bool = False,
        metadata: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        network: Network | None = None,
        rates: Rates | None = None,
        processes: int = 2048,
    ) -> "Sandbox":
        """From a template or snapshot. `timeout` in seconds, None for ever; `on_timeout` pause or kill."""
        runtime = runtime or default_runtime()
        request = Request(
            template, timeout, on_timeout, pause_mode, auto_resume, metadata or {}, env or {}, network or Network(),
            rates or Rates(), processes,
        )  # fmt: skip
        return cls(runtime, runtime.create(request).id)

    @classmethod
    def connect(cls, identity: str, timeout: float | None = 300.0, runtime: Runtime | None = None) -> "Sandbox":
        """A sandbox that exists; resumed when it is paused, adopted when its process is gone."""
        runtime = runtime or default_runtime()
        runtime.connect(identity, timeout)
        return cls(runtime, identity)

    @staticmethod
    def list(runtime: Runtime | None = None) -> list[Record]:
        """All sandboxes, newest first."""
        return (runtime or default_runtime()).records()

    @property
    def live(self) -> Live:
        """Its machine and agent; Conflict when it does not run."""
        return self.runtime.live(self.id)

    @property
    def record(self) -> Record:
        """What is known of it."""
        return self.runtime.record(self.id)

    def pause(self, mode: str = "full") -> None:
        """To disk: no CPU, no memory. `full` keeps processes, memory and files; `disk` only files."""
        self.runtime.pause(self.id, mode)

    def resume(self, timeout: float | None = 300.0, recover: bool = False, reboot: bool = False) -> None:
        """Go on. `recover`: a lost one from its last pause; `reboot`: from the disk alone."""
        self.runtime.resume(self.id, timeout, recover, reboot)

    def fork(self, count: int = 1, timeout: float | None = 300.0) -> "Children":
        """Independent copies, from running and paused; each is a sandbox or its error."""
        made = self.runtime.fork(self.id, count, timeout)
        return [one if isinstance(one, SandboxError) else Sandbox(self.runtime, one.id) for one in made]

    def snapshot(self, name: str | None = None, mode: str = "full") -> Snapshot:
        """An instant that stays; `Sandbox.create(name)` starts from it any number of times."""
        return self.runtime.snapshot(self.id, name, mode)

    def kill(self) -> None:
        """End it; nothing stays but its snapshots."""
        self.runtime.kill(self.id)

    def set_timeout(self, seconds: float | None) -> None:
        """From now."""
        self.runtime.set_timeout(self.id, seconds)

    def pty(
        self, columns: int = 80, rows: int = 24, command: str = "exec bash -i -l", user: str | None = None
    ) -> Process:
        """A terminal."""
        return self.commands.start(["/bin/bash", "-c", command], user, pty=(columns, rows))

    def open_port(self, port: int) -> socket.socket:
        """A connection to a port on the guest's loopback, as a socket; GuestError when nothing listens."""
        inbox = Inbox()
        stream = self.live.agent.connect(port, inbox)
        inbox.get(10)
        ours, theirs = socket.socketpair()
        threading.Thread(target=_to_guest, args=(theirs, stream), daemon=True).start()
        threading.Thread(target=_from_guest, args=(theirs, inbox, stream), daemon=True).start()
        return ours

    def copy_in(self, source: Path, target: str, user: str | None = None) -> None:
        """A file or a directory from the host. Links are copied as links: what they point to on the host stays
        there."""
        if source.is_symlink():
            link = ["ln", "-sfn", "--", os.readlink(source), target]  # noqa: PTH115 - a text, not a path of this host
            if self.commands.run(link, user).exit_code:
                raise SandboxError(f"the link {target} cannot be made")
            return
        if source.is_dir():
            self.files.make_dir(target, user)
            for child in sorted(source.iterdir()):
                self.copy_in(child, f"{target.rstrip('/')}/{child.name}", user)
            return
        if not source.is_file():
            raise InvalidRequest(f"{source.name} is neither a file, a directory nor a link")
        with source.open("rb") as file:
            self.files.write(target, iter(lambda: file.read(1 << 18), b""), user, source.stat().st_mode & 0o777)

    def copy_out(self, source: str, target: Path, user: str | None = None) -> None:
        """A file or a directory to the host. Names come from the guest, so only plain ones are used, and no link of
        the host's is followed."""
        self._copy_out(source, target, user, 0)

    def _copy_out(self, source: str, target: Path, user: str | None, depth: int) -> None:
        if depth > _DEEPEST:
            raise InvalidRequest(f"{source} lies deeper than {_DEEPEST} directories")
        if depth and target.is_symlink():
            raise InvalidRequest(f"{target} is a link")
        if self.files.stat(source, user).kind != "d":
            with target.open("wb") as file:
                for piece in self.files.pieces(source, user):
                    file.write(piece)
            return
        target.mkdir(parents=True, exist_ok=True)
        for entry in self.files.list(source, user=user):
            if "/" not in entry.name and entry.name not in (".", "..") and entry.kind in ("d", "f"):
                self._copy_out(entry.path, target / entry.name, user, depth + 1)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(NotFound):
            self.kill()


Children = list[Sandbox | SandboxError]


def _to_guest(theirs: socket.socket, stream: Stream) -> None:
    with contextlib.suppress(OSError, SandboxError):
        while data := theirs.recv(1 << 15):
            stream.write(data)
        stream.end_input()


def _from_guest(theirs: socket.socket, inbox: Inbox, stream: Stream) -> None:
    with contextlib.suppress(OSError, SandboxError):
        while (event := inbox.get(None)).type is Type.DATA:
            theirs.sendall(event.data)
            event.done()
    with contextlib.suppress(OSError):
        theirs.shutdown(socket.SHUT_RDWR)
    theirs.close()
    stream.close()
