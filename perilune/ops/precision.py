"""What autocast must not touch: operations that chose their own precision."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def own_precision(function: F) -> F:
    """Runs `function` with autocast off on its tensors' device.

    Autocast rewrites products inside a custom autograd function too, forward and, where `backward()` is called under
    it, backward: fp32 scores would silently become bf16.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = _device((*args, *kwargs.values()))
        if not torch.amp.is_autocast_available(device):  # of a meta tensor
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return cast(F, wrapped)


def _device(args: tuple[Any, ...]) -> str:
    """Of the first tensor, or of the first one in a list."""
    first = next((x for x in args if isinstance(x, Tensor)), None)
    lists = (x[0] for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor))
    found = first if first is not None else next(lists, None)
    return "cpu" if found is None else found.device.type
