"""Quantile Balancing: additive counts, one bin of error, balance reached, the solver's optimum."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.ops.quantile import (
    alternating_solver,
    bin_range,
    centred,
    exact_quantile,
    expert_counts,
    histogram_quantile,
    margin_histogram,
    margins,
    sign_step,
)
from perilune.ops.router import select

E, K = 8, 2


def scores(tokens: int, seed: int, skew: float = 2.0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.sigmoid(torch.randn(tokens, E, generator=gen) + skew * torch.linspace(1, -1, E))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.floats(0, 3), st.integers(0, 99))
def test_counts_do_not_know_how_tokens_were_split(split: list[int], spread: float, seed: int) -> None:
    s, bias = scores(sum(split), seed), spread * torch.linspace(-1, 1, E)
    _, threshold = select(s, bias, K)
    whole = margin_histogram(s, threshold, bias)
    parts = [margin_histogram(a, b, bias) for a, b in zip(s.split(split), threshold.split(split), strict=True)]
    assert torch.equal(torch.stack(parts).sum(0), whole)
    assert (whole.sum(1) == len(s)).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 400), st.floats(0, 3), st.integers(0, 99))
def test_histogram_is_the_exact_quantile_within_a_bin(tokens: int, spread: float, seed: int) -> None:
    s, bias = scores(tokens, seed), spread * torch.linspace(-1, 1, E)
    _, threshold = select(s, bias, K)
    r = margins(s, threshold)
    low, high = bin_range(bias)
    assert (r >= low).all() and (r <= high).all()
    got = histogram_quantile(margin_histogram(s, threshold, bias), bias, K)
    # q = k·m/n falls between two order statistics when it is not whole; the estimate lies in the bin of the ⌈q⌉-th.
    rank = max(1, -(-tokens * K // E))
    want = r.kthvalue(rank, dim=0).values
    assert ((got - want).abs() <= (high - low) / 1000 + 1e-6).all()


def test_padding_counts_for_nothing() -> None:
    s, bias = scores(50, 0), torch.zeros(E)
    idx, threshold = select(s, bias, K)
    mask = torch.arange(50) < 30
    assert torch.equal(
        margin_histogram(s, threshold, bias, mask_T=mask), margin_histogram(s[:30], threshold[:30], bias)
    )
    assert torch.equal(expert_counts(idx, E, mask), torch.bincount(idx[:30].flatten(), minlength=E))
    assert torch.equal(margins(s, threshold, mask), margins(s[:30], threshold[:30]))
    nothing = margin_histogram(s, threshold, bias + 0.25, mask_T=torch.zeros(50, dtype=torch.bool))
    torch.testing.assert_close(histogram_quantile(nothing, bias + 0.25, K), bias + 0.25)


@pytest.mark.parametrize("how", ["histogram", "exact"])
def test_iterating_reaches_the_solvers_balance(how: str) -> None:
    s, bias = scores(2000, 3), torch.zeros(E)
    for _ in range(60):
        _, threshold = select(s, bias, K)
        if how == "exact":
            bias = centred(exact_quantile(margins(s, threshold), K))
        else:
            bias = centred(histogram_quantile(margin_histogram(s, threshold, bias), bias, K))
    best = alternating_solver(s.double(), K).float()
    assert (bias - best).abs().max() < (1e-5 if how == "exact" else 1e-2)
    load = expert_counts(select(s, bias, K)[0], E)
    assert load.max() <= (1.01 if how == "exact" else 1.03) * 2000 * K / E


def dual(s: torch.Tensor, bias: torch.Tensor, top_k: int) -> float:
    """Equation 23 with the best α for this bias; no balanced assignment scores more."""
    alpha = (s + bias).topk(top_k + 1, 1).values[:, top_k:]
    return float((s + bias - alpha).clamp_min(0).sum() + top_k * alpha.sum() - len(s) * top_k / s.shape[1] * bias.sum())


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 999))
def test_solver_descends_and_bounds_every_balanced_assignment(seed: int) -> None:
    s = torch.rand(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    duals = [dual(s, alternating_solver(s, 1, steps=n), 1) for n in (0, 1, 2, 5, 50)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(duals))
    best = max(
        float(s[torch.arange(6), list(p)].sum())
        for p in itertools.product(range(3), repeat=6)
        if sorted(p) == [0, 0, 1, 1, 2, 2]
    )
    assert best <= duals[-1] + 1e-12


def test_sign_rule_pushes_against_the_load() -> None:
    moved = sign_step(torch.zeros(4), torch.tensor([8, 4, 4, 0]), 0.01)
    torch.testing.assert_close(moved, torch.tensor([-0.01, 0.0, 0.0, 0.01]))
