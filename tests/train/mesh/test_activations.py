"""Policies of saved tensors: gradients stay, memory goes, weights are left alone."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from train.mesh.world import MODEL

from perilune.model.kda import KDA
from perilune.model.layout import Layout
from perilune.model.mla import MLA
from perilune.model.moe import LatentMoE
from perilune.train.mesh.activations import (
    BLOCK,
    Packed,
    Storage,
    apply_policy,
    check_policies,
    dequantize,
    quantize,
)

T = 96


def module(kind: str) -> nn.Module:
    torch.manual_seed(3)
    made = {"kda": lambda: KDA(MODEL, 0), "mla": lambda: MLA(MODEL, 0), "moe": lambda: LatentMoE(MODEL)}[kind]()
    for p in made.parameters():
        nn.init.normal_(p, std=0.2)
    return made


def gradients(part: nn.Module, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(4)
    x = torch.randn(T, MODEL.hidden_size, requires_grad=True)
    y = part(x)[0] if kind == "moe" else part(x, Layout.packed([40, 56]))
    (y * torch.randn(y.shape)).sum().backward()
    found = [x.grad, *(p.grad.clone() for p in part.parameters())]
    part.zero_grad()
    return found


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((g - w).norm() / w.norm()) for g, w in zip(got, want) if w.norm() > 0)


@pytest.mark.parametrize("kind", ["kda", "mla", "moe"])
@pytest.mark.parametrize("policy", ["recompute", "offload", "recompute+offload"])
def test_what_rounds_nothing_changes_no_bit(kind: str, policy: str) -> None:
    part = module(kind)
    want = gradients(part, kind)
    apply_policy(part, policy)
    assert all(torch.equal(g, w) for g, w in zip(gradients(part, kind), want))


@pytest.mark.parametrize(
    "kind,policy",
    [
        ("kda", "fp8+offload"),
        ("mla", "fp8"),
        ("moe", "fp8"),
        ("mla", "recompute+fp8"),
        ("moe", "recompute+fp8+offload"),
    ],
)
def test_fp8_is_near_and_is_used(kind: str, policy: str) -> None:
    part = module(kind)
    want = gradients(part, kind)
    apply_policy(part, policy)
    assert 0 < error(gradients(part, kind), want) < 0.1  # e4m3 rounds by up to 6%


@pytest.mark.parametrize("kind", ["kda", "mla", "moe"])
def test_weights_are_kept_and_nothing_else(kind: str) -> None:
    """Every large input of a product is packed, and no weight, nor several joined into one."""
    part, left, packed = module(kind), [], []
    pack = Storage._pack

    def seen(self: Storage, x: torch.Tensor, kept: set[int]) -> torch.Tensor | Packed:
        made = pack(self, x, kept)
        (packed if isinstance(made, Packed) else left).append(x)
        return made

    storage = Storage("fp8", part)
    storage._pack = seen.__get__(storage)  # type: ignore[method-assign]
    x = torch.randn(T, MODEL.hidden_size, requires_grad=True)
    storage.run(part, x, *(() if kind == "moe" else (Layout.packed([T]),)))
    assert packed and not [x.shape for x in packed if _is_weight(x, part)]
    assert not [x.shape for x in left if x.dim() == 2 and x.numel() >= 1024 and not _is_weight(x, part)]


def _is_weight(x: torch.Tensor, part: nn.Module) -> bool:
    """A parameter, or several on top of each other, seen from either side."""
    weights = [p.detach() for p in part.parameters() if p.dim() > 1]
    return any(torch.equal(side.reshape(-1)[: w.numel()], w.reshape(-1)) for w in weights for side in (x, x.mT))


def test_fp8_blocks() -> None:
    """Within e4m3's half step of each block's own scale; exact zeros; any shape and length."""
    x = torch.randn(7, 61) * torch.logspace(-6, 4, 7)[:, None]
    x[2] = 0
    codes, scale = quantize(x)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (-(-x.numel() // BLOCK), BLOCK)
    y = dequantize(codes, scale, x.shape, x.dtype)
    largest = scale.repeat_interleave(BLOCK)[: x.numel()].view(x.shape) * 448
    assert ((y - x).abs() <= largest / 28 + 1e-30).all() and (y[2] == 0).all()


def test_hooks_end_with_the_module() -> None:
    """What the caller saves afterwards is not the policy's."""
    part = module("mla")
    apply_policy(part, "offload")
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        gradients(part, "mla")
    x = torch.randn(64, 64, requires_grad=True)
    y = (x * x).sum()
    assert y.grad_fn is not None
    y.backward()
    assert torch.equal(x.grad, 2 * x)


def test_policies_are_checked() -> None:
    check_policies({"mla": "recompute+fp8+offload", "mlp": "keep"})
    with pytest.raises(ValueError, match="recomputing decays from a rounded input"):
        check_policies({"kda": "recompute+fp8"})
    with pytest.raises(ValueError, match=r"mesh\.activations\.kda: unknown policy 'zip'"):
        check_policies({"kda": "zip"})
