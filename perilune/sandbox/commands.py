"""Programs in a guest: started, fed, listened to, ended."""

import contextlib
import signal as signals
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.stream import Event, Inbox, Stream
from perilune.sandbox.agent.wire import Command, Type
from perilune.sandbox.errors import NotFound, SandboxError, TimedOut


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
