"""Routed experts whose weights stay packed in MXFP4 (technical report §4.1.4, §5.4.2): a decoding step.

    out_t = Σ_i p_{t,i} E_{e(t,i)}(z_t),   w = E2M1(code) · 2^(scale − 127)

A step of few tokens is bound by the bytes of the weights it touches; packed they are 4.25 bits a value. On an NVIDIA
GPU two kernels stream them once, decoding in registers (`packed_triton`); elsewhere they are unpacked first.
Shapes: T tokens, k chosen, E experts, I expert width, L width of the rows; I and L multiples of 32. No gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.dispatch import fused, kernels
from perilune.ops.experts import Activation, check_choices, experts, experts_reference, order_few
from perilune.ops.mx import GROUP, round_mxfp8, unpack_mxfp4


class Packed(NamedTuple):
    """Matrices [E,N,K]: codes uint8 [E,N,K/2], the low nibble the even column, and scales uint8 [E,N,K/32]."""

    codes: Tensor
    scales: Tensor

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return unpack_mxfp4(self.codes, self.scales, dtype)


class Rounded(Activation):
    """The same, its value rounded to MXFP8."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return round_mxfp8(super().forward(gate, up))

    def slopes(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, along_gate, along_up = super().slopes(gate, up)
        return round_mxfp8(value), along_gate, along_up


@torch.no_grad()
def packed_experts(
    z: Tensor,
    idx: Tensor,
    weight: Tensor,
    gate_up: Packed,
    down: Packed,
    activation: Activation | None = None,
    *,
    partial: bool = False,
    mxfp8: bool = False,
    impl: str = "auto",
) -> Tensor:
    """z [T,L], idx [T,k] int64, weight [T,k] fp32, gate_up [E,2I,L] and down [E,L,I] packed -> [T,L] in z's dtype.

    partial: as in `experts`. mxfp8: what enters a product is rounded to MXFP8 (E4M3, groups of 32), as a model that was
    trained so expects: z before the gate and up products, the activation before the down product.
    Raises ValueError naming the argument that does not fit.
    """
    _check(z, gate_up, down)
    check_choices("packed_experts", z, idx, weight, len(gate_up.codes), partial)
    act = activation or Activation()
    if mxfp8:
        z, act = round_mxfp8(z), Rounded(*act)
    if not fused("packed_experts", impl, z):
        both_wide = gate_up.unpack(z.dtype), down.unpack(z.dtype)
        return experts(z, idx, weight, *both_wide, act, partial=partial, impl="eager")
    (order, expert), k = order_few(idx, len(gate_up.codes)), idx.shape[1]
    both = tuple(x.contiguous() for x in gate_up), tuple(x.contiguous() for x in down)
    y = kernels("packed_triton").rows(
        z.contiguous(), order.source, expert, order.ends, weight.reshape(-1), *both, k, partial, *act.rules,
        then=round_mxfp8 if mxfp8 else None,
    )  # fmt: skip
    out: Tensor = kernels("experts_triton").combine(y, order.place, k)
    return out


def packed_experts_reference(
    z: Tensor, idx: Tensor, weight: Tensor, gate_up: Packed, down: Packed, activation: Activation | None = None
) -> Tensor:
    """The equation, one expert after another, on unpacked weights."""
    return experts_reference(z, idx, weight, gate_up.unpack(z.dtype), down.unpack(z.dtype), activation)


def _check(z: Tensor, gate_up: Packed, down: Packed) -> None:
    if gate_up.codes.dim() != 3:
        raise ValueError(f"packed_experts: gate_up must be [E,2I,L] packed, got {tuple(gate_up.codes.shape)}.")
    E, twice, half = gate_up.codes.shape
    L, inner = 2 * half, twice // 2
    if z.dim() != 2 or z.shape[1] != L:
        raise ValueError(f"packed_experts: z must be [T,{L}], got {tuple(z.shape)}.")
    if L % GROUP or inner % GROUP:
        raise ValueError(f"packed_experts: widths {L} and {inner} must be multiples of {GROUP}.")
    if down.codes.shape != (E, L, inner // 2):
        raise ValueError(f"packed_experts: down must be [{E},{L},{inner}] packed, got {tuple(down.codes.shape)}.")
    for name, x in (("gate_up", gate_up), ("down", down)):
        if x.scales.shape != (*x.codes.shape[:2], x.codes.shape[2] * 2 // GROUP):
            raise ValueError(f"packed_experts: scales of {name} do not fit its codes, got {tuple(x.scales.shape)}.")
