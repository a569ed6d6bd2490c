"""Borrowed experts: slots shared by all layers, and the right of one layer to fill them (report §5.2.1).

A rank has B slots for each kind of expert tensor, whatever the number of layers. A layer's weights are therefore gone
from them when its backward runs; its `Loan` knows, and fetches them again.

Values on the MXFP4 grid (quantisation-aware training) can travel packed: 4.25 bits a value instead of 16, unpacked
where they arrive, bit for bit the same. The gradient passes as if they had travelled whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perilune.ops.mx import pack_mxfp4, unpack_mxfp4
from perilune.parallel.fabric import Fabric, Traffic


@dataclass
class Pool:
    """Slots [B, ...] for one kind of expert tensor, and the loan that filled them last."""

    slots: Tensor
    holder: Loan | None = None


@dataclass(eq=False)
class Loan:
    """The experts that one layer borrows. own [E/R, ...]: this rank's experts, every rank's of the same shape."""

    fabric: Fabric
    traffic: Traffic
    own: tuple[Tensor, ...]
    pools: tuple[Pool, ...]

    def fetch(self) -> bool:
        """Send for the borrowed experts unless the slots still hold them; True: call `arrived` once they are there."""
        if all(pool.holder is self for pool in self.pools):
            return False
        for pool in self.pools:
            pool.holder = self
        self._send()
        return True

    def _send(self) -> None:
        self.fabric.lend(self.own, [pool.slots for pool in self.pools], self.traffic)

    def arrived(self) -> None:
        """What was sent is there: nothing to do where it travels as it is used."""

    def slots(self) -> tuple[Tensor, ...]:
        """The borrowed experts, [B, ...] each; a collective call, by all ranks, where they must be fetched."""
        sent = self.fetch()
        self.fabric.settle(sent)
        if sent:
            self.arrived()
        return tuple(pool.slots for pool in self.pools)

    def gradient_slots(self) -> tuple[Tensor, ...]:
        """Where a compute may write the gradients of used slots, [B, ...] each; what it returns for them."""
        return tuple(self.fabric.gradient_slots([pool.slots for pool in self.pools]))


@dataclass(eq=False)
class PackedLoan(Loan):
    """A loan of values on the MXFP4 grid, in rows of a multiple of 32: their codes and scales travel, `parts`."""

    wires: tuple[Pool, ...] = ()
    parts: tuple[Tensor, ...] = ()

    def _send(self) -> None:
        self.fabric.lend(self.parts, [wire.slots for wire in self.wires], self.traffic)

    def arrived(self) -> None:
        used = self.traffic.plan.replicas[self.fabric.rank] >= 0
        for i, pool in enumerate(self.pools):
            codes, scales = (wire.slots for wire in self.wires[2 * i : 2 * i + 2])
            values = unpack_mxfp4(codes, scales, pool.slots.dtype)
            shape = [-1] + [1] * (values.dim() - 1)
            pool.slots.copy_(torch.where(used.view(shape), values, pool.slots))


def packed(own: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(codes, scales) of every tensor in turn."""
    return tuple(part for weights in own for part in pack_mxfp4(weights.detach()))


@dataclass
class Pools:
    """All pools of one exchange, made when a kind of tensor is first lent."""

    fabric: Fabric
    slots: int
    made: dict[Any, Pool] = field(default_factory=dict)

    def of(self, kind: str, tensors: Sequence[Tensor]) -> tuple[Pool, ...]:
        return tuple(self._one((kind, i, t.shape[1:], t.dtype, t.device), t) for i, t in enumerate(tensors))

    def _one(self, key: Any, like: Tensor) -> Pool:
        if key not in self.made:
            self.made[key] = Pool(self.fabric.slots(like.detach(), self.slots))
        return self.made[key]
