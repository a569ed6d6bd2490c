# mypy: allow-untyped-defs
"""Kernels that start while the one before them still runs (programmatic dependent launch, Hopper and later).

Inside `dispatch.chained`, a kernel launched with `chain()` is let in as soon as every program of its predecessor has
called `start`. Up to `wait` it may only read what nothing in the chain writes; from there on it sees all before it.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from perilune.ops import dispatch


@triton.jit
def start(CHAIN: tl.constexpr):
    """The next kernel may come in."""
    if CHAIN:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(CHAIN: tl.constexpr):
    """All kernels before this one have ended."""
    if CHAIN:
        cuda.gdc_wait()


def chain() -> dict[str, bool]:
    """Launch options of a kernel that calls `start` and `wait`."""
    return {"CHAIN": True, "launch_pdl": True} if dispatch.chaining() else {}
