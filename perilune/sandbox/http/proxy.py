"""HTTP, server-sent events and WebSockets to a port inside a sandbox, carried by the agent: no guest network is
needed."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web

from perilune.sandbox.agent.wire import Type
from perilune.sandbox.errors import GuestError, MachineLost, SandboxError, Unauthorized
from perilune.sandbox.http.auth import Keys, same
from perilune.sandbox.http.bridge import AsyncInbox, blocking
from perilune.sandbox.runtime import Runtime

_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailers", "transfer-encoding",
        "upgrade", "content-length"}  # fmt: skip
_OURS = {"e2b-sandbox-id", "e2b-sandbox-port", "x-agentenv-sandbox-id", "x-agentenv-target-port", "x-api-key",
         "e2b-traffic-access-token", "x-access-token"}  # fmt: skip


class Proxy:
    """Each (sandbox, port) gets a UNIX socket whose connections continue on the guest's loopback."""

    def __init__(self, runtime: Runtime, keys: Keys) -> None:
        self._runtime, self._keys = runtime, keys
        self._doors: dict[tuple[str, int], tuple[asyncio.Server, aiohttp.ClientSession]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _authorize(self, request: web.Request, identity: str) -> None:
        if self._runtime.record(identity).network.public:
            return
        if not same(request.headers.get("E2b-Traffic-Access-Token", ""), self._keys.traffic(identity)):
            raise Unauthorized("this sandbox's ports need its traffic token (header e2b-traffic-access-token)")

    async def _door(self, identity: str, port: int) -> aiohttp.ClientSession:
        if (identity, port) not in self._doors:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="perilune-")
            path = Path(self._folder.name) / f"{identity}-{port}"

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._carry(identity, port, reader, writer)

            server = await asyncio.start_unix_server(answer, path)
            # A fresh connection for each request: none may outlive the guest it was opened to across a pause.
            connector = aiohttp.UnixConnector(str(path), force_close=True)
            session = aiohttp.ClientSession(
                connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
            self._doors[identity, port] = (server, session)
        return self._doors[identity, port][1]

    async def _carry(
        self, identity: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        inbox = AsyncInbox()
        try:
            live = await blocking(self._runtime.live, identity)
            stream = await blocking(live.agent.connect, port, inbox)
        except SandboxError:
            writer.close()
            return

        async def outward() -> None:
            with contextlib.suppress(SandboxError, OSError):
                while data := await reader.read(32 << 10):
                    await blocking(stream.write, data)
                await blocking(stream.end_input)

        sending = asyncio.create_task(outward())
        try:
            while True:
                event = await inbox.get()
                if event.error or event.type in (Type.END, Type.EXITED):
                    break
                if event.type is Type.DATA:
                    writer.write(event.data)
                    await writer.drain()
                    await blocking(event.done)
        except OSError:
            pass  # the client left
        finally:
            sending.cancel()
            writer.close()
            await blocking(stream.close)

    async def _reachable(self, identity: str, port: int) -> None:
        """MachineLost with the words the SDK looks for when nothing listens on the port."""
        live, inbox = await blocking(self._runtime.live, identity), AsyncInbox()
        stream = await blocking(live.agent.connect, port, inbox)
        try:
            event = await inbox.get(10)
        finally:
            await blocking(stream.close)
        if isinstance(event.error, GuestError):
            raise MachineLost(f"The sandbox is running but port is not open: {port}")
        if event.error:
            raise event.error

    async def handle(self, request: web.Request, identity: str, port: int) -> web.StreamResponse:
        """Forward one request."""
        await blocking(self._authorize, request, identity)
        await self._reachable(identity, port)
        session = await self._door(identity, port)
        url = f"http://localhost:{port}{request.raw_path}"
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP | _OURS}
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._websocket(request, session, url, headers)
        body = request.content if request.can_read_body else None
        async with session.request(request.method, url, headers=headers, data=body, allow_redirects=False) as inner:
            kept = [(k, v) for k, v in inner.headers.items() if k.lower() not in _HOP - {"content-length"}]
            response = web.StreamResponse(status=inner.status, reason=inner.reason)
            for key, value in kept:
                response.headers.add(key, value)
            await response.prepare(request)
            async for piece in inner.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def _websocket(
        self, request: web.Request, session: aiohttp.ClientSession, url: str, headers: dict[str, str]
    ) -> web.StreamResponse:
        protocols = [p.strip() for p in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if p.strip()]
        plain = {k: v for k, v in headers.items() if not k.lower().startswith("sec-websocket")}
        outer = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
        async with session.ws_connect(url, headers=plain, protocols=protocols, max_msg_size=0) as inner:
            await outer.prepare(request)
            tasks = [asyncio.create_task(_pump(outer, inner)), asyncio.create_task(_pump(inner, outer))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await outer.close()
        return outer

    async def close(self) -> None:
        """Close every door."""
        for server, session in self._doors.values():
            server.close()
            await session.close()
        self._doors.clear()
        if self._folder:
            self._folder.cleanup()


Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _pump(source: Socket, sink: Socket) -> None:
    async for message in source:
        if message.type is aiohttp.WSMsgType.TEXT:
            await sink.send_str(message.data)
        elif message.type is aiohttp.WSMsgType.BINARY:
            await sink.send_bytes(message.data)
