"""Which tokens of a micro-batch a rank holds, and what its parts know about the rest.

A data-parallel rank's rows are packed on one axis. Context parallelism cuts it into `cp` equal contiguous pieces,
tensor parallelism each piece into `tp` equal slices. A rank keeps its slice's stream; attention, dense feed-forward and
head gather the slices of a piece, so that a stage's ranks hold distinct tokens everywhere else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.data.batches import NO_TARGET, Batch
from perilune.model.layout import Layout
from perilune.parallel import Shard, shard
from perilune.train.loss import second_targets


@dataclass(frozen=True)
class Slice(Layout):
    """The layout of this rank's own tokens; `past` counts a first document's tokens on other ranks.

    piece: the context-parallel piece. documents: its layout, what attention sees after gathering over tp. all: the
    layout of the whole axis. first: index of the rank's first token in the micro-batch of all dp ranks.
    """

    piece: Shard | None = None
    documents: Layout | None = None
    all: Layout | None = None
    first: int = 0


@dataclass(frozen=True)
class Micro:
    """One micro-batch as a rank sees it. tokens, targets: of its slice. head_targets, second: of what its head reads
    (the piece when words are split over tp). real: positions of its slice that have a second target."""

    layout: Slice
    tokens: Tensor
    targets: Tensor
    head_targets: Tensor
    second: Tensor
    real: Tensor


def cut(batch: Batch, *, cp: tuple[int, int], tp: tuple[int, int], dp: int, device: torch.device) -> Micro:
    """This rank's part of a data-parallel rank's batch. cp, tp: (rank, size)."""
    (c, cs), (t, ts) = cp, tp
    piece, own = shard(batch.lengths, c, cs), shard(batch.lengths, c * ts + t, cs * ts)
    here = slice(own.borders[own.rank], own.borders[own.rank + 1])
    head = slice(piece.borders[c], piece.borders[c + 1])
    borders = Layout.packed(own.lengths, device).cu_seqlens
    layout = Slice(
        own.lengths, borders, past=(own.carried, *[0] * (len(own.lengths) - 1)), piece=piece,
        documents=Layout.packed(piece.lengths, device), all=Layout.packed(batch.lengths, device),
        first=dp * len(batch.tokens) + here.start,
    )  # fmt: skip
    second = second_targets(batch.targets, Layout.packed(batch.lengths))
    real = torch.nonzero(second[here] != NO_TARGET).flatten().to(device)
    on = lambda x, part: x[part].to(device)  # noqa: E731
    tokens, targets = on(batch.tokens, here), on(batch.targets, here)
    return Micro(layout, tokens, targets, on(batch.targets, head), on(second, head), real)
