"""y = x Wᵀ for what decoding has: one row at a time, where the bytes of W are all that a product costs.

A library's product is made for many rows; for one on an NVIDIA GPU `one_triton` streams W instead. No gradient there;
everything else is torch's own product. Shapes: x [T,K], W [N,K] -> [T,N].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.dispatch import fused, kernels


def linear(x: Tensor, weight: Tensor, *, impl: str = "auto") -> Tensor:
    """x [..., K] through weight [N,K], in x's dtype."""
    if not _alone(x, weight, impl):
        return F.linear(x, weight)
    y: Tensor = kernels("one_triton").linear(x, weight)[0]
    return y


def pair(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Two products, in one launch where each has one row and both are equally deep."""
    if x[0].shape != x[1].shape or not all(_alone(one, w, impl) for one, w in zip(x, weight)):
        return F.linear(x[0], weight[0]), F.linear(x[1], weight[1])
    both: tuple[Tensor, Tensor] = kernels("one_triton").linear(x[0], weight[0], also=(x[1], weight[1]))
    return both


def _alone(x: Tensor, weight: Tensor, impl: str) -> bool:
    """Whether x is a single row that `one_triton` takes."""
    if torch.is_grad_enabled() or x.dim() != 2 or len(x) != 1 or x.dtype != weight.dtype:
        return False
    return x.stride(1) == 1 and weight.is_contiguous() and fused("linear", impl, x)
