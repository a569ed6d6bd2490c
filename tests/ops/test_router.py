"""Routing against the golden vectors."""

import json

import pytest
import torch
from golden import golden
from safetensors.torch import load_file

from perilune.ops.router import mixture, route, select


def test_golden() -> None:
    folder = golden("moe-router")
    tensors = load_file(folder / "cases.safetensors")
    for name, meta in json.loads((folder / "README.json").read_text()).items():
        case = {key.removeprefix(name + "."): x for key, x in tensors.items() if key.startswith(name + ".")}
        got = route(
            case["x"],
            case["weight"],
            case["bias"],
            top_k=meta["topk"],
            activation=meta["activation"],
            groups=meta["num_expert_group"],
            top_groups=meta["topk_group"],
            renormalize=meta["renormalize"],
            scaling=meta["routed_scaling_factor"],
        )
        idx, order = got.idx.sort(-1)
        assert torch.equal(idx, case["idx"].long()), name
        weight = got.weight.gather(-1, order)
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight.double(), case["w_fp64"], rtol=1e-6, atol=1e-6, msg=name)


def test_threshold_parts_the_chosen_from_the_rest() -> None:
    scores = torch.rand(50, 12, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-0.3, 0.3, 12)
    idx, threshold = select(scores, bias, 3)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, idx, True)
    biased = scores + bias
    assert torch.equal(chosen, biased > threshold.unsqueeze(1))
    assert ((biased == threshold.unsqueeze(1)).sum(1) == 1).all()


def test_bias_moves_the_choice_and_never_the_weight() -> None:
    x, weight = torch.randn(30, 8), torch.randn(6, 8)
    bias = torch.tensor([10.0, 10, 0, 0, 0, 0])
    got = route(x, weight, bias, top_k=2)
    assert (got.idx.sort(-1).values == torch.tensor([0, 1])).all()
    torch.testing.assert_close(got.weight, mixture(torch.sigmoid(x @ weight.T), got.idx))


def test_a_left_out_group_is_never_chosen_even_when_all_scores_are_negative() -> None:
    scores, bias = torch.rand(20, 8, generator=torch.Generator().manual_seed(1)), torch.full((8,), -3.0)
    idx, _ = select(scores, bias, 2, groups=4, top_groups=1)
    assert (idx[:, 0] // 2 == idx[:, 1] // 2).all()


def test_all_experts_chosen() -> None:
    idx, threshold = select(torch.rand(4, 3), None, 3)
    assert idx.shape == (4, 3)
    assert (threshold == float("-inf")).all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((9,), "top_k is 9"), ((2, 3, 1), "3 groups"), ((5, 4, 2), "top_k 5 is more than 2 groups hold")],
)
def test_bad_input_is_named(arguments, says) -> None:
    with pytest.raises(ValueError, match=says):
        select(torch.rand(4, 8), None, *arguments)
