"""Attention Residuals against the golden vectors and their equation."""

import json

import pytest
import torch
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from perilune.ops.attnres import mix, mix_reference, probabilities, rms_scale


@pytest.mark.parametrize("op", [mix, mix_reference])
def test_golden(op) -> None:
    folder = golden("attnres")
    tensors = load_file(folder / "cases.safetensors")
    for name, meta in json.loads((folder / "README.json").read_text()).items():
        case = {key.removeprefix(name + "."): x for key, x in tensors.items() if key.startswith(name + ".")}
        blocks, partial, want = list(case["blocks"].unbind(1)), case["partial"], case["out_fp64"]
        weight = case["norm"].float() * case["proj"][0].float()
        out = op(blocks, partial, weight, eps=meta["eps"])
        assert out.dtype == partial.dtype
        if partial.dtype == torch.bfloat16:
            torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-9)
        else:
            largest = max(x.abs().max() for x in (*blocks, partial))
            assert (out.double() - want).abs().max() <= 1e-6 * largest, name
        wide = op([b.double() for b in blocks], partial.double(), case["norm"].double() * case["proj"][0].double())
        torch.testing.assert_close(wide, want, rtol=1e-9, atol=1e-9)


def draw(n: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 1, 2, 3, 16, generator=gen, dtype=torch.float64) * 2
    return list(x[:-1]), x[-1], torch.randn(16, generator=gen, dtype=torch.float64) * 0.5


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("n", [1, 4, 8])
def test_gradients(n: int, cached: bool) -> None:
    blocks, partial, weight = draw(n)
    leaves = [x.clone().requires_grad_() for x in (*blocks, partial, weight)]
    cotangent = torch.randn(partial.shape, dtype=torch.float64)
    scales = [rms_scale(b) for b in blocks] if cached else None
    want = torch.autograd.grad((mix_reference(leaves[:n], *leaves[n:]) * cotangent).sum(), leaves)
    got = torch.autograd.grad((mix(leaves[:n], *leaves[n:], scales=scales) * cotangent).sum(), leaves)
    torch.testing.assert_close(got, want)
    summed = torch.autograd.grad(mix(leaves[:n], *leaves[n:]).sum(), leaves)
    torch.testing.assert_close(summed, torch.autograd.grad(mix_reference(leaves[:n], *leaves[n:]).sum(), leaves))


def test_no_block_is_the_identity() -> None:
    _, partial, weight = draw(0)
    assert mix([], partial, weight) is partial


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(5)))
def test_order_of_sources_is_irrelevant(order: list[int]) -> None:
    blocks, partial, weight = draw(4)
    sources = [*blocks, partial]
    shuffled = [sources[i] for i in order]
    torch.testing.assert_close(mix(shuffled[:-1], shuffled[-1], weight), mix(blocks, partial, weight))


def test_probabilities_make_the_output() -> None:
    blocks, partial, weight = draw(3)
    p = probabilities(blocks, partial, weight)
    torch.testing.assert_close(p.sum(0), torch.ones(2, 3, dtype=torch.float64))
    out = (p.unsqueeze(-1) * torch.stack([*blocks, partial])).sum(0)
    torch.testing.assert_close(out, mix(blocks, partial, weight))


def test_bad_input_is_named() -> None:
    blocks, partial, weight = draw(2)
    with pytest.raises(ValueError, match=r"weight must be \[16\]"):
        mix(blocks, partial, weight[:4])
    with pytest.raises(ValueError, match="block 1"):
        mix([blocks[0], blocks[1][:1]], partial, weight)
    with pytest.raises(ValueError, match="1 scales for 2 blocks"):
        mix(blocks, partial, weight, scales=[rms_scale(blocks[0])])
