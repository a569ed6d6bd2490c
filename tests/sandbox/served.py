"""A server on a thread of its own, for as long as a test module needs it."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from perilune.sandbox.http.app import Server


@contextlib.contextmanager
def served(server: Server) -> Iterator[int]:
    """The port it listens on."""
    loop, started, found = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def run() -> None:
        async with server.listening("127.0.0.1", 0) as port:
            found.append(port)
            started.set()
            await stop.wait()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)
