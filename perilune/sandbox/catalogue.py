"""What exists, in SQLite: sandboxes with their state, snapshot and template names. Survives kill -9 of any process."""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from perilune.sandbox.errors import AlreadyExists, DiskFull, InvalidRequest, NotFound, SandboxError
from perilune.sandbox.vmm.driver import Rates, Shape


class Phase(StrEnum):
    """Where a sandbox stands. The -ING phases are only seen by others while their call is under way."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    LOST = "lost"  # its machine died; the last pause, if any, can be resumed with recover=True
    KILLED = "killed"


@dataclass
class Network:
    """What a sandbox may reach. `allow` wins over `deny`; entries are CIDRs, addresses or (allow only) domains."""

    internet: bool = False
    allow: list[str] = field(default_factory=list)
    deny: list[str] = field(default_factory=list)
    public: bool = True  # its ports are served without a traffic token


@dataclass
class Record:
    """One sandbox."""

    id: str
    template: str
    phase: Phase = Phase.CREATING
    shape: Shape = field(default_factory=Shape)
    rates: Rates = field(default_factory=Rates)
    processes: int = 2048  # most processes inside
    created: float = field(default_factory=time.time)
    started: float = field(default_factory=time.time)
    end: float | None = None  # wall clock at which the timeout strikes
    on_timeout: str = "pause"  # or kill
    pause_mode: str = "full"  # or disk: what a timeout's pause keeps
    auto_resume: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: str = ""
    network: Network = field(default_factory=Network)
    secure: bool = False
    snapshot: str = ""  # the last pause
    fault: str = ""  # why it is lost
    folder: str = ""  # of the machine, in run/
    base: str = ""  # memory base it runs on
    top: str = ""  # disk layer it writes to
    slot: int = -1  # network namespace
    pid: int = 0
    pid_started: int = 0
    owner: int = 0  # process that drives it
    owner_started: int = 0


def dump(record: Record) -> str:
    """To JSON."""
    return json.dumps(vars(record), default=vars)


def parse(text: str) -> Record:
    """The inverse."""
    body = json.loads(text)
    body["shape"], body["rates"] = Shape(**body["shape"]), Rates(**body["rates"])
    body["network"], body["phase"] = Network(**body["network"]), Phase(body["phase"])
    return Record(**body)


_RESERVE = 1 << 20  # bytes
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, phase TEXT, created REAL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, snapshot TEXT NOT NULL, sandbox TEXT, created REAL);
CREATE TABLE IF NOT EXISTS kept (snapshot TEXT PRIMARY KEY, kind TEXT NOT NULL, sandbox TEXT, created REAL);
"""


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        kind = DiskFull if "full" in str(error) else SandboxError
        raise kind(f"the catalogue cannot be written: {error}") from None
    except UnicodeEncodeError:
        raise InvalidRequest("a name must not hold half a character (a lone surrogate)") from None


class Catalogue:
    """Thread-safe; several processes may open the same file. Some room is set aside, given up when the disk is full:
    there sandboxes must still come to an end."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._reserve = path.with_suffix(".reserve")
        with contextlib.suppress(OSError), self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE)
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def _rows(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, _failures():
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.OperationalError:
                if not self._reserve.exists():
                    raise
                self._reserve.unlink()
                return self._db.execute(query, values).fetchall()

    def put(self, record: Record) -> None:
        """Insert or replace."""
        self._rows(
            "INSERT OR REPLACE INTO sandboxes VALUES (?,?,?,?)",
            record.id, record.phase, record.created, dump(record),
        )  # fmt: skip

    def claim(self, record: Record, before: Phase, owner: int) -> bool:
        """Replace it, provided that it is in the phase `before` of that owner still: of two processes one does."""
        query = "UPDATE sandboxes SET phase=?, data=? WHERE id=? AND phase=? AND json_extract(data, '$.owner')=?"
        return bool(self._rows(f"{query} RETURNING 1", record.phase, dump(record), record.id, before, owner))

    def get(self, identity: str) -> Record:
        """NotFound when there is none."""
        rows = self._rows("SELECT data FROM sandboxes WHERE id=?", identity)
        if not rows:
            raise NotFound(f"sandbox {identity!r} was not found")
        return parse(rows[0][0])

    def drop(self, identity: str) -> None:
        """Forget a sandbox."""
        self._rows("DELETE FROM sandboxes WHERE id=?", identity)

    def all(self) -> list[Record]:
        """Newest first."""
        return [parse(data) for (data,) in self._rows("SELECT data FROM sandboxes ORDER BY created DESC, id")]

    # ---- snapshots that stay until they are deleted, and their names ----

    def vet(self, name: str, kind: str) -> None:
        """InvalidRequest for what is no name; AlreadyExists where a snapshot would take a template's, so that everybody
        who asks for the template got the snapshot."""
        if not name.isprintable() or name.strip() != name or name.startswith("-") or not 0 < len(name) <= 255:
            raise InvalidRequest(f"{name[:80]!r} is no name: 1 to 255 printable characters, not beginning with a dash")
        if kind == "snapshot" and name.startswith(("step:", "image:")):
            raise InvalidRequest(f"{name!r} begins as the build cache's own names do")
        query = "SELECT 1 FROM kept LEFT JOIN names USING (snapshot) WHERE kind='template' AND ? IN (name, snapshot)"
        if kind == "snapshot" and self._rows(query, name):
            raise AlreadyExists(f"{name!r} is a template: give the snapshot another name")

    def keep(self, snapshot: str, kind: str, sandbox: str, names: list[str]) -> None:
        """A template or a snapshot the user asked for; a name moves to the newest that claims it."""
        now = time.time()
        with self._transaction():
            self._rows("INSERT OR REPLACE INTO kept VALUES (?,?,?,?)", snapshot, kind, sandbox, now)
            for name in names:
                self._rows("INSERT OR REPLACE INTO names VALUES (?,?,?,?)", name, snapshot, sandbox, now)

    def unkeep(self, snapshot: str) -> bool:
        """Forget it and its names; False when it was not kept."""
        with self._transaction():
            known = bool(self._rows("DELETE FROM kept WHERE snapshot=? RETURNING 1", snapshot))
            self._rows("DELETE FROM names WHERE snapshot=?", snapshot)
        return known

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._rows("BEGIN")
            try:
                yield
            except BaseException:
                with contextlib.suppress(SandboxError):  # a full disk has rolled back by itself
                    self._rows("ROLLBACK")
                raise
            self._rows("COMMIT")

    def unname(self, name: str) -> None:
        """Forget one name."""
        self._rows("DELETE FROM names WHERE name=?", name)

    def resolve(self, name: str) -> str | None:
        """The snapshot behind a name or an id that is kept."""
        rows = self._rows("SELECT snapshot FROM names WHERE name=?", name)
        rows = rows or self._rows("SELECT snapshot FROM kept WHERE snapshot=?", name)
        return rows[0][0] if rows else None

    def names(self, snapshot: str) -> list[str]:
        """Its names, oldest first."""
        return [
            name for (name,) in self._rows("SELECT name FROM names WHERE snapshot=? ORDER BY created, name", snapshot)
        ]

    def kept(self) -> Iterator[tuple[str, str, str, float]]:
        """(snapshot, kind, sandbox it came from, created), newest first."""
        yield from self._rows("SELECT snapshot, kind, sandbox, created FROM kept ORDER BY created DESC, snapshot")

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()
