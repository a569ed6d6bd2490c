"""Router biases of a training run: Quantile Balancing over whole steps (report §2.3.3, appendix D).

    r_ij = α_i − s_ij             the bias that would put expert j at token i's cutoff
    H_j  = histogram of r_·j      summed over micro-batches and ranks; the rules are in ops.quantile
    b̂_j  = the (k/n)-quantile of r_·j read from H_j;   b <- b̂ − mean b̂, used from the next step on

Each MoE layer returns a `Tap` a forward pass. The balancer adds them up without communication; `update`, once a step,
makes one integer all-reduce for all layers together and writes the new biases. In evaluation nobody calls it.
Shapes: L MoE layers, E experts, B bins, T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.ops.quantile import BINS, centred, exact_quantile, histogram_quantile, sign_step

BalanceMode = Literal["quantile", "exact", "sign", "none"]


class Tap(Protocol):
    """What a MoE layer reports of one forward pass; padding tokens are in none of it.

    counts [E] integer: tokens each expert received. histogram [E, B] integer (mode "quantile"): of r over
    [b_min − 1, b_max + 1] for the layer's bias b. margins [T, E] fp32 (mode "exact"): r itself.
    """

    @property
    def counts(self) -> Tensor: ...
    @property
    def histogram(self) -> Tensor | None: ...
    @property
    def margins(self) -> Tensor | None: ...


@dataclass(frozen=True)
class RouterTap:
    """A `Tap` as a plain value."""

    counts: Tensor
    histogram: Tensor | None = None
    margins: Tensor | None = None


@dataclass(frozen=True)
class Load:
    """A layer's load over one step. `max_violation`: largest load over the mean, less one; `dead`: share of experts
    without a token."""

    max_violation: float
    dead: float


def loads(counts_LE: Tensor) -> list[Load]:
    """Load statistics of each layer; all zero for a step without tokens."""
    counts_LE = counts_LE.double()
    mean_L = counts_LE.mean(-1)
    violation_L = torch.where(mean_L > 0, counts_LE.amax(-1) / mean_L.clamp_min(1e-300) - 1, 0.0)
    dead_L = torch.where(mean_L > 0, (counts_LE == 0).double().mean(-1), 0.0)
    return [Load(v, d) for v, d in zip(violation_L.tolist(), dead_L.tolist(), strict=True)]


class QuantileBalancer:
    """Accumulates `Tap`s over a step and moves the biases, which are the model's own fp32 buffers [E], in place.

    Modes: "quantile" (histograms), "exact" (all margins of the step; one process only), "sign" (b += γ sign(mean load −
    load), for comparison), "none" (statistics only). `ema` is the weight of the former bias against the new quantile.
    `group`: the ranks that see this model's tokens; all processes by default.
    """

    def __init__(
        self,
        biases: Mapping[int, Tensor],
        top_k: int,
        mode: BalanceMode = "quantile",
        *,
        bins: int = BINS,
        ema: float = 0.0,
        gamma: float = 1e-3,
        group: dist.ProcessGroup | None = None,
    ):
        if mode not in ("quantile", "exact", "sign", "none"):
            raise ValueError(f"Unknown balance mode {mode!r}: quantile, exact, sign or none.")
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"balance.ema must lie in [0, 1), not {ema}.")
        if mode == "exact" and _ranks(group) > 1:
            raise ValueError('balance.mode "exact" works in one process only; use "quantile".')
        self.layers, self.top_k, self.mode, self.ema, self.gamma = list(biases), top_k, mode, ema, gamma
        self.biases, self.group = biases, group
        self.updates = 0
        self._margins: dict[int, list[Tensor]] = {layer: [] for layer in biases}
        first = next(iter(biases.values()))
        # One buffer is one all-reduce: column 0 holds the loads, the others the histogram.
        columns = 1 + (bins if mode == "quantile" else 0)
        self._sums_LEC = torch.zeros(len(biases), first.numel(), columns, dtype=torch.int64, device=first.device)

    def observe(self, taps: Mapping[int, Tap]) -> None:
        """Adds one micro-batch; `taps` by layer, those of one pipeline stage or of all. Raises ValueError if a layer
        reports less than the mode needs."""
        for layer, tap in taps.items():
            i = self.layers.index(layer)
            self._sums_LEC[i, :, 0] += tap.counts
            if self.mode == "quantile":
                if tap.histogram is None or tap.histogram.shape != self._sums_LEC[i, :, 1:].shape:
                    raise ValueError(f"Layer {layer} reports no histogram of {self._sums_LEC.shape[2] - 1} bins.")
                self._sums_LEC[i, :, 1:] += tap.histogram
            elif self.mode == "exact":
                if tap.margins is None:
                    raise ValueError(f"Layer {layer} reports no margins.")
                self._margins[layer].append(tap.margins.detach().float())

    @torch.no_grad()
    def update(self) -> list[Load]:
        """Ends the step: sums over ranks, writes the next step's biases, returns each layer's load in this one."""
        if _ranks(self.group) > 1:
            dist.all_reduce(self._sums_LEC, group=self.group)
        found = loads(self._sums_LEC[:, :, 0])
        for i, layer in enumerate(self.layers):
            if self.mode != "none" and self._sums_LEC[i, :, 0].any():
                self._move(self.biases[layer], self._target(i, layer))
        self.updates += self.mode != "none"
        self.discard()
        return found

    def discard(self) -> None:
        """Forgets the step so far, as after one that was skipped."""
        self._sums_LEC.zero_()
        for margins in self._margins.values():
            margins.clear()

    def state_dict(self) -> dict[str, int]:
        """The biases are the model's; this is the rest."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.updates = int(state["updates"])

    def _target(self, i: int, layer: int) -> Tensor:
        bias_E = self.biases[layer]
        if self.mode == "quantile":
            return histogram_quantile(self._sums_LEC[i, :, 1:], bias_E, self.top_k)
        if self.mode == "exact":
            return exact_quantile(torch.cat(self._margins[layer]), self.top_k)
        return sign_step(bias_E, self._sums_LEC[i, :, 0], self.gamma)

    def _move(self, bias_E: Tensor, target_E: Tensor) -> None:
        target_E = centred(target_E)
        # Averaging centred biases is averaging the quantiles; the first step has no former one to average with.
        if self.ema and self.updates and self.mode != "sign":
            target_E = torch.lerp(target_E, bias_E, self.ema)
        bias_E.copy_(target_E)


def _ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
