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
        device = next((x.device.type for x in args if isinstance(x, Tensor)), None) or _nested(args)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return cast(F, wrapped)


def _nested(args: tuple[Any, ...]) -> str:
    for x in args:
        if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor):
            return x[0].device.type
    return "cpu"
