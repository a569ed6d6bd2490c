"""The stream over depth: Block Attention Residuals (report §2.2, eq. 8-10), their full form, or plain addition.

    α_i = softmax_i( w · RMSNorm(v_i) ),   h = Σ α_i v_i      over finished block sums v_i and the running sum

The stream is a value; a layer reads it twice and adds to it twice. In inference the two phases of §5.4.2 take over:
when a block closes, all reads until the next border take their part of the finished blocks at once (`Ahead`); each read
then folds in the running sum, in one pass with the last addition and the norm that follows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.model.linear import Linear, Weight, beside
from perilune.model.norm import RMSNorm
from perilune.model.taps import Taps
from perilune.ops.attnres import Ahead, block_scale, merge, mix, mix_ahead, probabilities
from perilune.ops.norm import add_rms_norm


@dataclass(frozen=True)
class Plan:
    """What inference knows of the reads before they come: their queries [reads, D], γ folded into w, in order, and how
    many there are between two borders. Without AttnRes there is nothing to know."""

    queries: Tensor | None = None
    reads: int = 0

    @classmethod
    @torch.no_grad()
    def of(cls, norms: list[Tensor], projections: list[Tensor], block: int) -> "Plan":
        """From the norm weights [D] and projections [1, D] of all reads and the layers of a block: one product, because
        a settled model has them side by side. Not kept: a recorded step must see weights that are changed in place."""
        side = beside(norms), beside(projections)
        gain = torch.stack(norms) if side[0] is None else side[0][: len(norms) * len(norms[0])].view(len(norms), -1)
        return cls(gain * (torch.cat(projections) if side[1] is None else side[1][: len(projections)]), 2 * block)


@dataclass(frozen=True)
class Stream:
    """finished: block sums that no longer change, with their `block_scale`s; running: the open block's sum,
    None right after a border. With a plan, `added` is still to be added to it; ahead: the finished blocks' part of the
    reads from `first` on; read: how many there were."""

    finished: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    running: Tensor | None
    plan: Plan | None = None
    added: Tensor | None = None
    ahead: Ahead | None = None
    first: int = 0
    read: int = 0

    @classmethod
    def start(cls, x: Tensor, plan: Plan | None = None) -> "Stream":
        return cls((), (), x, plan)

    def add(self, y: Tensor) -> "Stream":
        if self.running is None:
            return replace(self, running=y)
        if self.plan is not None:
            return replace(self, added=y)
        return replace(self, running=self.running + y)

    @property
    def total(self) -> Tensor:
        """The running sum with everything added."""
        assert self.running is not None
        return self.running if self.added is None else self.running + self.added

    def close(self, eps: float) -> "Stream":
        """The running sum becomes a finished source; the next addition starts a new block."""
        total = self.total
        blocks = (*self.finished, total)
        if self.plan is None or self.plan.queries is None:
            return replace(self, finished=blocks, scales=(*self.scales, block_scale(total, eps)), running=None)
        coming = self.plan.queries[self.read : self.read + self.plan.reads]
        ahead = mix_ahead(blocks, coming, eps=eps)
        return replace(self, finished=blocks, running=None, added=None, ahead=ahead, first=self.read)

    def norm(self, norm: RMSNorm) -> "tuple[Tensor, Stream]":
        """The normed running sum, and the stream in which it has been made."""
        assert self.running is not None
        if self.added is None:
            return norm(self.running), replace(self, read=self.read + 1)
        x, total = add_rms_norm(self.running, self.added, norm.weight, norm.eps)
        return x, replace(self, running=total, added=None, read=self.read + 1)


def read(
    stream: Stream, norm: Weight, proj: Linear, eps: float, taps: Taps | None = None, then: RMSNorm | None = None
) -> tuple[Tensor, Stream]:
    """(h [T, hidden], the stream after it): the mixture of finished blocks and running sum under one query (γ folded
    into w), normed by `then` if given."""
    assert stream.running is not None
    gain, after = (None, eps) if then is None else (then.weight, then.eps)
    if stream.ahead is not None:
        assert stream.plan is not None and stream.plan.queries is not None
        query, number = stream.plan.queries[stream.read], stream.read - stream.first
        h, total = merge(
            stream.ahead, number, stream.running, query, added=stream.added, eps=eps, norm=gain, norm_eps=after
        )
        return h, replace(stream, running=total, added=None, read=stream.read + 1)
    if stream.plan is not None and not stream.finished and then is not None:
        return stream.norm(then)
    query = norm.weight * proj.weight[0]
    if taps is not None and "attn_res" in taps.kinds and stream.finished:
        taps.attn_res.append(probabilities(stream.finished, stream.running, query, eps=eps).mean(1))
    h = mix(stream.finished, stream.running, query, scales=stream.scales, eps=eps, norm=gain, norm_eps=after)
    return h, stream
