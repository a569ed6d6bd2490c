"""What carries rows and experts between ranks: collectives of torch.distributed (gloo on CPUs, NCCL on GPUs).

`route` plans one routing and makes its `Traffic` once; every transfer of the layer, forward and backward, reuses it:

    push       a row per token and host, a number per entry -> my receive buffer (dispatch; adjoint of pull)
    pull       my receive buffer -> a sum per token, a number per entry (combine; adjoint of push)
    lend       my experts -> the slots of the ranks that borrow them; there after the next push, or `settle`
    give_back  gradients of borrowed experts -> added to those of their homes

Sums have one order on every fabric: a host adds the rows of a token in ascending k, in fp32, and rounds once to the row
dtype; the token's rank adds what the hosts send in ascending k; a home adds to its own gradient those of the borrowers
by ascending rank. `symmetric.py` does the same over NVLink without the host. Collectives know their sizes on the host,
so `route` waits for the device once; the symmetric fabric does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.parallel.planner import plan
from perilune.parallel.routes import Route, count_rows, route, segments
from perilune.parallel.tables import Plan, Segments


class FabricError(RuntimeError):
    """A transfer failed or timed out; the message names the rank and the phase."""


class Traffic(Protocol):
    """What one routing needs on this rank, made once by `Fabric.route`."""

    plan: Plan
    ends: Tensor  # int32 [G], for grouped products; the last one is the number of rows of the receive buffer
    rows: int  # of the receive buffer


@dataclass(frozen=True)
class Terms:
    """What is fixed of an exchange: experts E in all, slots B a rank, rows of the receive buffer (None: as routed).

    chained: the entries of a token on one host share one payload.
    """

    experts: int
    slots: int
    tolerance: int
    align: int
    rows: int | None
    chained: bool


class Fabric(Protocol):
    """The seam between the exchange and the wires. Every rank calls the same methods in the same order."""

    rank: int
    size: int

    def route(self, experts_SK: Tensor, terms: Terms) -> Any: ...

    def push(self, x_SH: Tensor, scalars_SK: Tensor | None, traffic: Any) -> tuple[Tensor, Tensor | None]: ...

    def pull(self, rows_NH: Tensor, scalars_N: Tensor | None, traffic: Any) -> tuple[Tensor, Tensor | None]: ...

    def slots(self, own: Tensor, count: int) -> Tensor: ...

    def lend(self, own: Sequence[Tensor], slots: Sequence[Tensor], traffic: Any) -> None: ...

    def settle(self, sent: bool) -> None: ...

    def gradient_slots(self, slots: Sequence[Tensor]) -> list[Tensor]: ...

    def give_back(self, borrowed: Sequence[Tensor], own: Sequence[Tensor], traffic: Any) -> None: ...


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Sums are fp32, and fp64 where the rows are (gradient checks)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Swap:
    """Sizes of one all-to-all along dim 0: rows to and from every rank. The reverse is the way back."""

    send: list[int]
    receive: list[int]

    @property
    def reverse(self) -> Swap:
        return Swap(self.receive, self.send)


@dataclass(frozen=True)
class CollectiveTraffic:
    """Index tables of one routing. M entries arrive here, P of them bring a row; S, K, N as in routes.

    order [S·K valid]  this rank's entries sorted by host, in flat order within a host.
    payload_token      tokens to send, one per token and host, in the same order.
    payload_of [S, K]  where in the returned payload the token's sum from the k-th entry lies; −1: none.
    slot [M], row [M]  rows of the receive buffer that arriving entries fill, and which arriving payload each takes.
    chain [P, K]       rows of the receive buffer that belong to each arriving payload, ascending k; −1: none.
    """

    plan: Plan
    ends: Tensor
    rows: int
    shape: torch.Size
    entries: Swap
    payloads: Swap
    order: Tensor
    payload_token: Tensor
    payload_of: Tensor
    slot: Tensor
    row: Tensor
    chain: Tensor
    lent: Swap
    lent_experts: Tensor  # home experts to send, by receiving rank, then slot
    lent_slots: Tensor  # slots that arriving experts fill, by sending rank, then slot


class Collective:
    """gloo or NCCL: uneven all-to-all with sizes known to the host."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, debug: bool = False) -> None:
        """group: the ranks that share the experts; None is the default group. debug: check before every transfer that
        all ranks are at the same one (one small all-gather each)."""
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.debug, self._calls = debug, 0

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        try:
            if self.debug:
                self._same_everywhere(name)
            yield
        except (RuntimeError, dist.DistBackendError) as error:
            if isinstance(error, FabricError):
                raise
            raise FabricError(f"rank {self.rank} of {self.size} failed in {name}: {error}") from error

    def _same_everywhere(self, name: str) -> None:
        self._calls += 1
        seen: list[object] = [None] * self.size
        dist.all_gather_object(seen, (self._calls, name), self.group)
        if any(s != seen[0] for s in seen):
            calls = ", ".join(f"rank {r}: {s[1]} (call {s[0]})" for r, s in enumerate(seen))  # type: ignore[index]
            raise FabricError(f"ranks call different transfers: {calls}")

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, [R, *x.shape]."""
        with self._phase("gather"):
            out = x.new_empty(self.size, *x.shape)
            dist.all_gather(list(out.unbind(0)), x.contiguous(), self.group)
        return out

    def swap(self, x: Tensor, sizes: Swap, phase: str) -> Tensor:
        """All-to-all along dim 0. fp8 travels as bytes (gloo does not know it)."""
        raw = x.contiguous()
        raw = raw.view(torch.uint8) if raw.dtype.itemsize == 1 else raw
        out = raw.new_empty(sum(sizes.receive), *raw.shape[1:])
        with self._phase(phase):
            dist.all_to_all_single(out, raw, sizes.receive, sizes.send, self.group)
        return out.view(x.dtype)

    def route(self, experts_SK: Tensor, terms: Terms) -> CollectiveTraffic:
        """Count, plan, find every address. experts_SK: [S, K] global ids, −1 for no entry."""
        counts_RE = self.gather(count_rows(experts_SK, terms.experts))
        made = plan(counts_RE, num_slots=terms.slots, tolerance=terms.tolerance)
        layout = segments(made, terms.align)
        at = route(made, layout, experts_SK, self.rank)
        if not terms.chained:  # every entry brings its own row
            at = Route(at.host, at.slot, at.slot, torch.full_like(at.slot, -1))
        return self._traffic(made, layout, at, terms.rows)

    def _traffic(self, made: Plan, layout: Segments, at: Route, rows: int | None) -> CollectiveTraffic:
        ends = layout.ends[self.rank].to(torch.int32, copy=True)
        rows = int(ends[-1]) if rows is None else rows
        if int(ends[-1]) > rows:
            raise ValueError(f"exchange: rank {self.rank} executes {int(ends[-1])} rows, its buffer holds {rows}")
        ends[-1] = rows  # rows past the last segment are zeros and weigh nothing
        host = at.host.flatten()
        order = torch.argsort(torch.where(host < 0, self.size, host), stable=True)[: int((host >= 0).sum())]
        primary = at.primary.flatten()[order]
        sent = torch.stack([torch.bincount(host[order], minlength=self.size),
                            torch.bincount(host[order][primary], minlength=self.size)], 1)  # fmt: skip
        arriving = self.swap(sent, Swap([1] * self.size, [1] * self.size), "sizes")
        entries, payloads = (Swap(sent[:, i].tolist(), arriving[:, i].tolist()) for i in range(2))
        links = torch.stack([at.slot, at.parent, at.next], -1).view(-1, 3)[order]
        slot, parent, follows = self.swap(links, entries, "links").unbind(1)
        K = at.host.shape[1]
        payload_of = torch.full((host.numel(),), -1, device=host.device)
        payload_of[order[primary]] = torch.arange(int(primary.sum()), device=host.device)
        heads = slot[parent == slot]
        number = torch.full((rows,), -1, device=slot.device)
        number[heads] = torch.arange(heads.numel(), device=slot.device)
        lent, experts, slots = self._loans(made)
        return CollectiveTraffic(
            made, ends, rows, at.host.shape, entries, payloads, order, order[primary] // max(K, 1),
            payload_of.view(at.host.shape), slot, number[parent], _chains(heads, slot, follows, K, rows),
            lent, experts, slots,
        )  # fmt: skip

    def _loans(self, made: Plan) -> tuple[Swap, Tensor, Tensor]:
        """Which home experts go to whom, and which of my slots they fill."""
        owner = torch.where(made.replicas < 0, -1, made.replicas // made.local)
        to, _ = (owner == self.rank).nonzero(as_tuple=True)  # by receiving rank, then slot
        experts = made.replicas[owner == self.rank] - self.rank * made.local
        mine = owner[self.rank]
        slots = torch.argsort(torch.where(mine < 0, self.size, mine), stable=True)[: int((mine >= 0).sum())]
        count = lambda x: torch.bincount(x, minlength=self.size).tolist()  # noqa: E731
        return Swap(count(to), count(mine[mine >= 0])), experts, slots

    def push(self, x_SH: Tensor, scalars_SK: Tensor | None, traffic: CollectiveTraffic) -> tuple[Tensor, Tensor | None]:
        """Every entry's row of the receive buffer [N, H] and its number [N]; zeros elsewhere."""
        got_PH = self.swap(x_SH[traffic.payload_token], traffic.payloads, "dispatch")
        rows_NH = x_SH.new_zeros(traffic.rows, x_SH.shape[1])
        rows_NH[traffic.slot] = got_PH[traffic.row]
        if scalars_SK is None:
            return rows_NH, None
        got_M = self.swap(scalars_SK.flatten()[traffic.order], traffic.entries, "dispatch of weights")
        return rows_NH, scalars_SK.new_zeros(traffic.rows).index_put((traffic.slot,), got_M)

    def pull(
        self, rows_NH: Tensor, scalars_N: Tensor | None, traffic: CollectiveTraffic
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of each token's rows [S, H], and each entry's number [S, K], zero where there was no entry."""
        got_PH = self.swap(_sum_in_order(rows_NH, traffic.chain), traffic.payloads.reverse, "combine")
        y_SH = _sum_in_order(got_PH, traffic.payload_of)
        if scalars_N is None:
            return y_SH, None
        got = self.swap(scalars_N[traffic.slot], traffic.entries.reverse, "combine of weights")
        flat = scalars_N.new_zeros(traffic.shape.numel()).index_put((traffic.order,), got)
        return y_SH, flat.view(traffic.shape)

    def slots(self, own: Tensor, count: int) -> Tensor:
        """Room for `count` borrowed experts like those of `own` [E/R, ...]."""
        return own.new_zeros(count, *own.shape[1:])

    def lend(self, own: Sequence[Tensor], slots: Sequence[Tensor], traffic: CollectiveTraffic) -> None:
        """Fill the used slots [B, ...] with experts of other ranks' own [E/R, ...]; unused ones are left alone."""
        for weights, pool in zip(own, slots, strict=True):
            pool[traffic.lent_slots] = self.swap(weights.detach()[traffic.lent_experts], traffic.lent, "prefetch")

    def settle(self, sent: bool) -> None:
        """Before slots are read; `sent`: after a `lend`. A collective returns with what it brings."""

    def gradient_slots(self, slots: Sequence[Tensor]) -> list[Tensor]:
        """Room for the gradients of slots like these; `give_back` reads the used ones only."""
        return [torch.empty_like(pool) for pool in slots]

    def give_back(self, borrowed: Sequence[Tensor], own: Sequence[Tensor], traffic: CollectiveTraffic) -> None:
        """Add gradients of slots [B, ...] to those of their homes [E/R, ...]: in place, in fp32, by ascending rank."""
        for grad, home in zip(borrowed, own, strict=True):
            got = self.swap(grad[traffic.lent_slots], traffic.lent.reverse, "gradient reduce")
            lent = traffic.lent_experts.unique()
            total = home[lent].to(accumulating(grad.dtype))
            for part, experts in zip(got.split(traffic.lent.send), traffic.lent_experts.split(traffic.lent.send)):
                total[torch.searchsorted(lent, experts)] += part  # a rank borrows an expert once: nothing races
            home[lent] = total.to(home.dtype)


def _chains(heads: Tensor, slot: Tensor, follows: Tensor, K: int, rows: int) -> Tensor:
    """[P, K]: the rows linked from each head, in order, −1 past the end."""
    after = torch.full((rows + 1,), -1, device=slot.device)
    after[slot] = follows
    chain = [heads]
    for _ in range(K - 1):
        chain.append(after[chain[-1]])  # −1 reads the last element, which stays −1
    return torch.stack(chain, 1) if K else heads[:, None][:, :0]


def _sum_in_order(x_PH: Tensor, index_SK: Tensor) -> Tensor:
    """Σ_k x[index[:, k]] in ascending k, fp32, rounded once; −1 adds nothing."""
    if x_PH.is_cuda and x_PH.dtype != torch.float64:
        from perilune.parallel.sums_triton import sum_in_order  # Triton is absent from CPU installs

        return sum_in_order(x_PH, index_SK)
    total = x_PH.new_zeros(index_SK.shape[0], x_PH.shape[1], dtype=accumulating(x_PH.dtype))
    if x_PH.shape[0] == 0:
        return total.to(x_PH.dtype)
    for index in index_SK.unbind(1):
        row = x_PH[index.clamp(min=0)].to(total.dtype)
        total = torch.where(index[:, None] >= 0, total + row, total)
    return total.to(x_PH.dtype)
