# mypy: allow-untyped-defs
"""Softmax cross-entropy of a chunk of logits and its gradient, in place: `ops.cross_entropy` holds the equation."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def softmax_gradient_kernel(
    logits, targets, nll, V, IGNORE: tl.constexpr, DIFFERENTIATE: tl.constexpr, BV: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * V
    y = tl.load(targets + row)
    lanes = tl.arange(0, BV)
    top = tl.full((BV,), float("-inf"), tl.float32)
    mass = tl.zeros((BV,), tl.float32)
    for first in range(0, V, BV):
        c = first + lanes
        z = tl.load(here + c, mask=c < V, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(top, z)
        # A lane that has seen nothing yet has no maximum to subtract.
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        mass = mass * tl.exp(top - safe) + tl.exp(z - safe)
        top = highest
    peak = tl.max(top, 0)
    total = tl.sum(mass * tl.exp(top - peak), 0)
    kept = y != IGNORE
    picked = tl.load(here + tl.where(kept, y, 0)).to(tl.float32)
    tl.store(nll + row, tl.where(kept, peak + tl.log(total) - picked, 0.0))
    if DIFFERENTIATE:
        tl.debug_barrier()  # every thread has read the target's logit
        share = tl.where(kept, 1.0 / total, 0.0)
        for first in range(0, V, BV):
            c = first + lanes
            z = tl.load(here + c, mask=c < V, other=float("-inf")).to(tl.float32)
            d = tl.exp(z - peak) * share - tl.where((c == y) & kept, 1.0, 0.0)
            tl.store(here + c, d.to(logits.dtype.element_ty), mask=c < V)


def softmax_gradient(logits: Tensor, targets: Tensor, ignore: int, differentiate: bool) -> Tensor:
    """nll [R] fp32 of logits [R,V], which become softmax − onehot (zero rows where the target is `ignore`)."""
    rows, vocabulary = logits.shape
    nll = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(4096, max(16, triton.next_power_of_2(vocabulary)))
    softmax_gradient_kernel[(rows,)](
        logits, targets, nll, vocabulary, IGNORE=ignore, DIFFERENTIATE=differentiate, BV=block, num_warps=8
    )
    return nll
