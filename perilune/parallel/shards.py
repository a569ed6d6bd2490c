"""A packed sequence cut over ranks: who holds which tokens, and the few that cross a border (report §5.1.2).

Tokens of all documents lie one after another; rank r holds a contiguous piece. Only its first document can have begun
on another rank and only its last can go on. What crosses borders:

    tail      the W − 1 tokens before a rank's first, for the short convolutions
    context   the earlier tokens of the first document, for attention over MLA latents (576 numbers a token)
    by_heads  all tokens of H/R heads for T/R tokens of all heads: every rank attends equally, whatever the documents
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.parallel.fabric import Collective, Swap, accumulating


@dataclass(frozen=True)
class Shard:
    """One rank's piece of the packed sequence; every rank knows everyone's.

    borders [R+1]  first token of each rank, and the end.
    reach [R]      how many tokens of each rank's first document lie on earlier ranks.
    through [R]    the rank's first document began earlier and is its only one.
    lengths        of the documents here, as far as they lie here; never empty: without tokens it is (0,).
    """

    rank: int
    size: int
    borders: tuple[int, ...]
    reach: tuple[int, ...]
    through: tuple[bool, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.borders[self.rank + 1] - self.borders[self.rank]

    @property
    def counts(self) -> list[int]:
        """Tokens of every rank."""
        return [b - a for a, b in itertools.pairwise(self.borders)]

    @property
    def carried(self) -> int:
        """Tokens of the first document here that lie on earlier ranks."""
        return self.reach[self.rank]

    @property
    def continues(self) -> bool:
        """The last document goes on on the next rank."""
        return self.rank + 1 < self.size and self.reach[self.rank + 1] > 0


def shard(lengths: Sequence[int], rank: int, size: int) -> Shard:
    """Cut documents of these lengths evenly; the first total % R ranks hold one token more. Empty documents drop."""
    if any(n < 0 for n in lengths) or not 0 <= rank < size:
        raise ValueError(f"shard: need lengths >= 0 and 0 <= rank < size, got {list(lengths)}, {rank}, {size}")
    total = sum(lengths)
    borders = [r * (total // size) + min(r, total % size) for r in range(size + 1)]
    ends = [*itertools.accumulate(n for n in lengths if n)]
    pieces, reach = zip(*(_pieces(ends, a, b) for a, b in itertools.pairwise(borders)))
    through = tuple(before > 0 and len(p) == 1 for p, before in zip(pieces, reach))
    return Shard(rank, size, tuple(borders), reach, through, tuple(pieces[rank]))


def _pieces(ends: list[int], a: int, b: int) -> tuple[list[int], int]:
    """Lengths of the documents within tokens a..b, and how many tokens of the first lie before a."""
    starts = [0, *ends[:-1]]
    inside = [(s, e) for s, e in zip(starts, ends) if s < b and e > a]
    if not inside:  # fewer tokens than ranks: the last ones hold none
        return [0], 0
    return [min(e, b) - max(s, a) for s, e in inside], max(a - inside[0][0], 0)


def tail(x_1TC: Tensor, width: int, fabric: Collective, piece: Shard) -> Tensor:
    """What `short_conv(tail=)` takes: [N, C, width], the inputs before each local document, zeros before its start.

    Differentiable: gradients go back to the rank that holds the tokens. One small all-to-all each way.
    """
    window = _Window.apply(x_1TC[0], width, fabric, piece)
    first = torch.cat([window.new_zeros(width - window.shape[0], window.shape[1]), window]).T
    rest = first.new_zeros(len(piece.lengths) - 1, *first.shape)
    return torch.cat([first[None], rest])


def context(x_TC: Tensor, fabric: Collective, piece: Shard) -> Tensor:
    """The first document's tokens on earlier ranks, then the local ones: [carried + T, C]. Differentiable.

    Queries of local document n see keys of the first (carried if n = 0) + lengths[n] tokens, aligned at their ends.
    """
    return torch.cat([_Window.apply(x_TC, piece.borders[-1], fabric, piece), x_TC])


def gather_tokens(x_TC: Tensor, fabric: Collective, piece: Shard) -> Tensor:
    """All tokens of all ranks, [ΣT, C]; the gradient is summed in rank order. Differentiable."""
    return _Gather.apply(x_TC, fabric, piece)


def by_heads(x_THD: Tensor, fabric: Collective, piece: Shard) -> Tensor:
    """[T, H, D] of this rank's tokens -> [ΣT, H/R, D] of this rank's heads. Differentiable."""
    return _Turn.apply(x_THD, fabric, piece, True)


def by_tokens(x_THD: Tensor, fabric: Collective, piece: Shard) -> Tensor:
    """The way back: [ΣT, H/R, D] -> [T, H, D]. Differentiable."""
    return _Turn.apply(x_THD, fabric, piece, False)


def _window_sizes(width: int, piece: Shard) -> tuple[list[tuple[int, int]], Swap]:
    """For each receiver the local rows it needs, and the sizes of the all-to-all."""
    a, b = piece.borders[piece.rank], piece.borders[piece.rank + 1]

    def overlap(receiver: int, lo: int, hi: int) -> tuple[int, int]:
        end = piece.borders[receiver]
        start = end - min(width, piece.reach[receiver])
        return (max(start, lo), max(min(end, hi), max(start, lo))) if receiver else (lo, lo)

    send = [overlap(r, a, b) for r in range(piece.size)]
    receive = [overlap(piece.rank, *piece.borders[r : r + 2]) for r in range(piece.size)]
    return [(s - a, e - a) for s, e in send], Swap([e - s for s, e in send], [e - s for s, e in receive])


class _Window(torch.autograd.Function):
    """Up to `width` tokens before this rank's first, as far as its first document reaches."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, width: int, fabric: Collective, piece: Shard) -> Tensor:  # type: ignore[override]
        ctx.pieces, ctx.sizes = _window_sizes(width, piece)
        ctx.fabric, ctx.shape = fabric, x_TC.shape
        return fabric.swap(torch.cat([x_TC[s:e] for s, e in ctx.pieces]), ctx.sizes, "context")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwindow: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        back = ctx.fabric.swap(dwindow, ctx.sizes.reverse, "context gradients")
        total = back.new_zeros(ctx.shape, dtype=accumulating(back.dtype))
        for part, (s, e) in zip(back.split(ctx.sizes.send), ctx.pieces):
            total[s:e] += part
        return total.to(back.dtype), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, fabric: Collective, piece: Shard) -> Tensor:  # type: ignore[override]
        ctx.fabric, ctx.sizes = fabric, Swap([piece.tokens] * piece.size, piece.counts)
        return fabric.swap(x_TC.repeat(piece.size, *[1] * (x_TC.dim() - 1)), ctx.sizes, "gather tokens")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dall: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parts = ctx.fabric.swap(dall, ctx.sizes.reverse, "gather tokens gradients").split(ctx.sizes.send)
        total = parts[0].to(accumulating(dall.dtype))
        for part in parts[1:]:
            total = total + part
        return total.to(dall.dtype), None, None


class _Turn(torch.autograd.Function):
    """Tokens to heads or back; each is the other's inverse and adjoint."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, fabric: Collective, piece: Shard, to_heads: bool) -> Tensor:  # type: ignore[override]
        ctx.fabric, ctx.piece, ctx.to_heads = fabric, piece, to_heads
        return _turn(x_THD, fabric, piece, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _turn(dx, ctx.fabric, ctx.piece, not ctx.to_heads), None, None, None


def _turn(x_THD: Tensor, fabric: Collective, piece: Shard, to_heads: bool) -> Tensor:
    R = piece.size
    sizes = Swap([piece.tokens] * R, piece.counts)
    if not to_heads:
        parts = fabric.swap(x_THD, sizes.reverse, "heads to tokens").split(sizes.send)
        return torch.cat(parts, 1)
    if x_THD.shape[1] % R:
        raise ValueError(f"by_heads: {x_THD.shape[1]} heads cannot be divided over {R} ranks")
    return fabric.swap(torch.cat(x_THD.chunk(R, 1)), sizes, "tokens to heads")
