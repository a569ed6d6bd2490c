"""The host's end of a guest's agent: many streams over one socket, kept across pause and resume."""

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.stream import Event, Inbox, Sink, Stream, check
from perilune.sandbox.agent.wire import Command, Frame, Op, Parser, Type
from perilune.sandbox.errors import Conflict, MachineLost, NotFound, OutOfCapacity, SandboxError, TimedOut
from perilune.sandbox.vmm.qmp import connect

_LONGEST = 256 << 20  # bytes of an answer kept in memory: a file may grow for ever


class Agent:
    """A guest's agent as the host sees it. Thread-safe. `verdict` explains a lost connection."""

    def __init__(self, verdict: Callable[[], Exception | None] = lambda: None) -> None:
        self.verdict = verdict
        self.lost: SandboxError | None = None
        self._streams: dict[int, Stream] = {}
        self._number = secrets.randbelow(1 << 20) + 1
        self._lock = threading.Lock()
        self._gate = threading.Condition(threading.Lock())
        self._quiet, self._closed = True, False
        self._owed: dict[int, int] = {}  # credit by stream, while quiet
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None

    # ---- connection ----

    def attach(self, path: Path, pid: int | None = None) -> None:
        """Connect to a (possibly still stopped) machine's port. Nothing is sent before `hello` or `identify`."""
        self._socket = connect(path, 10.0, pid)
        self._quiet, self._closed, self.lost = True, False, None

    def use(self, connection: socket.socket) -> None:
        """Talk over a socket that is connected already."""
        self._socket, self._quiet, self._closed, self.lost = connection, True, False, None

    def start(self) -> None:
        """Begin to read."""
        self._reader = threading.Thread(target=self._read, args=(self._socket,), daemon=True, name="agent")
        self._reader.start()

    def detach(self) -> None:
        """Close the connection and keep the streams: the guest is paused and will come back."""
        self._closed = True
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        if self._reader and self._reader is not threading.current_thread():
            self._reader.join(5.0)

    def hold(self) -> None:
        """The guest stands still; when its machine ends meanwhile, no stream does. `unhold` before it goes on."""
        self._closed = True

    def unhold(self) -> None:
        """Its machine goes on, over the same connection."""
        self._closed = False

    def close(self, error: SandboxError | None = None) -> None:
        """Detach for good; whoever waits for a stream is told."""
        self.detach()
        self._lose(error or NotFound("the sandbox was killed"))

    def _read(self, source: socket.socket) -> None:
        parser = Parser()
        error: SandboxError | None = None
        while not self._closed:
            try:
                data = source.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                break
            try:
                for frame in parser.feed(data):
                    self._dispatch(frame)
            except (SandboxError, struct.error, ValueError) as lie:
                error = MachineLost(f"the guest agent broke the protocol: {lie}")
                break
        if not self._closed:
            self._lose(error or self._why())

    def _why(self) -> SandboxError:
        """The machine's verdict; a process that just closed its socket needs a moment to be seen as ended."""
        for _ in range(40):
            verdict = self.verdict()
            if isinstance(verdict, SandboxError):
                return verdict
            time.sleep(0.05)
        return MachineLost("the guest agent's connection is lost")

    def _dispatch(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream:
            stream.deliver(frame)

    def _lose(self, error: SandboxError) -> None:
        self.lost = error
        with self._gate:
            self._gate.notify_all()
        for stream in list(self._streams.values()):
            stream.lose(error)

    def interrupt(self, error: SandboxError) -> None:
        """The guest stands still for who knows how long: file operations and connections end with `error`, commands go
        on when it does."""
        for stream in list(self._streams.values()):
            if stream.command is None and not self._quiet:
                with contextlib.suppress(SandboxError):
                    self.send(Type.CLOSE, stream.number)
                stream.lose(error)

    def forget(self, number: int) -> None:
        """A stream is over."""
        self._streams.pop(number, None)

    # ---- sending ----

    def send(self, kind: Type, stream: int, payload: bytes = b"") -> None:
        """One frame; waits while the guest is held still for a checkpoint."""
        data = Frame(kind, 0, stream, payload).pack()
        while True:
            with self._gate:
                while self._quiet and not self.lost:
                    if not self._gate.wait(60.0):
                        raise Conflict("the sandbox is paused")
            with self._lock:
                if not self._quiet or self.lost:
                    self._put(data)
                    return

    def grant(self, stream: int, size: int) -> None:
        """Credit for what was consumed. Never waits: it is given by the reader too, which must hear the answer that a
        quiet time begins or ends with. Until then the credit is owed."""
        with self._lock, contextlib.suppress(SandboxError):
            if self._quiet:
                self._owed[stream] = self._owed.get(stream, 0) + size
            else:
                self._put(_credit(stream, size))

    def _speak(self) -> None:
        """The quiet time is over."""
        with self._lock, contextlib.suppress(SandboxError):
            self._quiet, owed, self._owed = False, self._owed, {}
            for stream, size in owed.items():
                self._put(_credit(stream, size))
        with self._gate:
            self._gate.notify_all()

    def _put(self, data: bytes) -> None:
        if self.lost:
            raise self.lost
        try:
            assert self._socket is not None
            self._socket.sendall(data)
        except OSError:
            self.lost = self.lost or self._why()  # the reader tells the streams
            raise self.lost from None

    def _open(self, command: Command | None = None) -> Stream:
        with self._lock:
            self._number += 1
            stream = self._streams[self._number] = Stream(self, self._number, command)
        return stream

    def _control(self, kind: Type, payload: bytes, timeout_s: float) -> Event:
        """A request that is answered by a frame of its own type, sent even while held still."""
        stream, inbox = self._open(), Inbox()
        stream.listen(inbox)
        try:
            with self._lock:
                self._put(Frame(kind, 0, stream.number, payload).pack())
            return inbox.get(timeout_s)
        finally:
            self.forget(stream.number)

    # ---- the machine ----

    def hello(self, timeout_s: float = 60.0) -> None:
        """Find the frame boundary: whatever an earlier host left half-read is skipped up to our nonce. Then `start`."""
        nonce, seen = os.urandom(16), b""
        assert self._socket is not None
        self._put(Frame(Type.HELLO, 0, 0, nonce).pack())
        self._socket.settimeout(timeout_s)
        try:
            while nonce not in seen:
                part = self._socket.recv(4096)
                if not part:
                    verdict = self.verdict()
                    raise verdict if verdict else MachineLost("the guest ended before its agent answered")
                seen = seen[-32:] + part
        except TimeoutError:
            raise TimedOut(f"the guest's agent did not answer within {timeout_s:.0f} s") from None
        self._socket.settimeout(None)
        self.start()

    def identify(self, payload: bytes, timeout_s: float = 60.0) -> None:
        """Clock, entropy, name, network, environment (wire.identity); ends a quiet time."""
        self._control(Type.IDENTITY, payload, timeout_s)
        self._speak()

    def quiesce(self, timeout_s: float = 60.0) -> None:
        """Nothing is under way in either direction until `identify`: the moment a checkpoint may be taken."""
        with self._lock:
            self._quiet = True
        try:
            self._control(Type.QUIESCE, b"", timeout_s)
        except SandboxError:
            self._speak()
            raise

    def inventory(self, timeout_s: float = 10.0) -> list[Stream]:
        """The commands that run in the guest; makes streams for those that this host does not know (after adopt or
        fork)."""
        stream, inbox, found = self._open(), Inbox(), []
        stream.window = _LONGEST
        stream.listen(inbox)
        self.send(Type.LIST, stream.number)
        while (event := inbox.get(timeout_s)).type is Type.DATA:
            try:
                number, pid, room, length = struct.unpack_from("<IIII", event.data)
                command = Command.unpack(event.data[16 : 16 + length])
            except (struct.error, IndexError, ValueError):
                raise MachineLost("the guest agent sent a malformed list of commands") from None
            with self._lock:
                known = self._streams.setdefault(number, Stream(self, number, command))
                self._number = max(self._number, number)
            known.pid = pid
            known.set_room(room)
            found.append(known)
        return found

    @property
    def commands(self) -> list[Stream]:
        """The commands known to run."""
        return [stream for stream in list(self._streams.values()) if stream.command and stream.pid and not stream.over]

    # ---- streams ----

    def execute(self, command: Command, sink: Sink) -> Stream:
        """Start a command; `sink` hears STARTED, DATA, and EXITED or FAILED."""
        stream = self._open(command)
        stream.listen(sink)
        self.send(Type.EXEC, stream.number, command.pack())
        return stream

    def connect(self, port: int, sink: Sink) -> Stream:
        """A TCP connection to a port on the guest's loopback."""
        payload = wire.short(port, "a port")
        stream = self._open()
        stream.listen(sink)
        self.send(Type.CONNECT, stream.number, payload)
        return stream

    def operate(self, payload: bytes, sink: Sink) -> Stream:
        """Start a file operation (wire.operation)."""
        stream = self._open()
        stream.listen(sink)
        self.send(Type.OP, stream.number, payload)
        return stream

    def call(
        self, op: Op, user: str, first: str = "", second: str = "", number: int = 0, timeout_s: float = 60.0
    ) -> bytes:
        """A file operation from start to end: its records, or GuestError with its errno."""
        found = bytearray()
        for piece in self.read(op, user, first, second, number, timeout_s):
            found += piece
            if len(found) > _LONGEST:
                raise OutOfCapacity(f"{first or 'the answer'} is longer than {_LONGEST >> 20} MiB: read it in pieces")
        return bytes(found)

    def read(
        self, op: Op, user: str, first: str = "", second: str = "", number: int = 0, timeout_s: float = 60.0
    ) -> Iterator[bytes]:
        """The same, piece by piece."""
        inbox = Inbox()
        stream = self.operate(wire.operation(op, user, first, second, number), inbox)
        try:
            while (event := inbox.get(timeout_s)).type is not Type.EXITED:
                event.done()
                if event.type is Type.DATA and event.channel == wire.OUTPUT:
                    yield event.data
        finally:
            stream.close()
        check(event, first)

    def write(self, user: str, path: str, pieces: Iterator[bytes], mode: int = 0, timeout_s: float = 60.0) -> None:
        """Create or replace a file (and its parent directories)."""
        inbox = Inbox()
        stream = self.operate(wire.operation(Op.WRITE, user, path, "", mode), inbox)
        try:
            for piece in pieces:
                with contextlib.suppress(NotFound):  # the operation failed already: its errno follows
                    stream.write(piece, timeout_s)
            if not stream.over:
                stream.end_input()
            while (event := inbox.get(timeout_s)).type is not Type.EXITED:
                event.done()
        finally:
            stream.close()
        check(event, path)


def _credit(stream: int, size: int) -> bytes:
    return Frame(Type.CREDIT, 0, stream, struct.pack("<I", size)).pack()
