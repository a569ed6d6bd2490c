"""The balanced plan: which rank executes how many rows of which expert (report §5.2.1, appendix E).

`counts[R, E]` says how many rows each source rank routes to each expert; expert e is at home on rank e // (E/R). The
plan gives every rank exactly its share of the rows, and no rank more than E/R experts from elsewhere:

    1. ranks.    b_h = (rows of the experts at home on h) − (share of h).  While some b_h > 0: the largest b gives the
                 smallest b exactly what it lacks.  A rank is filled once, whole, by one other rank, which has E/R
                 experts: that is the bound (theorem 1).  The giver may fall below its share and be filled later.
    2. experts.  Inside one home: the receiver still lacking most takes from the expert with most rows left.

Ties go to the smallest rank and the smallest expert, so the plan is a pure function of `counts` and every rank computes
the same one. This file is the reference, in exact Python integers; `planner_triton` is the same plan in one kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from perilune.parallel.tables import Plan, occurrence

log = logging.getLogger(__name__)


def plan(counts: Tensor, *, num_slots: int | None = None, tolerance: int = 0, impl: str = "auto") -> Plan:
    """Plan one exchange from the global counts. Pure, exact, deterministic.

    counts: integer [R, E], E divisible by R, total below 2^31. Ranks may bring different numbers of rows, none
        included: the share of rank r is total // R, and one more for the first total % R ranks.
    num_slots: remote experts a rank may hold (B). None: E/R, which always suffices. Fewer (inference): what finds no
        slot stays at home, and `rows` says how uneven the result is; 0 is the classic placement.
    tolerance: rows that a home may keep above its share to spare copies; the smallest are spared first. 0: exact
        balance.
    impl: "reference" (host integers; reads `counts`), "triton" (one kernel, nothing read by the host), or "auto".
    Raises ValueError on shapes, dtypes, slots or tolerances that make no sense (values only where counts lie on the
    CPU).
    """
    slots = _checked(counts, num_slots, tolerance)
    return _implementation(impl, counts.device.type)(counts, slots, tolerance)


def _checked(counts: Tensor, num_slots: int | None, tolerance: int) -> int:
    if counts.dim() != 2 or counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise ValueError(f"counts: need an integer tensor [ranks, experts], got {counts.dtype} {tuple(counts.shape)}")
    ranks, experts = counts.shape
    if ranks == 0 or experts == 0 or experts % ranks:
        raise ValueError(f"counts: {experts} experts cannot be divided over {ranks} ranks")
    if counts.device.type == "cpu" and int(counts.min()) < 0:
        raise ValueError("counts: a number of rows is negative")
    slots = experts // ranks if num_slots is None else num_slots
    if not 0 <= slots <= experts // ranks:
        raise ValueError(f"num_slots: {slots} is outside 0..{experts // ranks} (experts / ranks)")
    if tolerance < 0:
        raise ValueError(f"tolerance: {tolerance} is negative")
    return slots


_chosen: set[tuple[str, str]] = set()


def _implementation(impl: str, device: str) -> Callable[[Tensor, int, int], Plan]:
    picked = impl if impl != "auto" else "triton" if device == "cuda" else "reference"
    if impl == "auto" and (device, picked) not in _chosen:
        _chosen.add((device, picked))
        log.info("plan: %s on %s", picked, device)
    if picked == "reference":
        return plan_reference
    if picked == "triton":
        from perilune.parallel.planner_triton import plan_triton  # Triton is absent from CPU installs

        return plan_triton
    raise ValueError(f"impl: {impl!r} is none of 'auto', 'reference', 'triton'")


def plan_reference(counts: Tensor, slots: int, tolerance: int) -> Plan:
    """`plan` in exact integers on the host; a few milliseconds at R=128, E=896."""
    ranks, experts = counts.shape
    local = experts // ranks
    totals = counts.sum(0).tolist()
    kept = [totals[h * local : (h + 1) * local] for h in range(ranks)]  # kept[h][j]: rows of expert h·E/R + j at home
    shares = _shares(sum(totals), ranks)
    balance = [sum(kept[h]) - shares[h] for h in range(ranks)]
    if slots < local:
        copies = fill_slots(balance, kept, slots)
    else:
        fills = fill_ranks(balance)
        copies = [copy for home in range(ranks) for copy in lend_experts(home, kept[home], fills[home])]
    if tolerance:
        copies = _without_small(copies, kept, shares, tolerance)
    return _plan_of(counts, kept, copies, slots)


def _shares(total: int, ranks: int) -> list[int]:
    return [total // ranks + (r < total % ranks) for r in range(ranks)]


def fill_ranks(balance: list[int]) -> list[dict[int, int]]:
    """Group level: for each giver, {receiver: rows}; at most R − 1 receivers. `balance` sums to zero, is used up."""
    fills: list[dict[int, int]] = [{} for _ in balance]
    while (most := max(balance)) > 0:
        giver, receiver = balance.index(most), balance.index(min(balance))  # index: the smallest rank of a tie
        fills[giver][receiver] = -balance[receiver]
        balance[giver] += balance[receiver]
        balance[receiver] = 0
    return fills


Copy = tuple[int, int, int, int]  # home, expert within home, receiver, rows


def lend_experts(home: int, kept: list[int], lacks: dict[int, int]) -> list[Copy]:
    """Expert level of one home: its copies; `kept` is left with the rows that stay."""
    lacks = dict(sorted(lacks.items()))
    copies: list[Copy] = []
    while any(lacks.values()):
        receiver = max(lacks, key=lacks.__getitem__)  # the first maximum: the smallest rank
        expert = kept.index(max(kept))
        rows = min(lacks[receiver], kept[expert])
        copies.append((home, expert, receiver, rows))
        kept[expert] -= rows
        lacks[receiver] -= rows
    return copies


def fill_slots(balance: list[int], kept: list[list[int]], slots: int) -> list[Copy]:
    """Fewer slots than E/R: the fullest home gives its fullest expert to the emptiest rank that has a slot left.

    Nobody gives below its share or receives above it, so no rank ends with more than it would have at home.
    """
    room = [slots] * len(balance)
    copies: list[Copy] = []
    while True:
        home = balance.index(max(balance))
        lacks = [min(b, 0) if free else 0 for b, free in zip(balance, room)]
        receiver = lacks.index(min(lacks))
        expert = kept[home].index(max(kept[home]))
        rows = min(balance[home], -lacks[receiver], kept[home][expert])
        if rows <= 0:
            return copies
        copies.append((home, expert, receiver, rows))
        kept[home][expert] -= rows
        balance[home] -= rows
        balance[receiver] += rows
        room[receiver] -= 1


def _without_small(copies: list[Copy], kept: list[list[int]], shares: list[int], tolerance: int) -> list[Copy]:
    """Take back the smallest copies of each home while it stays within share + tolerance.

    `slack` counts against everything the rank executes: what it keeps and what it borrows.
    """
    slack = [shares[r] + tolerance - sum(kept[r]) for r in range(len(kept))]
    for _, _, receiver, rows in copies:
        slack[receiver] -= rows
    remaining = []
    for home, expert, receiver, rows in sorted(copies, key=lambda c: (c[0], c[3], c[2], c[1])):
        if rows <= slack[home]:
            slack[home] -= rows
            kept[home][expert] += rows
        else:
            slack[home] = 0  # later ones are no smaller
            remaining.append((home, expert, receiver, rows))
    return remaining


def _plan_of(counts: Tensor, kept: list[list[int]], copies: list[Copy], slots: int) -> Plan:
    ranks, experts = counts.shape
    local = experts // ranks
    home, expert, receiver, rows = torch.tensor(sorted(copies), dtype=torch.int64).reshape(-1, 4).unbind(1)
    own = torch.arange(ranks)
    assigned = torch.zeros(ranks, experts, dtype=torch.int64)
    assigned.view(ranks, ranks, local)[own, own] = torch.tensor(kept)
    assigned[receiver, home * local + expert] = rows
    quotas = torch.zeros(ranks, ranks, dtype=torch.int64).index_put_((home, receiver), rows, accumulate=True)
    replicas = torch.full((ranks, slots), -1, dtype=torch.int64)
    replicas[receiver, occurrence(receiver)] = home * local + expert  # sorted: ascending ids within a receiver
    on = counts.device
    return Plan(counts.long(), assigned.to(on), replicas.to(on), assigned.sum(1).to(on), quotas.to(on))
