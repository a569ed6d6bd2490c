"""One upstream server: whether it may be used, and what it holds."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from perilune.serve.router.admission import Budget

log = logging.getLogger("perilune.route")


class Sessions:
    """Prompt tokens each session is believed to have cached here; the oldest are forgotten beyond `limit`."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit, self._tokens = limit, OrderedDict[str, float]()

    def __getitem__(self, session: str) -> float:
        return self._tokens.get(session, 0.0)

    def __setitem__(self, session: str, tokens: float) -> None:
        self._tokens[session] = tokens
        self._tokens.move_to_end(session)
        if len(self._tokens) > self._limit:
            self._tokens.popitem(last=False)


@dataclass
class Upstream:
    """healthy is what the last look or the last failure says; draining is an operator's word, which outlasts it."""

    url: str
    client: httpx.AsyncClient
    budget: Budget
    healthy: bool = False
    draining: bool = False
    requests: int = 0
    sessions: Sessions = field(default_factory=Sessions)

    @property
    def usable(self) -> bool:
        return self.healthy and not self.draining

    async def look(self) -> None:
        """One health check. A draining or failed server answers 503 and counts as not healthy."""
        try:
            healthy = (await self.client.get("/health", timeout=2.0)).status_code == 200
        except httpx.HTTPError:
            healthy = False
        if healthy != self.healthy:
            log.warning("%s is %s", self.url, "healthy" if healthy else "not healthy")
        self.healthy = healthy
        if not healthy:  # it may come back empty
            self.sessions = Sessions()

    def describe(self) -> dict[str, object]:
        held = {name: round(account.held) for name, account in self.budget.accounts.items()}
        waiting = {name: len(account.queue) for name, account in self.budget.accounts.items()}
        state = "draining" if self.draining else "ok" if self.healthy else "down"
        return {"url": self.url, "state": state, "requests": self.requests, "held": held, "waiting": waiting}


async def watch(workers: Sequence[Upstream], seconds: float) -> None:
    """Look at every worker every so often, until cancelled."""
    while True:
        await asyncio.gather(*(worker.look() for worker in workers))
        await asyncio.sleep(seconds)
