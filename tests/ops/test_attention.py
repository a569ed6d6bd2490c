"""Attention over packed documents against its equation, and the width of its output."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.config import preset
from perilune.model import mla
from perilune.model.layout import Layout
from perilune.ops.attention import attention, attention_reference


def draw(lengths: list[int], dk: int = 24, dv: int = 16, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    made = torch.Generator().manual_seed(sum(lengths))
    sizes = (dk, dk, dv)
    return [torch.randn(sum(lengths), 2, n, generator=made, dtype=dtype).requires_grad_() for n in sizes]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 5, 15, 16, 17, 40]), min_size=1, max_size=6))
def test_values_and_gradients(lengths: list[int]) -> None:
    found = []
    for op in (attention, attention_reference):
        leaves = draw(lengths)
        o = op(*leaves, lengths, 0.3)
        found.append([o, *torch.autograd.grad(o, leaves, torch.cos(o.detach() * 9))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("lengths", [[64], [40, 24, 0, 1]])
def test_training_keeps_the_output_in_fp32(lengths: list[int]) -> None:
    """Its error is that of fp32 arithmetic on 16-bit inputs, a thousandth of a rounding to bf16."""
    leaves = [x.detach().bfloat16().requires_grad_() for x in draw(lengths)]
    exact = attention_reference(*(x.detach().double() for x in leaves), lengths, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(*leaves, lengths, 0.3)
        o.sum().backward()
    assert o.dtype == torch.float32 and all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in leaves)
    error = float((o.detach().double() - exact).norm() / exact.norm())
    rounding = float((exact.bfloat16().double() - exact).norm() / exact.norm())
    assert error < 1e-6 < 1e-3 < rounding
    with torch.no_grad():
        assert attention(*leaves, lengths, 0.3).dtype == torch.bfloat16


def test_the_gate_gets_it_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the model's layer under autocast, up to the product with the gate."""
    seen, gate = [], mla.sigmoid_gate
    monkeypatch.setattr(mla, "sigmoid_gate", lambda x, z: seen.append((x.dtype, z.dtype)) or gate(x, z))
    config = preset("tiny")
    layer = mla.MLA(config, config.mla_layers[0])
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(20, config.hidden_size), Layout.packed([12, 8])).sum().backward()
    assert seen == [(torch.float32, torch.bfloat16)]


def test_training_after_inference_over_the_same_lengths() -> None:
    """What is kept of lengths from call to call serves both."""
    leaves = draw([3, 29])
    with torch.inference_mode():
        attention(*(x.detach() for x in leaves), [3, 29], 0.3)
    attention(*leaves, [3, 29], 0.3).sum().backward()
    assert all(x.grad is not None for x in leaves)


def test_what_does_not_fit_is_named() -> None:
    q, k, v = draw([5])
    for wrong in ((q, k[1:], v), (q, k, v[:, :1])):
        with pytest.raises(ValueError, match="q and k must be"):
            attention(*wrong, [5], 1.0)
    with pytest.raises(ValueError, match="4 tokens"):
        attention(q, k, v, [4], 1.0)
    with pytest.raises(ValueError, match="share a dtype"):
        attention(q, k, v.float(), [5], 1.0)
