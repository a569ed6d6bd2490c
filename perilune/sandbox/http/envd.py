"""E2B's in-guest daemon (port 49983), answered by the host: files by HTTP, processes and directories by Connect."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from aiohttp import web

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.client import Event, Stream, check
from perilune.sandbox.agent.wire import Command, Entry, Op, Type
from perilune.sandbox.errors import GuestError, InvalidRequest, NotFound, SandboxError, Unauthorized
from perilune.sandbox.http import connect
from perilune.sandbox.http.bridge import AsyncInbox, blocking
from perilune.sandbox.live import Live
from perilune.sandbox.runtime import Runtime

VERSION = "0.5.7"  # what is implemented; the SDK asks nothing of a later one
PORT = 49983
_KINDS = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: signal.SIGTERM, 9: signal.SIGKILL}
_PIECE = 256 << 10
Items = AsyncIterator[dict[str, Any]]


@dataclass
class Watcher:
    """A directory watch that is polled."""

    stream: Stream
    buffer: bytearray = field(default_factory=bytearray)
    changes: list[wire.Change] = field(default_factory=list)


def entry_json(entry: Entry) -> dict[str, Any]:
    """E2B's EntryInfo."""
    final = entry.target_kind if entry.kind == "l" and entry.target_kind != "?" else entry.kind
    when = datetime.fromtimestamp(entry.mtime_ns / 1e9, UTC).isoformat().replace("+00:00", "Z")
    info = {
        "name": entry.name, "type": _KINDS.get(final, "FILE_TYPE_UNSPECIFIED"), "path": entry.path,
        "size": str(entry.size), "mode": entry.mode & 0o7777, "permissions": permissions(entry.mode),
        "owner": entry.owner, "group": entry.group, "modifiedTime": when,
    }  # fmt: skip
    return {**info, "symlinkTarget": entry.target} if entry.kind == "l" else info


def permissions(mode: int) -> str:
    """-rwxr-xr-x"""
    kind = {0o040000: "d", 0o120000: "L"}.get(mode & 0o170000, "-")
    return kind + "".join(letter if mode >> (8 - i) & 1 else "-" for i, letter in enumerate("rwxrwxrwx"))


def signature(path: str, operation: str, user: str, token: str, expires: str | None) -> str:
    """Of a signed file URL."""
    text = ":".join([path, operation, user, token, *([expires] if expires else [])])
    return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


class Envd:
    """The daemon's routes for any sandbox of a runtime. `token` gives a sandbox's access token, or None for none."""

    def __init__(self, runtime: Runtime, token: Callable[[str], str | None]) -> None:
        self._runtime, self._token = runtime, token
        self._watchers: dict[tuple[str, str], Watcher] = {}
        unary = {
            "process.Process": (self.list, self.send_input, self.send_signal, self.close_stdin, self.update),
            "filesystem.Filesystem": (
                self.stat, self.list_dir, self.make_dir, self.move, self.remove,
                self.create_watcher, self.get_watcher_events, self.remove_watcher,
            ),
        }  # fmt: skip
        self._unary = {f"/{service}/{_camel(m.__name__)}": m for service, methods in unary.items() for m in methods}
        self._streams: dict[str, Callable[..., Items]] = {
            "/process.Process/Start": self.start,
            "/process.Process/Connect": self.join,
            "/filesystem.Filesystem/WatchDir": self.watch_dir,
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
        if expected is None or hmac.compare_digest(request.headers.get("X-Access-Token", ""), expected):
            return
        query = request.query
        if request.path == "/files" and "signature" in query:
            operation = "read" if request.method == "GET" else "write"
            expires = query.get("signature_expiration")
            wanted = signature(query.get("path", ""), operation, query.get("username", ""), expected, expires)
            fresh = expires is None or (expires.isdigit() and int(expires) > time.time())
            if fresh and hmac.compare_digest(wanted, query["signature"]):
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
                await self._stream_input(request, live)
                return web.json_response({})
            method = self._unary.get(request.path)
            if method is None:
                raise NotFound(f"{request.path} is not part of this API")
            body = connect.message(await request.read())
            return web.json_response(await method(live, body, self._user(request, live)))
        except (SandboxError, ValueError, TypeError, AttributeError, KeyError) as error:
            known = isinstance(error, SandboxError)
            return connect.refusal(error if known else InvalidRequest(f"the message has a wrong field: {error}"))

    async def _stream(self, request: web.Request, live: Live, method: Callable[..., Items]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        keepalive = request.headers.get("Keepalive-Ping-Interval", "")
        interval = float(keepalive) if keepalive.isdigit() and int(keepalive) else None
        raw = await request.read()
        await response.prepare(request)
        end: dict[str, Any] = {}
        try:
            body = connect.parse(raw)
            async with contextlib.aclosing(method(live, body, self._user(request, live), interval)) as items:  # type: ignore[type-var]
                async for item in items:
                    await response.write(connect.envelope(item))
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

    # ---- processes ----

    async def start(self, live: Live, body: dict[str, Any], user: str, interval: float | None) -> Items:
        """Run a command and tell what it says."""
        config, size = body.get("process") or {}, (body.get("pty") or {}).get("size")
        env = tuple((str(k), str(v)) for k, v in (config.get("envs") or {}).items())
        argv = (str(config["cmd"]), *map(str, config.get("args") or ()))
        pty = (int(size.get("cols", 80)), int(size.get("rows", 24))) if size else None
        stdin = body.get("stdin", True) is not False
        cwd = str(config.get("cwd") or live.record.workdir)
        command = Command(argv, user, cwd, env, pty, stdin, str(body.get("tag") or ""))
        inbox = AsyncInbox()
        stream = await blocking(live.agent.execute, command, inbox)
        async for item in self._events(stream, inbox, interval, command.pty is not None):
            yield item

    async def join(self, live: Live, body: dict[str, Any], _user: str, interval: float | None) -> Items:
        """Follow a command that runs already."""
        stream = await blocking(find_process, live, body.get("process") or {})
        inbox = AsyncInbox()
        stream.listen(inbox)
        yield {"event": {"start": {"pid": stream.pid}}}
        pty = stream.command is not None and stream.command.pty is not None
        async for item in self._events(stream, inbox, interval, pty):
            yield item

    async def _events(self, stream: Stream, inbox: AsyncInbox, interval: float | None, pty: bool) -> Items:
        try:
            while True:
                try:
                    event = await inbox.get(interval)
                except TimeoutError:
                    yield {"event": {"keepalive": {}}}
                    continue
                if event.error:
                    raise _start_error(event.error, stream)
                if event.type is Type.EXITED:
                    yield {"event": {"end": _end(event)}}
                    return
                if event.type is Type.STARTED:
                    yield {"event": {"start": {"pid": stream.pid}}}
                elif event.type is Type.DATA:
                    name = "pty" if pty else "stderr" if event.channel == wire.ERRORS else "stdout"
                    yield {"event": {"data": {name: base64.b64encode(event.data).decode()}}}
                    await blocking(event.done)
        finally:
            inbox.leave(stream)

    async def list(self, live: Live, _body: dict[str, Any], _user: str) -> dict[str, Any]:
        """What runs."""
        found = []
        for stream in live.agent.commands:
            command = stream.command
            assert command is not None
            config = {
                "cmd": command.argv[0],
                "args": list(command.argv[1:]),
                "envs": dict(command.env),
                "cwd": command.cwd,
            }
            found.append({"config": config, "pid": stream.pid, **({"tag": command.tag} if command.tag else {})})
        return {"processes": found}

    async def send_input(self, live: Live, body: dict[str, Any], _user: str) -> dict[str, Any]:
        """Bytes to a command's standard input or terminal."""
        stream, given = find_process(live, body.get("process") or {}), body.get("input") or {}
        data = base64.b64decode(given.get("stdin") or given.get("pty") or "", validate=True)
        await blocking(stream.write, data)
        return {}

    async def _stream_input(self, request: web.Request, live: Live) -> None:
        stream: Stream | None = None
        for item in connect.messages(await request.read()):
            item = item.get("event") or item
            if "start" in item:
                stream = find_process(live, item["start"].get("process") or {})
            elif "data" in item and stream:
                given = item["data"].get("input") or {}
                data = given.get("stdin") or given.get("pty") or ""
                await blocking(stream.write, base64.b64decode(data, validate=True))

    async def send_signal(self, live: Live, body: dict[str, Any], _user: str) -> dict[str, Any]:
        """SIGTERM or SIGKILL."""
        stream = find_process(live, body.get("process") or {})
        number = _SIGNALS.get(body.get("signal", ""))
        if number is None:
            raise InvalidRequest("the signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        await blocking(stream.signal, int(number))
        return {}

    async def close_stdin(self, live: Live, body: dict[str, Any], _user: str) -> dict[str, Any]:
        """End of input."""
        await blocking(find_process(live, body.get("process") or {}).end_input)
        return {}

    async def update(self, live: Live, body: dict[str, Any], _user: str) -> dict[str, Any]:
        """A terminal's new size."""
        size = (body.get("pty") or {}).get("size") or {}
        stream = find_process(live, body.get("process") or {})
        await blocking(stream.resize, int(size.get("cols", 80)) & 0xFFFF, int(size.get("rows", 24)) & 0xFFFF)
        return {}

    # ---- directories ----

    async def _entry(self, live: Live, user: str, path: str) -> dict[str, Any]:
        records = await blocking(live.agent.call, Op.STAT, user, path)
        return entry_json(wire.entries(records)[0])

    async def stat(self, live: Live, body: dict[str, Any], user: str) -> dict[str, Any]:
        """One entry."""
        return {"entry": await self._entry(live, user, _path(body))}

    async def list_dir(self, live: Live, body: dict[str, Any], user: str) -> dict[str, Any]:
        """A directory, `depth` levels deep."""
        depth = int(body.get("depth") or 1)
        if not 1 <= depth <= 64:
            raise InvalidRequest(f"depth must be between 1 and 64, not {depth}")
        records = await blocking(live.agent.call, Op.LISTDIR, user, _path(body), "", depth)
        return {"entries": [entry_json(entry) for entry in wire.entries(records)]}

    async def make_dir(self, live: Live, body: dict[str, Any], user: str) -> dict[str, Any]:
        """With its parents; already_exists when it is there."""
        await blocking(live.agent.call, Op.MAKEDIR, user, _path(body))
        return {"entry": await self._entry(live, user, _path(body))}

    async def move(self, live: Live, body: dict[str, Any], user: str) -> dict[str, Any]:
        """Rename."""
        source, target = _path(body, "source"), _path(body, "destination")
        await blocking(live.agent.call, Op.MOVE, user, source, target)
        return {"entry": await self._entry(live, user, target)}

    async def remove(self, live: Live, body: dict[str, Any], user: str) -> dict[str, Any]:
        """A file or a whole tree."""
        await blocking(live.agent.call, Op.REMOVE, user, _path(body))
        return {}

    async def watch_dir(self, live: Live, body: dict[str, Any], user: str, interval: float | None) -> Items:
        """Changes as they happen."""
        inbox, buffer = AsyncInbox(), bytearray()
        stream = await blocking(live.agent.operate, _watch(body, user), inbox)
        try:
            while True:
                try:
                    event = await inbox.get(interval)
                except TimeoutError:
                    yield {"keepalive": {}}
                    continue
                if event.error:
                    raise event.error
                if event.type is Type.EXITED:
                    check(event, _path(body))
                    return
                if event.type is Type.DATA:
                    buffer += event.data
                    await blocking(event.done)
                    for change in wire.changes(buffer):
                        yield {"start": {}} if change.kind == "ready" else {"filesystem": _change(change)}
        finally:
            await blocking(stream.close)

    async def create_watcher(self, live: Live, body: dict[str, Any], user: str) -> dict[str, Any]:
        """A watch that is polled with `get_watcher_events`."""
        inbox = AsyncInbox()
        stream = await blocking(live.agent.operate, _watch(body, user), inbox)
        watcher = Watcher(stream)
        while True:  # until it stands, or the path is refused
            event = await inbox.get(30)
            if event.error:
                raise event.error
            if event.type is Type.EXITED:
                check(event, _path(body))
            if event.type is Type.DATA:
                break
        watcher.buffer += event.data
        wire.changes(watcher.buffer)

        def collect(event: Event) -> None:
            watcher.buffer += event.data if event.type is Type.DATA else b""
            watcher.changes += wire.changes(watcher.buffer)
            del watcher.changes[:-10_000]
            event.done()

        stream.listen(collect)
        inbox.leave(stream)
        name = secrets.token_hex(8)
        self._watchers[live.record.id, name] = watcher
        return {"watcherId": name}

    async def get_watcher_events(self, live: Live, body: dict[str, Any], _user: str) -> dict[str, Any]:
        """What changed since the last time."""
        watcher = self._watcher(live, body)
        changes, watcher.changes = watcher.changes, []
        return {"events": [_change(change) for change in changes if change.kind != "ready"]}

    async def remove_watcher(self, live: Live, body: dict[str, Any], _user: str) -> dict[str, Any]:
        """Stop."""
        watcher = self._watcher(live, body)
        del self._watchers[live.record.id, str(body.get("watcherId"))]
        await blocking(watcher.stream.close)
        return {}

    def _watcher(self, live: Live, body: dict[str, Any]) -> Watcher:
        found = self._watchers.get((live.record.id, str(body.get("watcherId"))))
        if not found:
            raise NotFound(f"watcher {body.get('watcherId')!r} was not found")
        return found

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
                    target = path or part.filename or ""  # type: ignore[union-attr]
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


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _quote(text: str) -> str:
    return quote(text, safe="")


def _path(body: dict[str, Any], key: str = "path") -> str:
    path = body.get(key)
    if not isinstance(path, str) or not path:
        raise InvalidRequest(f"the message lacks `{key}`")
    return path


def _watch(body: dict[str, Any], user: str) -> bytes:
    return wire.operation(Op.WATCH, user, _path(body), "", int(bool(body.get("recursive"))))


def _change(change: wire.Change) -> dict[str, str]:
    return {"name": change.name, "type": f"EVENT_TYPE_{change.kind.upper()}"}


def _file_refusal(error: GuestError) -> web.Response:
    status = {2: 404, 1: 401, 13: 401, 28: 507}.get(error.errno, 400)
    return web.json_response({"code": status, "message": str(error)}, status=status)


def _start_error(error: SandboxError, stream: Stream) -> SandboxError:
    if isinstance(error, GuestError) and stream.command and not stream.pid:
        message = f"{stream.command.argv[0]}: {error}"
        return NotFound(message) if error.errno == 2 and "user" not in str(error) else InvalidRequest(message)
    return error


def _end(event: Event) -> dict[str, Any]:
    code, number = event.numbers
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return {"exitCode": -1, "exited": False, "status": f"signal: {name}", "error": f"signal: {name}"}
    end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    return {**end, "error": f"exit status {code}"} if code else end


def find_process(live: Live, selector: dict[str, Any]) -> Stream:
    """By pid or tag; NotFound."""
    for stream in live.agent.commands:
        tag = stream.command.tag if stream.command else ""
        if (selector.get("pid") is not None and stream.pid == selector["pid"]) or (tag and tag == selector.get("tag")):
            return stream
    raise NotFound(f"process {json.dumps(selector)} was not found")


def usage(live: Live) -> dict[str, Any]:
    """What the guest uses now: E2B's metric fields."""
    text = live.agent.call(Op.STATS, "root").decode()
    memory, cpu, disk = {}, (0, 0), (0, 0)
    for line in text.splitlines():
        key, *values = line.split()
        if key.endswith(":"):
            memory[key[:-1]] = int(values[0]) << 10
        elif key == "cpu":
            ticks = [int(value) for value in values]
            cpu = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
        elif key == "disk":
            disk = (int(values[0]), int(values[1]))
    cached = memory.get("Cached", 0) + memory.get("Buffers", 0)
    total = memory.get("MemTotal", 0)
    now = datetime.now(UTC)
    return {
        "timestamp": now.isoformat().replace("+00:00", "Z"), "timestampUnix": int(now.timestamp()),
        "cpuCount": live.record.shape.vcpus, "cpuUsedPct": round(100 * cpu[0] / max(1, cpu[1]), 2),
        "memTotal": total, "memUsed": total - memory.get("MemFree", 0) - cached, "memCache": cached,
        "diskTotal": disk[0], "diskUsed": disk[0] - disk[1],
    }  # fmt: skip
