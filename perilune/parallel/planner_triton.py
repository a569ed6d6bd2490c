"""The plan in one Triton kernel of one CTA, equal bit for bit to `planner.plan_reference` (report §5.2.1, appendix E).

Everything is an integer and lives in registers: the rows each home still has of its experts, one number a rank for
balances and lacks, and the list of copies so far. The host reads nothing; every rank runs the kernel on the same counts
and has the same plan. A second small kernel, one program a rank, lists the replicas and lays out the segments
(`routes.segments`).
Legend: R ranks, L = E/R experts at home, B slots; RP, LP, CP, EP, GP powers of two for R, L, copies, E, L + B.
"""

# Kernel arguments are pointers and constants of the Triton language.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.parallel.planner import Plan
from perilune.parallel.routes import Segments


@triton.jit
def _first_max(x, index, none: tl.constexpr):
    """Largest value of a vector and the smallest index that has it."""
    best = tl.max(x, 0)
    return best, tl.min(tl.where(x == best, index, none), 0)


@triton.jit
def _pick(x, index, at):
    return tl.sum(tl.where(index == at, x, 0), 0)


@triton.jit
def _fullest(kept_RL, row, col, home, LP: tl.constexpr):
    """Rows of the fullest expert of a home and its place there, the smallest of a tie."""
    mine = tl.max(tl.where(row == home, kept_RL, -1), 0)
    return _first_max(mine, tl.max(tl.where(row == home, col, -1), 0), LP)


@triton.jit
def _plan_kernel(
    counts, assigned, quotas, tolerance,
    R: tl.constexpr, L: tl.constexpr, B: tl.constexpr, RP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr,
    TOLERATE: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = R * L
    rank, copy = tl.arange(0, RP), tl.arange(0, CP)
    row, col = rank[:, None], tl.arange(0, LP)[None, :]
    own = (row < R) & (col < L)
    expert = row * L + col

    kept = tl.zeros((RP, LP), tl.int64)
    for r in range(R):
        kept += tl.load(counts + r * E + expert, own, 0)
        tl.store(assigned + r * E + expert, tl.zeros((RP, LP), tl.int64), own)
    load = tl.sum(kept, 1)
    total = tl.sum(load, 0)
    share = tl.where(rank < R, total // R + (rank < total % R).to(tl.int64), 0)
    balance = load - share

    place = tl.zeros((CP,), tl.int64)  # receiver * E + expert of each copy
    rows = tl.zeros((CP,), tl.int64)
    got = tl.zeros((RP,), tl.int64)
    n = 0
    if B == L:
        # Ranks: the fullest gives the emptiest exactly what it lacks.
        lack = tl.zeros((RP,), tl.int64)
        giver = tl.zeros((RP,), tl.int32)
        most, home = _first_max(balance, rank, RP)
        while most > 0:
            least, receiver = _first_max(-balance, rank, RP)
            lack = tl.where(rank == receiver, least, lack)
            giver = tl.where(rank == receiver, home, giver)
            balance = tl.where(rank == home, balance - least, tl.where(rank == receiver, 0, balance))
            most, home = _first_max(balance, rank, RP)
        # Experts: homes are independent, so the largest lack of all is also the largest of its own home.
        most, receiver = _first_max(lack, rank, RP)
        while most > 0:
            home = _pick(giver, rank, receiver)
            full, e = _fullest(kept, row, col, home, LP)
            take = tl.minimum(most, full)
            kept -= tl.where((row == home) & (col == e), take, 0)
            lack -= tl.where(rank == receiver, take, 0)
            got += tl.where(rank == receiver, take, 0)
            place = tl.where(copy == n, receiver * E + home * L + e, place)
            rows = tl.where(copy == n, take, rows)
            n += 1
            most, receiver = _first_max(lack, rank, RP)
    else:
        # Few slots: one expert at a time from the fullest home to the emptiest rank with a slot left.
        used = tl.zeros((RP,), tl.int32)
        take = total
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
        never: tl.constexpr = 1 << 62
        slack = share + tolerance - tl.sum(kept, 1) - got
        for home in range(R):
            room = _pick(slack, rank, home)
            key = tl.where((rows > 0) & (place % E // L == home), rows * (R * E) + place, never)
            smallest = tl.min(key, 0)
            while smallest // (R * E) <= room:  # `never` is larger than any room
                take = smallest // (R * E)
                kept += tl.where((row == home) & (col == smallest % E - home * L), take, 0)
                rows = tl.where(key == smallest, 0, rows)
                room -= take
                key = tl.where(key == smallest, never, key)
                smallest = tl.min(key, 0)

    tl.debug_barrier()  # the zeros above lie under the rows below
    tl.store(assigned + row * E + expert, kept, own)
    tl.store(assigned + place, rows, rows > 0)
    tl.atomic_add(quotas + (place % E // L) * R + place // E, rows, rows > 0)


@triton.jit
def _segments_kernel(
    assigned, replicas, total_R, starts, ends, used, align,
    R: tl.constexpr, L: tl.constexpr, B: tl.constexpr, EP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One rank: its replicas in ascending order, and where each of its segments begins and ends."""
    E: tl.constexpr = R * L
    G: tl.constexpr = L + B
    rank = tl.program_id(0)
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
    # Scatter of starts, by group: own experts first, then the replicas just listed.
    replica = tl.load(replicas + rank * B + g - L, (g >= L) & (g < G), -1)
    expert = tl.where(g < L, rank * L + g, replica)
    tl.store(starts + rank * E + e, -1, e < E)
    tl.debug_barrier()
    tl.store(starts + rank * E + expert, end - padded, (g < G) & (expert >= 0))


def plan_triton(counts: Tensor, slots: int, tolerance: int) -> Plan:
    """`planner.plan` on the device; nothing is read by the host."""
    return plan_segments_triton(counts, slots, tolerance, align=1)[0]


def plan_segments_triton(counts: Tensor, slots: int, tolerance: int, align: int) -> tuple[Plan, Segments]:
    """The plan and its padded segments, two launches. counts: integer [R, E] on the device. Total below 2^31."""
    R, E = counts.shape
    L, on = E // R, counts.device
    counts = counts.long().contiguous()
    assigned, starts = (torch.empty(R, E, dtype=torch.int64, device=on) for _ in range(2))
    ends, used = (torch.empty(R, L + slots, dtype=torch.int64, device=on) for _ in range(2))
    replicas = torch.empty(R, slots, dtype=torch.int64, device=on)
    rows = torch.empty(R, dtype=torch.int64, device=on)
    quotas = torch.zeros(R, R, dtype=torch.int64, device=on)
    up = triton.next_power_of_2
    copies = min(R * slots, R - 1 + E) if slots else 1
    _plan_kernel[(1,)](
        counts, assigned, quotas, tolerance,
        R=R, L=L, B=slots, RP=up(R), LP=up(L), CP=up(max(copies, 1)), TOLERATE=tolerance > 0, num_warps=4,
    )  # fmt: skip
    _segments_kernel[(R,)](
        assigned, replicas, rows, starts, ends, used, align,
        R=R, L=L, B=slots, EP=up(E), GP=up(L + slots), num_warps=4,
    )  # fmt: skip
    return Plan(counts, assigned, replicas, rows, quotas), Segments(starts, ends, used)
