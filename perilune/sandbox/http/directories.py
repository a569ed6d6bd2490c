"""envd's filesystem.Filesystem service: entries, directories and watches of one sandbox."""

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.stream import Event, Stream, check
from perilune.sandbox.agent.wire import Entry, Op, Type
from perilune.sandbox.errors import InvalidRequest, NotFound
from perilune.sandbox.http.bridge import AsyncInbox, blocking
from perilune.sandbox.http.processes import Items
from perilune.sandbox.live import Live

_KINDS = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}


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


class Directories:
    """Unary methods take (sandbox, message, user); streaming ones also the keepalive interval in seconds."""

    def __init__(self) -> None:
        self._watchers: dict[tuple[str, str], Watcher] = {}

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


def _path(body: dict[str, Any], key: str = "path") -> str:
    path = body.get(key)
    if not isinstance(path, str) or not path:
        raise InvalidRequest(f"the message lacks `{key}`")
    return path


def _watch(body: dict[str, Any], user: str) -> bytes:
    return wire.operation(Op.WATCH, user, _path(body), "", int(bool(body.get("recursive"))))


def _change(change: wire.Change) -> dict[str, str]:
    return {"name": change.name, "type": f"EVENT_TYPE_{change.kind.upper()}"}
