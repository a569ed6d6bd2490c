"""Our policy as Ray Serve's request router: placement by session, budgets by class, over the replicas Ray keeps alive.

    choose_replicas -> [primary], [secondary] that have room;   none has: ask again soon, refuse after `wait` seconds

Ray starts, watches and restarts replicas and says which there are; a replica that is gone takes its budget and what it
had cached with it, and its sessions alone move. The request a handle is called with is an `Errand`.
`perilune.fleet` is the application.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RunningReplica

from perilune.serve.router.admission import Budget, Cost, Refused
from perilune.serve.router.placement import placed
from perilune.serve.router.policy import Policy
from perilune.serve.router.proxy import Errand
from perilune.serve.router.worker import Sessions


@dataclass
class Seat:
    """A replica's budget and sessions, as this router has filled them."""

    budget: Budget
    sessions: Sessions = field(default_factory=Sessions)


class SessionRouter(ConsistentHashRouter):
    """Ray's own session router lends its loop, which retries a request until it is placed or given up; where requests
    go is decided here. Several front ends each know what they sent themselves: divide `budget` among them."""

    def initialize_state(self, budget: float = 1e6, wait: float = 10.0, **cost: float) -> None:
        """budget: cost in flight on one replica; wait: seconds before a refusal; cost: fields of `Cost`."""
        self.policy, self.budget, self.wait = Policy(Cost(**cost)), budget, wait
        self.seats: dict[str, Seat] = {}
        self._charged: dict[str, tuple[Seat, str, float]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        here = {replica.replica_id.unique_id for replica in replicas}
        self.seats = {name: self.seats.get(name) or Seat(Budget(self.budget)) for name in sorted(here)}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        errand = _errand(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = [name for name in placed(errand.session, sorted(self.seats)) if name in replicas]
        ready = [name for name in names if self.policy.has_room(errand, self.seats[name])]
        if not ready:
            self._give_up(pending_request, errand, names)
        for name in ready[:1]:  # the engine orders its queue by the router's classes
            errand.headers["x-request-class"] = self.policy.price(errand, self.seats[name])[0].name
        return [[replicas[name]] for name in ready]

    def _give_up(self, pending: PendingRequest, errand: Errand, names: Sequence[str]) -> None:
        """Refuse what has waited long enough. Its caller gets the exception; the loop sees that it is done."""
        if names and time.time() - pending.created_at > self.wait and not pending.future.done():
            seat = self.seats[names[0]]
            kind, cost = self.policy.price(errand, seat)
            pending.future.set_exception(seat.budget.refusal(kind.name, cost))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:  # noqa: ARG002 - Ray's signatures
        errand, seat = _errand(pending_request), self.seats.get(replica_id.unique_id)
        if seat is None:
            return
        kind, cost = self.policy.price(errand, seat)
        charge = seat.budget.hold(kind.name, cost)
        self._charged[pending_request.metadata.internal_request_id] = (seat, kind.name, charge)
        seat.sessions[errand.session] = errand.prompt

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002
        if (charged := self._charged.pop(internal_request_id, None)) is not None:
            seat, kind, charge = charged
            seat.budget.give_back(kind, charge)


def _errand(pending: PendingRequest) -> Errand:
    errand: Any = pending.args[0]
    assert isinstance(errand, Errand), "a handle is called with an Errand"
    return errand


__all__ = ["Refused", "SessionRouter"]
