"""From a plan to addresses: where every routed row of a token lies on the rank that executes it (report §5.2.1).

Receive buffer of a rank: one segment per expert it executes, first its own E/R in id order, then the replicas in slot
order; every segment is padded up to a multiple of `align`. Entry (token, k) of expert e is the i-th row of e on its
source rank, in token order. Each source keeps what it can on itself, min(counts, assigned) rows of each expert; the
remaining rows of all sources, in rank order, fill the remaining places of all hosts, in rank order. So every entry
finds its place from the global counts alone, without asking anyone.

Chains. A token may have several of its K rows on one host. The row travels once: the first entry is the primary, the
later ones only carry weights and find their row through `parent`; `next` links them for the sums on the way back.
Legend: S tokens of this rank, K routes a token, R ranks, E experts, G = E/R + B groups, N rows of the receive buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.parallel.tables import Plan, Segments, occurrence


@dataclass(frozen=True)
class Route:
    """Addresses of the entries of one source rank. int64 [S, K] each; −1 where `experts` was −1 (a padding token).

    host   rank that executes the entry.
    slot   its row in that rank's receive buffer.
    parent row, same buffer, of the token's first entry there (`parent == slot`: this is it, the one that carries data).
    next   row of the token's following entry there; −1 at the end of the chain.
    """

    host: Tensor
    slot: Tensor
    parent: Tensor
    next: Tensor

    @property
    def primary(self) -> Tensor:
        return (self.slot >= 0) & (self.parent == self.slot)


def capacity(rows: int, local: int, slots: int, align: int) -> int:
    """Rows a receive buffer needs for at most `rows` rows in local + slots padded segments, whatever the routing."""
    groups = min(local + slots, rows)  # an empty segment takes no room
    return _up(rows + groups * (align - 1), align)


def _up(n: int, align: int) -> int:
    return -(-n // align) * align


def segments(plan: Plan, align: int = 1) -> Segments:
    """Padded segments of every rank. No host synchronisation."""
    ranks, experts, on = plan.ranks, plan.experts, plan.counts.device
    own = torch.arange(experts, device=on).view(ranks, plan.local)
    groups_RG = torch.cat([own, plan.replicas], 1)
    rows_RG = plan.assigned.gather(1, groups_RG.clamp(min=0)) * (groups_RG >= 0)
    padded_RG = (rows_RG + align - 1) // align * align
    ends_RG = padded_RG.cumsum(1)
    idle = torch.where(groups_RG < 0, experts, groups_RG)  # idle slots scatter into a column that is cut off
    starts = torch.full((ranks, experts + 1), -1, dtype=torch.int64, device=on)
    starts.scatter_(1, idle, ends_RG - padded_RG)
    return Segments(starts[:, :experts].contiguous(), ends_RG, rows_RG)


def count_rows(experts_SK: Tensor, experts: int) -> Tensor:
    """Rows this rank routes to each expert, int64 [E]; entries of −1 are not counted. No host synchronisation."""
    flat = experts_SK.reshape(-1).long()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, torch.where(flat < 0, experts, flat), torch.ones_like(flat))
    return counts[:experts]


def flows(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Sources matched to hosts, [R, E] each: rows that stay, spill before each source, places up to each host."""
    stays = torch.minimum(plan.counts, plan.assigned)
    spill = plan.counts - stays
    places = plan.assigned - stays
    return stays, spill.cumsum(0) - spill, places.cumsum(0)


def route(plan: Plan, layout: Segments, experts_SK: Tensor, rank: int) -> Route:
    """Addresses of the entries of source `rank`. experts_SK: integer [S, K] global expert ids, −1 for no entry.

    `plan.counts[rank]` must be `count_rows(experts_SK, E)`. No host synchronisation.
    """
    flat = experts_SK.reshape(-1).long()
    expert = flat.clamp(min=0)
    index = occurrence(flat)
    stays, before, upto = flows(plan)
    spilled = index - stays[rank, expert] + before[rank, expert]  # position among the spilled rows of all sources
    # The first host whose places reach past the position. Hosts before it count one each.
    host = (upto[:, expert] <= spilled).sum(0).clamp(max=plan.ranks - 1)
    places = upto[host, expert] - (plan.assigned - stays)[host, expert]
    at = stays[host, expert] + spilled - places
    kept = index < stays[rank, expert]
    host = torch.where(kept, rank, host)
    slot = layout.starts[host, expert] + torch.where(kept, index, at)
    shape = experts_SK.shape
    return chain(torch.where(flat < 0, -1, host).view(shape), torch.where(flat < 0, -1, slot).view(shape))


def chain(host_SK: Tensor, slot_SK: Tensor) -> Route:
    """Link the entries of every token that share a host, in ascending k."""
    K = host_SK.shape[1]
    same_SKK = (host_SK[:, :, None] == host_SK[:, None, :]) & (host_SK >= 0)[:, :, None]
    k = torch.arange(K, device=host_SK.device)
    later = same_SKK & (k[None, :] > k[:, None])
    first = torch.where(same_SKK, k, K).amin(2).clamp(max=K - 1) if K else host_SK
    follows = torch.where(later, k, K).amin(2) if K else host_SK
    parent = torch.where(host_SK < 0, -1, slot_SK.gather(1, first))
    next_SK = torch.where(follows == K, -1, slot_SK.gather(1, follows.clamp(max=K - 1)))
    return Route(host_SK, slot_SK, parent, next_SK)
