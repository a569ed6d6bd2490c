"""Index tables and constants that are made once and kept: they depend on lengths, sizes and dtypes alone."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

F = TypeVar("F", bound=Callable[..., Any])


def kept(maxsize: int | None = None) -> Callable[[F], F]:
    """`functools.lru_cache` for functions that make tensors.

    What inference mode asked for first serves training as well. While someone traces (`torch.compile`, fake tensors)
    nothing is kept or looked up: a fake table must not meet a real tensor, nor the other way round.
    """

    def decorate(function: F) -> F:
        make = torch.inference_mode(False)(function)
        look_up = functools.lru_cache(maxsize)(make)

        @functools.wraps(function)
        def wrapped(*key: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*key)
            return make(*key) if is_in_torch_dispatch_mode() else look_up(*key)

        return cast(F, wrapped)

    return decorate
