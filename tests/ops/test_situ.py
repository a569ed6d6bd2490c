"""SiTU-GLU against the golden vectors, and both activations' gradients."""

import json

import pytest
import torch
from golden import golden
from safetensors.torch import load_file

from perilune.ops.situ import situ_glu, situ_glu_reference, swiglu, swiglu_gradients


@pytest.mark.parametrize("op", [situ_glu, situ_glu_reference])
def test_golden(op) -> None:
    folder = golden("situ")
    tensors = load_file(folder / "cases.safetensors")
    for name, meta in json.loads((folder / "README.json").read_text()).items():
        gate, up, want = (tensors[f"{name}.{key}"] for key in ("gate", "up", "out_fp64"))
        out = op(gate, up, meta["beta"], meta["linear_beta"])
        assert out.dtype == gate.dtype
        rtol = 1e-6 if gate.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out.double(), want, rtol=rtol, atol=1e-30, equal_nan=True, msg=name)
        torch.testing.assert_close(
            op(gate.double(), up.double(), meta["beta"], meta["linear_beta"]), want, rtol=1e-12, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, 25.0), (1.0, None), (0.5, 2.0)])
def test_gradients(beta, linear_beta) -> None:
    x = torch.linspace(-12, 12, 49, dtype=torch.float64)
    gate, up = (y.flatten().requires_grad_() for y in torch.meshgrid(x, 3 * x, indexing="ij"))
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, beta, linear_beta), (gate[::37], up[::37]))
    single = [y.detach().float().requires_grad_() for y in (gate, up)]
    want = torch.autograd.grad(situ_glu_reference(gate, up, beta, linear_beta).sum(), (gate, up))
    got = torch.autograd.grad(situ_glu(*single, beta, linear_beta).sum(), single)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).abs().max() <= 2e-6 * b.abs().max()


def test_missing_beta_is_one() -> None:
    gate, up = torch.randn(2, 20)
    for beta in (None, 0):
        torch.testing.assert_close(situ_glu(gate, up, beta, None), situ_glu(gate, up, 1.0, None), rtol=0, atol=0)


def test_swiglu() -> None:
    gate, up, dout = (torch.randn(50, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    want = torch.autograd.grad((swiglu(gate, up) * dout).sum(), (gate, up))
    torch.testing.assert_close(swiglu_gradients(gate, up, dout)[1:], want)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="gate and up must agree"):
        situ_glu(torch.zeros(3), torch.zeros(4))
