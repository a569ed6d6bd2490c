"""Sampling against its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from serve.toy import VOCAB, make, prompt, run, text

from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions, Request, Sampling
from perilune.serve.sampling import Row, distribution, draw, logprobs, sample, uniform

rules = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 0.3, 1, 2.5]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 5: -100.0}]),
)


def by_hand(logits: list[float], s: Sampling, prompt: list[int], output: list[int], mask: list[bool]) -> list[float]:
    """The definition, an id at a time."""
    x = list(logits)
    for v, bias in s.logit_bias.items():
        x[v] += bias
    for v in {*prompt, *output}:
        x[v] = x[v] / s.repetition_penalty if x[v] > 0 else x[v] * s.repetition_penalty
    for v in set(output):
        x[v] -= s.presence_penalty + s.frequency_penalty * output.count(v)
    x = [value if ok else -math.inf for value, ok in zip(x, mask)]
    if s.temperature == 0:
        return [float(v == x.index(max(x))) for v in range(len(x))]
    p = [math.exp((value - max(x)) / s.temperature) for value in x]
    order = sorted(range(len(p)), key=lambda v: -p[v])
    kept = [v for v in order if p[v] >= s.min_p * p[order[0]]][: s.top_k or len(p)]
    total, mass, nucleus = sum(p[v] for v in kept), 0.0, []
    for v in kept:
        if mass < s.top_p * total or s.top_p == 1:
            nucleus.append(v)
        mass += p[v]
    total = sum(p[v] for v in nucleus)
    return [p[v] / total if v in nucleus else 0.0 for v in range(len(p))]


@given(st.lists(rules, min_size=1, max_size=4), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_distribution_is_its_definition_row_by_row(many: list[Sampling], seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(0, 2, (len(many), 12)))
    rows, want = [], []
    for x, s in zip(logits, many):
        before, after = rng.integers(0, 12, 3).tolist(), rng.integers(0, 12, 4).tolist()
        mask = rng.random(12) < 0.8
        mask[1] = True
        rows.append(Row(s, 0, 0, before, after, torch.tensor(mask)))
        want.append(by_hand(x.tolist(), s, before, after, mask.tolist()))
    torch.testing.assert_close(distribution(logits, rows), torch.tensor(want, dtype=torch.float64), atol=1e-9, rtol=0)


def test_draws_follow_the_distribution() -> None:
    p = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.05, 0.0])
    n = 20000
    picked = draw(p.repeat(n, 1), [uniform(7, i, "draw") for i in range(n)])
    counts = np.bincount(picked, minlength=6)
    assert counts[1] == counts[5] == 0
    real = p > 0
    assert stats.chisquare(counts[real.numpy()], p[real].numpy().astype(float) * n).pvalue > 1e-3


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_pick_ids_with_mass(u: float) -> None:
    assert draw(torch.tensor([[0.0, 0.3, 0.7, 0.0]]), [u]) == [1 if u == 0 else 2]


def test_a_seed_fixes_the_text_whoever_shares_the_batch() -> None:
    model = make()
    hot = Sampling(temperature=1.3, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True)
    alone = Engine(model, EngineOptions(block_tokens=16))
    alone.submit(Request("a", prompt(20), hot))
    want = text(run(alone)["a"])
    crowd = Engine(model, EngineOptions(block_tokens=16, token_budget=16, max_batch=3))
    for i in range(3):
        crowd.submit(Request(f"s{i}", prompt(9 + i, i), Sampling(seed=i, max_tokens=9)))
    crowd.submit(Request("a", prompt(20), hot))
    assert text(run(crowd)["a"]) == want
    other = Engine(model, EngineOptions(block_tokens=16))
    other.submit(Request("a", prompt(20), Sampling(temperature=1.3, top_p=0.9, seed=12, max_tokens=12)))
    assert text(run(other)["a"]) != want


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 9, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    for at, said in enumerate(logprobs(logits, [4, 0, 8], 3)):
        assert said.logprob == float(logp[at, said.token])
        assert said.rank == 1 + int((logp[at] > logp[at, said.token]).sum())
        assert said.top == tuple((int(i), float(logp[at, i])) for i in logp[at].topk(3).indices)
    assert logprobs(logits, [4, 0, 8], 0)[0].top == ()


class Cycle:
    """Allows 1, 2, 3, 1, 2, 3, ... and the end after a 3."""

    def start(self) -> int:
        return 0

    def mask(self, state: int, left: int | None = None) -> np.ndarray:  # noqa: ARG002
        allowed = np.zeros(VOCAB, dtype=bool)
        allowed[[state % 3 + 1, *([0] if self.accepting(state) else [])]] = True
        return allowed

    def advance(self, state: int, token: int) -> int:
        if not self.mask(state)[token]:
            raise ValueError("not allowed")
        return state + 1

    def accepting(self, state: int) -> bool:
        return state > 0 and state % 3 == 0


class Nothing(Cycle):
    def mask(self, state: int, left: int | None = None) -> np.ndarray:  # noqa: ARG002
        return np.zeros(VOCAB, dtype=bool)


class Breaks(Cycle):
    """Grows too large after five tokens."""

    def mask(self, state: int, left: int | None = None) -> np.ndarray:
        if state == 5:
            raise ValueError("The grammar is too large to hold an answer to.")
        return super().mask(state, left)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_grammar_that_fails_ends_its_request_alone(drafts: int) -> None:
    engine = Engine(make(), EngineOptions(block_tokens=16, speculate=drafts))
    engine.submit(Request("a", prompt(20), Sampling(seed=1, max_tokens=20, grammar=Breaks())))
    engine.submit(Request("b", prompt(20), Sampling(temperature=0, max_tokens=20, ignore_eos=True)))
    said = run(engine)
    assert said["a"][-1].finish == "error" and text(said["a"]) in ([1, 2, 3, 1, 2], [1, 2, 3, 0])
    assert len(text(said["b"])) == 20 and engine.stats().pages_running == 0


def test_a_grammar_binds_and_one_that_allows_nothing_ends_its_request_alone() -> None:
    engine = Engine(make(), EngineOptions(block_tokens=16))
    engine.submit(Request("a", prompt(20), Sampling(seed=1, max_tokens=20, grammar=Cycle())))
    engine.submit(Request("b", prompt(20), Sampling(seed=1, max_tokens=20, grammar=Nothing())))
    engine.submit(Request("c", prompt(20), Sampling(temperature=0, max_tokens=20, ignore_eos=True)))
    said = run(engine)
    ids = text(said["a"])
    want = [(i % 3) + 1 for i in range(20)]
    assert ids[:-1] == want[: len(ids) - 1] and ids[-1] in (0, want[len(ids) - 1])
    assert [d.finish for d in said["b"]] == ["error"] and "grammar" in said["b"][0].message
    assert len(text(said["c"])) == 20


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2}, {"repetition_penalty": 0},
              {"max_tokens": -1}, {"logit_bias": {1: math.nan}}]
)  # fmt: skip
def test_no_such_rule(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_greedy_takes_no_detour() -> None:
    logits = torch.randn(4, 30)
    rows = [Row(Sampling(temperature=0), 0, i) for i in range(4)]
    assert sample(logits, rows) == logits.argmax(-1).tolist() == draw(distribution(logits, rows), [0.5] * 4)
