"""From the agent's threads to asyncio, and back."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from perilune.sandbox.agent.stream import Event, Stream

P = ParamSpec("P")
T = TypeVar("T")
_threads = ThreadPoolExecutor(64, "perilune-http")


async def blocking(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call of the synchronous library on a thread."""
    return await asyncio.get_running_loop().run_in_executor(_threads, functools.partial(call, *args, **kwargs))


class AsyncInbox:
    """A stream's sink whose events are awaited."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def __call__(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the server stopped while a guest was still talking
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self, timeout_s: float | None = None) -> Event:
        """The next event; TimeoutError after `timeout_s`."""
        return await asyncio.wait_for(self._queue.get(), timeout_s)

    def leave(self, stream: Stream) -> None:
        """Stop listening; what was delivered and not read is credited."""
        stream.ignore(self)
        while not self._queue.empty():
            _threads.submit(self._queue.get_nowait().done)
