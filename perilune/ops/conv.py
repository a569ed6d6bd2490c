"""Depthwise causal short convolution with SiLU over packed sequences (technical report §2.1.1, eq. 2: q, k, v of KDA).

    y_t = silu( Σ_w weight[:, w] · x_{t − (W−1) + w} )       the last tap multiplies the current token

Sequences start from a tail of W−1 earlier inputs (zeros by default) and never see each other. Computed in fp32
(fp64 for fp64 inputs) whatever x is; the weights belong to the fp32 set. On an NVIDIA GPU kernels run
(`conv_triton`), unless the tail wants a gradient.
Shapes: B batch, T tokens, C channels, W taps, N sequences.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from perilune.ops.dispatch import fused, kernels, rows_of
from perilune.ops.kept import kept
from perilune.ops.precision import own_precision


def short_conv(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`short_convs` in one part: (y [B,T,C], new tail)."""
    (y,), tail = short_convs(x, weight, 1, **options)
    return y, tail


def short_convs(
    x: Tensor,
    weight: Tensor,
    parts: int,
    *,
    tail: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    activation: bool = True,
    impl: str = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Convolves x [B,T,C] with weight [C,W] or [C,1,W] and hands out the channels in equal parts (q, k, v of KDA).

    Args:
        tail: [N,C,W−1], the inputs before each sequence, oldest first; zeros by default. N = B, or len(lengths).
        lengths: tokens of each packed sequence (B = 1), empty ones included; None means B sequences of T.
        activation: False leaves SiLU out.
    Returns:
        `parts` tensors [B,T,C/parts] in x's dtype, and the new tail [N,C,W−1] in the tail's dtype (x's without one).
    Raises:
        ValueError: one sentence that names the argument.
    """
    weight = weight.squeeze(1) if weight.dim() == 3 else weight
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"short_conv: x must be [B,T,C] and weight [C,W], got {tuple(x.shape)}, {tuple(weight.shape)}."
        )
    if lengths is not None and any(not isinstance(n, int) or n < 0 for n in lengths):
        raise ValueError(f"short_conv: lengths must be integers of 0 or more, got {[*lengths]}.")
    if parts < 1 or x.shape[-1] % parts or weight.shape[1] < 1:
        raise ValueError(f"short_conv: {x.shape[-1]} channels in {parts} parts under {weight.shape[1]} taps do not go.")
    if lengths is not None and (x.shape[0] != 1 or sum(lengths) != x.shape[1]):
        raise ValueError(f"short_conv: lengths hold {sum(lengths)} tokens, x is {tuple(x.shape)}; packing needs B = 1.")
    taps = weight.shape[1]
    sequences = x.shape[0] if lengths is None else len(lengths)
    if tail is not None and tail.shape != (sequences, x.shape[-1], taps - 1):
        raise ValueError(f"short_conv: tail must be {[sequences, x.shape[-1], taps - 1]}, got {tuple(tail.shape)}.")
    wants_tail = tail is not None and tail.requires_grad and torch.is_grad_enabled()
    unless = None if parts in (1, 3) and not wants_tail else "they make one or three parts, and no gradient of a tail"
    if fused("short_conv", impl, x, unless):
        spans = tuple(lengths) if lengths is not None else (x.shape[1],) * x.shape[0]
        ys = _Fused.apply(x, weight, tail, spans, parts, activation)
        return ys, _new_tail(x.reshape(-1, x.shape[-1]), tail, spans, taps)
    if taps == 1:  # nothing crosses a border
        y, _ = _ShortConv.apply(x, weight, None, None, activation)
        return y.chunk(parts, -1), x.new_zeros(sequences, x.shape[-1], 0) if tail is None else tail.clone()
    rows = None if lengths is None or len(lengths) == 1 else _rows(tuple(lengths), taps, x.device)
    y, tail = _ShortConv.apply(x, weight, tail, rows, activation)
    return y.chunk(parts, -1), tail


@own_precision
def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    *,
    tail: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    activation: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same by torch's conv1d, one sequence at a time."""
    weight = (weight.squeeze(1) if weight.dim() == 3 else weight).to(_accumulating(x.dtype))
    taps = weight.shape[1]
    pieces = list(x) if lengths is None else list(x[0].split(list(lengths)))
    outputs, tails = [], []
    for n, piece in enumerate(pieces):
        before = x.new_zeros(x.shape[-1], taps - 1) if tail is None else tail[n]
        whole = torch.cat([before.to(weight.dtype), piece.T.to(weight.dtype)], 1)
        y = F.conv1d(whole, weight.unsqueeze(1), groups=len(weight)) if len(piece) else whole[:, :0]
        outputs.append((F.silu(y) if activation else y).T.to(x.dtype))
        tails.append(whole[:, whole.shape[1] - taps + 1 :].to(before.dtype))
    y = torch.stack(outputs) if lengths is None else torch.cat(outputs).unsqueeze(0)
    return y, torch.stack(tails)


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(lengths: tuple[int, ...], taps: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers in the extended axis, where each sequence is preceded by its tail.

    Returns the rows of the tokens [T], of the old tails [N·(W−1)] and of the new tails [N·(W−1)].
    """
    count = torch.tensor(lengths, dtype=torch.int64)
    ahead = taps - 1
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), count)
    starts = count.cumsum(0) - count + ahead * torch.arange(len(lengths))  # extended row of each tail's first
    tokens = torch.arange(int(count.sum())) + ahead * (sequence + 1)
    within = torch.arange(ahead)
    old = (starts.unsqueeze(1) + within).flatten()
    new = ((starts + count).unsqueeze(1) + within).flatten()
    return tokens.to(device), old.to(device), new.to(device)


@kept(maxsize=32)
def _places(lengths: tuple[int, ...], taps: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token its index within its sequence and the sequence's number, int32 [T]; and for each slot of the new
    tails [N,W−1] the token that fills it, or less than zero, counted back from the old tail's end."""
    count = torch.tensor(lengths, dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), count)
    starts = torch.tensor([0, *itertools.accumulate(lengths[:-1])])
    position = torch.arange(len(sequence)) - starts[sequence]
    within = count[:, None] + torch.arange(1 - taps, 0)
    filled = torch.where(within >= 0, within + starts[:, None], within)
    return position.to(device, torch.int32), sequence.to(device, torch.int32), filled.to(device)


def _new_tail(x: Tensor, tail: Tensor | None, lengths: tuple[int, ...], taps: int) -> Tensor:
    """[N,C,W−1]: the last inputs of each sequence, the old tail's where it is shorter."""
    filled = _places(lengths, taps, x.device)[2]
    if not len(x):
        return x.new_zeros(len(lengths), x.shape[-1], taps - 1) if tail is None else tail.clone()
    new = x[filled.clamp(min=0)].transpose(1, 2)
    if tail is None:
        return new.masked_fill(filled[:, None] < 0, 0.0)
    slot = (filled % (taps - 1)).unsqueeze(1).expand(-1, x.shape[-1], -1)
    return torch.where(filled[:, None] < 0, tail.gather(2, slot), new.to(tail.dtype))


class _Fused(torch.autograd.Function):
    """Keeps its inputs; the pre-activations are made again. The tail gets no gradient here."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        tail: Tensor | None,
        lengths: tuple[int, ...],
        parts: int,
        activation: bool,
    ) -> tuple[Tensor, ...]:
        position, sequence, _ = _places(lengths, weight.shape[1], x.device)
        weight, tail = weight.T.contiguous(), None if tail is None else tail.contiguous()
        ctx.save_for_backward(x, weight, tail, position, sequence)
        ctx.activation = activation
        ys = kernels("conv_triton").forward(rows_of(x), weight, tail, position, sequence, parts, activation)
        return tuple(y.view(*x.shape[:2], -1) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, tail, position, sequence = ctx.saved_tensors
        flat = tuple(rows_of(d) for d in dys)
        if len({d.stride(0) for d in flat}) > 1:
            flat = tuple(d.contiguous() for d in flat)
        dx, dw = kernels("conv_triton").backward(rows_of(x), weight, tail, position, sequence, flat, ctx.activation)
        return dx.view(x.shape), dw.T.contiguous().to(weight.dtype), None, None, None, None


class _ShortConv(torch.autograd.Function):
    """Shifted multiply-adds over one extended buffer: on CPU faster than conv1d and its layout changes."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        tail: Tensor | None,
        rows: tuple[Tensor, Tensor, Tensor] | None,
        activation: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype, taps = _accumulating(x.dtype), weight.shape[1]
        w = weight.to(dtype).T.contiguous()  # [W,C]: a tap's row lies together, or addcmul leaves its vector loop
        extended = _extend(x, tail, rows, taps, dtype)
        valid = extended.shape[1] - taps + 1
        pre = extended[:, taps - 1 :] * w[-1]
        for j in range(taps - 1):
            pre.addcmul_(extended[:, j : j + valid], w[j])
        if rows is not None:
            pre = pre.index_select(1, rows[0] - (taps - 1))
            new_tail = extended.index_select(1, rows[2]).view(-1, taps - 1, x.shape[2]).transpose(1, 2)
        else:
            new_tail = extended[:, valid:].transpose(1, 2)
        y = F.silu(pre) if activation else pre
        ctx.save_for_backward(extended, w, pre if activation else None)
        ctx.rows, ctx.dtypes = rows, (x.dtype, weight.dtype, None if tail is None else tail.dtype)
        return y.to(x.dtype), new_tail.to(x.dtype if tail is None else tail.dtype).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_new_tail: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        extended, w, pre = ctx.saved_tensors
        rows, (x_dtype, weight_dtype, tail_dtype), taps = ctx.rows, ctx.dtypes, w.shape[0]
        dpre = dy.to(w.dtype)
        if pre is not None:
            dpre = torch.ops.aten.silu_backward(dpre, pre)
        valid = extended.shape[1] - taps + 1
        if rows is not None:
            packed, dpre = dpre, extended.new_zeros(1, valid, extended.shape[2])
            dpre.index_copy_(1, rows[0] - (taps - 1), packed)
        dweight = torch.stack([(dpre * extended[:, j : j + valid]).sum((0, 1)) for j in range(taps)], 1)
        dextended = torch.zeros_like(extended)
        for j in range(taps):
            dextended[:, j : j + valid].addcmul_(dpre, w[j])
        d_new_tail = d_new_tail.to(w.dtype).transpose(1, 2)
        if rows is not None:
            dextended.index_add_(1, rows[2], d_new_tail.reshape(1, -1, extended.shape[2]))
            dx = dextended.index_select(1, rows[0])
            dtail = dextended.index_select(1, rows[1]).view(-1, taps - 1, extended.shape[2])
        else:
            dextended[:, valid:] += d_new_tail
            dx, dtail = dextended[:, taps - 1 :], dextended[:, : taps - 1]
        dtail_out = None if tail_dtype is None else dtail.transpose(1, 2).to(tail_dtype)
        return dx.to(x_dtype), dweight.to(weight_dtype), dtail_out, None, None


def _extend(
    x: Tensor, tail: Tensor | None, rows: tuple[Tensor, Tensor, Tensor] | None, taps: int, dtype: torch.dtype
) -> Tensor:
    """Each sequence after its tail, on one axis: [B, T + W−1, C], or [1, T + N(W−1), C] when packed."""
    ahead = taps - 1
    if rows is None:
        if tail is None:
            return F.pad(x.to(dtype), (0, 0, ahead, 0))
        return torch.cat([tail.to(dtype).transpose(1, 2), x.to(dtype)], 1)
    extended = x.new_zeros(1, x.shape[1] + rows[1].numel(), x.shape[2], dtype=dtype)
    extended.index_copy_(1, rows[0], x.to(dtype))
    if tail is not None:
        extended.index_copy_(1, rows[1], tail.to(dtype).transpose(1, 2).reshape(1, -1, x.shape[2]))
    return extended
