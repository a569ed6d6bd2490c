"""Quantile Balancing over a step: exact sums, error bound, balance reached, invariance to ranks and micro-batches."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.ops.quantile import bin_range
from perilune.train.balance import QuantileBalancer, RouterTap, loads

K, E, BINS = 2, 8, 1000


def tap(scores_TE: Tensor, bias_E: Tensor, mode: str = "quantile", bins: int = BINS) -> RouterTap:
    """What a MoE layer reports, from its scores, straight from equations 13 and 14."""
    best = (scores_TE + bias_E).topk(K + 1, -1)
    counts = best.indices[:, :K].flatten().bincount(minlength=E)
    r_TE = best.values[:, K:] - scores_TE
    if mode == "exact":
        return RouterTap(counts, margins=r_TE)
    low, high = bin_range(bias_E)
    index_TE = ((r_TE - low) / (high - low) * bins).long().clamp(0, bins - 1)
    histogram = torch.stack([index_TE[:, e].bincount(minlength=bins) for e in range(E)])
    return RouterTap(counts, histogram.int())


def scores(tokens: int, seed: int, skew: float = 2.0) -> Tensor:
    """Sigmoid scores whose first experts are favoured."""
    generator = torch.Generator().manual_seed(seed)
    return torch.sigmoid(torch.randn(tokens, E, generator=generator) + skew * torch.linspace(1, -1, E))


@pytest.mark.parametrize("mode", ["quantile", "exact"])
def test_a_few_steps_balance_a_skewed_router(mode: str) -> None:
    bias, violations = torch.zeros(E), []
    balancer = QuantileBalancer({3: bias}, K, mode)  # type: ignore[arg-type]
    for step in range(10):
        balancer.observe({3: tap(scores(4000, step), bias, mode)})
        violations.append(balancer.update()[0].max_violation)
        assert abs(float(bias.mean())) < 1e-6
    assert violations[0] > 1.5 and max(violations[3:]) < 0.2 and max(violations[7:]) < 0.08


def test_the_sign_rule_moves_each_bias_by_gamma_and_is_centred() -> None:
    bias = torch.zeros(E)
    balancer = QuantileBalancer({0: bias}, K, "sign", gamma=0.01)
    balancer.observe({0: RouterTap(torch.tensor([8, 6, 4, 4, 4, 4, 2, 0]))})
    balancer.update()
    expected = 0.01 * torch.tensor([-1.0, -1, 0, 0, 0, 0, 1, 1])
    torch.testing.assert_close(bias, expected)


def test_none_measures_and_changes_nothing() -> None:
    bias = torch.randn(E)
    before = bias.clone()
    balancer = QuantileBalancer({0: bias}, K, "none")
    balancer.observe({0: tap(scores(100, 0), bias)})
    assert balancer.update()[0].max_violation > 0 and torch.equal(bias, before)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_any_cut_into_micro_batches_gives_the_same_bias(seed: int, cuts: list[int]) -> None:
    whole, parts = torch.zeros(E), torch.zeros(E)
    s = scores(sum(cuts) + 1, seed)
    one, many = QuantileBalancer({0: whole}, K), QuantileBalancer({0: parts}, K)
    one.observe({0: tap(s, whole)})
    for piece in s.split([*cuts, 1]):
        many.observe({0: tap(piece, parts)})
    assert one.update() == many.update()
    assert torch.equal(whole, parts)


def test_a_step_is_not_routed_by_its_own_bias_and_a_discarded_one_leaves_no_trace() -> None:
    bias, other = torch.zeros(E), torch.zeros(E)
    balancer, fresh = QuantileBalancer({0: bias}, K), QuantileBalancer({0: other}, K)
    balancer.observe({0: tap(scores(50, 1), bias)})
    assert not bias.any()
    balancer.discard()
    for b, buffer in ((balancer, bias), (fresh, other)):
        b.observe({0: tap(scores(50, 2), buffer)})
        b.update()
    assert torch.equal(bias, other) and bias.any()


def test_a_step_without_tokens_keeps_the_bias() -> None:
    bias = torch.linspace(-1, 1, E)
    before = bias.clone()
    balancer = QuantileBalancer({0: bias}, K)
    balancer.observe({0: RouterTap(torch.zeros(E, dtype=torch.long), torch.zeros(E, BINS, dtype=torch.int32))})
    assert balancer.update()[0].dead == 0.0 and torch.equal(bias, before)


def test_ema_averages_from_the_second_step_on_and_survives_a_resume() -> None:
    plain, averaged = torch.zeros(E), torch.zeros(E)
    QuantileBalancer({0: plain}, K).observe({0: tap(scores(200, 0), plain)})
    balancer = QuantileBalancer({0: averaged}, K, ema=0.75)
    balancer.observe({0: tap(scores(200, 0), averaged)})
    balancer.update()
    first = averaged.clone()
    resumed = QuantileBalancer({0: averaged}, K, ema=0.75)
    resumed.load_state_dict(balancer.state_dict())
    reference, target = QuantileBalancer({0: plain}, K), scores(200, 1)
    plain.copy_(first)
    for b, buffer in ((resumed, averaged), (reference, plain)):
        b.observe({0: tap(target, buffer)})
        b.update()
    torch.testing.assert_close(averaged, 0.75 * first + 0.25 * plain)


def test_load_statistics_of_a_worked_example() -> None:
    found = loads(torch.tensor([[18, 12, 6, 4], [10, 10, 20, 0], [0, 0, 0, 0]]))
    assert [f.max_violation for f in found] == pytest.approx([0.8, 1.0, 0.0])
    assert [f.dead for f in found] == [0.0, 0.25, 0.0]


def test_what_a_mode_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="topk"):
        QuantileBalancer({0: torch.zeros(E)}, K, "topk")  # type: ignore[arg-type]
    for mode, word in (("quantile", "histogram of 1000 bins"), ("exact", "margins")):
        balancer = QuantileBalancer({7: torch.zeros(E)}, K, mode)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"Layer 7 reports no {word}"):
            balancer.observe({7: RouterTap(torch.zeros(E, dtype=torch.long))})


def _rank(rank: int, world: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    biases = {layer: torch.zeros(E) for layer in (1, 4)}
    balancer = QuantileBalancer(biases, K)
    with pytest.raises(ValueError, match="one process"):
        QuantileBalancer(biases, K, "exact")
    for step in range(3):
        share = {layer: scores(96, 10 * step + layer).tensor_split([31])[rank].split(16) for layer in biases}
        for piece in range(len(share[1])):
            balancer.observe({layer: tap(share[layer][piece], biases[layer]) for layer in biases})
        found = balancer.update()
    torch.save((biases, found), f"{out}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_with_uneven_shares_get_the_biases_of_one_process(tmp_path) -> None:  # type: ignore[no-untyped-def]
    mp.spawn(_rank, args=(2, str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    biases = {layer: torch.zeros(E) for layer in (1, 4)}
    balancer = QuantileBalancer(biases, K)
    for step in range(3):
        balancer.observe({layer: tap(scores(96, 10 * step + layer), biases[layer]) for layer in biases})
        found = balancer.update()
    for rank in range(2):
        theirs, their_loads = torch.load(tmp_path / f"out.{rank}", weights_only=False)
        assert their_loads == found
        assert all(torch.equal(theirs[layer], biases[layer]) for layer in biases)
