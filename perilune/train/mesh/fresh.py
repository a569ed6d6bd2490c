"""Fresh weights of a model that no process holds whole.

K3's constructor and `reset_parameters` fill parameters in place, in one order, from torch's generator. Here they have
no storage (the meta device): each filling runs on a real tensor of that shape instead, which is handed on and
forgotten. The generator moves as it does for a whole model, so all values are those of one process, bit for bit, and a
rank never holds more than its shards and the largest tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from perilune.config import ModelConfig
from perilune.model.net import K3


class _Filled(TorchFunctionMode):
    """Every in-place call on a tensor without storage acts on a real one, for `take(the tensor, its values)`.

    The values lie in one buffer that the next call overwrites.
    """

    def __init__(self, take: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.take, self.buffer = take, torch.empty(0, device="cpu")

    def _like(self, target: Tensor) -> Tensor:
        n = target.numel()
        if self.buffer.numel() < n or self.buffer.dtype != target.dtype:
            self.buffer = torch.empty(n, dtype=target.dtype, device="cpu")
        return self.buffer[:n].view(target.shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = args[0] if args else kwargs.pop("tensor", None)
        name = getattr(func, "__name__", "")
        if not (isinstance(target, Tensor) and target.is_meta and name.endswith("_") and not name.endswith("__")):
            return func(*args, **({} if args or target is None else {"tensor": target}), **kwargs)
        values = self._like(target)
        with torch.no_grad():
            func(values, *args[1:], **kwargs)
        self.take(target, values)
        return target


def skeleton(config: ModelConfig) -> K3:
    """The model without storage; the generator is where building it leaves it."""
    with torch.device("meta"), _Filled(lambda _, __: None):
        return K3(config)


def fill(model: K3, take: Callable[[str, Tensor], None]) -> None:
    """`reset_parameters` of a `skeleton`: take(name, values) of every parameter and buffer, the last call counts.

    `values` are valid during the call.
    """
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    left = set(names.values())

    def named(target: Tensor, values: Tensor) -> None:
        left.discard(names[id(target)])
        take(names[id(target)], values)

    with _Filled(named):
        model.reset_parameters()
    if left:
        raise ValueError(f"{min(left)} has no values of its own after reset_parameters.")
