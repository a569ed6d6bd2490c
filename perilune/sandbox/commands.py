"""Programs in a guest: started, fed, listened to, ended."""

import contextlib
import signal as signals
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.stream import Event, Inbox, Stream
from perilune.sandbox.agent.wire import Command, Type
from perilune.sandbox.errors import GuestError, InvalidRequest, NotFound, OutOfCapacity, SandboxError, TimedOut

LONGEST = 64 << 20  # bytes of a command's output kept in memory


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
                yield ("stderr" if event.channel == wire.ERRORS else "stdout"), event.data

    def wait(self, timeout: float | None = None, on_output: Callable[[str, bytes], None] | None = None) -> Result:
        """Its result, with the output that `events` has not given away; TimedOut leaves it running, OutOfCapacity
        (more than LONGEST bytes) kills it."""
        out = {"stdout": bytearray(), "stderr": bytearray()}
        for name, data in self.events(timeout):
            out[name] += data
            if on_output:
                on_output(name, data)
            if len(out[name]) > LONGEST:
                self.kill()
                raise OutOfCapacity(f"the command wrote more than {LONGEST >> 20} MiB: send it to a file")
        assert self._end is not None
        texts = [bytes(text).decode(errors="replace") for text in out.values()]
        return Result(texts[0], texts[1], *self._end.numbers)

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
        try:
            event = inbox.get(60)
        except GuestError as error:  # which of them it could not
            raise GuestError(error.errno, f"{argv[0]} in {plan.cwd or 'home'} as {plan.user}: {error}") from None
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
        if timeout is not None and not timeout <= threading.TIMEOUT_MAX:  # nan is not
            raise InvalidRequest(f"a timeout is a number of seconds or None for none, not {timeout}")
        if isinstance(stdin, str):
            stdin = stdin.encode(errors="replace")
        process = self.start(command, user, cwd, env, stdin is not None)
        if stdin is not None:
            with contextlib.suppress(NotFound):
                process.write(stdin)
                process.close_stdin()
        try:
            return process.wait(timeout, on_output)
        except TimedOut:
            _ = self._box.live  # a machine that stands still says why
            process.kill()
            raise TimedOut(f"the command did not end within {timeout:g} s and was killed: {command!r}") from None

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
