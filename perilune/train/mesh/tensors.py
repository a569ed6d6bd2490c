"""Tensor parallelism: a module computes 1/tp of its heads, hidden units or words for all tokens of a piece.

    y = scatter( module_local( gather(x) ) )      gather: slices -> piece;  scatter: sum over ranks, each its slice

The module's own code runs unchanged on its part of the weights, with a config of its part of the heads. What is not cut
(low-rank maps, norms) sees the piece on every rank but only its heads' gradients: summed over the stage they are whole.
The head is cut by words; its cross-entropy needs the largest logit, the mass and the target's logit of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from perilune.config import ModelConfig
from perilune.data.batches import NO_TARGET
from perilune.model.kda import KDA
from perilune.model.mla import MLA

# torch 2.13 renamed both.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def divide_heads(config: ModelConfig, tp: int) -> ModelConfig:
    """What an attention module of one rank is told. Checks of a whole model are not its business, widths are."""
    return config.replace(
        kda_num_heads=config.kda_num_heads // tp, num_attention_heads=config.num_attention_heads // tp
    )


def gather_around(module: nn.Module, group: dist.ProcessGroup) -> None:
    """From now on the module takes this rank's slice [T/tp, C] and returns the same slice of the summed outputs."""
    inner = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = _Scatter.apply(inner(_Gather.apply(x, group), *args, **kwargs), group)
        return y

    module.forward = forward  # type: ignore[method-assign]


def gather_slices(x_TC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The piece [T, C] from every rank's slice, in rank order; the gradient is summed and cut. Differentiable."""
    y: Tensor = _Gather.apply(x_TC, group)
    return y


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    _GATHER(out, x.contiguous(), group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    _REDUCE(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scatter(dy, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_gather(dy, ctx.group), None


def split_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`ops.cross_entropy.linear_cross_entropy` with words split over the group: weight [V/tp, D] of this rank.

    hidden is the same on every rank, and so is the sum returned. The gradient of hidden is this rank's words' part.
    """
    total: Tensor = _SplitCrossEntropy.apply(hidden_TD, weight_VD, targets_T, group)
    return total


_CHUNK_VALUES = 1 << 23  # logits held at a time


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        words = weight.shape[0]
        local = targets - words * dist.get_rank(group)
        w, d_hidden = weight.to(hidden.dtype), torch.empty_like(hidden)
        d_weight, total = torch.zeros_like(weight, dtype=wide), torch.zeros((), dtype=wide, device=hidden.device)
        rows = max(1, _CHUNK_VALUES // words)
        for part in range(0, len(hidden), rows):
            h, y, known = (
                hidden[part : part + rows],
                local[part : part + rows],
                targets[part : part + rows] != NO_TARGET,
            )
            mine = ((y >= 0) & (y < words)).unsqueeze(1)
            at = y.clamp(0, words - 1).unsqueeze(1)
            logits = (h @ w.T).to(wide)
            top = logits.amax(-1, keepdim=True)
            dist.all_reduce(top, dist.ReduceOp.MAX, group)
            picked = torch.where(mine, logits.gather(1, at), 0.0)
            p = logits.sub_(top).exp_()
            sums = torch.cat([p.sum(-1, keepdim=True), picked], 1)
            dist.all_reduce(sums, group=group)
            mass, picked = sums.split(1, 1)
            total += ((mass.log() + top - picked).squeeze(1) * known).sum()
            p = p.div_(mass).scatter_add_(1, at, -mine.to(wide)).mul_(known.unsqueeze(1)).to(hidden.dtype)
            d_hidden[part : part + rows] = p @ w
            d_weight += (p.T @ h).to(wide)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * g.to(d_hidden.dtype), (d_weight * g).to(ctx.dtype), None, None


def use_part(module: KDA | MLA, config: ModelConfig, group: dist.ProcessGroup) -> None:
    """An attention module whose weights were cut by heads: its part's config, and slices around it."""
    module.config = divide_heads(config, dist.get_world_size(group))
    gather_around(module, group)
