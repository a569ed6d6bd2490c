"""MLA latents shared out over tokens: of R ranks, rank r holds tokens r, r + R, r + 2R, … of every sequence.

    o = Σ_r exp(l_r − l) o_r,   l = log Σ_r exp l_r        (o_r, l_r): attention of all heads to the tokens of rank r

Repeated latents cost every rank the whole context; shared, a pool of the same bytes holds R times as many tokens. What
is bought with it, a layer: a decoding step sends every rank's queries to all (absorbed, so latents are never sent), and
the parts of the answer to the ranks that own the heads. A chunk of a prompt brings its past together instead, one layer
at a time: its queries are more than its latents. Whole prompts send nothing.
Page numbers, hash blocks and the schedule stay those of one engine: a page of P tokens has P/R of them here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.model.cache import Book, State
from perilune.ops.mla import merge_parts, mla_part


@dataclass(frozen=True)
class Shares:
    """This rank's share, and how the ranks speak. All of them call the same methods in the same order."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def count(self, tokens: int) -> int:
        """How many of the first `tokens` are here."""
        return (tokens - self.rank + self.size - 1) // self.size

    def place(self, page: Tensor, offset: Tensor, elsewhere: int) -> tuple[Tensor, Tensor]:
        """Page and offset there of tokens that lie so in whole pages; what is another rank's goes to page
        `elsewhere`."""
        return torch.where(offset % self.size == self.rank, page, elsewhere), offset // self.size

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, [R, *x.shape]."""
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), x.contiguous(), group=self.group)
        return out

    def whole(self, here_NLR: Tensor, longest: int) -> Tensor:
        """Contexts of at most `longest` tokens, of which here_NLR are these: [N, longest, width]."""
        all_RNLR = self.gather(here_NLR[:, : -(-longest // self.size)])
        return all_RNLR.permute(1, 2, 0, 3).flatten(1, 2)[:, :longest]

    def exchange(self, x: Tensor) -> Tensor:
        """x[r] goes to rank r; what the ranks have for this one, [R, *x.shape[1:]]."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out


@dataclass(frozen=True)
class SharedBook(Book):
    """A decoding window's latents, of which a part is here. lengths: tokens of whole contexts, the window included."""

    shares: Shares = field(default_factory=lambda: Shares(0, 1))

    def attend(self, q: Tensor, values: int, scale: float) -> Tensor:
        """q [N, W, my heads, R] -> [N, W, my heads, values], over the tokens of all ranks."""
        N, W, H, _ = q.shape
        s = self.shares
        position = (self.lengths - W).unsqueeze(1) + torch.arange(W, device=q.device)
        seen = (position - s.rank + s.size) // s.size
        heads = s.gather(q.flatten(0, 1)).transpose(0, 1).flatten(1, 2)
        table = self.table.repeat_interleave(W, 0)
        o, lse = mla_part(heads, self.latents, table, seen.flatten(), values=values, scale=scale)
        mine = torch.cat([o, lse.unsqueeze(-1)], -1).unflatten(1, (s.size, H)).transpose(0, 1).contiguous()
        parts = s.exchange(mine)
        return merge_parts(parts[..., :-1], parts[..., -1]).to(q.dtype).view(N, W, H, values)


def interleaved(states: Sequence[State]) -> dict[int, Tensor]:
    """The latents of whole contexts from what the ranks exported, in their order."""
    size, whole = len(states), {}
    for layer, part in states[0].mla.items():
        whole[layer] = part.new_empty(sum(len(s.mla[layer]) for s in states), *part.shape[1:])
        for rank, s in enumerate(states):
            whole[layer][rank::size] = s.mla[layer]
    return whole
