"""The stream over depth: Block Attention Residuals (report §2.2, eq. 8-10), their full form, or plain addition.

    α_i = softmax_i( w · RMSNorm(v_i) ),   h = Σ α_i v_i      over finished block sums v_i and the running sum

The stream is a value; a layer reads it twice and adds to it twice.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from perilune.model.linear import Linear, Weight
from perilune.model.norm import RMSNorm
from perilune.model.taps import Taps
from perilune.ops.attnres import block_scale, mix, probabilities


@dataclass(frozen=True)
class Stream:
    """finished: block sums that no longer change, with their `block_scale`s; running: the open block's sum,
    None right after a border."""

    finished: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    running: Tensor | None

    @classmethod
    def start(cls, x: Tensor) -> "Stream":
        return cls((), (), x)

    def add(self, y: Tensor) -> "Stream":
        return replace(self, running=y if self.running is None else self.running + y)

    def close(self, eps: float) -> "Stream":
        """The running sum becomes a finished source; the next addition starts a new block."""
        assert self.running is not None
        return Stream((*self.finished, self.running), (*self.scales, block_scale(self.running, eps)), None)


def read(
    stream: Stream, norm: Weight, proj: Linear, eps: float, taps: Taps | None = None, then: RMSNorm | None = None
) -> Tensor:
    """h [T, hidden]: the mixture of finished blocks and running sum under one query (γ folded into w), normed by
    `then` if given."""
    assert stream.running is not None
    query = norm.weight * proj.weight[0]
    if taps is not None and "attn_res" in taps.kinds and stream.finished:
        taps.attn_res.append(probabilities(stream.finished, stream.running, query, eps=eps).mean(1))
    gain, after = (None, eps) if then is None else (then.weight, then.eps)
    return mix(stream.finished, stream.running, query, scales=stream.scales, eps=eps, norm=gain, norm_eps=after)
