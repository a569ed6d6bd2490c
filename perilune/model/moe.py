"""Feed-forward layers: the dense MLP, and Stable LatentMoE (report §2.3, eq. 11-13).

    y = W_up RMSNorm( Σ_{i∈T} p_i E_i(W_down x) ) + E_shared(x),   T = TopK(σ(W_r x) + b),   p = σ / Σ_T σ

The router reads the full width in fp32; the bias only selects. All experts share one grouped product.
"""

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.linear import Linear, beside, cast, project, settle
from perilune.model.norm import RMSNorm
from perilune.ops.experts import Activation, experts, gated_mlp
from perilune.ops.mx import GROUP, pack_mxfp4
from perilune.ops.packed import Packed, packed_experts
from perilune.ops.router import Routing, route
from perilune.ops.situ import packed_glu


def activation(config: ModelConfig) -> Activation:
    """The gated activation as the grouped product takes it."""
    if config.hidden_act == "silu":
        return Activation("swiglu")
    return Activation("situ", config.activation_situ_beta, config.activation_situ_linear_beta)


class MLP(nn.Module):
    """down(act(gate x, up x)): the dense layers and the fused shared experts."""

    def __init__(self, config: ModelConfig, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (Linear(config.hidden_size, hidden) for _ in range(2))
        self.down_proj = Linear(hidden, config.hidden_size)
        self.act = activation(config)

    @property
    def pair(self) -> tuple[Tensor, Tensor] | None:
        """(gate and up weights, down weight) for a pass without gradients, if they lie beside each other."""
        if torch.is_grad_enabled() or type(self.down_proj) is not Linear:
            return None
        together = beside([self.gate_proj.weight, self.up_proj.weight])
        return None if together is None else (together[: 2 * self.down_proj.in_features], self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        if (pair := self.pair) is not None:
            return gated_mlp(x, *pair, self.act)
        (gate_up,) = project(x, (self.gate_proj, self.up_proj))
        return self.down_proj(packed_glu(gate_up, *self.act))

    def settle(self) -> None:
        settle(self.gate_proj, self.up_proj)


class Router(nn.Module):
    """Scores in fp32 whatever the stream's dtype; the bias is set by balancing, never by a gradient."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Routing:
        """x [T, hidden] -> chosen experts, their weights, all scores."""
        c = self.config
        return route(
            x,
            self.weight,
            self.e_score_correction_bias,
            top_k=c.num_experts_per_token,
            activation=c.moe_router_activation_func,
            groups=c.num_expert_group,
            top_groups=c.topk_group,
            renormalize=c.moe_renormalize,
            scaling=c.routed_scaling_factor,
        )


class Experts(nn.Module):
    """Stacked routed experts: w13 [E, 2·hidden, width] (gate rows, then up rows), w2 (down) [E, width, hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        e, hidden, width = config.num_experts, config.moe_intermediate_size, config.expert_width
        self.w13 = nn.Parameter(torch.zeros(e, 2 * hidden, width))
        self.w2 = nn.Parameter(torch.zeros(e, width, hidden))
        self.act = activation(config)

    def forward(self, z: Tensor, routing: Routing) -> Tensor:
        """Σ_i p_i E_i(z): z [T, width] -> [T, width]."""
        w13, w2 = cast(self.w13).to(z.dtype), cast(self.w2).to(z.dtype)  # under autocast the masters are fp32
        return experts(z, routing.idx, routing.weight, w13, w2, self.act)

    def beside(self, shared: tuple[Tensor, Tensor], z: Tensor, routing: Routing) -> Tensor:
        """The same, plus an MLP of z (its gate and up, its down) in the same launches. No gradient."""
        return experts(z, routing.idx, routing.weight, self.w13, self.w2, self.act, shared=shared)

    def share(self, z: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
        """The same where some choices are E, somebody else's: they add nothing. No gradient."""
        return experts(z, idx, weight, self.w13, self.w2, self.act, partial=True)


class PackedExperts(nn.Module):
    """The same in MXFP4, as released, 4.25 bits a weight in memory: for inference."""

    w13_codes: Tensor
    w13_scales: Tensor
    w2_codes: Tensor
    w2_scales: Tensor
    mxfp8 = False  # whether activations are rounded, as quantisation-aware training rounds them

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.act = experts.act
        for name, weight in (("w13", experts.w13.detach()), ("w2", experts.w2.detach())):
            e, rows, columns = weight.shape
            if columns % GROUP:
                raise ValueError(f"MXFP4 experts need widths that are multiples of {GROUP}, not {columns}.")
            if weight.is_meta:
                parts = [weight.new_empty(e, rows, columns // n, dtype=torch.uint8) for n in (2, GROUP)]
            else:
                each = [pack_mxfp4(matrix) for matrix in weight]  # one at a time: packing takes room
                parts = [torch.stack(kind) for kind in zip(*each)]
            for kind, part in zip(("codes", "scales"), parts):
                self.register_buffer(f"{name}_{kind}", part)

    @property
    def _both(self) -> tuple[Packed, Packed]:
        return Packed(self.w13_codes, self.w13_scales), Packed(self.w2_codes, self.w2_scales)

    def forward(self, z: Tensor, routing: Routing) -> Tensor:
        """As `Experts.forward`, without a gradient."""
        return packed_experts(z, routing.idx, routing.weight, *self._both, self.act, mxfp8=self.mxfp8)

    def share(self, z: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
        """As `Experts.share`."""
        return packed_experts(z, idx, weight, *self._both, self.act, partial=True, mxfp8=self.mxfp8)


class LatentMoE(nn.Module):
    """Stable LatentMoE; without a latent width the experts read the full stream and nothing is normalised."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.gate = Router(c)
        self.experts = Experts(c)
        self.latent = c.routed_expert_hidden_size is not None
        self.normed = self.latent and c.latent_moe_use_norm
        if self.latent:
            self.routed_expert_down_proj = Linear(c.hidden_size, c.expert_width)
            self.routed_expert_up_proj = Linear(c.expert_width, c.hidden_size)
        if self.normed:
            self.routed_expert_norm = RMSNorm(c.expert_width, c.rms_norm_eps)
        self.shared_experts = MLP(c, c.shared_width) if c.num_shared_experts else None

    def pack(self) -> None:
        if isinstance(self.experts, Experts):
            self.experts = PackedExperts(self.experts)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x [T, hidden] -> ([T, hidden], how it was routed, detached)."""
        routing = self.gate(x)
        pair = None if self.latent or self.shared_experts is None else self.shared_experts.pair
        if pair is not None and isinstance(self.experts, Experts) and len(self.experts.w13) == len(self.gate.weight):
            return self.experts.beside(pair, x, routing), routing
        u = self.experts(self.routed_expert_down_proj(x) if self.latent else x, routing)
        if self.normed:
            u = self.routed_expert_norm(u)
        y = self.routed_expert_up_proj(u) if self.latent else u
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        return y, Routing(*(part.detach() for part in routing))
