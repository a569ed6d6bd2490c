"""The thread that owns the engine. The asyncio side talks to it by commands and hears from it through queues.

The engine is not thread safe, so every call on it is a closure in one queue: a cancellation that follows an admission
in that queue always finds it, whatever the client did meanwhile. Deltas go back once a step, all together.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from perilune.serve.request import Delta, Request, Stats

log = logging.getLogger(__name__)
T = TypeVar("T")


class Runs(Protocol):
    """What the worker needs of an engine."""

    @property
    def busy(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> Stats: ...


class Unavailable(RuntimeError):  # noqa: N818 - as Full
    """The server drains, or its engine failed; the message is one sentence."""


class Stream:
    """Deltas of one or more requests, in the order they come. Leaving `async with` cancels what has not finished."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._open: set[str] = set()

    async def add(self, request: Request) -> None:
        """Submit. Raises what the engine raises (ValueError, Full), or Unavailable."""
        self._worker.streams.add(self)
        self._open.add(request.id)  # before the wait: a client that leaves during it must not strand the request
        try:
            await self._worker.admit(request, self)
        except Exception:
            self._open.discard(request.id)
            raise

    def put(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)

    def cancel(self, id: str) -> None:
        """End one request early; no more of its deltas are seen."""
        if id in self._open:
            self._open.discard(id)
            self._worker.cancel(id)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        while self._open:
            delta = await self._queue.get()
            if delta.id not in self._open:
                continue
            if delta.finish is not None:
                self._open.discard(delta.id)
            return delta
        raise StopAsyncIteration

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not finished."""
        self._worker.streams.discard(self)
        for id in list(self._open):
            self.cancel(id)


class Worker:
    """Runs `engine` in a thread from `start` to `stop`."""

    def __init__(self, engine: Runs) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[str, Stream] = {}  # touched by the engine's thread only
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._refreshed = 0.0
        self._gap = 1.0  # seconds between two requests finishing, smoothed
        self._finished = time.monotonic()
        self.streams: set[Stream] = set()  # those being answered; touched by the loop's thread only
        self.stats = engine.stats()
        self.draining = False
        self.failed: str | None = None

    def start(self) -> None:
        """Begin, delivering to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def drain(self) -> None:
        """Take no new request from here on."""
        self.draining = True

    def stop(self) -> None:
        """End the thread; requests still running are cancelled."""
        self._commands.put(self._halt)
        self._thread.join()

    async def admit(self, request: Request, stream: Stream) -> None:
        """Submit `request`, its deltas to go to `stream`."""
        if self.draining or self.failed:
            raise Unavailable(self.failed or "The server is shutting down and takes no new requests.")

        def submit() -> None:
            self._engine.submit(request)
            self._owners[request.id] = stream

        await self.call(submit)

    def cancel(self, id: str) -> None:
        """Stop working on a request; an unknown or finished one is no mistake."""

        def drop() -> None:
            if self._owners.pop(id, None) is not None:
                self._engine.cancel(id)

        self._commands.put(drop)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine's thread between two steps; its result or exception."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(future)

    def retry_after(self) -> int:
        """Seconds until a refused client may try again: what is waiting, at the pace requests finish now."""
        return max(1, min(60, round(self._gap * (self.stats.waiting + 1))))

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._obey(self._engine.busy)
                if self._engine.busy:
                    self._deliver(self._engine.step())
                self._refresh()
            except Exception as error:
                log.exception("the engine failed")
                self._fail(f"The engine failed ({type(error).__name__}: {error}).")

    def _obey(self, busy: bool) -> None:
        """All waiting commands; idle, wait for the first."""
        if not busy:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _deliver(self, deltas: list[Delta]) -> None:
        mail: list[tuple[Stream, Delta]] = []
        for delta in deltas:
            owner = self._owners.get(delta.id)
            if delta.finish is not None:
                self._owners.pop(delta.id, None)
                self._pace()
            if owner is not None:
                mail.append((owner, delta))
        if mail:
            self._post(mail)

    def _post(self, mail: list[tuple[Stream, Delta]]) -> None:
        def put() -> None:
            for stream, delta in mail:
                stream.put(delta)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(put)

    def _pace(self) -> None:
        now = time.monotonic()
        self._gap, self._finished = 0.8 * self._gap + 0.2 * min(now - self._finished, 30.0), now

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._refreshed > 0.05 or not self._engine.busy:
            self.stats, self._refreshed = self._engine.stats(), now

    def _fail(self, sentence: str) -> None:
        """No request is left hanging, and none is taken any more: what the engine holds can no longer be trusted."""
        self.failed = sentence
        self._post([(stream, _error(id, sentence)) for id, stream in self._owners.items()])
        self._owners.clear()
        while not self._stopping:
            self._commands.get()()

    def _halt(self) -> None:
        self._stopping = True
        for id in list(self._owners):
            self._engine.cancel(id)
        self._owners.clear()


def _error(id: str, sentence: str) -> Delta:
    return Delta(id=id, tokens=(), finish="error", message=sentence)
