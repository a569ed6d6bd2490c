"""Layout: the one description of a batch. Sequences lie end to end on a single token axis [T]."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """N sequences packed on one token axis of T = sum(lengths) tokens.

    lengths: new tokens of each sequence, on the host (kernels plan from it without a sync).
    cu_seqlens: int64 [N+1] on the device, borders of the sequences.
    slots: int64 [N], the cache row each sequence owns; absent without a cache.
    past: tokens each sequence already has in the cache, on the host; empty without one.
    export_at: offsets on the token axis, each a multiple of 16 from its sequence's start, after whose tokens the cache
        wants the KDA states too: checkpoints inside a chunk.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    slots: Tensor | None = None
    past: tuple[int, ...] = ()
    export_at: tuple[int, ...] = ()

    @classmethod
    def packed(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Self:
        """Whole sequences without a cache: training and evaluation."""
        return cls(tuple(lengths), _borders(lengths, device))

    @classmethod
    def cached(
        cls, lengths: Sequence[int], slots: Sequence[int], past: Sequence[int], device: torch.device | str
    ) -> Self:
        """Continue sequences that own rows `slots` of a cache and have `past` tokens there: prefill and decode."""
        if not len(lengths) == len(slots) == len(past):
            raise ValueError(f"lengths, slots and past differ: {len(lengths)}, {len(slots)}, {len(past)}.")
        rows = torch.tensor(list(slots), dtype=torch.int64, device=device)
        return cls(tuple(lengths), _borders(lengths, device), rows, tuple(past))

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @property
    def starts(self) -> tuple[int, ...]:
        """Offset of each sequence's first token, on the host."""
        return tuple(itertools.accumulate(self.lengths[:-1], initial=0))

    @property
    def fresh(self) -> bool:
        """No sequence has a past: attention needs nothing but the new tokens."""
        return not any(self.past)

    @property
    def one_each(self) -> bool:
        """A decoding step: every sequence brings one token."""
        return all(n == 1 for n in self.lengths)

    @cached_property
    def sequence_of(self) -> Tensor:
        """int64 [T]: the sequence each token belongs to."""
        counts = torch.diff(self.cu_seqlens)
        ids = torch.arange(self.sequences, device=self.device)
        return torch.repeat_interleave(ids, counts, output_size=self.tokens)

    @cached_property
    def position_of(self) -> Tensor:
        """int64 [T]: the index of each token within its sequence, the cached past included."""
        start = self.cu_seqlens[:-1]
        if self.past:
            start = start - torch.tensor(self.past, device=self.device)
        return torch.arange(self.tokens, device=self.device) - start[self.sequence_of]

    @cached_property
    def last(self) -> Tensor:
        """int64 [N]: index of each sequence's last token; of the nearest other token, where a sequence is empty."""
        return (self.cu_seqlens[1:] - 1).clamp(min=0)


def _borders(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64, device=device)
