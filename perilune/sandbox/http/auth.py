"""Keys and tokens: one API key for the control plane; per sandbox an access token (its daemon) and a traffic token (its
ports). Both derive from the sandbox's id and a seed kept in the home, so they survive a restart and differ in every
fork."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox.errors import InvalidRequest, Unauthorized


def same(given: str, wanted: str) -> bool:
    """Compared in constant time; `given` may be any bytes that a header carries."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())


@dataclass(frozen=True)
class Keys:
    """The server's secrets."""

    api_key: str
    seed: bytes

    @classmethod
    def load(cls, home: Path, api_key: str | None = None) -> "Keys":
        """From PERILUNE_SANDBOX_API_KEY or E2B_API_KEY, else a key generated once and kept in the home (mode 600)."""
        given = api_key or os.environ.get("PERILUNE_SANDBOX_API_KEY") or os.environ.get("E2B_API_KEY")
        if given is not None and len(given) < 16:
            raise InvalidRequest("the API key is shorter than 16 characters")
        return cls(given or _kept(home / "api-key", lambda: "e2b_" + secrets.token_hex(20)), _seed(home))

    def check(self, given: str | None) -> None:
        """Unauthorized unless `given` is the API key."""
        if not same(given or "", self.api_key):
            raise Unauthorized("the API key is missing or wrong (header X-API-Key)")

    def access(self, sandbox: str) -> str:
        """Opens a sandbox's daemon."""
        return self._derive("access", sandbox)

    def traffic(self, sandbox: str) -> str:
        """Opens a sandbox's ports."""
        return self._derive("traffic", sandbox)

    def _derive(self, purpose: str, sandbox: str) -> str:
        return hmac.new(self.seed, f"{purpose}:{sandbox}".encode(), hashlib.sha256).hexdigest()


def _seed(home: Path) -> bytes:
    return bytes.fromhex(_kept(home / "seed", lambda: secrets.token_hex(32)))


def _kept(path: Path, make: Callable[[], str]) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(make())
        file.flush()
        os.fsync(file.fileno())
    return path.read_text().strip()
