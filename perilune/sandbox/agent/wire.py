"""The bytes between host and guest agent; `guest/agent.h` is the other half.

A frame is {u8 type, u8 channel, u16 zero, u32 stream, u32 length} little-endian and `length` bytes. A stream may have
WINDOW bytes under way towards the host and INBOX towards the guest; whoever consumes returns the credit.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from perilune.sandbox.errors import InvalidRequest, MachineLost

HEAD = struct.Struct("<BBHII")
MAX_FRAME, WINDOW, INBOX, CHUNK = 1 << 20, 256 << 10, 64 << 10, 32 << 10
_EXEC, _ENTRY, _IDENTITY = struct.Struct("<IHHHH"), struct.Struct("<IBBIQq"), struct.Struct("<q64sI")


class Type(IntEnum):
    """What a frame says."""

    HELLO, IDENTITY, QUIESCE, LIST = 1, 2, 3, 4
    EXEC, OP, CONNECT = 10, 11, 12
    DATA, END, CREDIT, SIGNAL, RESIZE, CLOSE = 20, 21, 22, 23, 24, 25
    STARTED, FAILED, EXITED = 30, 31, 32


class Op(IntEnum):
    """File operations; see guest/ops.c."""

    STAT, LISTDIR, MAKEDIR, MOVE, REMOVE, READ, WRITE, WATCH, FREEZE, THAW, STATS = range(1, 12)


OUTPUT, ERRORS = 1, 2
WITH_PTY, WITH_STDIN = 1, 2


@dataclass(frozen=True)
class Frame:
    """One message."""

    type: int
    channel: int
    stream: int
    payload: bytes

    def pack(self) -> bytes:
        """To bytes; refuses what the guest would drop the connection for."""
        if len(self.payload) > MAX_FRAME:
            raise InvalidRequest(f"a message of {len(self.payload)} bytes exceeds the limit of {MAX_FRAME}")
        return HEAD.pack(self.type, self.channel, 0, self.stream, len(self.payload)) + self.payload


class Parser:
    """Bytes in, frames out. MachineLost when the bytes are no frames: a guest that lies loses its connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """All frames that are complete after `data`."""
        self._buffer += data
        frames, at = [], 0
        while len(self._buffer) - at >= HEAD.size:
            kind, channel, zero, stream, length = HEAD.unpack_from(self._buffer, at)
            if zero or length > MAX_FRAME:
                raise MachineLost("the guest agent sent a malformed frame")
            end = at + HEAD.size + length
            if end > len(self._buffer):
                break
            frames.append(Frame(kind, channel, stream, bytes(self._buffer[at + HEAD.size : end])))
            at = end
        del self._buffer[:at]
        return frames


@dataclass(frozen=True)
class Command:
    """A program to run in the guest. `argv[0]` is searched in PATH; an empty `cwd` is the user's home."""

    argv: tuple[str, ...]
    user: str = "root"
    cwd: str = ""
    env: tuple[tuple[str, str], ...] = ()
    pty: tuple[int, int] | None = None  # columns, rows
    stdin: bool = False
    tag: str = ""

    def pack(self) -> bytes:
        """The EXEC payload."""
        flags = (WITH_PTY if self.pty else 0) | (WITH_STDIN if self.stdin else 0)
        cols, rows = self.pty or (0, 0)
        if not self.argv or len(self.argv) > 0xFFFF or len(self.env) > 0xFFFF:
            raise InvalidRequest("a command needs between 1 and 65535 arguments")
        if not (0 <= cols <= 0xFFFF and 0 <= rows <= 0xFFFF):
            raise InvalidRequest(f"a terminal of {cols} columns and {rows} rows is impossible")
        texts = [self.user, self.cwd, self.tag, *self.argv, *(f"{k}={v}" for k, v in self.env)]
        return _EXEC.pack(flags, cols, rows, len(self.argv), len(self.env)) + strings(*texts)

    @classmethod
    def unpack(cls, payload: bytes) -> "Command":
        """The inverse of `pack`."""
        flags, cols, rows, argc, envc = _EXEC.unpack_from(payload)
        texts = [part.decode(errors="replace") for part in payload[_EXEC.size :].split(b"\0")[:-1]]
        env = tuple(
            (key, value) for key, _, value in (text.partition("=") for text in texts[3 + argc : 3 + argc + envc])
        )
        pty = (cols, rows) if flags & WITH_PTY else None
        return cls(tuple(texts[3 : 3 + argc]), texts[0], texts[1], env, pty, bool(flags & WITH_STDIN), texts[2])


def strings(*texts: str) -> bytes:
    """NUL-terminated strings."""
    for text in texts:
        if "\0" in text:
            raise InvalidRequest("a path, argument or variable must not contain a NUL character")
    try:
        return b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in texts)
    except UnicodeEncodeError:
        raise InvalidRequest("a path, argument or variable must not hold half a character (a lone surrogate)") from None


def short(number: int, words: str) -> bytes:
    """A number of 16 bits; InvalidRequest, `words` saying what it is."""
    if not isinstance(number, int) or not 0 <= number <= 0xFFFF:
        raise InvalidRequest(f"{words} must be a whole number between 0 and 65535, not {number!r}")
    return struct.pack("<H", number)


def operation(op: Op, user: str, first: str = "", second: str = "", number: int = 0) -> bytes:
    """The OP payload."""
    return struct.pack("<BI", op, number) + strings(user, first, second)


def identity(now_ns: int, entropy: bytes, processes: int, hostname: str, network: str, env: dict[str, str]) -> bytes:
    """The IDENTITY payload: what makes this guest another one than its siblings. Entropy is 64 bytes."""
    return _IDENTITY.pack(now_ns, entropy, processes) + strings(
        hostname, network, *(f"{k}={v}" for k, v in env.items())
    )


@dataclass(frozen=True)
class Entry:
    """A file in the guest. `kind` is d, f, l or o; `target_kind` that of what a link points to (? when broken)."""

    path: str
    kind: str
    target_kind: str
    mode: int
    size: int
    mtime_ns: int
    owner: str
    group: str
    target: str

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rstrip("/").rsplit("/", 1)[-1] or "/"


def entries(records: bytes) -> list[Entry]:
    """Parse STAT and LISTDIR records."""
    found, at = [], 0
    while at < len(records):
        if at + _ENTRY.size > len(records):
            raise MachineLost("the guest agent sent a malformed directory entry")
        length, kind, final, mode, size, when = _ENTRY.unpack_from(records, at)
        if length < _ENTRY.size + 4 or at + length > len(records):
            raise MachineLost("the guest agent sent a malformed directory entry")
        texts = records[at + _ENTRY.size : at + length].split(b"\0")
        owner, group, path, target = (text.decode("utf-8", "surrogateescape") for text in texts[:4])
        found.append(Entry(path, chr(kind), chr(final), mode, size, when, owner, group, target))
        at += length
    return found


_CREATED, _WRITTEN, _REMOVED, _RENAMED, _CHMOD = 0x100 | 0x80, 0x2, 0x200, 0x40, 0x4


@dataclass(frozen=True)
class Change:
    """Something happened to `name` (relative to the watched directory): create, write, remove, rename or chmod."""

    name: str
    kind: str


def changes(buffer: bytearray) -> list[Change]:
    """Take the complete WATCH records from the front of `buffer`; the first, empty one says the watch stands."""
    found = []
    while len(buffer) >= 8:
        mask, length = struct.unpack_from("<II", buffer)
        if len(buffer) < 8 + length:
            break
        name = bytes(buffer[8 : 8 + length]).decode("utf-8", "surrogateescape")
        del buffer[: 8 + length]
        table = (
            (_CREATED, "create"),
            (_WRITTEN, "write"),
            (_REMOVED, "remove"),
            (_RENAMED, "rename"),
            (_CHMOD, "chmod"),
        )
        found.append(Change(name, next((kind for bits, kind in table if mask & bits), "ready")))
    return found
