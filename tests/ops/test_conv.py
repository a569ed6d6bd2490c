"""The short convolution against conv1d, across borders and cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.ops.conv import short_conv, short_conv_reference


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("tailed", [True, False])
@pytest.mark.parametrize(("batch", "lengths"), [(3, None), (1, None), (1, [5, 0, 1, 2, 0, 9]), (1, [17]), (1, [0, 17])])
def test_values_and_gradients(batch, lengths, tailed, activation) -> None:
    leaves = {"x": draw(batch, 17, 6), "weight": draw(6, 4, seed=1)}
    if tailed:
        leaves["tail"] = draw(batch if lengths is None else len(lengths), 6, 3, seed=2)
    results = []
    for op in (short_conv, short_conv_reference):
        inputs = {key: x.clone().requires_grad_() for key, x in leaves.items()}
        y, tail = op(**inputs, lengths=lengths, activation=activation)
        ((y * draw(*y.shape, seed=3)).sum() + (tail * draw(*tail.shape, seed=4)).sum()).backward()
        results.append((y, tail, {key: x.grad for key, x in inputs.items()}))
    torch.testing.assert_close(results[0], results[1])


def test_released_weight_shape_and_expanded_cotangent() -> None:
    x, weight = draw(2, 9, 4).requires_grad_(), draw(4, 1, 4, seed=1).requires_grad_()
    short_conv(x, weight)[0].sum().backward()
    got = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    short_conv_reference(x, weight)[0].sum().backward()
    torch.testing.assert_close(got, (x.grad, weight.grad))


def test_last_tap_is_the_current_token() -> None:
    x = torch.zeros(1, 5, 1)
    x[0, 1] = 1.0
    y, tail = short_conv(x, torch.tensor([[0.1, 0.2, 0.3, 0.4]]), activation=False)
    torch.testing.assert_close(y[0, :, 0], torch.tensor([0.0, 0.4, 0.3, 0.2, 0.1]))
    torch.testing.assert_close(tail[0, 0], torch.zeros(3))


def test_bf16_is_one_rounding_of_fp32() -> None:
    x = draw(1, 30, 8).bfloat16()
    weight = draw(8, 4, seed=1).float()
    y, tail = short_conv(x, weight)
    assert y.dtype == tail.dtype == torch.bfloat16
    torch.testing.assert_close(y, short_conv(x.float(), weight)[0].bfloat16(), rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_any_cut_equals_the_whole(pieces: list[int], taps: int) -> None:
    x, weight = draw(1, sum(pieces), 3), draw(3, taps, seed=1)
    whole, final = short_conv(x, weight)
    tail, parts = None, []
    for piece in x.split(pieces, 1):
        y, tail = short_conv(piece, weight, tail=tail)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(tail, final)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_packed_equals_separate(lengths: list[int]) -> None:
    x, weight, tail = draw(1, sum(lengths), 3), draw(3, 4, seed=1), draw(len(lengths), 3, 3, seed=2)
    packed, tails = short_conv(x, weight, tail=tail, lengths=lengths)
    for n, (piece, y) in enumerate(zip(x.split(lengths, 1), packed.split(lengths, 1), strict=True)):
        alone, t = short_conv(piece, weight, tail=tail[n : n + 1])
        torch.testing.assert_close(y, alone)
        torch.testing.assert_close(tails[n], t[0])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="lengths hold 3 tokens"):
        short_conv(torch.zeros(1, 4, 2), torch.zeros(2, 4), lengths=[3])
    with pytest.raises(ValueError, match=r"tail must be \[1, 2, 3\]"):
        short_conv(torch.zeros(1, 4, 2), torch.zeros(2, 4), tail=torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match="weight"):
        short_conv(torch.zeros(1, 4, 2), torch.zeros(3, 4))
