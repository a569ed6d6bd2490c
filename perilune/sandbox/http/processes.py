"""envd's process.Process service: commands and terminals of one sandbox."""

import base64
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.stream import Event, Stream
from perilune.sandbox.agent.wire import Command, Type
from perilune.sandbox.errors import GuestError, InvalidRequest, NotFound, SandboxError
from perilune.sandbox.http import connect
from perilune.sandbox.http.bridge import AsyncInbox, blocking
from perilune.sandbox.live import Live

Items = AsyncIterator[dict[str, Any]]
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: signal.SIGTERM, 9: signal.SIGKILL}


class Processes:
    """Unary methods take (sandbox, message, user); streaming ones also the keepalive interval in seconds."""

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

    async def stream_input(self, live: Live, raw: bytes) -> None:
        """A client's stream of input for one command."""
        stream: Stream | None = None
        for item in connect.messages(raw):
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
