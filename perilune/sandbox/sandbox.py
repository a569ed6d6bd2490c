"""`Sandbox`: the synchronous interface to one microVM. Everything blocks; errors are `perilune.sandbox.errors`."""

import contextlib
import os
import signal as signals
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.client import Event, Inbox, Stream, check
from perilune.sandbox.agent.wire import Change, Command, Entry, Op, Type
from perilune.sandbox.catalogue import Network, Record
from perilune.sandbox.errors import GuestError, InvalidRequest, NotFound, SandboxError, TimedOut
from perilune.sandbox.live import Live
from perilune.sandbox.request import Request
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.vmm.driver import Rates

_lock = threading.Lock()
_default: Runtime | None = None


def default_runtime() -> Runtime:
    """The runtime of this process over the default home, opened on first use."""
    global _default
    with _lock:
        if _default is None:
            _default = Runtime()
        return _default


@dataclass(frozen=True)
class Result:
    """A command that ended. `signal` is the number that killed it, 0 when it exited by itself."""

    stdout: str
    stderr: str
    exit_code: int
    signal: int = 0


class Process:
    """A command or terminal in the guest."""

    def __init__(self, stream: Stream, inbox: Inbox) -> None:
        self._stream, self._inbox = stream, inbox
        self._end: Event | None = None
        self._out: dict[int, bytearray] = {wire.OUTPUT: bytearray(), wire.ERRORS: bytearray()}

    @property
    def pid(self) -> int:
        """In the guest."""
        return self._stream.pid

    def events(self, timeout: float | None = None) -> Iterator[tuple[str, bytes]]:
        """("stdout" | "stderr", bytes) until it ends; TimedOut when `timeout` seconds pass in all."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._end is None:
            event = self._inbox.get(None if until is None else max(0.0, until - time.monotonic()))
            if event.type is Type.EXITED:
                self._end = event
            elif event.type is Type.DATA:
                event.done()
                self._out[event.channel] += event.data
                yield ("stderr" if event.channel == wire.ERRORS else "stdout"), event.data

    def wait(self, timeout: float | None = None) -> Result:
        """Its result; TimedOut leaves it running."""
        for _ in self.events(timeout):
            pass
        assert self._end is not None
        code, number = self._end.numbers
        out, err = (bytes(self._out[channel]).decode(errors="replace") for channel in (wire.OUTPUT, wire.ERRORS))
        return Result(out, err, code, number)

    def write(self, data: str | bytes) -> None:
        """To its standard input or terminal."""
        self._stream.write(data.encode() if isinstance(data, str) else data)

    def close_stdin(self) -> None:
        """End of input."""
        self._stream.end_input()

    def resize(self, columns: int, rows: int) -> None:
        """Of its terminal."""
        self._stream.resize(columns, rows)

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Signal its process group."""
        self._stream.signal(signal)

    def disconnect(self) -> None:
        """Listen no more; it goes on."""
        self._stream.ignore(self._inbox)


class Host(Protocol):
    """What commands and files need: an agent to ask, and the image's user and directory."""

    @property
    def live(self) -> Any:
        """Something with an `agent`."""

    @property
    def record(self) -> Any:
        """Something with a `user` and a `workdir`."""


class Commands:
    """Programs in the guest."""

    def __init__(self, sandbox: Host) -> None:
        self._box = sandbox

    def start(
        self,
        command: str | list[str],
        user: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
    ) -> Process:
        """Start a shell line (bash, as a login shell) or an argument vector."""
        live, record = self._box.live, self._box.record
        argv = ("/bin/bash", "-l", "-c", command) if isinstance(command, str) else tuple(command)
        inbox = Inbox()
        plan = Command(
            argv, user or record.user, cwd or record.workdir, tuple((env or {}).items()), pty, stdin or pty is not None
        )
        stream = live.agent.execute(plan, inbox)
        event = inbox.get(60)
        if event.type is not Type.STARTED:
            raise SandboxError(f"{argv[0]} did not start")
        return Process(stream, inbox)

    def run(
        self,
        command: str | list[str],
        user: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout: float | None = 60.0,
        stdin: str | bytes | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> Result:
        """Run to the end. A non-zero exit is a result, not an error; after `timeout` seconds it is killed: TimedOut."""
        process = self.start(command, user, cwd, env, stdin is not None)
        if stdin is not None:
            with contextlib.suppress(NotFound):
                process.write(stdin)
                process.close_stdin()
        try:
            for name, data in process.events(timeout):
                if on_output:
                    on_output(name, data)
        except TimedOut:
            _ = self._box.live  # a machine that stands still says why
            process.kill()
            raise TimedOut(f"the command did not end within {timeout:g} s and was killed: {command!r}") from None
        return process.wait()

    def list(self) -> list[tuple[int, Command]]:
        """(pid, command) of what runs."""
        return [(s.pid, s.command) for s in self._box.live.agent.commands if s.command]

    def connect(self, pid: int) -> Process:
        """Listen to a command that runs already; NotFound."""
        for stream in self._box.live.agent.commands:
            if stream.pid == pid:
                inbox = Inbox()
                stream.listen(inbox)
                return Process(stream, inbox)
        raise NotFound(f"process {pid} was not found")

    def kill(self, pid: int) -> bool:
        """SIGKILL its group; False when there is none."""
        try:
            self.connect(pid).kill()
        except NotFound:
            return False
        return True


class Files:
    """The guest's file system, as the sandbox's user unless told otherwise. Relative paths start at the user's home."""

    def __init__(self, sandbox: Host) -> None:
        self._box = sandbox

    def _call(self, op: Op, user: str | None, first: str, second: str = "", number: int = 0) -> bytes:
        return self._box.live.agent.call(op, user or self._box.record.user, first, second, number)

    def read(self, path: str, user: str | None = None) -> bytes:
        """All of a file; GuestError with the errno."""
        return self._call(Op.READ, user, path)

    def read_text(self, path: str, user: str | None = None) -> str:
        """All of a file as UTF-8."""
        return self.read(path, user).decode()

    def write(self, path: str, data: str | bytes | Iterable[bytes], user: str | None = None, mode: int = 0) -> None:
        """Create or replace a file and its parent directories."""
        pieces = iter([data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data)
        self._box.live.agent.write(user or self._box.record.user, path, pieces, mode)

    def list(self, path: str, depth: int = 1, user: str | None = None) -> list[Entry]:
        """A directory."""
        return wire.entries(self._call(Op.LISTDIR, user, path, number=depth))

    def stat(self, path: str, user: str | None = None) -> Entry:
        """One entry."""
        return wire.entries(self._call(Op.STAT, user, path))[0]

    def exists(self, path: str, user: str | None = None) -> bool:
        """Whether there is such a path."""
        try:
            self.stat(path, user)
        except GuestError as error:
            if error.errno in (2, 20):  # ENOENT, ENOTDIR
                return False
            raise
        return True

    def make_dir(self, path: str, user: str | None = None) -> bool:
        """With parents; False when it was there."""
        try:
            self._call(Op.MAKEDIR, user, path)
        except GuestError as error:
            if error.errno == 17:  # EEXIST
                return False
            raise
        return True

    def rename(self, old: str, new: str, user: str | None = None) -> None:
        """Move."""
        self._call(Op.MOVE, user, old, new)

    def remove(self, path: str, user: str | None = None) -> None:
        """A file or a whole tree."""
        self._call(Op.REMOVE, user, path)

    def watch(
        self, path: str, on_change: Callable[[Change], None], recursive: bool = False, user: str | None = None
    ) -> Callable[[], None]:
        """Call `on_change` (from another thread) for every change until the returned function is called."""
        ready, buffer, failure = threading.Event(), bytearray(), []

        def sink(event: Event) -> None:
            if event.type is Type.DATA:
                buffer.extend(event.data)
                event.done()
                for change in wire.changes(buffer):
                    if change.kind == "ready":
                        ready.set()
                    else:
                        on_change(change)
            elif event.type in (Type.EXITED, Type.FAILED):
                failure.append(event)
                ready.set()

        agent, name = self._box.live.agent, user or self._box.record.user
        stream = agent.operate(wire.operation(Op.WATCH, name, path, "", int(recursive)), sink)
        ready.wait(30)
        if failure:
            if failure[0].error:
                raise failure[0].error
            check(failure[0], path)
        return stream.close


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
        """A file or a directory to the host. Names come from the guest, so only plain ones are used."""
        if self.files.stat(source, user).kind != "d":
            target.write_bytes(self.files.read(source, user))
            return
        target.mkdir(parents=True, exist_ok=True)
        for entry in self.files.list(source, user=user):
            if "/" not in entry.name and entry.name not in (".", "..") and entry.kind in "df":
                self.copy_out(entry.path, target / entry.name, user)

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
