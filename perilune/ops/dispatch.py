"""Which implementation of an op runs: settled by device and dtype alone, said once, never changed in silence.

Every op with kernels takes `impl`: "auto" (kernels on an NVIDIA GPU, torch elsewhere), "fused" (kernels, or an error)
or "eager" (torch). The equation itself is the op's `*_reference`.
"""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

log = logging.getLogger(__name__)

CAPABILITY = (8, 0)
AUTO = "cuda"  # where "auto" means kernels; a test makes it "cpu" for Triton's interpreter
_chaining = False
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused(op: str, impl: str, x: Tensor, unless: str | None = None) -> bool:
    """Whether `op` on x runs its kernels; `unless`: why not whatever the device, for a call that they do not know.

    Raises ValueError where "fused" is asked for and cannot be.
    """
    if impl not in ("auto", "fused", "eager"):
        raise ValueError(f"{op}: impl is {impl!r}; known are auto, fused, eager.")
    if impl == "eager" or (impl == "auto" and (unless is not None or x.device.type != AUTO)):
        return False
    why = _unfit(x.device.type, x.dtype) or unless
    if impl == "auto":
        _say(op, x.dtype, why)
        return why is None
    if why is not None:
        raise ValueError(f"{op}: the fused kernels cannot run this: {why}.")
    return True


@functools.cache
def kernels(module: str) -> Any:
    """`perilune.ops.MODULE`, imported when its kernels are first wanted: Triton is an extra."""
    return importlib.import_module(f"perilune.ops.{module}")


@functools.cache
def _unfit(device: str, dtype: torch.dtype) -> str | None:
    """None, or why kernels cannot take such a tensor. Triton's interpreter takes those of a CPU."""
    if dtype not in _DTYPES:
        return f"they compute in fp32, the input is {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device != "cuda":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "there is no NVIDIA GPU"
    if torch.cuda.get_device_capability() < CAPABILITY:
        return "the GPU is older than Ampere"
    return None


@functools.cache
def _say(op: str, dtype: torch.dtype, why: str | None) -> None:
    if why is None:
        log.info("%s: fused kernels for %s.", op, dtype)
    else:
        log.warning("%s: torch's own operations, because %s.", op, why)


@contextmanager
def chained() -> Iterator[None]:
    """Within it, kernels that can start while their predecessor still runs do so (`chain_triton`). They read weights
    before it has ended, so nothing in between may change weights: for recording a decoding step."""
    global _chaining
    outer, _chaining = _chaining, torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    try:
        yield
    finally:
        _chaining = outer


def chaining() -> bool:
    return _chaining


def readable(x: Tensor) -> bool:
    """Whether the values of x can be looked at for nothing: they lie on a CPU and nobody traces."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()


def rows_of(x: Tensor) -> Tensor:
    """[..., C] as [R,C] with a contiguous last axis: a view where the strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
