"""A guest's file system, seen from the host."""

import threading
from collections.abc import Callable, Iterable, Iterator

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.stream import Event, check
from perilune.sandbox.agent.wire import Change, Entry, Op, Type
from perilune.sandbox.commands import Host
from perilune.sandbox.errors import GuestError


class Files:
    """The guest's file system, as the sandbox's user unless told otherwise. Relative paths start at the user's home."""

    def __init__(self, sandbox: Host) -> None:
        self._box = sandbox

    def _call(self, op: Op, user: str | None, first: str, second: str = "", number: int = 0) -> bytes:
        return self._box.live.agent.call(op, user or self._box.record.user, first, second, number)

    def read(self, path: str, user: str | None = None) -> bytes:
        """All of a file; GuestError with the errno."""
        return self._call(Op.READ, user, path)

    def pieces(self, path: str, user: str | None = None) -> Iterator[bytes]:
        """The same, as it comes."""
        return self._box.live.agent.read(Op.READ, user or self._box.record.user, path)

    def read_text(self, path: str, user: str | None = None) -> str:
        """All of a file as UTF-8."""
        return self.read(path, user).decode()

    def write(self, path: str, data: str | bytes | Iterable[bytes], user: str | None = None, mode: int = 0) -> None:
        """Create or replace a file and its parent directories."""
        pieces = iter([data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data)
        self._box.live.agent.write(user or self._box.record.user, path, pieces, mode)

    def list(self, path: str, depth: int = 1, user: str | None = None) -> list[Entry]:
        """A directory."""
        return wire.entries(self._call(Op.LISTDIR, user, path, number=depth))

    def stat(self, path: str, user: str | None = None) -> Entry:
        """One entry."""
        return wire.entries(self._call(Op.STAT, user, path))[0]

    def exists(self, path: str, user: str | None = None) -> bool:
        """Whether there is such a path."""
        try:
            self.stat(path, user)
        except GuestError as error:
            if error.errno in (2, 20):  # ENOENT, ENOTDIR
                return False
            raise
        return True

    def make_dir(self, path: str, user: str | None = None) -> bool:
        """With parents; False when it was there."""
        try:
            self._call(Op.MAKEDIR, user, path)
        except GuestError as error:
            if error.errno == 17:  # EEXIST
                return False
            raise
        return True

    def rename(self, old: str, new: str, user: str | None = None) -> None:
        """Move."""
        self._call(Op.MOVE, user, old, new)

    def remove(self, path: str, user: str | None = None) -> None:
        """A file or a whole tree."""
        self._call(Op.REMOVE, user, path)

    def watch(
        self, path: str, on_change: Callable[[Change], None], recursive: bool = False, user: str | None = None
    ) -> Callable[[], None]:
        """Call `on_change` (from another thread) for every change until the returned function is called."""
        ready, buffer, failure = threading.Event(), bytearray(), []

        def sink(event: Event) -> None:
            if event.type is Type.DATA:
                buffer.extend(event.data)
                event.done()
                for change in wire.changes(buffer):
                    if change.kind == "ready":
                        ready.set()
                    else:
                        on_change(change)
            elif event.type in (Type.EXITED, Type.FAILED):
                failure.append(event)
                ready.set()

        agent, name = self._box.live.agent, user or self._box.record.user
        stream = agent.operate(wire.operation(Op.WATCH, name, path, "", int(recursive)), sink)
        ready.wait(30)
        if failure:
            if failure[0].error:
                raise failure[0].error
            check(failure[0], path)
        return stream.close
