"""RMSNorm, the gated norm and the linear cross-entropy against their equations, values and gradients, in fp64."""

import pytest
import torch

from perilune.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from perilune.ops.norm import gated_rms_norm, gated_rms_norm_reference, rms_norm, rms_norm_reference


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def compare(fast, reference, args, *rest) -> None:
    fast_out, ref_out = fast(*args, *rest), reference(*args, *rest)
    torch.testing.assert_close(fast_out, ref_out, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn_like(ref_out)
    for mine, theirs in zip(
        torch.autograd.grad(fast_out, args, cotangent), torch.autograd.grad(ref_out, args, cotangent)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-11)


def test_rms_norm() -> None:
    compare(rms_norm, rms_norm_reference, tensors((5, 3, 32), (32,)), 1e-5)


def test_gated_rms_norm() -> None:
    compare(gated_rms_norm, gated_rms_norm_reference, tensors((5, 3, 32), (5, 3, 32), (32,)), 1e-5)


def test_expanded_cotangent() -> None:
    x, w = tensors((7, 16), (16,))
    rms_norm(x, w, 1e-5).sum().backward()
    mine = x.grad.clone()
    x.grad = None
    rms_norm_reference(x, w, 1e-5).sum().backward()
    torch.testing.assert_close(mine, x.grad)


def test_bf16_casts_where_the_release_casts() -> None:
    """The plain norm rounds before the weight, the gated one once at the end: their bits differ, each from its own."""
    torch.manual_seed(0)
    x, gate = torch.randn(64, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    w = torch.randn(128)
    assert torch.equal(rms_norm(x, w.bfloat16(), 1e-5), rms_norm_reference(x, w.bfloat16(), 1e-5))
    assert torch.equal(gated_rms_norm(x, gate, w, 1e-5), gated_rms_norm_reference(x, gate, w, 1e-5))
    assert rms_norm(x, w, 1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens, vocab", [(1, 5), (300, 17), (41, 1 << 19)])
def test_linear_cross_entropy(tokens: int, vocab: int) -> None:
    """The last case needs several chunks of rows."""
    hidden, weight = tensors((tokens, 3), (vocab, 3))
    targets = torch.randint(0, vocab, (tokens,))
    targets[:: max(2, tokens // 4)] = -100
    compare(linear_cross_entropy, linear_cross_entropy_reference, [hidden, weight], targets)


def test_all_targets_ignored_is_zero() -> None:
    hidden, weight = tensors((4, 3), (9, 3))
    total = linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    total.backward()
    assert total.item() == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()
