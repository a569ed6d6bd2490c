"""E2B's JSON for what we have, and what its requests mean to us."""

from datetime import UTC, datetime
from typing import Any

from perilune.sandbox.catalogue import Network, Phase, Record
from perilune.sandbox.errors import InvalidRequest
from perilune.sandbox.http import envd
from perilune.sandbox.http.auth import Keys
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.snapshot import Snapshot

_FAR = 10 * 365 * 86400.0  # seconds after which a sandbox without timeout is said to end
STATES = {Phase.PAUSED: "paused", Phase.RESUMING: "running", Phase.PAUSING: "running"}


def stamp(when: float) -> str:
    """RFC 3339."""
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def number(body: dict[str, Any], key: str, least: float, most: float, default: float | None = None) -> float | None:
    """A number within bounds; InvalidRequest names the key."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequest(f"`{key}` must be a number between {least:g} and {most:g}, not {value!r}")
    return float(value)


def strings(body: dict[str, Any], key: str) -> dict[str, str]:
    """An object of strings."""
    value = body.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise InvalidRequest(f"`{key}` must be an object of strings")
    return value


def words(body: dict[str, Any], key: str) -> list[str]:
    """A list of strings."""
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InvalidRequest(f"`{key}` must be a list of strings")
    return value


def network(body: dict[str, Any], default: bool) -> Network:
    """From NewSandbox's `network` and `allow_internet_access` (or camel case)."""
    given = body.get("network") or {}
    if not isinstance(given, dict):
        raise InvalidRequest("`network` must be an object")
    access = body.get("allow_internet_access", body.get("allowInternetAccess"))
    internet = default if access is None else bool(access)
    public = given.get("allowPublicTraffic")
    return Network(internet, words(given, "allowOut"), words(given, "denyOut"), public is not False)


class Views:
    """Of one runtime's sandboxes and snapshots."""

    def __init__(self, runtime: Runtime, keys: Keys, domain: str) -> None:
        self._runtime, self._keys, self._domain = runtime, keys, domain

    def access(self, record: Record) -> str | None:
        """The sandbox's daemon token, when it has one."""
        return self._keys.access(record.id) if record.secure else None

    def brief(self, record: Record) -> dict[str, Any]:
        """E2B's Sandbox."""
        found: dict[str, Any] = {
            "templateID": record.template, "sandboxID": record.id, "clientID": "perilune", "alias": record.template,
            "envdVersion": envd.VERSION, "domain": self._domain,
        }  # fmt: skip
        if record.secure:
            found["envdAccessToken"] = self._keys.access(record.id)
        if not record.network.public:
            found["trafficAccessToken"] = self._keys.traffic(record.id)
        return found

    def listed(self, record: Record) -> dict[str, Any]:
        """E2B's ListedSandbox."""
        end = record.end if record.end is not None else record.started + _FAR
        return {
            **self.brief(record), "startedAt": stamp(record.started), "endAt": stamp(end),
            "cpuCount": record.shape.vcpus, "memoryMB": record.shape.memory_mb, "diskSizeMB": record.shape.disk_mb,
            "state": STATES.get(record.phase, "running"), "metadata": record.metadata,
        }  # fmt: skip

    def full(self, record: Record) -> dict[str, Any]:
        """E2B's SandboxDetail."""
        net = record.network
        found = {
            **self.listed(record), "allowInternetAccess": net.internet,
            "network": {"allowOut": net.allow, "denyOut": net.deny, "allowPublicTraffic": net.public},
            "lifecycle": {"autoResume": record.auto_resume, "onTimeout": record.on_timeout},
        }  # fmt: skip
        if record.phase is Phase.PAUSED:
            mode = self._runtime.store.read(record.snapshot).mode
            found["pauseMode"] = "full" if mode == "full" else "filesystem"
        return found

    def snapshot(self, snapshot: Snapshot, sandbox: str = "") -> dict[str, Any]:
        """E2B's SnapshotInfo."""
        names = self._runtime.catalogue.names(snapshot.id)
        shape = snapshot.shape
        return {
            "snapshotID": names[0] if names else snapshot.id, "names": names, "cpuCount": shape.vcpus,
            "memoryMB": shape.memory_mb, "diskSizeMB": shape.disk_mb, "createdAt": stamp(snapshot.created),
            "updatedAt": stamp(snapshot.created), "sandboxID": sandbox, "mode": snapshot.mode,
        }  # fmt: skip
