"""SiTU-GLU and SwiGLU (technical report §2.3.2, eq. 12).

    SiTU-GLU(g, u) = β₁ tanh(g/β₁) sigmoid(g) · β₂ tanh(u/β₂)        K3: β₁ = 4, β₂ = 25; |out| ≤ 100
    SwiGLU(g, u)   = g sigmoid(g) · u

The sigmoid takes the uncapped gate. Computed in fp32 (fp64 for fp64 inputs), cast back once. β₁ of None or 0 means 1;
β₂ of None leaves u uncapped. The backward is not differentiable again: on an accelerator it recomputes from g and u; on
a CPU, where a tanh costs as much as fifteen products, the forward leaves the two partial derivatives instead.
On an NVIDIA GPU each direction is one kernel (`situ_triton`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from perilune.ops.dispatch import fused, kernels, rows_of

ACTIVATIONS = ("situ", "swiglu")


def situ_glu(
    gate: Tensor, up: Tensor, beta: float | None = 4.0, linear_beta: float | None = 25.0, *, impl: str = "auto"
) -> Tensor:
    """SiTU-GLU of two tensors of one shape and dtype; the result has both."""
    _check("situ_glu", gate, up)
    _check_betas(beta, linear_beta)
    betas = float(beta or 1.0), None if linear_beta is None else float(linear_beta)
    if fused("situ_glu", impl, gate):
        return _Fused.apply(gate, up, *betas, False)
    return _SituGlu.apply(gate, up, *betas, keeps_slopes(gate))


def keeps_slopes(x: Tensor) -> bool:
    """Whether a forward over x should leave its derivatives for the backward, in the room of what it was made of."""
    return torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype.itemsize >= 4


def packed_glu(
    gate_up: Tensor,
    name: str = "situ",
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
    *,
    impl: str = "auto",
) -> Tensor:
    """The activation `name` ("situ" or "swiglu") of one product [..., 2C] = [gate | up] -> [..., C].

    As `situ_glu` or `swiglu` of its halves, but the gradient is made in one piece.
    """
    _check_betas(beta, linear_beta)
    if name not in ACTIVATIONS or gate_up.shape[-1] % 2:
        raise ValueError(
            f"packed_glu: need {' or '.join(ACTIVATIONS)} of [gate | up], not {name!r} of {[*gate_up.shape]}."
        )
    if fused("packed_glu", impl, gate_up):
        return _FusedPacked.apply(gate_up, float(beta or 1.0), linear_beta, name == "swiglu")
    gate, up = gate_up.chunk(2, -1)
    return swiglu(gate, up, impl=impl) if name == "swiglu" else situ_glu(gate, up, beta, linear_beta, impl=impl)


def situ_glu_reference(gate: Tensor, up: Tensor, beta: float | None = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """The equation, by autograd."""
    b1 = float(beta or 1.0)
    g, u = _widen(gate), _widen(up)
    capped = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (b1 * torch.tanh(g / b1) * torch.sigmoid(g) * capped).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor, *, impl: str = "auto") -> Tensor:
    """SwiGLU of two tensors of one shape and dtype, in fp32, cast once."""
    _check("swiglu", gate, up)
    if fused("swiglu", impl, gate):
        return _Fused.apply(gate, up, 1.0, None, True)
    return (F.silu(_widen(gate)) * _widen(up)).to(gate.dtype)


def situ_glu_gradients(
    gate: Tensor, up: Tensor, dout: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, d gate, d up) in the accumulating dtype: a backward that recomputes needs all three, and the value's
    parts are the gradients' parts."""
    value, by_gate, by_up = situ_glu_slopes(gate, up, beta, linear_beta, quick=True)
    d = _widen(dout)
    return value, by_gate.mul_(d), by_up.mul_(d)


def situ_glu_slopes(
    gate: Tensor,
    up: Tensor,
    beta: float,
    linear_beta: float | None,
    quick: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, ∂ value/∂ gate, ∂ value/∂ up) in the accumulating dtype; `quick` if only gradients need it."""
    tanh = _quick_tanh if quick else _tanh
    g, u = _widen(gate), _widen(up)
    sigma, t = torch.sigmoid(g), tanh(g, beta)
    capped = (t * sigma).mul_(beta)
    # d/dg of β₁ tanh(g/β₁) σ(g) = σ ((1 − tanh²) + β₁ tanh (1 − σ)) = σ (1 − tanh²) + capped (1 − σ)
    slope = torch.addcmul(capped, capped, sigma, value=-1.0).add_(sigma).addcmul_(sigma, t.square_(), value=-1.0)
    if linear_beta is None:
        return capped * u, slope.mul_(u), capped
    t = tanh(u, linear_beta)
    value = (capped * t).mul_(linear_beta)
    slope.mul_(t).mul_(linear_beta)
    return value, slope, capped.addcmul_(capped, t.square_(), value=-1.0)


def swiglu_gradients(gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(value, d gate, d up) in the accumulating dtype."""
    g, u, d = _widen(gate), _widen(up), _widen(dout)
    silu = F.silu(g)
    return silu * u, torch.ops.aten.silu_backward(d * u, g), silu.mul_(d)


def swiglu_slopes(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(value, ∂ value/∂ gate, ∂ value/∂ up) in the accumulating dtype."""
    g, u = _widen(gate), _widen(up)
    silu = F.silu(g)
    return silu * u, torch.ops.aten.silu_backward(u, g), silu


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, keep: bool
    ) -> Tensor:
        ctx.betas, ctx.keep = (beta, linear_beta), keep
        if not keep:
            ctx.save_for_backward(gate, up)
            return situ_glu_forward(gate, up, beta, linear_beta).to(gate.dtype)
        value, by_gate, by_up = situ_glu_slopes(gate, up, beta, linear_beta)
        ctx.save_for_backward(by_gate, by_up)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.keep:
            by_gate, by_up = ctx.saved_tensors
            return by_gate * dout, by_up * dout, None, None, None
        gate, up = ctx.saved_tensors
        _, dgate, dup = situ_glu_gradients(gate, up, dout, *ctx.betas)
        return dgate.to(gate.dtype), dup.to(up.dtype), None, None, None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None, swiglu: bool
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.rules = beta, linear_beta, swiglu
        return kernels("situ_triton").forward(rows_of(gate), rows_of(up), *ctx.rules).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dgate, dup = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
        kernels("situ_triton").backward(*(rows_of(x) for x in (gate, up, dout, dgate, dup)), *ctx.rules)
        return dgate, dup, None, None, None


class _FusedPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, beta: float, linear_beta: float | None, swiglu: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate_up)
        ctx.rules = beta, linear_beta, swiglu
        out = kernels("situ_triton").forward(*rows_of(gate_up).chunk(2, -1), *ctx.rules)
        return out.view(*gate_up.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        d = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        kernels("situ_triton").backward(
            *rows_of(gate_up).chunk(2, -1), rows_of(dout), *rows_of(d).chunk(2, -1), *ctx.rules
        )
        return d, None, None, None


def situ_glu_forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The value alone, in the accumulating dtype, with few passes over memory."""
    g, u = _widen(gate), _widen(up)
    out = _tanh(g, beta).mul_(torch.sigmoid(g))
    if linear_beta is None:
        return out.mul_(u).mul_(beta)
    return out.mul_(_tanh(u, linear_beta)).mul_(beta * linear_beta)


def _tanh(x: Tensor, beta: float) -> Tensor:
    return (x / beta).tanh_()


def _quick_tanh(x: Tensor, beta: float) -> Tensor:
    """tanh(x/β) as 2σ(2x/β) − 1: a third of tanh's time, absolute error 1e-7, which a gradient does not see.

    In fp64 the gradient check does see it, so tanh is taken there.
    """
    if x.dtype == torch.float64:
        return _tanh(x, beta)
    return (x * (2.0 / beta)).sigmoid_().mul_(2.0).sub_(1.0)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check_betas(beta: float | None, linear_beta: float | None) -> None:
    if (beta or 0.0) < 0 or (linear_beta is not None and not linear_beta > 0):
        raise ValueError(f"situ_glu: beta must not be negative and linear_beta be positive; got {beta}, {linear_beta}.")


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise ValueError(
            f"{name}: gate and up must agree, got {tuple(gate.shape)} {gate.dtype} on {gate.device} and "
            f"{tuple(up.shape)} {up.dtype} on {up.device}."
        )
    if not gate.is_floating_point():
        raise ValueError(f"{name}: gate and up must be floating point, got {gate.dtype}.")
