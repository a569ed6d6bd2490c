"""Routing of Stable LatentMoE (technical report §2.3, eq. 13): who is chosen and with what weight.

    σ = sigmoid(x Wᵀ) (or softmax), in fp32, from the full-width input
    chosen = top-k of σ + bias;  p = σ[chosen] / (Σ σ[chosen] + 1e-20) · scaling

The bias only selects: it never enters p. One chosen expert keeps its σ un-renormalised. With groups, a group's score is
the sum of its two best biased scores and only the best groups stand for election. On an NVIDIA GPU a sigmoid router of
one group is one kernel each way beside its products (`router_triton`).
Shapes: T tokens, D width, E experts, k chosen.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from perilune.ops.dispatch import fused, kernels


class Routing(NamedTuple):
    """Of each token: chosen experts idx [T,k] (best first), their weights [T,k] fp32, all scores [T,E] fp32, and the
    threshold [T], the (k+1)-th best biased score, which Quantile Balancing reads (−inf when k = E)."""

    idx: Tensor
    weight: Tensor
    scores: Tensor
    threshold: Tensor


def router_scores(x: Tensor, weight: Tensor, activation: str = "sigmoid") -> Tensor:
    """Scores [T,E] in fp32 (fp64 for fp64 inputs) of x [T,D] against weight [E,D]."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        logits = F.linear(x.to(dtype), weight.to(dtype))
    if activation == "sigmoid":
        return torch.sigmoid(logits)
    if activation == "softmax":
        return torch.softmax(logits, -1)
    raise ValueError(f"router_scores: activation is {activation!r}; known are sigmoid, softmax.")


def select(
    scores: Tensor, bias: Tensor | None, top_k: int, groups: int = 1, top_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Chosen experts [T,k] and the threshold [T]; no gradient. bias [E] fp32 or None."""
    experts = scores.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"select: top_k is {top_k} with {experts} experts.")
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(f"select: {groups} groups (best {top_groups} kept) do not divide {experts} experts.")
    if top_k > experts // groups * top_groups:
        raise ValueError(f"select: top_k {top_k} is more than {top_groups} groups hold.")
    with torch.no_grad():
        biased = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
        if groups > 1:
            biased = _best_groups(biased, groups, top_groups)
        if top_k == experts:
            return biased.topk(top_k, -1).indices, scores.new_full(scores.shape[:-1], float("-inf"))
        best, idx = biased.topk(top_k + 1, -1)
        return idx[..., :top_k], best[..., top_k]


def _best_groups(biased: Tensor, groups: int, top_groups: int) -> Tensor:
    """Scores with every expert outside the best groups at −inf."""
    grouped = biased.unflatten(-1, (groups, -1))
    merit = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    kept = torch.zeros_like(merit, dtype=torch.bool).scatter_(-1, merit.topk(top_groups, -1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def mixture(scores: Tensor, idx: Tensor, renormalize: bool = True, scaling: float = 1.0) -> Tensor:
    """Weights [T,k] of the chosen experts, differentiable in scores."""
    weight = scores.gather(-1, idx)
    if renormalize and idx.shape[-1] > 1:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return weight * scaling if scaling != 1.0 else weight


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    activation: str = "sigmoid",
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
    impl: str = "auto",
) -> Routing:
    """x [T,D], weight [E,D], bias [E] -> `Routing`."""
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"route: x must be [T,D] and weight [E,D], got {tuple(x.shape)} and {tuple(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"route: bias must be [{weight.shape[0]}], got {tuple(bias.shape)}.")
    plain = activation == "sigmoid" and groups == 1 and 1 <= top_k < weight.shape[0]
    if fused("route", impl, x, None if plain else "they choose some of one group by sigmoid"):
        idx, p, scores, threshold = _Fused.apply(x, weight, bias, top_k, renormalize, float(scaling))
        return Routing(idx, p, scores, threshold)
    scores = router_scores(x, weight, activation)
    idx, threshold = select(scores, bias, top_k, groups, top_groups)
    return Routing(idx, mixture(scores, idx, renormalize, scaling), scores, threshold)


class _Fused(torch.autograd.Function):
    """Products in bf16 for the gradients, as everywhere else; the forward's are exact in fp32."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, renormalize: bool, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k = kernels("router_triton")
        idx, p, scores, threshold = k.select(*k.logits(x, weight), bias, top_k, renormalize, scaling)
        ctx.mark_non_differentiable(idx, threshold)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, idx, p, scores)
        ctx.rules = renormalize, scaling
        return idx, p, scores, threshold

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, dp: Tensor | None, dscores: Tensor | None, __: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, idx, p, scores = ctx.saved_tensors
        dp = torch.zeros_like(p) if dp is None else dp.contiguous()
        dscores = None if dscores is None else dscores.contiguous()
        d = kernels("router_triton").select_backward(dp, dscores, p, scores, idx, *ctx.rules, x.dtype)
        return d @ weight.to(d.dtype), (d.T @ x).to(weight.dtype), None, None, None, None
