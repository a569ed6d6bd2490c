"""A server on a thread of its own, for as long as a test module needs it."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web


@contextlib.contextmanager
def served(app: web.Application) -> Iterator[int]:
    """The port it listens on."""
    loop, started, found = asyncio.new_event_loop(), threading.Event(), []

    async def begin() -> web.AppRunner:
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.append(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(begin())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
