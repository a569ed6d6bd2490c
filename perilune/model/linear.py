"""Linear maps as the model needs them: bias-free, several from one input in one product, weights cast once a step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from perilune.ops.linear import linear

_ALIGN = 64  # rows of a joined weight on a GPU: every column of the product then starts on a 16-byte border
_ALIGN_CPU = 16  # in training: 290 columns of 4096 rows of 96 take 3.8 ms, 304 take 2.3

_casts: dict[tuple[Any, ...], Tensor] | None = None


class Linear(nn.Linear):
    """A bias-free nn.Linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, cast(self.weight))


Group = nn.Linear | tuple[nn.Linear, ...]


def project(x: Tensor, *groups: Group) -> tuple[Tensor, ...]:
    """Every group applied to the same x [T, D]: a layer, or a tuple of layers whose outputs lie side by side.

    In training as one product over the concatenated weights: the gradient of x is then one product too, instead of
    one per layer and their sums. Without gradients the weights stay where they are; it is one product if they lie
    beside each other (`settle`).
    """
    joint = [group if isinstance(group, tuple) else (group,) for group in groups]
    weights = [layer.weight for group in joint for layer in group]
    if torch.is_grad_enabled():
        weight = cast(*weights)
    elif (together := beside(weights)) is not None:
        weight = together
    else:
        return tuple(_side_by_side([layer(x) for layer in group]) for group in joint)
    widths = [sum(layer.out_features for layer in group) for group in joint]
    spare = weight.shape[0] - sum(widths)
    parts = linear(x, weight).split([*widths, spare] if spare else widths, dim=-1)
    return parts[: len(widths)]


def settle(*layers: Any) -> None:
    """Move the weights [N_i, ...] of layers into one block of memory, in this order, on a GPU with rows of zeros up to
    a multiple of 64: what was several products of one input can be one. Values and names stay."""
    weights = [layer.weight for layer in layers]
    if len(weights) > 1 and beside(weights) is None and len({w.dtype for w in weights}) == 1:
        rest = _together(weights[0].dtype, tuple(weights), _ALIGN if weights[0].device.type == "cuda" else 1)
        for weight in weights:
            weight.data, rest = rest[: len(weight)], rest[len(weight) :]


def beside(weights: Sequence[Tensor]) -> Tensor | None:
    """The one tensor of which these are the rows, with the zeros that `settle` left; None if they lie apart."""
    first, rows, at = weights[0], 0, weights[0].data_ptr()
    home = first.untyped_storage()
    for w in weights:
        if w.data_ptr() != at or w.untyped_storage().data_ptr() != home.data_ptr() or not w.is_contiguous():
            return None
        rows, at = rows + len(w), at + w.nbytes
    there = home.nbytes() // first.itemsize - first.storage_offset()
    rows = max(rows, min(there // first.stride(0), rows + -rows % _ALIGN))
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Within it a weight is cast to autocast's dtype once, whatever the number of micro-batches and recomputed blocks.

    The weights must not change inside: a training step opens it around its passes and closes it before the update.
    """
    global _casts
    outer, _casts = _casts, {}
    try:
        yield
    finally:
        _casts = outer


def cast(*weights: Tensor) -> Tensor:
    """One weight, or several [N_i, D] on top of each other, in autocast's dtype (their own without autocast).

    Several get rows of zeros up to a multiple of 64, on a CPU of 16. Gradients arrive in each weight's own dtype.
    """
    first = weights[0]
    kind = first.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else first.dtype
    if dtype.itemsize > first.dtype.itemsize or first.dtype == torch.float64:
        dtype = first.dtype
    if len(weights) == 1 and dtype == first.dtype:
        return first
    joined: Tensor = _Cast.apply(dtype, *weights)
    return joined


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.dtypes = [len(w) for w in weights], [w.dtype for w in weights]
        key = (dtype, *(id(w) for w in weights))
        made = None if _casts is None else _casts.get(key)
        if made is None:
            made = _together(dtype, weights, _ALIGN if weights[0].device.type == "cuda" else _ALIGN_CPU)
            if _casts is not None:
                _casts[key] = made
        return made.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parts = g.split([*ctx.rows, len(g) - sum(ctx.rows)])
        return None, *(part.to(dtype) for part, dtype in zip(parts, ctx.dtypes))


def _together(dtype: torch.dtype, weights: tuple[Tensor, ...], align: int) -> Tensor:
    if len(weights) == 1:
        return weights[0].detach().to(dtype)
    rows = [len(w) for w in weights]
    spare = -sum(rows) % align
    joined = weights[0].new_empty(sum(rows) + spare, *weights[0].shape[1:], dtype=dtype)
    parts = joined.split([*rows, spare])
    torch._foreach_copy_(list(parts[:-1]), [w.detach() for w in weights])
    parts[-1].zero_()
    return joined


class Weight(nn.Module):
    """Holds a bare norm weight, so that its name ends in `.weight` as in the release."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
