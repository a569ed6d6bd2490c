"""The laws of a balanced plan and of the addresses made from it, as functions that name what is broken.

Each law yields its name when violated, so that the negative controls can show that every one of them can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.parallel.planner import plan
from perilune.parallel.routes import Route, capacity, count_rows, route, segments
from perilune.parallel.tables import Plan, Segments


@dataclass(frozen=True)
class Case:
    """One routing: `experts[r]` [S_r, K] for every source rank, ids in 0..E-1."""

    experts: list[Tensor]
    ranks: int
    local: int

    @property
    def counts(self) -> Tensor:
        return torch.stack([count_rows(e, self.ranks * self.local) for e in self.experts])


def shares(counts: Tensor) -> Tensor:
    total, ranks = int(counts.sum()), counts.shape[0]
    return torch.tensor([total // ranks + (r < total % ranks) for r in range(ranks)])


def popularity(kind: str, ranks: int, local: int, rng: np.random.Generator) -> np.ndarray:
    """Routing distributions over experts: skewed, one expert, even, and theorem 2's adversary (nothing for rank 0)."""
    experts = ranks * local
    if kind == "dirichlet":
        return rng.dirichlet(np.full(experts, 0.1))
    if kind == "one-hot":
        return np.eye(experts)[rng.integers(experts)]
    if kind == "adversary" and ranks > 1:
        p = np.ones(experts)
        p[:local] = 0
        return p / p.sum()
    return np.full(experts, 1 / experts)


def random_case(rng: np.random.Generator) -> Case:
    ranks, local = int(rng.integers(1, 9)), int(rng.choice([1, 2, 3, 4, 7]))
    top_k = int(rng.choice([1, 2, 3, 8, 32], p=[0.3, 0.3, 0.2, 0.15, 0.05]))  # K beyond E: repeated experts
    most = max(1, 40 // top_k)
    tokens = rng.integers(0, most + 1, size=ranks) if rng.random() < 0.5 else np.full(ranks, rng.integers(1, most + 1))
    p = popularity(str(rng.choice(["dirichlet", "one-hot", "even", "adversary"])), ranks, local, rng)
    experts = [torch.from_numpy(rng.choice(len(p), size=(int(s), top_k), p=p)) for s in tokens]
    return Case(experts, ranks, local)


def plan_violations(made: Plan, *, exact: bool = True, tolerance: int = 0) -> Iterator[str]:
    """Laws 1 to 7 and 15 of the allocation. exact: enough slots, so that shares must be met."""
    counts, assigned = made.counts, made.assigned
    ranks, local = made.ranks, made.local
    home = torch.arange(made.experts) // local
    remote = (assigned > 0) & (home[None] != torch.arange(ranks)[:, None])
    share = shares(counts)
    if (assigned < 0).any():
        yield "a negative number of rows"
    if not torch.equal(assigned.sum(0), counts.sum(0)):
        yield "rows of an expert lost or made up"
    if not torch.equal(made.rows, assigned.sum(1)):
        yield "rows disagrees with assigned"
    if exact and tolerance == 0 and not torch.equal(assigned.sum(1), share):
        yield "a rank without exactly its share"
    if exact and (assigned.sum(1) > share + tolerance).any():
        yield "a rank above share + tolerance"
    moved = torch.zeros(ranks, ranks, dtype=torch.int64)
    moved.index_add_(0, home, (assigned * remote).T.contiguous())
    if not torch.equal(moved, made.quotas):
        yield "quotas disagrees with assigned"
    if ((made.quotas > 0).sum(0) > 1).any():
        yield "a rank that borrows from two homes"
    if (made.quotas > 0).sum() > max(ranks - 1, 0):
        yield "more than R - 1 fills"
    if (remote.sum(1) > made.slots).any():
        yield "more remote experts than slots"
    for r in range(ranks):
        listed = made.replicas[r][made.replicas[r] >= 0].tolist()
        if listed != remote[r].nonzero().flatten().tolist():
            yield "replicas does not list the remote experts in ascending order"
            break
    if (made.replicas[:, :-1] < 0).logical_and(made.replicas[:, 1:] >= 0).any():
        yield "an idle slot before a used one"
    if torch.equal(counts.sum(0).view(ranks, local).sum(1), share) and remote.any():
        yield "rows moved although every home has its share"


def segment_violations(made: Plan, layout: Segments, align: int) -> Iterator[str]:
    """Law 8: padded ends."""
    padded = layout.ends.diff(dim=1, prepend=torch.zeros(made.ranks, 1, dtype=torch.int64))
    if (padded < 0).any() or (layout.ends % align).any():
        yield "ends not monotone multiples of align"
    if ((padded - layout.rows < 0) | (padded - layout.rows >= align)).any():
        yield "padding of a segment outside 0..align-1"
    if (layout.ends[:, -1] > capacity(int(made.rows.max()), made.local, made.slots, align)).any():
        yield "rows beyond the buffer"
    if not torch.equal(layout.rows.sum(1), made.rows):
        yield "segments do not hold the rows of the plan"


def route_violations(case: Case, made: Plan, layout: Segments, routes: list[Route], align: int) -> Iterator[str]:
    """Laws 9, 10, 12, 13: every entry has its own row, in a segment of its expert; chains link its token on a host."""
    size = capacity(int(made.rows.max()), made.local, made.slots, align)
    owner = torch.full((made.ranks, size), -1)
    own = torch.arange(made.experts).view(made.ranks, made.local)
    for r in range(made.ranks):
        starts = layout.ends[r] - (layout.rows[r] + align - 1) // align * align
        for group, expert in enumerate(torch.cat([own[r], made.replicas[r]]).tolist()):
            owner[r, starts[group] : starts[group] + layout.rows[r, group]] = expert
    taken = torch.zeros_like(owner)
    for r, at in enumerate(routes):
        if not torch.equal(owner[at.host, at.slot], case.experts[r]):
            yield "an entry outside a segment of its expert"
        taken.index_put_((at.host, at.slot), torch.tensor(1), accumulate=True)
        yield from chain_violations(at)
        local = torch.bincount(case.experts[r][at.host == r].flatten(), minlength=made.experts)
        if not torch.equal(local, torch.minimum(made.counts[r], made.assigned[r])):
            yield "a source that sends away rows it could keep"
    if not torch.equal(taken, (owner >= 0).long()):
        yield "addresses are not a bijection onto the rows"


def chain_violations(at: Route) -> Iterator[str]:
    for hosts, slots, parents, follows in zip(*(t.tolist() for t in (at.host, at.slot, at.parent, at.next))):
        for host in set(hosts):
            here = [k for k, h in enumerate(hosts) if h == host]
            chain = [slots[k] for k in here]
            if [parents[k] for k in here] != chain[:1] * len(chain):
                yield "a parent that is not the token's first entry on the host"
            if [follows[k] for k in here] != [*chain[1:], -1]:
                yield "a chain that does not link the token's entries in order"


def case_violations(case: Case, align: int) -> list[str]:
    made = plan(case.counts)
    layout = segments(made, align)
    routes = [route(made, layout, e, r) for r, e in enumerate(case.experts)]
    return [
        *plan_violations(made),
        *segment_violations(made, layout, align),
        *route_violations(case, made, layout, routes, align),
    ]
