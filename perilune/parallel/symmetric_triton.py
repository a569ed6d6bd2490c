"""Kernels of the symmetric fabric: peers are written and read through tables of addresses (report §5.2.1).

A table `peers` [R] int64 holds where the same buffer lies on every rank. Stores go to hosts, loads come from them;
between a store and the load that needs it lies one `barrier`. No multicast. Sums have the orders named in `fabric`.
Legend: S tokens, K routes (KP a power of two), R ranks, E experts, L at home, B slots (BP), H width, N rows of the
receive buffer, W words of one expert. host, slot, parent [S, K] and parent, next [N] are int32 and mean what they mean
in `routes`; LOCAL as a row's parent says that its own rank has filled it.

A rank's own tokens never go through shared buffers: `push` writes all their rows while those of others are on the wire,
and `pull` sums them while it waits for the others' sums.
"""

# Kernel arguments are pointers and constants of the Triton language.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LOCAL = tl.constexpr(-2)


@triton.jit
def _peer(peers, rank, like):
    """The peer's buffer, as a pointer to what `like` points to, 16-byte aligned."""
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["rank", "phase"])
def barrier_kernel(pads, mine, epoch, status, rank, phase, R: tl.constexpr, RP: tl.constexpr, LIMIT: tl.constexpr):
    """What any rank wrote before is visible after. pads [R]: addresses of int32 [R] on every rank; mine: this one's.

    A rank that does not come within LIMIT looks leaves status = (phase, its number, the epoch); nothing hangs.
    """
    now = tl.load(epoch) + 1
    lane = tl.arange(0, RP)
    there = lane < R
    theirs = tl.load(pads + lane, there, 0).to(tl.pointer_type(tl.int32)) + rank
    tl.atomic_xchg(theirs, now, there, sem="release", scope="sys")
    waiting = R
    looks = 0
    while (waiting > 0) & (looks < LIMIT):
        seen = tl.atomic_add(mine + lane, 0, there, sem="acquire", scope="sys")
        waiting = tl.sum((there & (seen - now < 0)).to(tl.int32), 0)
        looks += 1
    if waiting > 0:
        seen = tl.atomic_add(mine + lane, 0, there, sem="acquire", scope="sys")
        missing = tl.min(tl.where(there & (seen - now < 0), lane, RP), 0)
        tl.store(status, phase)
        tl.store(status + 1, missing)
        tl.store(status + 2, now)
    tl.store(epoch, now)


@triton.jit(do_not_specialize=["tokens"])
def count_kernel(experts, histogram, tokens, E, K: tl.constexpr, TB: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr):
    """Entries of each expert in this block of TB tokens: histogram [blocks, E]."""
    block = tl.program_id(0)
    e = tl.arange(0, EP)
    tl.store(histogram + block * E + e, tl.zeros((EP,), tl.int32), e < E)
    token, k = block * TB + tl.arange(0, TB), tl.arange(0, KP)
    inside = (token[:, None] < tokens) & (k[None, :] < K)
    expert = tl.load(experts + token[:, None] * K + k[None, :], inside, -1)
    tl.debug_barrier()  # the zeros lie under the counts
    tl.atomic_add(histogram + block * E + expert, 1, expert >= 0)


@triton.jit(do_not_specialize=["blocks", "rank"])
def announce_kernel(histogram, peers, like, blocks, rank, E, R: tl.constexpr, EB: tl.constexpr, BB: tl.constexpr):
    """My counts into row `rank` of every rank's counts [R, E] int64. The histogram becomes that of earlier blocks."""
    e = tl.program_id(0) * EB + tl.arange(0, EB)
    total = tl.zeros((EB,), tl.int32)
    for first in range(0, blocks, BB):
        b = first + tl.arange(0, BB)
        inside = (b[:, None] < blocks) & (e[None, :] < E)
        at = histogram + b[:, None] * E + e[None, :]
        seen = tl.load(at, inside, 0)
        tl.store(at, total[None, :] + tl.cumsum(seen, 0) - seen, inside)
        total += tl.sum(seen, 0)
    for r in range(R):
        tl.store(_peer(peers, r, like) + rank * E + e, total.to(tl.int64), e < E)


@triton.jit(do_not_specialize=["tokens", "rank"])
def route_kernel(
    experts, histogram, counts, assigned, starts, host_SK, slot_SK, parent_SK, next_SK, tokens, rank, E,
    K: tl.constexpr, R: tl.constexpr, TB: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """`routes.route` for one block of TB tokens: addresses from the global counts, then chains within each token."""
    BS: tl.constexpr = TB * KP
    block = tl.program_id(0)
    token, k = block * TB + tl.arange(0, TB), tl.arange(0, KP)
    at = token[:, None] * K + k[None, :]
    inside = (token[:, None] < tokens) & (k[None, :] < K)
    flat = tl.reshape(tl.load(experts + at, inside, -1), (BS,))
    expert = tl.maximum(flat, 0)

    i = tl.arange(0, BS)
    index = tl.sum(((flat[:, None] == flat[None, :]) & (i[None, :] < i[:, None])).to(tl.int64), 1)
    index += tl.load(histogram + block * E + expert)  # of the same expert in earlier blocks

    stays = tl.minimum(tl.load(counts + rank * E + expert), tl.load(assigned + rank * E + expert))
    spilled = index - stays
    for r in range(rank):
        sent = tl.load(counts + r * E + expert)
        spilled += sent - tl.minimum(sent, tl.load(assigned + r * E + expert))
    host = tl.where(index < stays, rank, -1)
    place = tl.where(index < stays, index, 0)
    upto = tl.zeros((BS,), tl.int64)
    for d in range(R):
        rows = tl.load(assigned + d * E + expert)
        kept = tl.minimum(tl.load(counts + d * E + expert), rows)
        before = upto
        upto += rows - kept
        here = (host < 0) & (spilled < upto)
        place = tl.where(here, kept + spilled - before, place)
        host = tl.where(here, d, host)
    slot = tl.load(starts + tl.maximum(host, 0) * E + expert) + place
    host = tl.reshape(tl.where(flat < 0, -1, host), (TB, KP)).to(tl.int32)
    slot = tl.reshape(tl.where(flat < 0, -1, slot), (TB, KP)).to(tl.int32)

    same = (host[:, :, None] == host[:, None, :]) & (host[:, :, None] >= 0)
    other = k[None, None, :]
    first_k = tl.min(tl.where(same, other, KP), 2)
    next_k = tl.min(tl.where(same & (other > k[None, :, None]), other, KP), 2)
    slots = slot[:, None, :]
    parent = tl.where(host < 0, -1, tl.sum(tl.where(other == first_k[:, :, None], slots, 0), 2))
    follows = tl.where(next_k == KP, -1, tl.sum(tl.where(other == next_k[:, :, None], slots, 0), 2))
    tl.store(host_SK + at, host, inside)
    tl.store(slot_SK + at, slot, inside)
    tl.store(parent_SK + at, parent.to(tl.int32), inside)
    tl.store(next_SK + at, follows.to(tl.int32), inside)


@triton.jit
def unused_kernel(ends, used, parent_N, PB: tl.constexpr):
    """parent = −1 for the padding after one group; the last one ends with the buffer. Nobody else writes there."""
    g = tl.program_id(0)
    first = tl.load(ends + g - 1, g > 0, 0) + tl.load(used + g).to(tl.int32)
    last = tl.load(ends + g)
    for at in range(first, last, PB):
        n = at + tl.arange(0, PB)
        tl.store(parent_N + n, -1, n < last)


@triton.jit(do_not_specialize=["rank"])
def push_kernel(
    x, scalars, host_SK, slot_SK, parent_SK, next_SK, inboxes, scalar_inboxes, parents, nexts, rows, row_scalars,
    rank, H, K: tl.constexpr, BH: tl.constexpr, SCALARS: tl.constexpr, LINKS: tl.constexpr,
):  # fmt: skip
    """One token: its row to every other host that has an entry of it, and to all rows of the entries that stay here;
    numbers and links of every entry."""
    s, part = tl.program_id(0), tl.program_id(1)
    col = part * BH + tl.arange(0, BH)
    row = tl.load(x + s.to(tl.int64) * H + col, col < H)
    for k in range(K):
        host = tl.load(host_SK + s * K + k)
        if host >= 0:
            slot = tl.load(slot_SK + s * K + k).to(tl.int64)
            parent = tl.load(parent_SK + s * K + k)
            if host == rank:
                tl.store(rows + slot * H + col, row, col < H)
            elif parent == slot:
                tl.store(_peer(inboxes, host, x) + slot * H + col, row, col < H)
            if part == 0:
                if SCALARS:
                    number = tl.load(scalars + s * K + k)
                    if host == rank:
                        tl.store(row_scalars + slot, number)
                    else:
                        tl.store(_peer(scalar_inboxes, host, scalars) + slot, number)
                if LINKS:
                    tl.store(_peer(parents, host, parent_SK) + slot, tl.where(host == rank, LOCAL, parent))
                    tl.store(_peer(nexts, host, next_SK) + slot, tl.load(next_SK + s * K + k))


@triton.jit
def expand_kernel(
    inbox, scalar_inbox, parent_N, rows, scalars, N, H, BN: tl.constexpr, BH: tl.constexpr, SCALARS: tl.constexpr
):
    """rows[n] = inbox[parent[n]] where another rank's token lies, zero where nothing does; BN rows."""
    n, part = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN), tl.program_id(1)
    parent = tl.load(parent_N + n, n < N, LOCAL).to(tl.int64)
    here = parent != LOCAL
    if tl.max(here.to(tl.int32), 0) > 0:
        col = part * BH + tl.arange(0, BH)[None, :]
        row = tl.load(inbox + parent[:, None] * H + col, (col < H) & (parent >= 0)[:, None], 0)
        tl.store(rows + n[:, None] * H + col, row, (col < H) & here[:, None])
        if SCALARS:  # noqa: SIM102  (one is known when compiling, the other is not)
            if part == 0:
                tl.store(scalars + n, tl.load(scalar_inbox + n, parent >= 0, 0), here)


@triton.jit
def fold_kernel(rows, parent_N, next_N, outbox, H, BH: tl.constexpr, WIDE: tl.constexpr):
    """outbox[n] = Σ of the chain that begins at n, in order, rounded once, for another rank's token."""
    n = tl.program_id(0).to(tl.int64)
    if tl.load(parent_N + n) == n:
        follows = tl.load(next_N + n).to(tl.int64)
        for first in range(0, H, BH):
            col = first + tl.arange(0, BH)
            total = tl.load(rows + n * H + col, col < H, 0).to(WIDE)
            link = follows
            while link >= 0:
                after = tl.load(next_N + link).to(tl.int64)
                total += tl.load(rows + link * H + col, col < H, 0).to(WIDE)
                link = after
            tl.store(outbox + n * H + col, total.to(outbox.dtype.element_ty), col < H)


@triton.jit(do_not_specialize=["rank"])
def pull_kernel(
    y, scalars, rows, row_scalars, host_SK, slot_SK, parent_SK, outboxes, scalar_outboxes, rank, H,
    K: tl.constexpr, BH: tl.constexpr, WIDE: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    """One token: the sum of its hosts' sums, in ascending k, this rank's own made here; and each entry's number.

    The own sum is added where the token's first own entry stands: entries are chained, one payload a token and host.
    """
    s, part = tl.program_id(0), tl.program_id(1)
    col = part * BH + tl.arange(0, BH)
    mine = tl.zeros((BH,), WIDE)
    for k in tl.static_range(K):
        here = tl.load(host_SK + s * K + k) == rank
        slot = tl.load(slot_SK + s * K + k).to(tl.int64)
        mine += tl.load(rows + slot * H + col, (col < H) & here, 0).to(WIDE)
    mine = mine.to(y.dtype.element_ty).to(WIDE)  # rounded once, as every host's sum is
    total = tl.zeros((BH,), WIDE)
    for k in range(K):
        host = tl.load(host_SK + s * K + k)
        slot = tl.load(slot_SK + s * K + k).to(tl.int64)
        number = 0.0
        if host >= 0:
            if tl.load(parent_SK + s * K + k) == slot:
                if host == rank:
                    total += mine
                else:
                    total += tl.load(_peer(outboxes, host, y) + slot * H + col, col < H, 0).to(WIDE)
            if SCALARS:
                if host == rank:
                    number = tl.load(row_scalars + slot)
                else:
                    number = tl.load(_peer(scalar_outboxes, host, scalars) + slot)
        if SCALARS:  # noqa: SIM102
            if part == 0:
                tl.store(scalars + s * K + k, number)
    tl.store(y + s.to(tl.int64) * H + col, total.to(y.dtype.element_ty), col < H)


@triton.jit
def _slot_of(replicas, rank, expert, B: tl.constexpr, BP: tl.constexpr):
    """Where `rank` holds a borrowed expert; −1: nowhere."""
    b = tl.arange(0, BP)
    held = tl.load(replicas + rank * B + b, b < B, -1)
    return tl.max(tl.where(held == expert, b, -1), 0).to(tl.int64)


@triton.jit
def _loans(replicas, rank, borrower, L: tl.constexpr, B: tl.constexpr, BP: tl.constexpr):
    """The experts in the slots of `borrower` [BP], and in which of them lie experts at home on `rank`: 0 or 1."""
    b = tl.arange(0, BP)
    held = tl.load(replicas + borrower * B + b, b < B, -1)
    return b, held, ((held >= rank * L) & (held < rank * L + L)).to(tl.int32)


@triton.jit
def _first_loan(b, held, mine, rank, L: tl.constexpr, BP: tl.constexpr):
    """The first of these slots and which expert of the home it holds."""
    slot = tl.min(tl.where(mine > 0, b, BP), 0).to(tl.int64)
    return slot, tl.sum(tl.where(b == slot, held, 0), 0) - rank * L


@triton.jit(do_not_specialize=["rank"])
def lend_kernel(
    own, replicas, pools, rank, W, L: tl.constexpr, R: tl.constexpr, B: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr
):
    """This rank's lent experts to the slots of their borrowers, in words of 8 bytes: all programs on one, then the
    next. Experts that stay at home cost nothing."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    for d in range(R):
        b, held, mine = _loans(replicas, rank, d, L, B, BP)
        while tl.sum(mine, 0) > 0:
            slot, e = _first_loan(b, held, mine, rank, L, BP)
            pool = _peer(pools, d, own)
            for tile in range(part, tl.cdiv(W, BW), parts):
                w = tile * BW + tl.arange(0, BW)
                tl.store(pool + slot * W + w, tl.load(own + e * W + w, w < W), w < W)
            mine = tl.where(b == slot, 0, mine)


@triton.jit(do_not_specialize=["rank"])
def stage_kernel(grad, replicas, shared, rank, W, B: tl.constexpr, BW: tl.constexpr):
    """Gradients of used slots into the shared buffer that their homes read."""
    slot, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(replicas + rank * B + slot) >= 0:
        for tile in range(part, tl.cdiv(W, BW), parts):
            w = tile * BW + tl.arange(0, BW)
            tl.store(shared + slot * W + w, tl.load(grad + slot * W + w, w < W), w < W)


@triton.jit(do_not_specialize=["rank"])
def give_back_kernel(
    home, replicas, shared, rank, W, L: tl.constexpr, R: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    BW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of this rank's lent experts += those of their borrowers, by ascending rank, rounded once. An expert's
    turn comes with its first borrower."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    for d in range(R):
        b, held, mine = _loans(replicas, rank, d, L, B, BP)
        while tl.sum(mine, 0) > 0:
            slot, e = _first_loan(b, held, mine, rank, L, BP)
            before = 0
            for c in range(d):
                before += (_slot_of(replicas, c, rank * L + e, B, BP) >= 0).to(tl.int32)
            if before == 0:
                for tile in range(part, tl.cdiv(W, BW), parts):
                    w = tile * BW + tl.arange(0, BW)
                    total = tl.load(home + e * W + w, w < W, 0).to(WIDE)
                    for r in range(d, R):
                        place = _slot_of(replicas, r, rank * L + e, B, BP)
                        if place >= 0:
                            total += tl.load(_peer(shared, r, home) + place * W + w, w < W, 0).to(WIDE)
                    tl.store(home + e * W + w, total.to(home.dtype.element_ty), w < W)
            mine = tl.where(b == slot, 0, mine)
