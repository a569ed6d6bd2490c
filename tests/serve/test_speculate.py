"""Speculation loses nothing: the same greedy text, the same distribution, the same states."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats
from serve.test_sampling import Cycle
from serve.toy import VOCAB, assert_says, greedy, make, oracle, prompt, run, text

from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions, Request, Sampling
from perilune.serve.sampling import Row, distribution, draw, uniform
from perilune.serve.speculate import verify

MODEL = make()
OPTIONS = EngineOptions(block_tokens=16, pool_tokens=1024, max_batch=4, token_budget=64, speculate=3)


class Oracle:
    """A draft that knows the answer and errs at every `wrong`-th token: any number of drafts gets accepted."""

    def __init__(self, answers: dict[str, list[int]], wrong: int) -> None:
        self.answers, self.wrong = answers, wrong

    def saw(self, *_: object) -> None: ...

    def catch_up(self, *_: object) -> None: ...

    def propose(self, sequences: list, count: int, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        drafts = []
        for s in sequences:
            at = len(s.output)
            ahead = (self.answers[s.request.id] + [1] * count)[at : at + count]
            drafts.append([t if (at + i) % self.wrong else (t + 1) % VOCAB for i, t in enumerate(ahead)])
        tokens = torch.tensor(drafts)
        return tokens, torch.nn.functional.one_hot(tokens, VOCAB).double()


@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_greedy_text_is_the_same(drafts: int) -> None:
    prompts = {f"r{i}": prompt(20 + 23 * i, i) for i in range(5)}
    engine = Engine(MODEL, dataclasses.replace(OPTIONS, speculate=drafts))
    for name, ids in prompts.items():
        engine.submit(Request(name, ids, greedy(20)))
    said = run(engine)
    for name, ids in prompts.items():
        assert_says(MODEL, ids, said[name])
        assert len(text(said[name])) == 20
    assert engine.stats().drafted > 0 and engine.stats().pages_running == 0


@pytest.mark.parametrize("wrong", [1, 2, 3, 4, 1000])
def test_whatever_is_accepted_the_states_follow(wrong: int) -> None:
    """None, some and all of a window; then the exported state and the checkpoints go on as if nothing was drafted."""
    plain = Engine(MODEL, dataclasses.replace(OPTIONS, speculate=0))
    prompts = {f"r{i}": prompt(17 + 6 * i, i) for i in range(3)}
    for name, ids in prompts.items():
        plain.submit(Request(name, ids, greedy(40), keep_state=True))
    want = run(plain)
    engine = Engine(MODEL, OPTIONS)
    engine.draft = Oracle({name: text(d) for name, d in want.items()}, wrong)
    for name, ids in prompts.items():
        engine.submit(Request(name, ids, greedy(40), keep_state=True))
    said = run(engine)
    for name, ids in prompts.items():
        assert_says(MODEL, ids, said[name])
        ours, theirs = said[name][-1].state, want[name][-1].state
        assert ours.length == theirs.length
        for part in ("kda", "conv", "mla"):
            for layer, x in getattr(theirs, part).items():
                torch.testing.assert_close(getattr(ours, part)[layer], x, atol=1e-9, rtol=0)
        turn = (*ids, *text(said[name]), *prompt(9, 3))
        engine.submit(Request(name, turn, greedy(4)))
        engine.draft.answers[name] = [1] * 9
        more = run(engine)[name]
        assert more[-1].usage.cached_tokens == (len(ids) + 39) // 16 * 16
        assert_says(MODEL, turn, more)
    accepted = engine.stats().accepted
    assert accepted == 0 if wrong == 1 else accepted > 0


@pytest.mark.parametrize("rules", [Sampling(), Sampling(temperature=0.7, top_p=0.8), Sampling(top_k=4, min_p=0.05)])
def test_what_comes_out_is_distributed_as_the_target(rules: Sampling) -> None:
    """20,000 windows of two drafts: the first token against p, and the second given the first, by chi-square."""
    torch.manual_seed(1)
    n, v = 20000, 6
    row = Row(rules, 0, 0)
    logits = torch.randn(3, v, dtype=torch.float64) * 1.5
    p = distribution(logits, [row] * 3)
    q = distribution(logits[:2] + torch.randn(2, v, dtype=torch.float64) * 0.7, [row] * 2)
    drafts = torch.tensor([draw(q, [uniform(seed, 9 + i, "draft") for i in range(2)]) for seed in range(n)])
    out = verify(p.expand(n, -1, -1), q.expand(n, -1, -1), drafts, range(n), [9] * n)
    first = np.bincount([o[0] for o in out], minlength=v)
    second = np.bincount([o[1] for o in out if len(o) > 1], minlength=v)
    for counts, target in ((first, p[0]), (second, p[1])):
        real = (target > 0).numpy()
        assert counts[~real].sum() == 0
        assert stats.chisquare(counts[real], target.numpy()[real] * counts.sum()).pvalue > 1e-3
    assert {len(o) for o in out} == {1, 2, 3}


def test_sampled_text_has_the_targets_distribution() -> None:
    """Through the whole engine: the two tokens after a prompt, 1,000 seeds, against the exact joint distribution."""
    rules = {"temperature": 0.6, "top_k": 3, "max_tokens": 2, "ignore_eos": True}
    engine = Engine(MODEL, dataclasses.replace(OPTIONS, max_batch=64, pool_tokens=8192, token_budget=4096))
    ids = prompt(20)
    for seed in range(1000):
        engine.submit(Request(str(seed), ids, Sampling(seed=seed, **rules)))
    pairs = [tuple(text(d)) for d in run(engine, audit=False).values()]
    row = Row(Sampling(**rules), 0, 0)
    joint = {}
    p1 = distribution(oracle(MODEL, list(ids))[-1:], [row])[0]
    for a in p1.nonzero().flatten().tolist():
        p2 = distribution(oracle(MODEL, [*ids, a])[-1:], [row])[0]
        joint |= {(a, b): float(p1[a] * p2[b]) for b in p2.nonzero().flatten().tolist()}
    assert set(pairs) <= set(joint)
    counts = [pairs.count(pair) for pair in joint]
    assert stats.chisquare(counts, [1000 * share for share in joint.values()]).pvalue > 1e-3


def test_a_grammar_rolls_back_with_the_drafts() -> None:
    for seed in range(3):
        engine = Engine(MODEL, OPTIONS)
        engine.submit(Request("a", prompt(20), Sampling(seed=seed, max_tokens=20, grammar=Cycle())))
        ids = text(run(engine)["a"])
        want = [(i % 3) + 1 for i in range(20)]
        assert ids[:-1] == want[: len(ids) - 1] and ids[-1] in (0, want[len(ids) - 1])


def test_penalties_count_the_drafts() -> None:
    rules = Sampling(temperature=0, max_tokens=24, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.2)
    texts = []
    for drafts in (0, 3):
        engine = Engine(MODEL, dataclasses.replace(OPTIONS, speculate=drafts))
        engine.submit(Request("a", prompt(20), rules))
        texts.append(text(run(engine)["a"]))
    assert texts[0] == texts[1]


def test_the_context_ends_a_window_early() -> None:
    engine = Engine(MODEL, dataclasses.replace(OPTIONS, context=40))
    engine.submit(Request("a", prompt(33), greedy(20)))
    said = run(engine)["a"]
    assert len(text(said)) == 7 and said[-1].finish == "length"
    assert_says(MODEL, prompt(33), said)


def test_a_model_without_a_draft_says_so() -> None:
    with pytest.raises(ValueError, match="MTP"):
        Engine(make(num_nextn_predict_layers=0), OPTIONS)
