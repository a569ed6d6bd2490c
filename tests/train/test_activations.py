"""Recomputed blocks give the same values and gradients, hold less, and leave the model's names alone."""

import pytest
import torch
from torch import nn

from perilune.train.activations import activation_policy, apply_policy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        y = torch.tanh(self.linear(x)) * scale
        return y, y.detach().abs().amax()


def run(model: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The output and the number of floats that autograd holds on to."""
    held = 0

    def pack(t: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held += t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for block in model:
            x, _ = block(x, scale=2.0)
    return x, held


def test_values_and_gradients_are_equal_and_less_is_held() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(4))
    names, results = list(model.state_dict()), {}
    for spec in ("keep", "recompute", "recompute:2", "keep"):
        apply_policy(model, activation_policy(spec, 4))
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        out, held = run(model, x)
        out.square().sum().backward()
        results[spec] = [out.detach(), x.grad, *(p.grad for p in model.parameters())], held
        model.zero_grad()
        assert list(model.state_dict()) == names
    for spec in ("recompute", "recompute:2"):
        assert all(torch.equal(a, b) for a, b in zip(results["keep"][0], results[spec][0], strict=True))
    assert results["recompute"][1] < results["recompute:2"][1] < results["keep"][1]


def test_recompute_runs_twice_only_with_gradients() -> None:
    model = nn.ModuleList([Block()])
    apply_policy(model, ("recompute",))
    with torch.no_grad():
        model[0](torch.ones(2, 8), scale=1.0)
    assert model[0].calls == 1
    model[0](torch.ones(2, 8, requires_grad=True), scale=1.0)[0].sum().backward()
    assert model[0].calls == 3


def test_policy_words() -> None:
    assert activation_policy("keep", 2) == ("keep", "keep")
    assert activation_policy("recompute", 2) == ("recompute", "recompute")
    assert activation_policy("recompute:3", 7) == ("recompute", "recompute", "keep") * 2 + ("recompute",)
    for spec in ("some", "keep:2", "recompute:1", "recompute:x"):
        with pytest.raises(ValueError, match=spec):
            activation_policy(spec, 3)
