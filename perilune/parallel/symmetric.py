"""The exchange over NVLink: peers' memory is written and read directly by Triton kernels (report §5.2.1).

Nothing is read by the host and every shape is fixed, so a layer is one sequence of launches. Peers are reached through
torch's symmetric memory; multicast is never used (set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before the first allocation).

A layer forward: count, announce counts | plan, segments, addresses; lend experts, push rows | expand, compute, fold |
pull, where each | is one barrier. A buffer is written again only after a barrier that all its readers reached behind
their reading. Reading follows a barrier directly, so the rule is local: whoever writes a buffer that was read since the
last barrier puts one before. In the order above none is needed.

Barriers are bounded: a rank that does not come in time is named, with the phase, at the next call or `check()`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from perilune.parallel import symmetric_triton as kernels
from perilune.parallel.fabric import FabricError, Terms, accumulating
from perilune.parallel.planner_triton import plan_segments_triton
from perilune.parallel.tables import Plan

PHASES = ("counts", "dispatch", "combine", "prefetch", "gradient reduce", "reuse of a buffer")
WIDE = {torch.float64: tl.float64}  # everything else is summed in fp32
COPY_PROGRAMS = 256  # of lent experts, each 8 KB at a time: what the wire needs under way
STAGE_PROGRAMS = 64  # of each slot
ROWS = 4  # of the receive buffer, in one program


@dataclass(frozen=True)
class Shared:
    """A buffer of the same shape on every rank: mine, and where everyone's lies (int64 [R], on the device)."""

    mine: Tensor
    peers: Tensor


@dataclass
class SymmetricTraffic:
    """Addresses of one routing, int32: host, slot, parent, next [S, K] of my entries; row_parent, row_next [N]."""

    plan: Plan
    ends: Tensor
    used: Tensor
    rows: int
    host: Tensor
    slot: Tensor
    parent: Tensor
    next: Tensor
    row_parent: Tensor | None = None
    row_next: Tensor | None = None


@dataclass
class Heap:
    """Symmetric allocations of torch, one rendezvous each. Every rank allocates the same, in the same order."""

    group: dist.ProcessGroup
    device: torch.device
    handles: list[Any] = field(default_factory=list)

    def shared(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        import torch.distributed._symmetric_memory as symm_mem

        mine = symm_mem.empty(*shape, dtype=dtype, device=self.device)
        handle = symm_mem.rendezvous(mine, self.group)
        if handle.multicast_ptr:
            raise FabricError("symmetric memory was set up with multicast; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
        mine.zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # nobody writes to a peer that still clears
        self.handles.append(handle)
        where = [handle.get_buffer(r, tuple(shape), dtype).data_ptr() for r in range(handle.world_size)]
        return Shared(mine, torch.tensor(where, dtype=torch.int64, device=self.device))


def preflight(group: dist.ProcessGroup) -> list[str]:
    """What the symmetric fabric misses among the ranks of `group`, one sentence each; empty: nothing."""
    if not torch.cuda.is_available():
        return [f"rank {dist.get_rank(group)} has no CUDA device"]
    mine = (socket.gethostname(), torch.cuda.current_device(), os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", ""))
    seen: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, mine, group)
    missing = []
    for rank, (host, device, multicast) in enumerate(seen):
        if multicast != "1":
            missing.append(f"rank {rank} runs without TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
        if host != mine[0]:
            missing.append(f"rank {rank} is on host {host}, not {mine[0]}: peers must share a host")
        elif device != mine[1] and not torch.cuda.can_device_access_peer(mine[1], device):
            missing.append(f"GPU {mine[1]} cannot reach GPU {device} of rank {rank}")
    return missing


class Symmetric:
    """A fabric for ranks that can reach each other's memory. `tokens` of the exchange must be set: shapes are fixed."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, patience: int = 1 << 24) -> None:
        """patience: looks at a peer's flag before giving up, roughly half a microsecond each."""
        group = group if group is not None else dist.distributed_c10d._get_default_group()
        missing = preflight(group)
        if missing:
            raise FabricError("no symmetric fabric: " + "; ".join(missing))
        device = torch.device("cuda", torch.cuda.current_device())
        self._start(dist.get_rank(group), dist.get_world_size(group), Heap(group, device), device, patience)

    def _start(self, rank: int, size: int, heap: Any, device: torch.device, patience: int) -> None:
        self.rank, self.size, self.heap, self.device, self.patience = rank, size, heap, device, patience
        self._buffers: dict[Any, Shared] = {}
        self._pools: dict[int, Shared] = {}
        self._reading: set[str] = set()  # buffers read since the last barrier
        self._lent: tuple[str, ...] = ()  # the slots, if experts are on their way
        self._pads = heap.shared((max(size, 4),), torch.int32)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)
        # Written by the device when a barrier gives up, read by the host without waiting.
        self._status = torch.zeros(3, dtype=torch.int32, pin_memory=device.type == "cuda").fill_(-1)

    def check(self) -> None:
        """Raise FabricError if a barrier gave up. Waits for nothing: call it after a synchronisation to be sure."""
        phase, missing, epoch = self._status.tolist()
        if phase >= 0:
            raise FabricError(f"rank {self.rank}: rank {missing} did not reach {PHASES[phase]} (barrier {epoch})")

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if all(grid):
            kernel[grid](*args, **constants)

    def _before_writing(self, buffer: str) -> None:
        if buffer in self._reading:
            self._barrier("reuse of a buffer")

    def _barrier(self, phase: str, *reading: str) -> None:
        """All ranks are here. `reading`: the buffers that are read from now on."""
        self.check()
        self._reading, self._lent = set(reading), ()
        self._launch(
            kernels.barrier_kernel, (1,), self._pads.peers, self._pads.mine, self._epoch, self._status, self.rank,
            PHASES.index(phase), R=self.size, RP=triton.next_power_of_2(self.size), LIMIT=self.patience, num_warps=1,
        )  # fmt: skip

    def _shared(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        key = (name, tuple(shape), dtype)
        if key not in self._buffers:
            self._buffers[key] = self.heap.shared(shape, dtype)
        return self._buffers[key]

    def route(self, experts_SK: Tensor, terms: Terms) -> SymmetricTraffic:
        """Count, plan, find every address: four launches and one barrier, nothing read by the host."""
        if terms.rows is None:
            raise ValueError("exchange: the symmetric fabric needs tokens= and one slot per home expert: fixed shapes")
        if not terms.chained:
            raise ValueError("exchange: the symmetric fabric sends one payload a token and host, so they are chained")
        S, K = experts_SK.shape
        R, E, up = self.size, terms.experts, triton.next_power_of_2
        experts = experts_SK.long().contiguous()
        TB = max(128 // up(K), 1)
        blocks = triton.cdiv(S, TB)
        histogram = torch.empty(max(blocks, 1), E, dtype=torch.int32, device=self.device)
        self._launch(kernels.count_kernel, (blocks,), experts, histogram, S, E, K=K, TB=TB, KP=up(K), EP=up(E))
        counts = self._shared("counts", (R, E), torch.int64)
        self._before_writing("counts")
        self._launch(
            kernels.announce_kernel, (triton.cdiv(E, 32),), histogram, counts.peers, counts.mine, blocks, self.rank, E,
            R=R, EB=32, BB=64,
        )  # fmt: skip
        self._barrier("counts", "counts")
        terms_here = terms.slots, terms.tolerance, terms.align, self.rank, terms.rows
        made, layout, ends = plan_segments_triton(counts.mine, *terms_here)
        host, slot, parent, follows = torch.empty(4, S, K, dtype=torch.int32, device=self.device).unbind(0)
        self._launch(
            kernels.route_kernel, (blocks,), experts, histogram, made.counts, made.assigned, layout.starts,
            host, slot, parent, follows, S, self.rank, E, K=K, R=R, TB=TB, KP=up(K),
        )  # fmt: skip
        return SymmetricTraffic(made, ends, layout.rows[self.rank], terms.rows, host, slot, parent, follows)

    def _inboxes(self, x: Tensor, rows: int) -> tuple[Shared, Shared]:
        return self._shared("inbox", (rows, x.shape[1]), x.dtype), self._shared("scalars in", (rows,), torch.float32)

    def push(self, x_SH: Tensor, scalars_SK: Tensor | None, traffic: SymmetricTraffic) -> tuple[Tensor, Tensor | None]:
        """Every entry's row of the receive buffer [N, H] and its number [N] (fp32); zeros elsewhere."""
        (S, H), N, K = x_SH.shape, traffic.rows, traffic.host.shape[1]
        self._before_writing("inbox")
        x = x_SH.contiguous()
        scalars = x.new_empty(0, dtype=torch.float32) if scalars_SK is None else scalars_SK.float().contiguous()
        inbox, scalar_inbox = self._inboxes(x, N)
        parents, nexts = (self._shared(name, (N,), torch.int32) for name in ("parent", "next"))
        new, BH = traffic.row_parent is None, min(triton.next_power_of_2(H), 1024)
        rows, row_scalars = x.new_empty(N, H), scalars.new_empty(N)
        self._launch(
            kernels.push_kernel, (S, triton.cdiv(H, BH)), x, scalars, traffic.host, traffic.slot, traffic.parent,
            traffic.next, inbox.peers, scalar_inbox.peers, parents.peers, nexts.peers, rows, row_scalars, self.rank, H,
            K=K, BH=BH, SCALARS=scalars_SK is not None, LINKS=new,
        )  # fmt: skip
        if new:
            G = traffic.ends.shape[0]
            self._launch(kernels.unused_kernel, (G,), traffic.ends, traffic.used, parents.mine, PB=128)
        self._barrier("dispatch", "inbox", *self._lent)
        if new:
            traffic.row_parent, traffic.row_next = parents.mine.clone(), nexts.mine.clone()
        self._launch(
            kernels.expand_kernel, (triton.cdiv(N, ROWS), triton.cdiv(H, BH)), inbox.mine, scalar_inbox.mine,
            traffic.row_parent, rows, row_scalars, N, H, BN=ROWS, BH=BH, SCALARS=scalars_SK is not None,
        )  # fmt: skip
        return rows, None if scalars_SK is None else row_scalars.to(scalars_SK.dtype)

    def pull(
        self, rows_NH: Tensor, scalars_N: Tensor | None, traffic: SymmetricTraffic
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of each token's rows [S, H], and each entry's number [S, K] (fp32), zero where there was no entry."""
        (N, H), (S, K) = rows_NH.shape, traffic.host.shape
        self._before_writing("outbox")
        rows, BH = rows_NH.contiguous(), min(triton.next_power_of_2(H), 1024)
        outbox = self._shared("outbox", (N, H), rows.dtype)
        scalar_outbox = self._shared("scalars out", (N,), torch.float32)
        wide = WIDE.get(rows.dtype, tl.float32)
        self._launch(
            kernels.fold_kernel, (N,), rows, traffic.row_parent, traffic.row_next, outbox.mine, H, BH=BH, WIDE=wide,
        )  # fmt: skip
        numbers = scalar_outbox.mine if scalars_N is None else scalar_outbox.mine.copy_(scalars_N)
        self._barrier("combine", "outbox")
        y = rows.new_empty(S, H)
        scalars = torch.empty(S, K, dtype=torch.float32, device=rows.device)
        self._launch(
            kernels.pull_kernel, (S, triton.cdiv(H, BH)), y, scalars, rows, numbers, traffic.host, traffic.slot,
            traffic.parent, outbox.peers, scalar_outbox.peers, self.rank, H,
            K=K, BH=BH, WIDE=wide, SCALARS=scalars_N is not None,
        )  # fmt: skip
        return y, None if scalars_N is None else scalars.to(scalars_N.dtype)

    def slots(self, own: Tensor, count: int) -> Tensor:
        """Room for `count` borrowed experts like those of `own` [E/R, ...], reachable by their homes."""
        made = self.heap.shared((count, *own.shape[1:]), own.dtype)
        self._pools[made.mine.data_ptr()] = made
        return made.mine

    def lend(self, own: Sequence[Tensor], slots: Sequence[Tensor], traffic: SymmetricTraffic) -> None:
        """Send my experts to the slots of their borrowers; they are there after the next barrier."""
        made = traffic.plan
        self._before_writing("slots")
        for weights, pool in zip(own, slots, strict=True):
            words = _words(weights.detach())
            L, W = words.shape
            self._launch(
                kernels.lend_kernel, (COPY_PROGRAMS if made.slots else 0,), words, made.replicas,
                self._pools[pool.data_ptr()].peers, self.rank, W,
                L=L, R=self.size, B=made.slots, BP=triton.next_power_of_2(max(made.slots, 1)), BW=1024,
            )  # fmt: skip
        self._lent = ("slots",)

    def settle(self, sent: bool) -> None:
        """Before slots are read: wait, on the device, until borrowed experts have arrived."""
        if sent:
            self._barrier("prefetch")
        self._reading.add("slots")

    def gradient_slots(self, slots: Sequence[Tensor]) -> list[Tensor]:
        """Shared buffers, so that homes read the gradients where they were written."""
        self._before_writing("gradients")
        return [self._shared(f"gradients {i}", pool.shape, pool.dtype).mine for i, pool in enumerate(slots)]

    def give_back(self, borrowed: Sequence[Tensor], own: Sequence[Tensor], traffic: SymmetricTraffic) -> None:
        """Add gradients of slots [B, ...] to those of their homes [E/R, ...]: in place, in fp32, by ascending rank."""
        made = traffic.plan
        if not made.slots:
            return
        buffers = [self._shared(f"gradients {i}", grad.shape, grad.dtype) for i, grad in enumerate(borrowed)]
        for grad, buffer in zip(borrowed, buffers, strict=True):
            if grad.data_ptr() != buffer.mine.data_ptr():  # of a compute that made its own
                self._before_writing("gradients")
                self._launch(
                    kernels.stage_kernel, (made.slots, STAGE_PROGRAMS), grad.contiguous(), made.replicas, buffer.mine,
                    self.rank, grad[0].numel(), B=made.slots, BW=1024,
                )  # fmt: skip
        self._barrier("gradient reduce", "gradients")
        for home, buffer in zip(own, buffers, strict=True):
            L, W = home.shape[0], home[0].numel()
            self._launch(
                kernels.give_back_kernel, (COPY_PROGRAMS,), home, made.replicas, buffer.peers, self.rank, W,
                L=L, R=self.size, B=made.slots, BP=triton.next_power_of_2(made.slots), BW=4096,
                WIDE=WIDE.get(accumulating(home.dtype), tl.float32),
            )  # fmt: skip


def _words(weights: Tensor) -> Tensor:
    """[L, ...] of any dtype as [L, W] words of 8 bytes."""
    flat = weights.contiguous().view(weights.shape[0], -1).view(torch.uint8)
    if flat.shape[1] % 8:
        raise ValueError(f"exchange: an expert tensor of {flat.shape[1]} bytes is no multiple of 8 bytes")
    return flat.view(torch.int64)
