"""Who answers a request: placement, price and budget together, over whatever stands for a worker.

    (primary, secondary) of its session; the secondary first only where the primary's budget is full and its own is not

`perilune route` asks it of servers it speaks to itself, `fleet` of Ray Serve's replicas.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from perilune.serve.router.admission import Budget, Class, Cost, class_of
from perilune.serve.router.worker import Sessions


class Asked(Protocol):
    """What is known of a request: prompt and output in tokens."""

    @property
    def session(self) -> str: ...
    @property
    def prompt(self) -> float: ...
    @property
    def output(self) -> float: ...
    @property
    def batch(self) -> bool: ...


class Seat(Protocol):
    """What is known of a worker."""

    budget: Budget
    sessions: Sessions


S = TypeVar("S", bound=Seat)


class Policy:
    """Prices and order. cost: the weights of a price."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost

    def price(self, asked: Asked, seat: Seat) -> tuple[Class, float]:
        """A request's class and cost on a worker: less where its session is known."""
        cost = self.cost.of(asked.prompt, seat.sessions[asked.session], asked.output)
        return class_of(cost, asked.batch), cost

    def has_room(self, asked: Asked, seat: Seat) -> bool:
        """Whether it would start there at once."""
        kind, cost = self.price(asked, seat)
        return seat.budget.has_room(kind.name, cost)

    def roomiest_first(self, asked: Asked, seats: Sequence[S]) -> list[S]:
        """A session's workers, primary first, unless its budget is full and the secondary's is not."""
        if len(seats) == 2 and not self.has_room(asked, seats[0]) and self.has_room(asked, seats[1]):
            return [seats[1], seats[0]]
        return list(seats)
