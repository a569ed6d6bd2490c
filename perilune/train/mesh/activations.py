"""What becomes of the tensors that layers save for their backward (report §5.2.2): policies by tensor class.

    class      kda | mla (attention)   mlp (dense, shared)   moe (router, latent maps, experts)
    policy     keep          as it is
               recompute     only the inputs of that part are kept; it runs again in backward
               fp8           inputs of products [tokens, width]: e4m3 in blocks of 128 values, an fp32 scale each
               offload       in pinned host memory, fetched back when needed

What ops keep for themselves, in more axes, is never rounded: a decay's logarithm off by 6% is another decay.
Policies join with +, "recompute+fp8+offload": what recomputing keeps is quantised, then moved. They act through hooks
on saved tensors and wrap functions, so no model code knows of them. Weights are never touched, nor anything small.
Reads of the AttnRes stream and the norms behind them need none: their op saves its sources, which every layer shares,
and computes the rest again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

CLASSES = ("kda", "mla", "mlp", "moe")
WORDS = ("keep", "recompute", "fp8", "offload")
BLOCK = 128
_SMALL = 1024  # values; below it a tensor stays
_E4M3_MAX = 448.0


def check_policies(policies: Mapping[str, str]) -> None:
    """Raises ValueError naming the first class or policy that does not exist."""
    for name, policy in policies.items():
        if name not in CLASSES:
            raise ValueError(f"mesh.activations.{name} is no tensor class; they are {', '.join(CLASSES)}.")
        words = policy.split("+")
        if unknown := [w for w in words if w not in WORDS]:
            raise ValueError(f"mesh.activations.{name}: unknown policy {unknown[0]!r}; they are {', '.join(WORDS)}.")
        if name == "kda" and {"recompute", "fp8"} <= set(words):  # half of A_log's gradient was lost in a test
            raise ValueError("mesh.activations.kda: recomputing decays from a rounded input loses their gradient.")
        if "keep" in words and len(words) > 1:
            raise ValueError(f'mesh.activations.{name}: "keep" joins with nothing, not {policy!r}.')


@dataclass(frozen=True)
class Packed:
    """A saved tensor in its policy's form. codes, scale: fp8 blocks; or the tensor itself in `codes`."""

    codes: Tensor
    scale: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, 128] and fp32 scales [N, 1] of a tensor's values in storage order, zero-padded to whole blocks."""
    flat = x.reshape(-1).float()
    flat = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1, keepdim=True).clamp_min_(1e-30) / _E4M3_MAX
    return (flat / scale).to(torch.float8_e4m3fn), scale


def dequantize(codes: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale).view(-1)[: shape.numel()].view(shape).to(dtype)


class _WeightsSeen(TorchFunctionMode):
    """Notes the second operand of every linear map: parameters, and copies of several joined for one product."""

    def __init__(self, kept: set[int]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.kept.add(_address(args[1]))
        return func(*args, **(kwargs or {}))


class Storage:
    """What one policy does to the tensors that `module` saves while it runs."""

    def __init__(self, policy: str, module: nn.Module) -> None:
        words = policy.split("+")
        self.fp8, self.offload, self.module = "fp8" in words, "offload" in words, module

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        kept = {_address(p) for p in self.module.parameters()}
        with saved_tensors_hooks(lambda x: self._pack(x, kept), _unpack), _WeightsSeen(kept):
            return function(*args)

    def _pack(self, x: Tensor, kept: set[int]) -> Tensor | Packed:
        if x.numel() < _SMALL or not x.is_floating_point() or _address(x) in kept:
            return x
        codes, scale = x.detach(), None
        if self.fp8 and x.dim() == 2 and x.dtype.itemsize in (2, 4):
            codes, scale = quantize(x)
        if self.offload:
            codes, scale = _to_host(codes), None if scale is None else _to_host(scale)
        return Packed(codes, scale, x.shape, x.dtype, x.device)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _unpack(saved: Tensor | Packed) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    codes = saved.codes.to(saved.device, non_blocking=True)
    if saved.scale is None:
        return codes
    return dequantize(codes, saved.scale.to(saved.device, non_blocking=True), saved.shape, saved.dtype)


def _to_host(x: Tensor) -> Tensor:
    """In pinned memory, on its way: the stream that reads it back is the one that writes it."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=True)


def apply_policy(module: nn.Module, policy: str) -> None:
    """From now on the module's forward follows the policy: recomputation inside, storage around it."""
    if policy == "keep":
        return
    inner: Callable[..., Any] = module.forward
    words = set(policy.split("+"))
    storage = Storage(policy, module) if words & {"fp8", "offload"} else None

    def forward(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args)
        run = partial(checkpoint, inner, use_reentrant=False, preserve_rng_state=False)
        chosen = run if "recompute" in words else inner
        return chosen(*args) if storage is None else storage.run(chosen, *args)

    module.forward = forward  # type: ignore[method-assign]
