"""One MoE layer without any exchange, and the same layer's inputs cut for R ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.ops.experts import Activation, experts_reference
from perilune.parallel.exchange import Exchange
from perilune.parallel.experts import Experts
from perilune.parallel.fabric import Fabric

ACT = Activation()


@dataclass
class Layer:
    """Inputs of every rank, parameters of all experts, and cotangents."""

    x: list[Tensor]
    experts: list[Tensor]
    weights: list[Tensor]
    gate_up: Tensor
    down: Tensor
    dy: list[Tensor]

    def slice(self, rank: int, size: int) -> list[Tensor]:
        local = self.gate_up.shape[0] // size
        return [p[rank * local : (rank + 1) * local] for p in (self.gate_up, self.down)]


def layer(
    seed: int,
    ranks: int,
    local: int,
    top_k: int,
    tokens: list[int],
    dtype: torch.dtype = torch.float64,
    skew: float = 1.5,
    width: int = 8,
) -> Layer:
    """A routing with lognormal popularity (skew: its sigma), repeats allowed, and some padding tokens."""
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    experts, H, I = ranks * local, width, width  # noqa: E741
    p = np.exp(skew * rng.standard_normal(experts))
    ids = [torch.from_numpy(rng.choice(experts, size=(s, top_k), p=p / p.sum())) for s in tokens]
    for e in ids:
        if e.shape[0] > 3:
            e[-1] = -1
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return Layer(
        [new(s, H) for s in tokens], ids, [torch.rand(s, top_k, generator=g).to(dtype) for s in tokens],
        new(experts, 2 * I, H) / H**0.5, new(experts, H, I) / I**0.5, [new(s, H) for s in tokens],
    )  # fmt: skip


@dataclass
class Result:
    y: Tensor
    dx: Tensor
    dweights: Tensor
    dgate_up: Tensor
    ddown: Tensor


def alone(case: Layer) -> Result:
    """The equation on one device, by autograd, over the tokens of all ranks."""
    ids = torch.cat(case.experts)
    x, w = torch.cat(case.x).requires_grad_(), torch.cat(case.weights).requires_grad_()
    gate_up, down = case.gate_up.clone().requires_grad_(), case.down.clone().requires_grad_()
    y = experts_reference(x, ids, w, gate_up, down, ACT)  # ids of −1 match no expert
    return Result(y.detach(), *torch.autograd.grad(y, (x, w, gate_up, down), torch.cat(case.dy)))


def together(fabric: Fabric, case: Layer, layers: int = 1, **options: object) -> Result:
    """This rank's part of the layer through an exchange; `layers` of them in sequence share the slots."""
    r, size = fabric.rank, fabric.size
    exchange = Exchange(fabric, case.gate_up.shape[0], case.weights[0].shape[1], **options)  # type: ignore[arg-type]
    x, w = (t[r].clone().requires_grad_() for t in (case.x, case.weights))
    own = [p.clone().requires_grad_() for p in case.slice(r, size)]
    y = x
    for _ in range(layers):
        y = exchange(y, case.experts[r], w, own, Experts(ACT))
    return Result(y.detach(), *torch.autograd.grad(y, (x, w, *own), case.dy[r]))


def joined(parts: list[Result]) -> Result:
    return Result(*(torch.cat([getattr(p, name) for p in parts]) for name in Result.__dataclass_fields__))
