"""E2B's in-guest daemon (port 49983), answered by the host: files by HTTP, processes and directories by Connect."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.message import Message
from typing import Any
from urllib.parse import quote

from aiohttp import web

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.stream import check
from perilune.sandbox.agent.wire import Op, Type
from perilune.sandbox.errors import GuestError, InvalidRequest, MachineLost, NotFound, SandboxError, Unauthorized
from perilune.sandbox.http import connect, silence
from perilune.sandbox.http.auth import same
from perilune.sandbox.http.bridge import AsyncInbox, blocking
from perilune.sandbox.http.directories import Directories
from perilune.sandbox.http.processes import Items, Processes
from perilune.sandbox.live import Live
from perilune.sandbox.runtime import Runtime

VERSION = "0.5.7"  # what is implemented; the SDK asks nothing of a later one
PORT = 49983
_PIECE = 256 << 10


def signature(path: str, operation: str, user: str, token: str, expires: str | None) -> str:
    """Of a signed file URL."""
    text = ":".join([path, operation, user, token, *([expires] if expires else [])])
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


class Envd:
    """The daemon's routes for any sandbox of a runtime. `token` gives a sandbox's access token, or None for none."""

    def __init__(self, runtime: Runtime, token: Callable[[str], str | None]) -> None:
        self._runtime, self._token = runtime, token
        self._processes, directories = Processes(), Directories()
        p, d = self._processes, directories
        services = {
            "process.Process": (p.list, p.send_input, p.send_signal, p.close_stdin, p.update),
            "filesystem.Filesystem": (
                d.stat, d.list_dir, d.make_dir, d.move, d.remove, d.create_watcher, d.get_watcher_events,
                d.remove_watcher,
            ),
        }  # fmt: skip
        self._unary = {f"/{service}/{_camel(m.__name__)}": m for service, methods in services.items() for m in methods}
        self._streams: dict[str, Callable[..., Items]] = {
            "/process.Process/Start": p.start,
            "/process.Process/Connect": p.join,
            "/filesystem.Filesystem/WatchDir": d.watch_dir,
        }

    async def handle(self, request: web.Request, identity: str) -> web.StreamResponse:
        """Any request to the daemon of sandbox `identity`."""
        path = request.path
        if path == "/health":
            await blocking(self._runtime.live, identity)
            return web.Response(status=204)
        self._authorize(request, identity)
        live = await blocking(self._runtime.live, identity)
        if path == "/files":
            return await (self._download(request, live) if request.method == "GET" else self._upload(request, live))
        if path == "/metrics":
            return web.json_response(await blocking(usage, live))
        if path == "/envs":
            return web.json_response(live.record.env)
        if path == "/init" and request.method == "POST":
            await blocking(live.identify)
            return web.Response(status=204)
        if request.method != "POST":
            raise NotFound(f"{request.method} {path} is not part of this API")
        if path in self._streams:
            return await self._stream(request, live, self._streams[path])
        return await self._call(request, live)

    def _authorize(self, request: web.Request, identity: str) -> None:
        expected = self._token(identity)
        if expected is None or same(request.headers.get("X-Access-Token", ""), expected):
            return
        query = request.query
        if request.path == "/files" and "signature" in query:
            operation = "read" if request.method == "GET" else "write"
            expires = query.get("signature_expiration")
            wanted = signature(query.get("path", ""), operation, query.get("username", ""), expected, expires)
            fresh = expires is None or (expires.isdigit() and int(expires) > time.time())
            if fresh and same(query["signature"], wanted):
                return
        raise Unauthorized("the sandbox's access token is missing or wrong")

    def _user(self, request: web.Request, live: Live) -> str:
        header = request.headers.get("Authorization", "")
        if header.startswith("Basic "):
            try:
                name = base64.b64decode(header[6:]).decode().partition(":")[0]
            except (binascii.Error, UnicodeDecodeError):
                raise InvalidRequest("the Authorization header is not Basic") from None
            if name:
                return name
        return request.query.get("username") or live.record.user or "root"

    # ---- calls ----

    async def _call(self, request: web.Request, live: Live) -> web.Response:
        try:
            if request.path == "/process.Process/StreamInput":
                await self._processes.stream_input(live, await silence.body(request))
                return web.json_response({})
            method = self._unary.get(request.path)
            if method is None:
                raise NotFound(f"{request.path} is not part of this API")
            body = connect.message(await silence.body(request))
            return web.json_response(await method(live, body, self._user(request, live)))
        except (SandboxError, ValueError, TypeError, AttributeError, KeyError) as error:
            known = isinstance(error, SandboxError)
            return connect.refusal(error if known else InvalidRequest(f"the message has a wrong field: {error}"))

    async def _stream(self, request: web.Request, live: Live, method: Callable[..., Items]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        keepalive = request.headers.get("Keepalive-Ping-Interval", "")
        interval = float(keepalive) if keepalive.isdigit() and int(keepalive) else None
        raw, limit = await silence.body(request), connect.limit(request.headers)
        await response.prepare(request)
        end: dict[str, Any] = {}
        started: dict[str, Any] = {}
        try:
            body = connect.parse(raw)
            user = self._user(request, live)
            async with asyncio.timeout(limit), contextlib.aclosing(method(live, body, user, interval)) as items:  # type: ignore[type-var]
                async for item in items:
                    started = item.get("event", {}).get("start", started)
                    await response.write(connect.envelope(item))
        except TimeoutError:
            end = {"error": {"code": "deadline_exceeded", "message": f"the call took longer than {limit:g} s"}}
            if method == self._processes.start and started:  # as E2B's daemon does; who leaves earlier lets it run on
                with contextlib.suppress(SandboxError):
                    await self._processes.send_signal(live, {"process": started, "signal": "SIGNAL_SIGKILL"}, user)
        except (SandboxError, ValueError, TypeError, AttributeError, KeyError) as error:
            known = isinstance(error, SandboxError)
            end = {
                "error": connect.error(error if known else InvalidRequest(f"the message has a wrong field: {error}"))
            }
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        await response.write(connect.envelope(end, connect.END_STREAM))
        await response.write_eof()
        return response

    # ---- files ----

    async def _download(self, request: web.Request, live: Live) -> web.StreamResponse:
        path, user = request.query.get("path", ""), self._user(request, live)
        if not path:
            raise InvalidRequest("the query lacks `path`")
        inbox = AsyncInbox()
        stream = await blocking(live.agent.operate, wire.operation(Op.READ, user, path), inbox)
        response: web.StreamResponse | None = None
        try:
            while (event := await inbox.get(60)).type is not Type.EXITED:
                if event.error:
                    raise event.error
                if event.type is Type.DATA and event.channel == wire.OUTPUT:
                    if response is None:
                        response = await self._prepare(request, path)
                    await response.write(event.data)
                    await blocking(event.done)
            check(event, path)
        except GuestError as error:
            if response is not None:
                raise ConnectionResetError(str(error)) from None  # half a file was sent: cut, never end well
            return _file_refusal(error)
        finally:
            await blocking(stream.close)
        response = response or await self._prepare(request, path)
        await response.write_eof()
        return response

    async def _prepare(self, request: web.Request, path: str) -> web.StreamResponse:
        name = path.rsplit("/", 1)[-1].replace('"', "").replace("\r", "").replace("\n", "")
        disposition = f"inline; filename*=UTF-8''{_quote(name)}"
        response = web.StreamResponse(
            headers={"Content-Type": "application/octet-stream", "Content-Disposition": disposition}
        )
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(request)
        return response

    async def _upload(self, request: web.Request, live: Live) -> web.Response:
        user, path, done = self._user(request, live), request.query.get("path", ""), []
        try:
            if request.content_type == "multipart/form-data":
                async for part in await request.multipart():
                    if part.name != "file":  # type: ignore[union-attr]
                        continue
                    target = path or _filename(part.headers) or ""  # type: ignore[union-attr]
                    await self._write(live, user, target, part.read_chunk)  # type: ignore[union-attr]
                    done.append(target)
            else:
                await self._write(live, user, path, request.content.read)
                done.append(path)
        except GuestError as error:
            return _file_refusal(error)
        entries = [wire.entries(await blocking(live.agent.call, Op.STAT, user, target))[0] for target in done]
        return web.json_response([{"name": e.name, "path": e.path, "type": "file"} for e in entries])

    async def _write(self, live: Live, user: str, path: str, read: Callable[[int], Awaitable[bytes]]) -> None:
        if not path:
            raise InvalidRequest("the query lacks `path`")
        loop = asyncio.get_running_loop()

        def pieces() -> Iterator[bytes]:
            while data := asyncio.run_coroutine_threadsafe(_awaited(read), loop).result(300):
                yield data

        await blocking(live.agent.write, user, path, pieces())


async def _awaited(read: Callable[[int], Awaitable[bytes]]) -> bytes:
    return bytes(await read(_PIECE))


def _filename(headers: Mapping[str, str]) -> str | None:
    """A part's file name as it was sent; aiohttp makes an absolute path a relative one."""
    message = Message()
    message["Content-Disposition"] = headers.get("Content-Disposition", "")
    return message.get_filename()


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _quote(text: str) -> str:
    return quote(text, safe="")


def _file_refusal(error: GuestError) -> web.Response:
    status = {2: 404, 1: 401, 13: 401, 28: 507}.get(error.errno, 400)
    return web.json_response({"code": status, "message": str(error)}, status=status)


def usage(live: Live) -> dict[str, Any]:
    """What the guest uses now: E2B's metric fields."""
    try:
        memory, cpu, disk = _parse(live.agent.call(Op.STATS, "root").decode())
    except (ValueError, IndexError):
        raise MachineLost("the guest's agent sent malformed statistics") from None
    cached = memory.get("Cached", 0) + memory.get("Buffers", 0)
    total = memory.get("MemTotal", 0)
    now = datetime.now(UTC)
    return {
        "timestamp": now.isoformat().replace("+00:00", "Z"), "timestampUnix": int(now.timestamp()),
        "cpuCount": live.record.shape.vcpus, "cpuUsedPct": round(100 * cpu[0] / max(1, cpu[1]), 2),
        "memTotal": total, "memUsed": total - memory.get("MemFree", 0) - cached, "memCache": cached,
        "diskTotal": disk[0], "diskUsed": disk[0] - disk[1],
    }  # fmt: skip


def _parse(text: str) -> tuple[dict[str, int], tuple[int, int], tuple[int, int]]:
    """Memory in bytes by /proc/meminfo's names; CPU ticks busy and in all; disk bytes in all and free."""
    memory: dict[str, int] = {}
    cpu, disk = (0, 0), (0, 0)
    for line in text.splitlines():
        key, *values = line.split()
        if key.endswith(":"):
            memory[key[:-1]] = int(values[0]) << 10
        elif key == "cpu":
            ticks = [int(value) for value in values]
            cpu = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        elif key == "disk":
            disk = (int(values[0]), int(values[1]))
    return memory, cpu, disk
