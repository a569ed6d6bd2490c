"""The plan in one Triton kernel, equal bit for bit to `planner.plan_reference` (report §5.2.1, appendix E).

Program r makes everything that concerns rank r: its row of the plan, its replicas, its segments (`routes.segments`).
No program waits for another: each runs the rank level, a number a rank in registers; and since a rank is filled by one
other, its row of the expert level needs two homes only, its own and its giver's. The host reads nothing.
With fewer slots than E/R there are many givers, and every program runs the whole greedy.
Legend: R ranks, L = E/R experts at home, B slots; RP, LP, CP, EP, GP powers of two for R, L, copies, E, L + B.
"""

# Kernel arguments are pointers and constants of the Triton language.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.parallel.tables import Plan, Segments

_NEVER = tl.constexpr(1 << 62)


@triton.jit
def _first_max(x, index, P: tl.constexpr):
    """Largest value of a vector, or 0, and the smallest index that has it. index < P: one reduction finds both."""
    best = tl.max(tl.maximum(x, 0) * P + (P - 1 - index), 0)
    return best // P, P - 1 - best % P


@triton.jit
def _pick(x, index, at):
    return tl.sum(tl.where(index == at, x, 0), 0)


@triton.jit
def _loads(counts, R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, RB: tl.constexpr):
    """Rows of the experts at home on each rank [RP], RB sources at a time."""
    rank, col = tl.arange(0, RP)[None, :, None], tl.arange(0, LP)[None, None, :]
    load = tl.zeros((RP,), tl.int64)
    for first in range(0, R, RB):
        source = first + tl.arange(0, RB)[:, None, None]
        part = tl.load(counts + source * (R * L) + rank * L + col, (source < R) & (rank < R) & (col < L), 0)
        load += tl.sum(tl.sum(part, 0), 1)
    return load


@triton.jit
def _fill_ranks(balance, rank, RP: tl.constexpr):
    """Rank level: what each rank gets, and from whom. The fullest gives the emptiest exactly what it lacks."""
    lack = tl.zeros((RP,), tl.int64)
    giver = tl.zeros((RP,), tl.int64)
    most, home = _first_max(balance, rank, RP)
    while most > 0:
        least, receiver = _first_max(-balance, rank, RP)
        lack = tl.where(rank == receiver, least, lack)
        giver = tl.where(rank == receiver, home, giver)
        balance = tl.where(rank == home, balance - least, tl.where(rank == receiver, 0, balance))
        most, home = _first_max(balance, rank, RP)
    return lack, giver


@triton.jit
def _lend(
    counts, home, lack, slack, me,
    R: tl.constexpr, L: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, TOLERATE: tl.constexpr,
):  # fmt: skip
    """Expert level of one home: rows that stay [LP], rows of each expert that go to `me` [LP], rows to each rank [RP].

    lack: what its receivers get. slack: rows that it may keep above its share, which the rank level leaves it exactly.
    """
    rank, col, copy = tl.arange(0, RP), tl.arange(0, LP), tl.arange(0, CP)
    inside = (rank[:, None] < R) & (col[None, :] < L)
    kept = tl.sum(tl.load(counts + rank[:, None] * (R * L) + home * L + col[None, :], inside, 0), 0)
    to_me = tl.zeros((LP,), tl.int64)
    sent, slack = lack, slack.to(tl.int64)
    place = tl.zeros((CP,), tl.int64)  # receiver * L + expert of each copy
    rows = tl.zeros((CP,), tl.int64)
    n = 0
    most, receiver = _first_max(lack, rank, RP)
    while most > 0:
        full, e = _first_max(kept, col, LP)
        take = tl.minimum(most, full)
        kept -= tl.where(col == e, take, 0)
        lack -= tl.where(rank == receiver, take, 0)
        to_me += tl.where((col == e) & (receiver == me), take, 0)
        if TOLERATE:
            place = tl.where(copy == n, receiver * L + e, place)
            rows = tl.where(copy == n, take, rows)
            n += 1
        most, receiver = _first_max(lack, rank, RP)
    if TOLERATE:
        key = tl.where(rows > 0, rows * (R * L) + place, _NEVER)
        smallest = tl.min(key, 0)
        while smallest // (R * L) <= slack:  # `_NEVER` is larger than any slack
            take = smallest // (R * L)
            back = tl.where(col == smallest % L, take, 0)
            receiver = smallest % (R * L) // L
            kept += back
            to_me -= tl.where(receiver == me, back, 0)
            sent -= tl.where(rank == receiver, take, 0)
            slack -= take
            key = tl.where(key == smallest, _NEVER, key)
            smallest = tl.min(key, 0)
    return kept, to_me, sent


@triton.jit
def _fullest(kept_RL, row, col, home, LP: tl.constexpr):
    """Rows of the fullest expert of a home and its place there, the smallest of a tie."""
    mine = tl.max(tl.where(row == home, kept_RL, -1), 0)
    return _first_max(mine, tl.max(tl.where(row == home, col, -1), 0), LP)


@triton.jit
def _fill_slots(
    counts, assigned, balance, share, tolerance, me,
    R: tl.constexpr, L: tl.constexpr, B: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
    TOLERATE: tl.constexpr,
):  # fmt: skip
    """Few slots: one expert at a time from the fullest home to the emptiest rank with a slot left.

    Stores the rows of `me`; returns what it sends to each rank [RP].
    """
    E: tl.constexpr = R * L
    rank, copy = tl.arange(0, RP), tl.arange(0, CP)
    row, col = rank[:, None], tl.arange(0, LP)[None, :]
    own = (row < R) & (col < L)
    kept = tl.zeros((RP, LP), tl.int64)
    for r in range(R):
        kept += tl.load(counts + r * E + row * L + col, own, 0)
    place = tl.zeros((CP,), tl.int64)  # receiver * E + expert of each copy
    rows = tl.zeros((CP,), tl.int64)
    got = tl.zeros((RP,), tl.int64)
    used = tl.zeros((RP,), tl.int32)
    n = 0
    take = tl.sum(balance * 0, 0) + 1
    while take > 0:
        most, home = _first_max(balance, rank, RP)
        lack = tl.where((used < B) & (rank < R), tl.maximum(-balance, 0), 0)
        most_lacking, receiver = _first_max(lack, rank, RP)
        full, e = _fullest(kept, row, col, home, LP)
        take = tl.minimum(tl.minimum(most, most_lacking), full)
        kept -= tl.where((row == home) & (col == e), take, 0)
        balance += tl.where(rank == receiver, take, 0) - tl.where(rank == home, take, 0)
        got += tl.where(rank == receiver, take, 0)
        used += tl.where((rank == receiver) & (take > 0), 1, 0)
        place = tl.where((copy == n) & (take > 0), receiver * E + home * L + e, place)
        rows = tl.where(copy == n, take, rows)
        n += tl.where(take > 0, 1, 0)
    if TOLERATE:
        slack = share + tolerance - tl.sum(kept, 1) - got
        for home in range(R):
            room = _pick(slack, rank, home)
            key = tl.where((rows > 0) & (place % E // L == home), rows * (R * E) + place, _NEVER)
            smallest = tl.min(key, 0)
            while smallest // (R * E) <= room:
                take = smallest // (R * E)
                kept += tl.where((row == home) & (col == smallest % E - home * L), take, 0)
                rows = tl.where(key == smallest, 0, rows)
                room -= take
                key = tl.where(key == smallest, _NEVER, key)
                smallest = tl.min(key, 0)
    tl.store(assigned + row * E + row * L + col, kept, own & (row == me))
    tl.store(assigned + place, rows, (rows > 0) & (place // E == me))
    to = (rank[:, None] == (place // E)[None, :]) & (place % E // L == me)[None, :]
    return tl.sum(tl.where(to, rows[None, :], 0), 1)


@triton.jit
def _segments(
    assigned, replicas, total_R, starts, ends, used, offsets, align, rank, mine, buffer_rows,
    R: tl.constexpr, L: tl.constexpr, B: tl.constexpr, EP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One rank: its replicas in ascending order, and where each of its segments begins and ends."""
    E: tl.constexpr = R * L
    G: tl.constexpr = L + B
    e, g = tl.arange(0, EP), tl.arange(0, GP)
    rows = tl.load(assigned + rank * E + e, e < E, 0)
    tl.store(total_R + rank, tl.sum(rows, 0))
    home = e // L == rank
    remote = (rows > 0) & (home == 0) & (e < E)
    group = tl.where(home, e - rank * L, L + tl.cumsum(remote.to(tl.int32), 0) - 1)  # where the expert's segment lies
    listed = (home | remote) & (e < E)
    tl.store(replicas + rank * B + g, -1, g < B)
    tl.store(used + rank * G + g, 0, g < G)
    tl.debug_barrier()
    tl.store(replicas + rank * B + group - L, e, remote)
    tl.store(used + rank * G + group, rows, listed)
    tl.debug_barrier()
    padded = (tl.load(used + rank * G + g, g < G, 0) + align - 1) // align * align
    end = tl.cumsum(padded, 0)
    tl.store(ends + rank * G + g, end, g < G)
    if rank == mine:  # what grouped products take: the last group ends with the buffer
        tl.store(offsets + g, tl.where(g == G - 1, buffer_rows, end).to(tl.int32), g < G)
    # Scatter of starts, by group: own experts first, then the replicas just listed.
    replica = tl.load(replicas + rank * B + g - L, (g >= L) & (g < G), -1)
    expert = tl.where(g < L, rank * L + g, replica)
    tl.store(starts + rank * E + e, -1, e < E)
    tl.debug_barrier()
    tl.store(starts + rank * E + expert, end - padded, (g < G) & (expert >= 0))


@triton.jit(do_not_specialize=["mine", "buffer_rows", "tolerance"])
def plan_kernel(
    counts, copied, assigned, quotas, replicas, total_R, starts, ends, used, offsets,
    tolerance, align, mine, buffer_rows,
    R: tl.constexpr, L: tl.constexpr, B: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
    EP: tl.constexpr, GP: tl.constexpr, RB: tl.constexpr, TOLERATE: tl.constexpr,
):  # fmt: skip
    """The plan and the segments of rank program_id(0). copied: its row of the counts goes there too."""
    E: tl.constexpr = R * L
    me = tl.program_id(0)
    rank, col, e = tl.arange(0, RP), tl.arange(0, LP), tl.arange(0, EP)
    tl.store(copied + me * E + e, tl.load(counts + me * E + e, e < E), e < E)
    tl.store(assigned + me * E + e, tl.zeros((EP,), tl.int64), e < E)
    load = _loads(counts, R, L, RP, LP, RB)
    total = tl.sum(load, 0)
    share = tl.where(rank < R, total // R + (rank < total % R).to(tl.int64), 0)
    tl.debug_barrier()  # the zeros above lie under the rows below
    if B == L:
        lack, giver = _fill_ranks(load - share, rank, RP)
        mine_lack = tl.where(giver == me, lack, 0)
        kept, _own, sent = _lend(counts, me, mine_lack, tolerance, me, R, L, RP, LP, CP, TOLERATE)
        tl.store(assigned + me * E + me * L + col, kept, col < L)
        if _pick(lack, rank, me) > 0:
            home = _pick(giver, rank, me)
            others = tl.where(giver == home, lack, 0)
            _kept, borrowed, _sent = _lend(counts, home, others, tolerance, me, R, L, RP, LP, CP, TOLERATE)
            tl.store(assigned + me * E + home * L + col, borrowed, col < L)
    else:
        sent = _fill_slots(counts, assigned, load - share, share, tolerance, me, R, L, B, RP, LP, CP, TOLERATE)
    tl.store(quotas + me * R + rank, sent, rank < R)
    tl.debug_barrier()
    _segments(assigned, replicas, total_R, starts, ends, used, offsets, align, me, mine, buffer_rows, R, L, B, EP, GP)


def plan_triton(counts: Tensor, slots: int, tolerance: int) -> Plan:
    """`planner.plan` on the device; nothing is read by the host."""
    return plan_segments_triton(counts.long().contiguous(), slots, tolerance, align=1)[0]


def plan_segments_triton(
    counts: Tensor, slots: int, tolerance: int, align: int, rank: int = 0, rows: int = 0
) -> tuple[Plan, Segments, Tensor]:
    """The plan, its padded segments, and the ends of `rank` for grouped products: int32 [G], `rows` as the last one.

    One launch. counts: int64 [R, E], contiguous, on the device; the plan has a copy. Total below 2^31.
    """
    R, E = counts.shape
    L, on, up = E // R, counts.device, triton.next_power_of_2
    copied, assigned, starts = torch.empty(3, R, E, dtype=torch.int64, device=on).unbind(0)
    ends, used = torch.empty(2, R, L + slots, dtype=torch.int64, device=on).unbind(0)
    replicas = torch.empty(R, slots, dtype=torch.int64, device=on)
    total = torch.empty(R, dtype=torch.int64, device=on)
    quotas = torch.empty(R, R, dtype=torch.int64, device=on)
    offsets = torch.empty(L + slots, dtype=torch.int32, device=on)
    copies = R + L if slots == L else min(R * slots, R - 1 + E)
    plan_kernel[(R,)](
        counts, copied, assigned, quotas, replicas, total, starts, ends, used, offsets, tolerance, align, rank, rows,
        R=R, L=L, B=slots, RP=up(R), LP=up(L), CP=up(max(copies, 1)), EP=up(E), GP=up(L + slots),
        RB=max(min(up(R), 2048 // (up(R) * up(L))), 1), TOLERATE=tolerance > 0, num_warps=4,
    )  # fmt: skip
    return Plan(copied, assigned, replicas, total, quotas), Segments(starts, ends, used), offsets
