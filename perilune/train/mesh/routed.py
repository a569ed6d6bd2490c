"""Expert parallelism: routed experts of a stage live on ep ranks, tokens travel to them (report §5.2.1).

The exchange and its balance are `perilune.parallel`'s; here it takes the place of a MoE layer's grouped product.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from perilune.model.moe import Experts, Router
from perilune.ops.router import Routing, mixture
from perilune.parallel import Collective, Exchange
from perilune.parallel.experts import Experts as Network
from perilune.train.mesh.devices import Mesh


def make_exchange(mesh: Mesh, experts: int, top_k: int, tokens: int) -> Exchange:
    """One for all layers of a rank: its slots are shared. tokens: of a micro-batch on this rank."""
    c, fabric = mesh.config, None
    if c.fabric == "symmetric":
        from perilune.parallel.symmetric import Symmetric  # Triton and CUDA, only where asked for

        fabric = Symmetric(mesh.group("ep"))
    return Exchange(fabric or Collective(mesh.group("ep")), experts, top_k, tokens, balanced=c.dispatcher == "balanced")


def spread_experts(module: Experts, exchange: Exchange) -> None:
    """From now on the module, which holds E/ep experts, serves the tokens of all ep ranks."""
    network = Network(module.act)

    def forward(z: Tensor, routing: Routing) -> Tensor:
        own = (module.w13.to(z.dtype), module.w2.to(z.dtype))
        return exchange(z, routing.idx, routing.weight, own, network)

    module.forward = forward  # type: ignore[method-assign]


class ForcedRouting:
    """Experts by position: token² + 3·layer + j mod E for the j-th choice, skewed and distinct, so that a tie in the
    scores cannot hide or fake an error. Scores still weigh them. `first`: position of this rank's first token."""

    def __init__(self) -> None:
        self.first = 0

    def force(self, module: Router, layer: int) -> None:
        module.forward = partial(self._route, type(module).forward, module, layer)  # type: ignore[method-assign]

    def _route(self, inner: Any, module: Router, layer: int, x: Tensor) -> Routing:
        c = module.config
        scored = inner(module, x)
        token = torch.arange(self.first, self.first + len(x), device=x.device)
        start = (token * token + 3 * layer) % c.num_experts  # squares leave some residues empty: a skewed load
        idx = (start[:, None] + torch.arange(c.num_experts_per_token, device=x.device)) % c.num_experts
        weight = mixture(scored.scores, idx, c.moe_renormalize, c.routed_scaling_factor)
        return Routing(idx, weight, scored.scores, scored.threshold)
