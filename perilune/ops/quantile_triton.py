# mypy: allow-untyped-defs
"""The margin histogram of Quantile Balancing in one pass over the scores: `ops.quantile` holds the equations."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def histogram_kernel(
    scores, threshold, mask, low, high, counts, T, E, bins,
    MASKED: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    kept = t < T
    if MASKED:
        kept = kept & (tl.load(mask + t, mask=t < T, other=0) != 0)
    inside = kept[:, None] & (e < E)[None, :]
    s = tl.load(scores + t[:, None] * E + e[None, :], mask=inside, other=0.0)
    bottom = tl.load(low)
    margin = tl.load(threshold + t, mask=t < T, other=0.0)[:, None] - s - bottom
    at = (margin * (bins / (tl.load(high) - bottom))).to(tl.int32)
    at = tl.minimum(tl.maximum(at, 0), bins - 1)
    # Integer additions: the counts do not depend on the order.
    tl.atomic_add(counts + e[None, :] * bins + at, 1, mask=inside, sem="relaxed")


def histogram(scores: Tensor, threshold: Tensor, low: Tensor, high: Tensor, bins: int, mask: Tensor | None) -> Tensor:
    """int32 [E,bins] of scores [T,E] fp32, threshold [T] fp32, low and high [] fp32, mask [T] bool or None."""
    T, E = scores.shape
    counts = torch.zeros(E, bins, dtype=torch.int32, device=scores.device)
    be = min(128, triton.next_power_of_2(E))
    bt = 2048 // be
    histogram_kernel[triton.cdiv(T, bt), triton.cdiv(E, be)](
        scores, threshold, scores if mask is None else mask.to(torch.uint8), low, high, counts, T, E, bins,
        MASKED=mask is not None, BT=bt, BE=be,
    )  # fmt: skip
    return counts
