"""The plain torch forms on a CUDA device: what runs where no kernel of ours does."""

import pytest
import torch

from perilune.ops.attnres import mix, mix_reference
from perilune.ops.conv import short_conv, short_conv_reference
from perilune.ops.experts import experts, experts_reference
from perilune.ops.kda import kda
from perilune.ops.quantile import margin_histogram
from perilune.ops.router import select

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).cuda()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("lengths", [None, [0, 300, 17, 0, 195]])
def test_chunked_kda(lengths, lower_bound) -> None:
    x = {"q": randn(1, 512, 2, 64), "k": randn(1, 512, 2, 64) + 0.1, "v": randn(1, 512, 4, 64)}
    x |= {"gate": randn(1, 512, 4, 64) * 3, "beta": randn(1, 512, 4), "A_log": randn(4) * 0.3, "dt_bias": randn(4, 64)}
    found = []
    for impl, dtype in (("chunk", torch.float32), ("reference", torch.float64)):
        leaves = {key: y.to(dtype, copy=True).requires_grad_() for key, y in x.items()}
        o, final, _ = kda(**leaves, lower_bound=lower_bound, lengths=lengths, impl=impl)
        (o.square().sum() + final.square().sum()).backward()
        found.append([o, final] + [y.grad for y in leaves.values()])
    assert max(relative(a, b) for a, b in zip(*found, strict=True)) < 1e-4


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])  # fp32: TF32 products
def test_experts(dtype: torch.dtype, tol: float) -> None:
    x = {
        "z": randn(200, 64),
        "weight": randn(200, 2).abs(),
        "gate_up": randn(8, 128, 64) * 0.2,
        "down": randn(8, 64, 64),
    }
    idx = torch.stack([torch.randperm(7, device="cuda")[:2] for _ in range(200)])
    found = []
    for op, kind in ((experts, dtype), (experts_reference, torch.float64)):
        leaves = {
            k: y.to(kind if k != "weight" else torch.promote_types(kind, torch.float32), copy=True)
            for k, y in x.items()
        }
        leaves = {k: y.requires_grad_() for k, y in leaves.items()}
        out = op(leaves["z"], idx, leaves["weight"], leaves["gate_up"], leaves["down"])
        out.sum().backward()
        found.append([out] + [y.grad for y in leaves.values()])
    assert max(relative(a, b) for a, b in zip(*found, strict=True)) < tol


def test_conv_and_attention_residuals() -> None:
    x, weight = randn(1, 90, 32), randn(32, 4)
    torch.testing.assert_close(
        short_conv(x, weight, lengths=[40, 0, 50]), short_conv_reference(x, weight, lengths=[40, 0, 50])
    )
    blocks, partial, w = [randn(50, 64), randn(50, 64) * 2], randn(50, 64), randn(64)
    torch.testing.assert_close(mix(blocks, partial, w), mix_reference(blocks, partial, w))


def test_histogram_counts_as_on_the_cpu() -> None:
    scores, bias = torch.rand(500, 16, generator=torch.Generator().manual_seed(0)), torch.linspace(-0.1, 0.1, 16)
    _, threshold = select(scores, bias, 4)
    want = margin_histogram(scores, threshold, bias)
    assert torch.equal(margin_histogram(scores.cuda(), threshold.cuda(), bias.cuda()).cpu(), want)
