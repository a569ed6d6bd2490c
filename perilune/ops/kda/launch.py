"""Launching a kernel again without looking at every argument again.

Triton inspects each of some fifty arguments at every launch, to find which of its compiled forms fits: 70 µs on the
host of an H200, as long as the kernel runs. What that depends on is known here in groups: numbers by their values,
tensors by type and alignment. Descriptors follow from the constants (`hopper.tiles`).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST = 4096  # forms remembered; a plan of new lengths brings new numbers

_made: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    descriptors: Sequence[object],
    tensors: Sequence[Tensor],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """kernel[grid](*descriptors, *tensors, *numbers, **constants), in this order in its signature too."""
    key = (
        id(kernel), tensors[0].device, numbers, *constants.values(), *options.values(),
        *[x.dtype for x in tensors], *[x.data_ptr() & 15 for x in tensors],
    )  # fmt: skip
    made = _made.get(key)
    if made is not None and not knobs.runtime.launch_enter_hook.calls:  # a profiler's
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        made.run(
            *grid, 1, stream, made.function, made.packed_metadata, None, None, None,
            *descriptors, *tensors, *numbers, *constants.values(),
        )  # fmt: skip
        return
    made = kernel[grid](*descriptors, *tensors, *numbers, **constants, **options)
    if isinstance(kernel, JITFunction) and made is not None:
        if len(_made) >= MOST:
            _made.clear()
        _made[key] = made
