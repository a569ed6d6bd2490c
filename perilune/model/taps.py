"""Taps: what a forward pass shows of itself, collected only on request."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.model.layout import Layout
from perilune.ops.kda.reference import log_decay

KINDS = frozenset({"hidden", "routes", "decay", "attn_res", "max_logit"})


@dataclass
class Taps:
    """Ask for kinds by name; each fills its own field.

    hidden: layer -> residual stream (with AttnRes: the running sum) after the layer, [T, hidden].
    routes: layer -> (expert index [T, k], weight [T, k]).
    decay: layer -> mean log-decay per head and channel, [H, K] (natural log; 1/|g| tokens is the memory).
    attn_res: one [sources] vector of mean mixing weights per read, in order of depth.
    max_logit: layer -> largest scaled MLA score per head, [heads].
    """

    kinds: frozenset[str] = frozenset()
    hidden: dict[int, Tensor] = field(default_factory=dict)
    routes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    decays: dict[int, Tensor] = field(default_factory=dict)
    attn_res: list[Tensor] = field(default_factory=list)
    max_logits: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, kinds: Iterable[str]) -> "Taps":
        wanted = frozenset(kinds)
        if unknown := wanted - KINDS:
            raise ValueError(f"Unknown taps {sorted(unknown)}; the kinds are {sorted(KINDS)}.")
        return cls(wanted)

    @torch.no_grad()
    def decay(self, layer: int, z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> None:
        if "decay" in self.kinds:
            heads = A_log.shape[0]
            self.decays[layer] = log_decay(z, A_log, dt_bias.view(heads, -1), lower_bound).mean((0, 1))

    @torch.no_grad()
    def max_logit(self, layer: int, q: Tensor, k: Tensor, layout: Layout, scale: float) -> None:
        """Over the causal pairs of each sequence, one sequence at a time (T² scores of one, never of all)."""
        if "max_logit" not in self.kinds:
            return
        longest, lengths = max(layout.lengths), list(layout.lengths)
        later = q.new_full((longest, longest), float("-inf")).triu_(1)
        top = q.new_full((q.shape[1],), float("-inf"))
        for q_HLD, k_HDL in zip(q.transpose(0, 1).split(lengths, 1), k.permute(1, 2, 0).split(lengths, 2)):
            if length := q_HLD.shape[1]:
                scores = torch.baddbmm(later[:length, :length], q_HLD, k_HDL)
                top = torch.maximum(top, scores.flatten(1).amax(1))
        self.max_logits[layer] = top * scale
