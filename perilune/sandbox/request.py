"""What a new sandbox should be, and the record it becomes."""

import secrets
import time
from dataclasses import dataclass, field, replace

from perilune.sandbox.catalogue import Network, Phase, Record
from perilune.sandbox.errors import InvalidRequest
from perilune.sandbox.network import check
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.vmm.driver import Rates

_MOST_PROCESSES = 1 << 22  # Linux has no more ids


@dataclass(frozen=True)
class Request:
    """`timeout` in seconds; None means for ever."""

    template: str = "base"
    timeout: float | None = 300.0
    on_timeout: str = "pause"
    pause_mode: str = "full"
    auto_resume: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    rates: Rates = field(default_factory=Rates)
    processes: int = 2048
    secure: bool = False

    def record(self, snapshot: Snapshot) -> Record:
        """A new sandbox's, made from `snapshot`; InvalidRequest."""
        if self.on_timeout not in ("pause", "kill") or self.pause_mode not in ("full", "disk"):
            raise InvalidRequest("on_timeout must be pause or kill, pause_mode full or disk")
        if not 0 <= self.processes <= _MOST_PROCESSES:
            raise InvalidRequest(f"processes must be between 0 (no limit) and {_MOST_PROCESSES}, not {self.processes}")
        for name, value in self.env.items():
            _vet_variable(name, str(value))
        check(self.network)
        defaults = snapshot.defaults
        return Record(
            new_id(), self.template, shape=snapshot.shape, rates=self.rates, processes=self.processes,
            end=ending(self.timeout), on_timeout=self.on_timeout, pause_mode=self.pause_mode,
            auto_resume=self.auto_resume, metadata=self.metadata, env={**defaults.env, **self.env}, user=defaults.user,
            workdir=defaults.workdir, network=self.network, secure=self.secure,
        )  # fmt: skip


def ending(timeout: float | None) -> float | None:
    """The wall clock at which a timeout that starts now strikes; InvalidRequest."""
    if timeout is not None and not timeout >= 0:  # nan is not
        raise InvalidRequest(f"a timeout is a number of seconds, at least 0, not {timeout}")
    return None if timeout is None else time.time() + timeout


def _vet_variable(name: str, value: str) -> None:
    if not name or "=" in name or "\0" in name + value:
        raise InvalidRequest(f"{name!r} is no environment variable: a name without =, neither part with NUL")
    try:
        (name + value).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"the environment variable {name!r} holds half a character (a lone surrogate)") from None


def twin(source: Record, end: float | None) -> Record:
    """A fork's record."""
    return replace(
        source, id=new_id(), phase=Phase.CREATING, snapshot="", end=end, fault="", pid=0, created=time.time(),
        metadata=dict(source.metadata), env=dict(source.env), network=replace(source.network),
    )  # fmt: skip


def new_id() -> str:
    """20 lower-case letters and digits, fit for a host name."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    return "i" + "".join(secrets.choice(alphabet) for _ in range(19))


def new_name(kind: str) -> str:
    """Of a snapshot: p a pause, s the user's, f a fork's, t a template."""
    return kind + secrets.token_hex(8)
