"""RMSNorm and the gated output norm of KDA, with hand-written backwards that save one number a row.

rms_norm:        y = cast(x · rsqrt(mean x² + eps)) · w        (cast to x's dtype first, then the weight)
gated_rms_norm:  y = cast(x · rsqrt(mean x² + eps) · w · σ(gate))      (all fp32, one cast: the release's fused op)
sigmoid_gate:    y = cast(x · σ(gate))                                 (MLA's output gate, the product in fp32)

On an NVIDIA GPU each direction is one kernel (`norm_triton`, `gate_triton`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.dispatch import fused, kernels, rows_of
from perilune.ops.precision import own_precision


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The equation, differentiable by autograd. x [..., D], weight [D]."""
    x32 = x if x.dtype == torch.float64 else x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def gated_rms_norm_reference(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The equation, differentiable by autograd. x, gate [..., D], weight [D]; no gate means ungated."""
    x32 = x if x.dtype == torch.float64 else x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight
    return (y if gate is None else y * torch.sigmoid(gate.to(y.dtype))).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Tensor:
    """RMSNorm over the last axis. x [..., D] in any float dtype, weight [D]; returns x's dtype."""
    _check("rms_norm", x, weight, None)
    if fused("rms_norm", impl, x):
        return _FusedNorm.apply(x, None, weight, eps)
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y


@torch.no_grad()
def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + added, x + added), both [..., D] in x's dtype, the sum rounded before its norm. No gradient."""
    _check("add_rms_norm", x, weight, added)
    if fused("add_rms_norm", impl, x):
        y, total = kernels("norm_triton").add_forward(rows_of(x), rows_of(added), weight, eps)
        return y.view(x.shape), total.view(x.shape)
    total = x + added
    return rms_norm(total, weight, eps, impl=impl), total


def gated_rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, *, impl: str = "auto") -> Tensor:
    """KDA's output norm and sigmoid gate. x, gate [..., H,D], weight [D] fp32; returns x's dtype."""
    _check("gated_rms_norm", x, weight, gate)
    if fused("gated_rms_norm", impl, x, None if gate is not None else "there is no gate"):
        return _FusedNorm.apply(x, gate, weight, eps)
    if gate is None:
        return gated_rms_norm_reference(x, None, weight, eps)
    y: Tensor = _GatedRMSNorm.apply(x, gate, weight, eps)
    return y


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """The equation, differentiable by autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * torch.sigmoid(gate.to(wide))).to(gate.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor, *, impl: str = "auto") -> Tensor:
    """MLA's output gate: x and gate [..., C] of one shape, any float dtypes; returns gate's dtype."""
    if x.shape != gate.shape:
        raise ValueError(f"sigmoid_gate: x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape.")
    if not fused("sigmoid_gate", impl, x):
        return sigmoid_gate_reference(x, gate)
    y: Tensor = _FusedGate.apply(x, gate)
    return y


def _check(op: str, x: Tensor, weight: Tensor, gate: Tensor | None) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"{op}: x must be [...,D] and weight [D], got {tuple(x.shape)} and {tuple(weight.shape)}.")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"{op}: x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape.")


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rstd(x32: Tensor, eps: float) -> Tensor:
    # vector_norm reads x once and writes one number a row; x.square().mean() would write x² first.
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    return torch.rsqrt(norm.square() / x32.shape[-1] + eps)


def _norm_backward(g: Tensor, weight: Tensor, x: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, g·x) of x·rstd·w under g, all wide: dx = rstd (g w − x rstd² mean(g w x)), dw = Σ rows g x rstd.

    Both sums over g·x are products of a matrix and a vector, which read it once.
    """
    width = x.shape[-1]
    along = g * x
    flat = along.reshape(-1, width)
    dw = rstd.reshape(1, -1) @ flat
    shrink = (flat @ weight).view(rstd.shape) * rstd.pow(3).div_(width)
    return (g * weight).mul_(rstd).addcmul_(x, shrink, value=-1), dw.view(width), along


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = _wide(x)
        rstd = _rstd(x32, eps)
        ctx.save_for_backward(x, weight, rstd)
        # The weight is cast so that fp32 master weights under bf16 activations do not widen the stream.
        return (x32 * rstd).to(x.dtype).mul_(weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw, _ = _norm_backward(_wide(g), weight.to(x.dtype).to(rstd.dtype), _wide(x), rstd)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = _wide(x)
        rstd = _rstd(x32, eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        return (x32 * rstd).mul_(weight).mul_(torch.sigmoid(_wide(gate))).to(x.dtype)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, rstd = ctx.saved_tensors
        open_ = torch.sigmoid(_wide(gate))
        dx, dw, along = _norm_backward(_wide(g) * open_, weight.to(rstd.dtype), _wide(x), rstd)
        dgate = along.mul_(1 - open_).mul_(weight).mul_(rstd)
        return dx.to(x.dtype), dgate.to(gate.dtype), dw.to(weight.dtype), None


class _FusedNorm(torch.autograd.Function):
    """Keeps its inputs only: a row's scale costs less to make again than to store and fetch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        rows, gates, heads = _as_rows(x, gate)
        y: Tensor = kernels("norm_triton").forward(rows, gates, weight, eps, heads)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gate, weight = ctx.saved_tensors
        rows, gates, heads = _as_rows(x, gate)
        dx, dgate, dw = kernels("norm_triton").backward(rows, gates, weight, rows_of(dy), ctx.eps, heads)
        return dx.view(x.shape), None if gate is None else dgate.view(gate.shape), dw.to(weight.dtype), None


def _as_rows(x: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """x as [R,D] and the gate as [R/H, H·D]: heads stay side by side, so a slice of a projection is not copied."""
    if gate is None or x.dim() < 2:
        return rows_of(x), None if gate is None else rows_of(gate), 1
    heads = x.shape[-2]
    return rows_of(x), rows_of(gate.flatten(-2)), heads


class _FusedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, gate)
        y: Tensor = kernels("gate_triton").forward(rows_of(x), rows_of(gate))
        return y.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, gate = ctx.saved_tensors
        dx, dgate = kernels("gate_triton").backward(rows_of(x), rows_of(gate), rows_of(dy))
        return dx.view(x.shape), dgate.view(gate.shape)
