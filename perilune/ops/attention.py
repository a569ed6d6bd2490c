"""Causal softmax attention over packed documents; in training its output is fp32 (report §2.1.2).

    o_i = Σ_j P_ij v_j,   P_i = softmax_j(scale · ⟨q_i, k_j⟩),   j ≤ i of the same document

Why fp32: the backward subtracts δ_i = ⟨do_i, o_i⟩ from ⟨do_i, v_j⟩, and what a rounded o leaves there is not noise but
a bias that grows (Qiu & Yao, arXiv 2510.04212). SDPA returns its input's dtype, so bf16 training on a GPU takes
kernels of our own (`attention_triton`); elsewhere SDPA gets its inputs in fp32.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.dispatch import fused, kernels
from perilune.ops.kept import kept
from perilune.ops.precision import own_precision

_SMALLEST = 16  # shorter documents share one bucket


@own_precision
def attention_reference(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """The equation, differentiable by autograd: all T² scores. Returns fp32 (fp64 for fp64)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    other = document[:, None] != document
    unseen = other | torch.ones_like(other).triu(1)
    scores = torch.einsum("ihd,jhd->hij", q.to(wide), k.to(wide)) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v.to(wide))


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, *, impl: str = "auto") -> Tensor:
    """Each query over its document's keys up to itself.

    Args:
        q, k: [T,H,DK]. v: [T,H,DV]. One dtype; autocast does not change it.
        lengths: tokens of each document, empty ones included; they sum to T.
        scale: of the scores.
        impl: of training; inference is SDPA's.
    Returns:
        [T,H,DV]: fp32 (fp64 for fp64) where gradients are enabled, v's dtype in inference.
    Raises:
        ValueError: shapes, dtypes or lengths that do not fit, or an impl that cannot run.
    """
    _check(q, k, v, lengths)
    if impl not in ("auto", "fused", "eager"):
        raise ValueError(f"attention: impl is {impl!r}; known are auto, fused, eager.")
    if not torch.is_grad_enabled():
        return _sdpa(q, k, v, tuple(lengths), scale)
    # fp32 loses nothing in SDPA, whose kernels for it are the better ones.
    wanted = "eager" if impl == "auto" and q.dtype.itemsize > 2 else impl
    if len(q) and fused("attention", wanted, q):
        o: Tensor = _Fused.apply(q, k, v, tuple(lengths), scale)
        return o
    wide = torch.promote_types(q.dtype, torch.float32)
    return _sdpa(q.to(wide), k.to(wide), v.to(wide), tuple(lengths), scale)


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> None:
    if q.dim() != 3 or k.shape != q.shape or v.shape[:-1] != q.shape[:-1] or sum(lengths) != len(q):
        raise ValueError(
            f"attention: q and k must be [T,H,DK], v [T,H,DV] and lengths sum to T; got {[*q.shape]}, {[*k.shape]}, "
            f"{[*v.shape]} and {sum(lengths)} tokens."
        )
    if any(not isinstance(n, int) or n < 0 for n in lengths):
        raise ValueError(f"attention: lengths must be integers of 0 or more, got {[*lengths]}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"attention: q, k and v must share a dtype of floats, not {q.dtype}, {k.dtype} and {v.dtype}.")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:  # type: ignore[override]
        q, k, v = (_close(x) for x in (q, k, v))
        o: Tensor
        o, lse = kernels("attention_triton").forward(q, k, v, _borders(lengths, q.device)[0], scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.lengths, ctx.scale = lengths, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        borders = _borders(ctx.lengths, q.device)
        grads = kernels("attention_triton").backward(q, k, v, o, lse, _close(do), *borders, ctx.scale)
        return *grads, None, None


def _close(x: Tensor) -> Tensor:
    """With a contiguous last axis; an expanded cotangent has none."""
    return x if x.stride(-1) == 1 else x.contiguous()


@kept(maxsize=32)
def _borders(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 [T] each: the first token of every token's document, and the one after its last."""
    count = torch.tensor(lengths, dtype=torch.int64)
    end = count.cumsum(0)
    return tuple(torch.repeat_interleave(x, count).to(device, torch.int32) for x in (end - count, end))  # type: ignore[return-value]


@own_precision
def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Without a mask: documents of similar length are one square causal call, at most half of which is padding."""
    different = set(lengths) - {0}
    if len(different) <= 1:  # equal lengths: a view, not a gather
        n = max(different, default=0)
        q, k, v = (x.unflatten(0, (-1, n)) if n else x.unsqueeze(0) for x in (q, k, v))
        return _square(q, k, v, scale).flatten(0, 1)
    out = v.new_empty(v.shape)
    for index, rows in _buckets(lengths, q.device):
        o = _square(q[index], k[index], v[index], scale)
        out = out.index_put((index[rows],), o[rows])
    return out


@kept(maxsize=32)
def _buckets(lengths: tuple[int, ...], device: torch.device) -> "list[tuple[Tensor, Tensor]]":
    """(token index [n,L], which of them are real [n,L]) for documents whose lengths share a power of two."""
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        if length:
            groups.setdefault(max(length, _SMALLEST - 1).bit_length(), []).append(document)
    starts = list(itertools.accumulate(lengths, initial=0))
    buckets = []
    for members in groups.values():
        first, count = torch.tensor([starts[d] for d in members]), torch.tensor([lengths[d] for d in members])
        offset = torch.arange(int(count.max()))
        # Padding repeats the last token: it comes after every real query, so causality hides it.
        index = first[:, None] + torch.minimum(offset, count[:, None] - 1)
        buckets.append((index.to(device), (offset < count[:, None]).to(device)))
    return buckets


def _square(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[n,L,H,DK] and [n,L,H,DV] -> [n,L,H,DV]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    width = v.shape[-1]
    if q.device.type == "cpu" and width < q.shape[-1]:
        # The CPU's fused kernel wants equal head sizes; without it SDPA writes the whole score matrix.
        v = F.pad(v, (0, q.shape[-1] - width))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return o[..., :width].transpose(1, 2)
