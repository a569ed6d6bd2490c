"""MXFP4 and MXFP8 against the released vectors, bit for bit, and their laws."""

import pytest
import torch
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from perilune.ops.mx import ocp_scale, pack_mxfp4, round_mxfp4, round_mxfp8, unpack_mxfp4


@pytest.fixture(scope="module")
def cases() -> dict[str, torch.Tensor]:
    return load_file(golden("mxfp4") / "cases.safetensors")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan() & b.isnan()
    return a.dtype == b.dtype and bool(((a.view(as_int) == b.view(as_int)) | nan).all())


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 254, 255])
def test_every_byte_at_every_scale(cases, scale: int) -> None:
    packed, scales = cases[f"unpack_s{scale}.packed"], cases[f"unpack_s{scale}.scale"]
    for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float64, "fp64")):
        assert same_bits(unpack_mxfp4(packed, scales, dtype), cases[f"unpack_s{scale}.value_{suffix}"])


def test_random_weights_and_their_product(cases) -> None:
    w = unpack_mxfp4(cases["rand.packed"], cases["rand.scale"], torch.bfloat16)
    assert same_bits(w, cases["rand.value_bf16"])
    torch.testing.assert_close(cases["rand.x"].double() @ w.double().T, cases["rand.y_fp64"])


@pytest.mark.parametrize("scale", [120, 127, 130])
def test_rounding_at_a_fixed_scale(cases, scale: int) -> None:
    packed, _ = pack_mxfp4(cases[f"round_s{scale}.x"], cases[f"round_s{scale}.scale"])
    assert torch.equal(packed, cases[f"round_s{scale}.packed"])


def test_ocp_scales(cases) -> None:
    packed, scale = pack_mxfp4(cases["quant_ocp.w"])
    assert torch.equal(scale, cases["quant_ocp.scale"])
    assert torch.equal(packed, cases["quant_ocp.packed"])


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 254))
def test_representable_values_survive(seed: int, scale: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (3, 16), generator=generator).to(torch.uint8)
    scales = torch.full((3, 1), scale, dtype=torch.uint8)
    again, _ = pack_mxfp4(unpack_mxfp4(packed, scales, torch.float64), scales)
    assert torch.equal(again, packed)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(-30, 30))
def test_rounding_is_idempotent_and_close(seed: int, log_size: float) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)) * 2**log_size
    amax = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(-2)
    four, eight = round_mxfp4(x), round_mxfp8(x)
    assert torch.equal(round_mxfp4(four), four)
    assert torch.equal(round_mxfp8(eight), eight)
    # Half a step of the top binade, or saturation between 6 and 8 (448 and 512).
    assert bool(((four - x).abs() <= amax / 4 + 1e-30).all())
    assert bool(((eight - x).abs() <= amax / 8 + 1e-30).all())


def test_zero_nan_inf_and_gradients() -> None:
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    packed, scale = pack_mxfp4(x)
    assert scale.flatten().tolist() == [127, 255, 254, 127]
    assert unpack_mxfp4(packed, scale)[1].isnan().all()
    y = torch.randn(2, 32, requires_grad=True)
    (round_mxfp4(y) * 3).sum().backward()
    assert torch.equal(y.grad, torch.full_like(y, 3.0))
    assert int(ocp_scale(torch.full((32,), 6.0), 2)) == 127


def test_wrong_shapes_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        pack_mxfp4(torch.zeros(3, 30))
    with pytest.raises(ValueError, match="need a scale per 32"):
        unpack_mxfp4(torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        unpack_mxfp4(torch.zeros(3, 16), torch.zeros(3, 1, dtype=torch.uint8))
