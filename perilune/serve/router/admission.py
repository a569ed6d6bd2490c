"""Admission by budget (report §5.4: request cost varies by three orders of magnitude).

    cost = (p − c) + (p² − c²) / 2A + R·c + O·o        in new tokens of short context

for a prompt of p tokens of which c are cached and o tokens of output. A is the context at which attention costs as much
as the weights (for K3: 0.208 TFLOP a token over 24·2·96·(192+128) FLOP a token of context = 141,000); R the share of a
token's time that bringing one back from CPU memory takes (27,648 B at 55 GB/s against 76,000 tokens/s: 0.04).

The cost decides the class, and each class has a budget of its own on each worker: a burst of one cannot take what is
another's. A request larger than its whole budget is charged the budget, so it runs alone in its class.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """Weights of the equation above. bytes_per_token turns a body into tokens without a tokenizer."""

    attention: float = 141_000.0
    restore: float = 0.04
    output: float = 1.0
    bytes_per_token: float = 4.0

    def of(self, prompt: float, cached: float = 0, output: float = 0) -> float:
        cached = min(cached, prompt)
        quadratic = (prompt**2 - cached**2) / (2 * self.attention)
        return prompt - cached + quadratic + self.restore * cached + self.output * output


@dataclass(frozen=True)
class Class:
    """Requests that cost less than `below` (and fit no cheaper class) share `share` of a worker's budget."""

    name: str
    below: float
    share: float


CLASSES = (
    Class("short", 8_000, 0.35),
    Class("medium", 128_000, 0.25),
    Class("long", math.inf, 0.25),
    Class("batch", 0, 0.15),  # by its service tier, whatever it costs
)


def class_of(cost: float, batch: bool, classes: Sequence[Class] = CLASSES) -> Class:
    """The class of a request."""
    if batch:
        return classes[-1]
    return next(one for one in classes if cost < one.below)


class Refused(Exception):  # noqa: N818 - not a fault
    """No room within the time a request may wait; `retry_after` is in seconds."""

    def __init__(self, name: str, retry_after: int) -> None:
        super().__init__(f"The budget for {name} requests is spent; try again in {retry_after} s.")
        self.name, self.retry_after = name, retry_after

    def __reduce__(self) -> tuple[type["Refused"], tuple[str, int]]:
        return type(self), (self.name, self.retry_after)  # it may cross a process


@dataclass
class _Account:
    """One class on one worker: what is held, and who waits, first come first served."""

    limit: float
    held: float = 0.0
    queue: deque[tuple[float, asyncio.Future[None]]] = field(default_factory=deque)
    rate: float = 0.0  # cost released a second, smoothed
    released: float = field(default_factory=time.monotonic)

    def fits(self, charge: float) -> bool:
        return self.held + charge <= self.limit * (1 + 1e-9)


class Budget:
    """What one worker may have in flight, by class. One event loop's; nothing here blocks."""

    def __init__(self, total: float, classes: Sequence[Class] = CLASSES, max_queue: int = 256) -> None:
        self.total, self._max_queue = total, max_queue
        self.accounts = {one.name: _Account(one.share * total) for one in classes}

    def has_room(self, name: str, cost: float) -> bool:
        """Whether a request would start at once."""
        account = self.accounts[name]
        return not account.queue and account.fits(min(cost, account.limit))

    def hold(self, name: str, cost: float) -> float:
        """Charge a request that starts whether there is room or not; the charge, to be given back."""
        account = self.accounts[name]
        charge = min(cost, account.limit)
        account.held += charge
        return charge

    def refusal(self, name: str, cost: float) -> Refused:
        """For one that has waited long enough."""
        account = self.accounts[name]
        return Refused(name, self._retry_after(account, min(cost, account.limit)))

    async def take(self, name: str, cost: float, seconds: float) -> float:
        """Wait at most `seconds` for room; the charge, to be given back. Raises Refused."""
        account = self.accounts[name]
        charge = min(cost, account.limit)
        if self.has_room(name, cost):
            return self.hold(name, cost)
        if len(account.queue) >= self._max_queue:
            raise Refused(name, self._retry_after(account, charge))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (charge, turn)
        account.queue.append(entry)
        try:
            await asyncio.wait_for(asyncio.shield(turn), seconds)
        except BaseException as error:
            if turn.done():  # its turn came in the same moment
                self.give_back(name, charge)
            else:
                account.queue.remove(entry)
                self._wake(account)
            if isinstance(error, TimeoutError):
                raise Refused(name, self._retry_after(account, charge)) from None
            raise
        return charge

    def give_back(self, name: str, charge: float) -> None:
        """A request ended."""
        account, now = self.accounts[name], time.monotonic()
        account.held = max(0.0, account.held - charge)
        pace = charge / max(now - account.released, 1e-3)
        account.rate = 0.8 * account.rate + 0.2 * pace if account.rate else pace
        account.released = now
        self._wake(account)

    @staticmethod
    def _wake(account: _Account) -> None:
        while account.queue and account.fits(account.queue[0][0]):
            charge, turn = account.queue.popleft()
            account.held += charge
            turn.set_result(None)

    @staticmethod
    def _retry_after(account: _Account, charge: float) -> int:
        ahead = sum(waiting for waiting, _ in account.queue) + charge
        return max(1, min(120, math.ceil(ahead / account.rate))) if account.rate else 5
