"""Cross-entropy of a linear head without the [T, V] logits: chunks of rows, gradients made on the way forward.

    nll_t = logsumexp(W h_t) − (W h_t)[y_t],    d nll / d logits = softmax − onehot

The whole logit matrix of a 160K vocabulary outweighs the model's activations; a chunk of it fits anywhere.
On an NVIDIA GPU what lies between the products of a chunk is one kernel, in place (`cross_entropy_triton`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.dispatch import fused, kernels, readable
from perilune.ops.precision import own_precision

IGNORE = -100
_CHUNK_VALUES = 1 << 23  # logits held at a time
_CHUNK_VALUES_CPU = 1 << 19  # a chunk stays in cache from its product to both gradients
_FUSED_CHUNK_VALUES = 1 << 28  # on a GPU: half a GiB in bf16, products long enough to fill the chip


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The equation, differentiable by autograd: sum of nll in nats over targets other than −100."""
    logits = hidden @ weight.to(hidden.dtype).T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, impl: str = "auto") -> Tensor:
    """Summed negative log-likelihood in nats.

    Args:
        hidden: [T, D]; the product runs in its dtype, softmax and sums in fp32 (fp64 for fp64).
        weight: [V, D].
        targets: [T] integer ids; −100 is left out.
    Under autocast nothing changes: the caller casts.
    Returns:
        A scalar fp32 (fp64) tensor; gradients flow to hidden and weight.
    Raises:
        ValueError: shapes or dtypes that do not fit, and targets outside the vocabulary where they lie on a CPU.
    """
    _check(hidden, weight, targets)
    op = _Fused if fused("linear_cross_entropy", impl, hidden) else _LinearCrossEntropy
    differentiate = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total: Tensor = op.apply(hidden, weight, targets, differentiate)
    return total


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: hidden must be [T,D], weight [V,D]; got {[*hidden.shape]}, {[*weight.shape]}."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"linear_cross_entropy: targets must be [{len(hidden)}] integers, got {[*targets.shape]} {targets.dtype}."
        )
    if readable(targets):
        wrong = (targets != IGNORE) & ((targets < 0) | (targets >= len(weight)))
        if wrong.any():
            raise ValueError(f"linear_cross_entropy: target {int(targets[wrong][0])} is not in 0..{len(weight) - 1}.")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    @own_precision
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, differentiate: bool) -> Tensor:
        w = weight.to(hidden.dtype)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if differentiate else None
        d_weight = torch.zeros_like(weight, dtype=wide) if differentiate else None
        rows = _rows(weight)
        for start in range(0, len(hidden), rows):
            h, y = hidden[start : start + rows], targets[start : start + rows]
            weights, mass, nll = _exponentials(h, w, y, wide)
            total += nll
            if d_hidden is not None and d_weight is not None:
                # softmax = weights / mass: the division is done on the narrow side of each product.
                keep = (y != IGNORE).to(wide).unsqueeze(1)
                share = keep / mass
                # One-hot targets enter as −mass at y, so that a single product serves both terms.
                weights.scatter_add_(1, y.clamp(min=0).unsqueeze(1), -mass)
                weights = weights.to(hidden.dtype)
                d_hidden[start : start + rows] = (weights @ w) * share
                _accumulate(d_weight, weights.T, (h * share).to(hidden.dtype))
        if differentiate:
            ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * g.to(d_hidden.dtype), (d_weight * g).to(ctx.weight_dtype), None, None


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in one call where the dtypes allow."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _rows(weight: Tensor) -> int:
    """Rows a chunk; on a CPU no fewer than make a product worth its call."""
    if weight.device.type == "cpu":
        return max(64, _CHUNK_VALUES_CPU // weight.shape[0])
    return max(1, _CHUNK_VALUES // weight.shape[0])


def _exponentials(h: Tensor, w: Tensor, y: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits − max) [R, V] and its row sums [R, 1], in place over the logits; and the rows' summed nll."""
    logits = (h @ w.T).to(wide)
    picked = logits.gather(1, y.clamp(min=0).unsqueeze(1))
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top).exp_()
    mass = weights.sum(-1, keepdim=True)
    nll = ((mass.log() + top - picked).squeeze(1) * (y != IGNORE)).sum()
    return weights, mass, nll


class _Fused(torch.autograd.Function):
    @staticmethod
    @own_precision
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, differentiate: bool) -> Tensor:
        w = weight.to(hidden.dtype)
        nll = hidden.new_empty(len(hidden), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if differentiate else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if differentiate else None
        rows = max(1, _FUSED_CHUNK_VALUES // weight.shape[0])
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = hidden[part] @ w.T
            nll[part] = kernels("cross_entropy_triton").softmax_gradient(logits, targets[part], IGNORE, differentiate)
            if d_hidden is not None and d_weight is not None:
                torch.mm(logits, w, out=d_hidden[part])
                d_weight += logits.T @ hidden[part]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return nll.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * g.to(d_hidden.dtype), (d_weight * g).to(ctx.weight_dtype), None, None
