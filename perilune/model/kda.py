"""The KDA layer (report §2.1.1, eq. 1-6): short convolutions, the delta-rule recurrence, an output norm and gate.

q, k, v = SiLU(conv(W x));  z = W_up W_down x;  β = σ(W_b x)
S_t = (I − β k kᵀ) diag(α) S_{t−1} + β k vᵀ,   o_t = Sᵀ q,   α = exp(gate(z))
y = W_o [ RMSNorm_head(o) · σ(W_g x) ]
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.cache import Cache, Place
from perilune.model.layout import Layout
from perilune.model.linear import Group, Linear, Weight, beside, cast, project, settle
from perilune.model.taps import Taps
from perilune.ops.conv import short_convs
from perilune.ops.kda import kda, kda_step
from perilune.ops.kda.decode import Drafts, decode
from perilune.ops.linear import pair
from perilune.ops.norm import gated_rms_norm


class KDA(nn.Module):
    """Kimi Delta Attention over a packed batch. Parameter names are the release's; A_log is stored unpadded."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c, h, width = config, config.hidden_size, config.kda_width
        self.config, self.layer = config, layer
        decays = width if c.kda_decay == "channel" else c.kda_num_heads
        self.q_proj, self.k_proj, self.v_proj = Linear(h, width), Linear(h, width), Linear(h, width)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(width, c.short_conv_kernel_size) for _ in "qkv")
        self.f_a_proj, self.f_b_proj = Linear(h, c.kda_head_dim), Linear(c.kda_head_dim, decays)
        self.b_proj = Linear(h, c.kda_num_heads)
        self.A_log = nn.Parameter(torch.zeros(c.kda_num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(decays))
        if c.kda_output_gate and c.use_full_rank_gate:
            self.g_proj = Linear(h, width)
        elif c.kda_output_gate:
            self.g_a_proj, self.g_b_proj = Linear(h, c.kda_head_dim), Linear(c.kda_head_dim, width)
        self.o_norm = Weight(c.kda_head_dim)
        self.o_proj = Linear(width, h)

    def forward(self, x: Tensor, layout: Layout, cache: Cache | None = None, taps: Taps | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        c, tokens = self.config, x.shape[0]
        place = cache.place_kda(self.layer, layout) if cache is not None else None
        if place is not None:
            return self._window(x, layout, place)
        state, tail = cache.read_kda(self.layer, layout) if cache is not None else (None, None)
        qkv, z, beta, gate = self._inputs(x)
        parts, tail = short_convs(qkv.unsqueeze(0), self._conv_weight, 3, tail=tail, lengths=layout.lengths)
        q, k, v = (y.reshape(1, tokens, c.kda_num_heads, c.kda_head_dim) for y in parts)
        z = z.reshape(1, tokens, c.kda_num_heads, -1)
        if taps is not None:
            taps.decay(self.layer, z, self.A_log, self.dt_bias, c.gate_lower_bound)
        rules, exports = self._rules | {"state": state}, None
        if cache is not None and layout.one_each:
            q, k, v, z = (part.squeeze(0) for part in (q, k, v, z))
            o, state = kda_step(q, k, v, z, beta, **rules)
        else:
            packing: dict[str, Any] = {"cu_seqlens": layout.cu_seqlens, "lengths": layout.lengths}
            packing["export_at"] = layout.export_at or None
            o, state, exported = kda(q, k, v, z, beta.unsqueeze(0), **packing, **rules)
            exports = None if exported is None else (exported, self._tails(qkv, layout))
        if cache is not None:
            cache.write_kda(self.layer, layout, state, tail, exports)
        gate = None if gate is None else gate.reshape(o.shape)
        y = gated_rms_norm(o, gate, self.o_norm.weight, c.rms_norm_eps)
        return self.o_proj(y.reshape(tokens, -1))

    @property
    def _conv_weight(self) -> Tensor:
        weights: list[Tensor] = [self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]
        together = None if torch.is_grad_enabled() else beside(weights)
        return torch.cat(weights) if together is None else together[: sum(map(len, weights))]

    @property
    def _rules(self) -> dict[str, Any]:
        c = self.config
        gate = {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": c.gate_lower_bound}
        return gate | {"delta": c.kda_delta}

    def _tails(self, qkv: Tensor, layout: Layout) -> Tensor:
        """The conv tails [E, C, W−1] at the layout's exports, from the projections [T, C]."""
        ends = torch.tensor(layout.export_at, device=qkv.device).unsqueeze(1)
        return qkv[ends + torch.arange(1 - self.config.short_conv_kernel_size, 0, device=qkv.device)].transpose(1, 2)

    def _window(self, x: Tensor, layout: Layout, place: Place) -> Tensor:
        """The same for a few tokens of each sequence, in place and in one call."""
        c, n = self.config, layout.sequences
        qkv, z, beta, gate = self._inputs(x)
        assert gate is not None
        heads = (n, -1, c.kda_num_heads)
        o = decode(
            qkv.unflatten(0, (n, -1)),
            z.unflatten(0, (n, -1)).unflatten(-1, (c.kda_num_heads, -1)),
            beta.reshape(heads),
            gate.unflatten(0, (n, -1)).unflatten(-1, (c.kda_num_heads, -1)),
            conv_weight=self._conv_weight,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=c.gate_lower_bound,
            norm_weight=self.o_norm.weight,
            eps=c.rms_norm_eps,
            **vars(place),
        )
        return self.o_proj(o.reshape(x.shape[0], -1))

    def replay(self, drafts: Drafts, state: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """(state [H, K, V], tail [C, W−1]) after the projected inputs of some tokens, [T, ...] each."""
        heads = (1, -1, self.config.kda_num_heads, self.config.kda_head_dim)
        parts, tail = short_convs(drafts.qkv.unsqueeze(0), self._conv_weight, 3, tail=tail.unsqueeze(0))
        q, k, v = (y.reshape(heads) for y in parts)
        inputs = drafts.gate.unsqueeze(0), drafts.beta.unsqueeze(0)
        _, state, _ = kda(q, k, v, *inputs, **self._rules, state=state.unsqueeze(0))
        return state[0], tail[0]

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(q|k|v [T, 3·width], z [T, decays], beta logits [T, H], output gate [T, width] or None)."""
        # The narrow ones come last, so that the others' columns stay aligned.
        groups: list[Group] = [(self.q_proj, self.k_proj, self.v_proj), *self._gates, self.f_a_proj, self.b_proj]
        qkv, *gate, f, beta = project(x, *groups)
        if gate and not self.config.use_full_rank_gate:
            z, out_gate = pair((f, gate[0]), (cast(self.f_b_proj.weight), cast(self.g_b_proj.weight)))
            return qkv, z, beta, out_gate
        return qkv, self.f_b_proj(f), beta, gate[0] if gate else None

    @property
    def _gates(self) -> list[Linear]:
        """The first projection of the output gate, where there is one."""
        if not self.config.kda_output_gate:
            return []
        return [self.g_proj if self.config.use_full_rank_gate else self.g_a_proj]

    def settle(self) -> None:
        settle(self.q_proj, self.k_proj, self.v_proj, *self._gates, self.f_a_proj, self.b_proj)
        settle(self.q_conv1d, self.k_conv1d, self.v_conv1d)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A = 0 (report); dt_bias so that fresh decays spread over exp(−dt), log-uniform dt in [1e-3, 0.1]."""
        self.A_log.zero_()
        # inferred: the report says "as in Mamba", which solves the gate for dt; ours solves whichever gate is set.
        u = torch.rand(self.dt_bias.shape, generator=generator)
        dt = torch.exp(u * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3)).clamp_(min=1e-4)
        bound = self.config.gate_lower_bound
        bias = torch.logit(dt / -bound) if bound is not None else torch.log(torch.expm1(dt))
        self.dt_bias.copy_(bias)
        for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
            nn.init.uniform_(conv.weight, -0.5, 0.5, generator=generator)


class ShortConv(nn.Module):
    """Holds a depthwise kernel [C, 1, W]; the last tap multiplies the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))
