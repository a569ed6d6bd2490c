"""One command, file operation or connection in a guest, as a stream of events with credits both ways."""

import contextlib
import os
import queue
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perilune.sandbox.agent.wire import CHUNK, INBOX, WINDOW, Command, Frame, Type, short
from perilune.sandbox.errors import GuestError, MachineLost, NotFound, SandboxError, TimedOut

if TYPE_CHECKING:
    from perilune.sandbox.agent.client import Agent


@dataclass(frozen=True)
class Event:
    """What a stream says. Output must be `done()` by whoever consumed it, or its stream stalls."""

    type: Type
    channel: int = 0
    data: bytes = b""
    done: Callable[[], None] = lambda: None
    error: SandboxError | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The payload as little-endian i32: pid, or exit code and signal."""
        return struct.unpack(f"<{len(self.data) // 4}i", self.data[: len(self.data) // 4 * 4])


_MOST_SIGNS = 8  # STARTED, END of either direction, EXITED
Sink = Callable[[Event], None]


class Stream:
    """One command, file operation or connection in the guest. Any number of sinks listen; without one, output is
    dropped."""

    def __init__(self, agent: "Agent", number: int, command: Command | None = None) -> None:
        self.agent, self.number, self.command = agent, number, command
        self.pid = 0
        self.over: Event | None = None
        self._sinks: list[Sink] = []
        self._room = INBOX
        self.window = WINDOW  # bytes that may wait for a listener
        self._waiting = self._signs = 0
        self._changed = threading.Condition()

    def listen(self, sink: Sink) -> None:
        """Deliver what comes to `sink` (from the reader's thread); an ended stream tells its end at once."""
        with self._changed:
            self._sinks.append(sink)
            over = self.over
        if over:
            sink(over)

    def ignore(self, sink: Sink) -> None:
        """Stop delivering to `sink`."""
        with self._changed:
            if sink in self._sinks:
                self._sinks.remove(sink)

    def deliver(self, frame: Frame) -> None:
        """A frame of this stream has come (reader's thread)."""
        kind = Type(frame.type)
        if kind is Type.CREDIT:
            self._add_room(*struct.unpack("<I", frame.payload))
            return
        if kind is Type.STARTED:
            (self.pid,) = struct.unpack("<i", frame.payload)
        with self._changed:
            self._waiting += len(frame.payload) if kind is Type.DATA else 0
            self._signs += kind is not Type.DATA
            if self._waiting > self.window or self._signs > _MOST_SIGNS:  # the honest agent waits for credit
                raise MachineLost("the guest agent sent more than it was granted")
            sinks = list(self._sinks)
        event = Event(kind, frame.channel, frame.payload, self._granter(len(frame.payload), len(sinks)))
        if kind is Type.FAILED:
            (number,) = struct.unpack_from("<i", frame.payload)
            event = Event(kind, error=GuestError(number, frame.payload[4:].decode(errors="replace")))
        if kind in (Type.EXITED, Type.FAILED):
            if kind is Type.EXITED and len(frame.payload) != 8:
                raise MachineLost("the guest agent sent a malformed exit")
            self._finish(event)
            return
        for sink in sinks:
            sink(event)
        if kind is Type.DATA and not sinks:
            self._consumed(len(frame.payload))
            self.agent.grant(self.number, len(frame.payload))

    def _granter(self, size: int, listeners: int) -> Callable[[], None]:
        """Called once by each listener; the last one returns the credit."""
        left = [listeners]

        def done() -> None:
            with self._changed:
                left[0] -= 1
                last = left[0] == 0
            if last:
                self._consumed(size)
            if last and not self.over:
                self.agent.grant(self.number, size)

        return done

    def _consumed(self, size: int) -> None:
        with self._changed:
            self._waiting -= size

    def _finish(self, event: Event) -> None:
        self.agent.forget(self.number)
        with self._changed:
            self.over, sinks = event, list(self._sinks)
            self._changed.notify_all()
        for sink in sinks:
            sink(event)

    def lose(self, error: SandboxError) -> None:
        """The machine is gone."""
        if not self.over:
            self._finish(Event(Type.FAILED, error=error))

    def _add_room(self, size: int) -> None:
        with self._changed:
            self._room += size
            self._changed.notify_all()

    def set_room(self, size: int) -> None:
        """What the guest says it can take (after a list)."""
        self._room = size

    def write(self, data: bytes, timeout_s: float = 60.0) -> None:
        """To the guest's side; waits while the guest does not read. MachineLost or NotFound when it cannot any more."""
        view, until = memoryview(data), time.monotonic() + timeout_s
        while view:
            with self._changed:
                while not self._room and not self.over:
                    if not self._changed.wait(max(0.0, until - time.monotonic())):
                        raise TimedOut(f"the process did not read its input for {timeout_s:.0f} s")
                if self.over:
                    raise self.over.error or NotFound("the process has ended")
                size = min(self._room, len(view), CHUNK)
                self._room -= size
            self.agent.send(Type.DATA, self.number, bytes(view[:size]))
            view = view[size:]

    def end_input(self) -> None:
        """Close the guest's standard input, or this direction of a connection."""
        self.agent.send(Type.END, self.number)

    def signal(self, number: int) -> None:
        """To the command's process group."""
        self.agent.send(Type.SIGNAL, self.number, struct.pack("<i", number))

    def resize(self, columns: int, rows: int) -> None:
        """Of the terminal."""
        self.agent.send(Type.RESIZE, self.number, short(columns, "columns") + short(rows, "rows"))

    def close(self) -> None:
        """Forget the stream; a command or operation that still runs is killed."""
        if not self.over:
            self.agent.forget(self.number)
            with contextlib.suppress(SandboxError):
                self.agent.send(Type.CLOSE, self.number)


class Inbox:
    """A sink that is read by blocking."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __call__(self, event: Event) -> None:
        self._queue.put(event)

    def get(self, timeout_s: float | None) -> Event:
        """The next event; TimedOut, or the error that ended the stream."""
        try:
            event = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise TimedOut(f"no answer from the guest within {timeout_s:.1f} s") from None
        if event.error:
            raise event.error
        return event


def check(event: Event, path: str) -> None:
    """GuestError when an operation's EXITED event carries an errno."""
    code, signal = event.numbers
    if code or signal:
        reason = os.strerror(code) if code > 0 else f"the operation was killed by signal {signal}"
        raise GuestError(code, f"{path or 'the guest'}: {reason}")
