"""Clients that connect and say nothing, or a little at a time, do not get to keep what they hold."""

import asyncio
import contextlib
import time

from aiohttp import web

from perilune.sandbox.errors import TimedOut

BODY_S = 60.0  # for all of a request's body, where it is read as a whole
_MOST = 1024  # connections that have not asked for anything yet


async def body(request: web.Request) -> bytes:
    """All of it; TimedOut when it comes too slowly."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise TimedOut(f"the request's body did not come within {BODY_S:.0f} s") from None


async def watch(server: web.Server, spoken: set[asyncio.BaseProtocol], patience_s: float) -> None:
    """Close connections that have not come up with a request (those in `spoken` have)."""
    first: dict[asyncio.BaseProtocol, float] = {}
    while True:
        await asyncio.sleep(patience_s / 5)
        now, there = time.monotonic(), set(server.connections)
        spoken &= there
        first = {c: first.get(c, now) for c in there - spoken}
        silent = sorted(first, key=lambda c: first[c])
        spare = max(0, len(silent) - _MOST)
        for i, connection in enumerate(silent):
            if i < spare or now - first[connection] > patience_s:
                with contextlib.suppress(AttributeError):  # it went by itself
                    connection.transport.abort()  # type: ignore[attr-defined]
