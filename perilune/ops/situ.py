"""SiTU-GLU and SwiGLU (technical report §2.3.2, eq. 12).

    SiTU-GLU(g, u) = β₁ tanh(g/β₁) sigmoid(g) · β₂ tanh(u/β₂)        K3: β₁ = 4, β₂ = 25; |out| ≤ 100
    SwiGLU(g, u)   = g sigmoid(g) · u

The sigmoid takes the uncapped gate. Computed in fp32 (fp64 for fp64 inputs), cast back once. β₁ of None or 0 means 1;
β₂ of None leaves u uncapped. The backward recomputes from g and u; it is not differentiable again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def situ_glu(gate: Tensor, up: Tensor, beta: float | None = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """SiTU-GLU of two tensors of one shape and dtype; the result has both."""
    _check("situ_glu", gate, up)
    return _SituGlu.apply(gate, up, float(beta or 1.0), None if linear_beta is None else float(linear_beta))


def situ_glu_reference(gate: Tensor, up: Tensor, beta: float | None = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """The equation, by autograd."""
    b1 = float(beta or 1.0)
    g, u = _widen(gate), _widen(up)
    capped = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (b1 * torch.tanh(g / b1) * torch.sigmoid(g) * capped).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of two tensors of one shape and dtype, in fp32, cast once."""
    _check("swiglu", gate, up)
    return (F.silu(_widen(gate)) * _widen(up)).to(gate.dtype)


def situ_glu_gradients(
    gate: Tensor, up: Tensor, dout: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, d gate, d up) in the accumulating dtype: a backward that recomputes needs all three, and the value's
    parts are the gradients' parts."""
    g, u, d = _widen(gate), _widen(up), _widen(dout)
    sigma, t = torch.sigmoid(g), _tanh(g, beta)
    capped = (t * sigma).mul_(beta)
    # d/dg of β₁ tanh(g/β₁) σ(g) = σ ((1 − tanh²) + β₁ tanh (1 − σ)) = σ (1 − tanh²) + capped (1 − σ)
    slope = torch.addcmul(capped, capped, sigma, value=-1.0).add_(sigma).addcmul_(sigma, t.square_(), value=-1.0)
    if linear_beta is None:
        return capped * u, slope.mul_(u).mul_(d), capped.mul_(d)
    t = _tanh(u, linear_beta)
    value = (capped * t).mul_(linear_beta)
    slope.mul_(t).mul_(d).mul_(linear_beta)
    capped.mul_(d)
    return value, slope, capped.addcmul_(capped, t.square_(), value=-1.0)


def swiglu_gradients(gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(value, d gate, d up) in the accumulating dtype."""
    g, u, d = _widen(gate), _widen(up), _widen(dout)
    silu = F.silu(g)
    return silu * u, torch.ops.aten.silu_backward(d * u, g), silu.mul_(d)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        return situ_glu_forward(gate, up, beta, linear_beta).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        _, dgate, dup = situ_glu_gradients(gate, up, dout, *ctx.betas)
        return dgate.to(gate.dtype), dup.to(up.dtype), None, None


def situ_glu_forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The value alone, in the accumulating dtype, with few passes over memory."""
    g, u = _widen(gate), _widen(up)
    out = (g / beta).tanh_().mul_(torch.sigmoid(g))
    if linear_beta is None:
        return out.mul_(u).mul_(beta)
    return out.mul_((u / linear_beta).tanh_()).mul_(beta * linear_beta)


def _tanh(x: Tensor, beta: float) -> Tensor:
    """tanh(x/β) as 2σ(2x/β) − 1: a third of tanh's time, absolute error 1e-7, which a gradient does not see.

    In fp64 the gradient check does see it, so tanh is taken there.
    """
    if x.dtype == torch.float64:
        return torch.tanh(x / beta)
    return (x * (2.0 / beta)).sigmoid_().mul_(2.0).sub_(1.0)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{name}: gate and up must agree, got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}."
        )
