"""The server: E2B's API on one port. Requests that name a sandbox go to it, all others to the control plane."""

import asyncio
import contextlib
import json
import re
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from perilune.sandbox.errors import InvalidRequest, NotFound, SandboxError, Unauthorized
from perilune.sandbox.http import openapi, silence
from perilune.sandbox.http.auth import Keys
from perilune.sandbox.http.bridge import blocking
from perilune.sandbox.http.control import Control
from perilune.sandbox.http.envd import PORT, Envd
from perilune.sandbox.http.metrics import Metrics
from perilune.sandbox.http.proxy import Proxy
from perilune.sandbox.http.templates import Templates
from perilune.sandbox.runtime import Runtime

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HOST = re.compile(r"^(\d{1,5})-([a-z0-9]{1,40})\.")
_OPEN = {"/health", "/metrics", "/openapi.json"}


def target(request: web.Request) -> tuple[str, int] | None:
    """(sandbox, port) that a request is for, by header or host name; None for the control plane."""
    headers = request.headers
    identity = headers.get("E2b-Sandbox-Id") or headers.get("X-Agentenv-Sandbox-Id")
    port = headers.get("E2b-Sandbox-Port") or headers.get("X-Agentenv-Target-Port") or str(PORT)
    if not identity:
        found = _HOST.match(request.host or "")
        if not found:
            return None
        port, identity = found.groups()
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{port!r} is not a port")
    return identity, int(port)


def refuse(error: SandboxError) -> web.Response:
    """E2B's error body."""
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return web.json_response({"code": error.status, "message": str(error)}, status=error.status, headers=headers)


class Server:
    """One runtime behind HTTP."""

    def __init__(
        self, runtime: Runtime, keys: Keys, domain: str = "localhost", internet: bool = False, patience_s: float = 15.0
    ) -> None:
        self.runtime, self.keys, self.patience_s = runtime, keys, patience_s
        self._spoken: set[asyncio.BaseProtocol] = set()
        self.control = Control(runtime, keys, domain, internet)
        self.templates = Templates(runtime)
        self.metrics = Metrics(runtime)
        self.envd = Envd(runtime, self._token)
        self.proxy = Proxy(runtime, keys)

    def _token(self, identity: str) -> str | None:
        return self.control.views.access(self.runtime.record(identity))

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._gate], client_max_size=64 << 20)
        app.add_routes([web.get("/health", self._health), web.get("/metrics", self._metrics)])
        app.add_routes([web.get("/openapi.json", self._openapi), web.get("/nodes", self._nodes)])
        app.add_routes(self.control.routes() + self.templates.routes())
        app.on_cleanup.append(self._cleanup)
        return app

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
        """Serve, over TLS when a context is given; gives the port."""
        runner = web.AppRunner(self.app(), access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, ssl_context=tls)
            await site.start()
            assert runner.server is not None
            watching = asyncio.create_task(silence.watch(runner.server, self._spoken, self.patience_s))
            try:
                yield runner.addresses[0][1]
            finally:
                watching.cancel()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._spoken.add(request.protocol)
        began, where = time.perf_counter(), None
        response: web.StreamResponse
        try:
            where = target(request)
            if where:
                response = await self._data_plane(request, *where)
            else:
                if request.path not in _OPEN and not self.templates.is_upload(request):
                    self.keys.check(request.headers.get("X-API-Key"))
                response = await handler(request)
        except SandboxError as error:
            response = refuse(error)
        except web.HTTPException as error:
            response = web.json_response({"code": error.status, "message": error.reason}, status=error.status)
        except (json.JSONDecodeError, UnicodeDecodeError, ValueError) as error:
            response = refuse(InvalidRequest(f"the request is malformed: {error}"))
        route = request.match_info.route.resource
        name = "data-plane" if where else route.canonical if route else "unmatched"
        self.metrics.observe(request.method, name, response.status, time.perf_counter() - began)
        return response

    async def _data_plane(self, request: web.Request, identity: str, port: int) -> web.StreamResponse:
        try:
            if port == PORT:
                return await self.envd.handle(request, identity)
            return await self.proxy.handle(request, identity, port)
        except Unauthorized as error:
            return refuse(error)
        except SandboxError as error:
            if error.status not in (404, 409, 502):
                return refuse(error)
            known = False
            with contextlib.suppress(NotFound):
                known = (await blocking(self.runtime.record, identity)).phase == "running"
            text = f"{error}" if known else f"The sandbox was not found: {error}"
            return web.json_response({"code": 502, "sandboxId": identity, "message": text}, status=502)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=await blocking(self.metrics.render), content_type="text/plain", charset="utf-8")

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response(openapi.document(request.app))

    async def _nodes(self, _request: web.Request) -> web.Response:
        return web.json_response([await blocking(self.metrics.node)])

    async def _cleanup(self, _app: web.Application) -> None:
        await self.proxy.close()


def certified(certificate: Path, key: Path) -> ssl.SSLContext:
    """A server's TLS from PEM files; InvalidRequest when they are none."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"{certificate} and {key} are no certificate and its key: {error}") from None
    return context


def serve(
    runtime: Runtime, host: str, port: int, keys: Keys, domain: str, internet: bool, tls: ssl.SSLContext | None = None
) -> None:
    """Until SIGINT or SIGTERM. Running sandboxes then go on; the next server adopts them."""

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        async with Server(runtime, keys, domain, internet).listening(host, port, tls):
            await stop.wait()

    try:
        asyncio.run(run())
    except OSError as error:
        raise InvalidRequest(f"{host}:{port} cannot be listened on: {error.strerror}") from None
    finally:
        runtime.release()
