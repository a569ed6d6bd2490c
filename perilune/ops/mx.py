"""OCP microscaling formats: MXFP4 expert weights (packed), MXFP8 activations, and straight-through rounding.

    value = E2M1(code) · 2^(scale − 127),    codes 0..7 = 0 .5 1 1.5 2 3 4 6, bit 3 the sign, one scale per 32 values

Two codes a byte, the low nibble the even column. A scale of 255 makes its whole group NaN. Rounding is to the nearest,
ties to the even code, saturating at 6; −0 and subnormal results are kept. Groups lie along the last axis.
"""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.kept import kept

GROUP = 32
_BIAS = 127
_NAN = 255
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_EMAX, _E4M3_EMAX = 2, 8
_E4M3_MAX = 448.0


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed uint8 [..., n/2], scale uint8 [..., n/32] -> values [..., n] in `dtype`, exact where it can hold them."""
    _check(packed, scale)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).unflatten(-1, (-1, GROUP))
    index = (scale.to(torch.int32) << 4).unsqueeze(-1) | codes.to(torch.int32)
    return _table(dtype, packed.device)[index].flatten(-2)


def pack_mxfp4(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., n], n a multiple of 32 -> (packed uint8 [..., n/2], scale uint8 [..., n/32]).

    `scale` fixes the scales; by default OCP's rule, 2^(⌊log2 amax⌋ − 2) of each group, 2^0 for a group of zeros. A NaN
    makes the scale of its group 255 in the second case; a fixed scale has no code for it and it saturates.
    """
    groups = _groups(x)
    if scale is None:
        scale = ocp_scale(x, _E2M1_EMAX)
    if scale.dtype != torch.uint8 or scale.shape != groups.shape[:-1]:
        raise ValueError(
            f"MXFP4 scales of {list(x.shape)} must be {list(groups.shape[:-1])} uint8, "
            f"got {list(scale.shape)} {scale.dtype}."
        )
    magnitude = groups.abs() * torch.exp2(_BIAS - scale.to(torch.float64)).unsqueeze(-1)
    codes = torch.bucketize(magnitude, _midpoints(x.device)).to(torch.uint8)
    codes = (codes | (torch.signbit(groups).to(torch.uint8) << 3)).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def ocp_scale(x: Tensor, emax: int) -> Tensor:
    """uint8 [..., n/32]: the biased exponent ⌊log2 amax⌋ − emax, clamped to 0..254; 255 where a group holds a NaN."""
    amax = _groups(x).abs().amax(-1)
    _, exponent = torch.frexp(amax)  # amax = m · 2^exponent, m in [1/2, 1): ⌊log2 amax⌋ = exponent − 1, exactly
    biased = (exponent - 1 - emax + _BIAS).clamp(0, 254)
    biased = torch.where(amax == 0, _BIAS, biased)
    biased = torch.where(torch.isinf(amax), 254, biased)
    return torch.where(torch.isnan(amax), _NAN, biased).to(torch.uint8)


def round_mxfp4(x: Tensor) -> Tensor:
    """x through MXFP4 and back, in x's dtype; the gradient passes straight through."""
    y: Tensor = _StraightThrough.apply(x, lambda v: unpack_mxfp4(*pack_mxfp4(v), dtype=v.dtype))
    return y


def round_mxfp8(x: Tensor) -> Tensor:
    """x through MXFP8 (E4M3, groups of 32) and back, in x's dtype; the gradient passes straight through."""
    y: Tensor = _StraightThrough.apply(x, _mxfp8)
    return y


def _mxfp8(x: Tensor) -> Tensor:
    factor = torch.exp2(ocp_scale(x, _E4M3_EMAX).to(torch.float64) - _BIAS).unsqueeze(-1)
    codes = (_groups(x) / factor).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float32).to(torch.float8_e4m3fn)
    return (codes.to(torch.float64) * factor).flatten(-2).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, f: Any) -> Tensor:
        return f(x)

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def _groups(x: Tensor) -> Tensor:
    """fp64 [..., n/32, 32]: powers of two then scale exactly, whatever x's exponent range."""
    if x.dim() == 0 or x.shape[-1] % GROUP:
        raise ValueError(f"MX groups hold {GROUP} values; the last axis of {list(x.shape)} is not a multiple.")
    return x.to(torch.float64).unflatten(-1, (-1, GROUP))


def _check(packed: Tensor, scale: Tensor) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 codes and scales are uint8, not {packed.dtype} and {scale.dtype}.")
    if packed.dim() == 0 or packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(f"MXFP4 codes {list(packed.shape)} need a scale per {GROUP} values, not {list(scale.shape)}.")


@kept()
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All 256 scales times 16 codes: entry scale·16 + code. A look-up keeps subnormals that a product may flush."""
    codes = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float64)
    scales = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS)
    scales[_NAN] = torch.nan
    return (scales[:, None] * codes).flatten().to(device, dtype)


@kept()
def _midpoints(device: torch.device) -> Tensor:
    """Borders between neighbouring codes; ties go to the even one, so every second border lies a hair lower."""
    codes = torch.tensor(_E2M1, dtype=torch.float64)
    middle = (codes[1:] + codes[:-1]) / 2
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros(1, dtype=torch.float64))
    return middle.to(device)
