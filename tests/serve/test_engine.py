"""Every path through the engine says what the plain forward says of the whole sequence."""

import dataclasses

import pytest
import torch
from serve.toy import VOCAB, assert_says, greedy, make, oracle, prompt, run, text

from perilune.model.net import K3
from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions, Full, Request, Sampling

B = 16  # hash block
OPTIONS = EngineOptions(block_tokens=B, pool_tokens=1024, max_batch=4, token_budget=64)


@pytest.fixture(scope="module")
def model() -> K3:
    return make()


def ask(engine: Engine, ids: tuple[int, ...], n: int = 4, name: str = "a", **more: object) -> list:
    engine.submit(Request(name, ids, greedy(n), **more))
    return run(engine)[name]


def test_page_size_of_the_toy(model: K3) -> None:
    """2 heads of 16·16 state and 3·16·3 tail values against 20 values a token: 40 tokens, so 3 hash blocks."""
    assert Engine(model, OPTIONS).stats().page_tokens == 48


def test_strangers_in_one_batch(model: K3) -> None:
    engine = Engine(model, OPTIONS)
    prompts = {f"r{i}": prompt(5 + 19 * i, i) for i in range(7)}
    for name, ids in prompts.items():
        engine.submit(Request(name, ids, greedy()))
    said = run(engine)
    for name, ids in prompts.items():
        assert_says(model, ids, said[name])
        assert said[name][-1].finish == "length" and said[name][-1].usage.completion_tokens == 8
    assert engine.stats().pages_running == 0


@pytest.mark.parametrize("around", [B, 48, 2 * 48])
def test_chunks_that_end_anywhere(model: K3, around: int) -> None:
    """Budgets and prompts one below, at and one above a hash block, a page, two pages."""
    for budget in (around - 1, around, around + 1):
        options = dataclasses.replace(OPTIONS, token_budget=budget)
        for n in (2 * around - 1, 2 * around, 2 * around + 1):
            assert_says(model, prompt(n), ask(Engine(model, options), prompt(n)))


@pytest.mark.parametrize("n", [k * m + d for m in (B, 48) for k in (2, 3) for d in (-1, 0, 1)])
def test_cached(model: K3, n: int) -> None:
    """The same prompt again, then the same with a longer tail."""
    engine = Engine(model, OPTIONS)
    ids = prompt(n)
    assert ask(engine, ids)[-1].usage.cached_tokens == 0
    again = ask(engine, ids)
    assert again[-1].usage.cached_tokens == (n - 1) // B * B
    assert_says(model, ids, again)
    longer = ids + prompt(30, 9)
    more = ask(engine, longer)
    assert more[-1].usage.cached_tokens == n // B * B
    assert_says(model, longer, more)


def test_forked_there_and_back(model: K3) -> None:
    """A, B, A again: going on from a shared checkpoint leaves it as it was."""
    engine = Engine(model, OPTIONS)
    shared, a, b = prompt(70), prompt(40, 1), prompt(50, 2)
    ask(engine, shared)
    for tail in (a, b, a, b, a):
        said = ask(engine, shared + tail, 20)
        assert said[-1].usage.cached_tokens >= 64
        assert_says(model, shared + tail, said)


def test_a_branch_point_gets_a_checkpoint_when_it_is_seen(model: K3) -> None:
    """Two prompts share 60 tokens, but checkpoints lie at their ends: the second marks the branch for the third."""
    engine = Engine(model, OPTIONS)
    system = prompt(60)
    cached = [ask(engine, system + prompt(100, i))[-1].usage.cached_tokens for i in range(3)]
    assert cached == [0, 0, 48]


def test_a_burst_computes_what_it_shares_once(model: K3) -> None:
    """Five prompts arrive together with 100 tokens in common: four wait for the first and find its branch."""
    engine = Engine(model, dataclasses.replace(OPTIONS, max_batch=6))
    prompts = {f"r{i}": prompt(100) + prompt(20 + i, i) for i in range(5)} | {"other": prompt(50, 9)}
    for name, ids in prompts.items():
        engine.submit(Request(name, ids, greedy(4)))
    said = run(engine)
    for name, ids in prompts.items():
        assert_says(model, ids, said[name])
    assert [said[f"r{i}"][-1].usage.cached_tokens for i in range(5)] == [0, 96, 96, 96, 96]
    assert engine.stats().hit_tokens == 4 * 96


def test_turn_ends_get_checkpoints(model: K3) -> None:
    engine = Engine(model, OPTIONS)
    ids = prompt(150)
    ask(engine, ids, checkpoints=(70,))
    said = ask(engine, ids[:70] + prompt(40, 3))
    assert said[-1].usage.cached_tokens == 64
    assert_says(model, ids[:70] + prompt(40, 3), said)


def test_the_next_turn_finds_prompt_and_answer(model: K3) -> None:
    engine = Engine(model, OPTIONS)
    ids = prompt(50)
    said = text(ask(engine, ids, 60))
    turn = (*ids, *said, *prompt(20, 4))
    more = ask(engine, turn)
    assert more[-1].usage.cached_tokens == 96  # 109 are in the cache, the last token is not
    assert_says(model, turn, more)


def test_preempted_requests_lose_nothing(model: K3) -> None:
    pages = 1 + 3 * 2 + 7 * 2
    geometry = Engine(model, OPTIONS).scheduler.geometry
    options = dataclasses.replace(OPTIONS, pool_bytes=pages * geometry.page_bytes)
    for cache in (True, False):
        engine = Engine(model, dataclasses.replace(options, prefix_cache=cache))
        prompts = {f"r{i}": prompt(90 + i, i) for i in range(4)}
        for name, ids in prompts.items():
            engine.submit(Request(name, ids, greedy(20)))
        said = run(engine)
        assert engine.stats().preemptions > 0
        for name, ids in prompts.items():
            assert_says(model, ids, said[name])


def test_an_urgent_class_goes_first_and_makes_room(model: K3) -> None:
    engine = Engine(model, dataclasses.replace(OPTIONS, max_batch=1))
    engine.submit(Request("slow", prompt(40), greedy(30), priority="batch"))
    for _ in range(5):
        engine.step()
    engine.submit(Request("later", prompt(30, 2), greedy(4), priority="batch"))
    engine.submit(Request("quick", prompt(30, 1), greedy(4)))
    order = []
    said = {}
    while engine.busy:
        for d in engine.step():
            said.setdefault(d.id, []).append(d)
            order += [d.id] if d.finish else []
    assert order == ["quick", "slow", "later"]
    assert engine.stats().preemptions == 1


def test_what_can_never_run_is_refused_in_one_sentence(model: K3) -> None:
    engine = Engine(model, dataclasses.replace(OPTIONS, max_waiting=1))
    for ids, says in (((), "empty"), ((VOCAB,), "vocabulary"), (prompt(513), "context")):
        with pytest.raises(ValueError, match=says):
            engine.submit(Request("a", ids))
    small = Engine(model, dataclasses.replace(OPTIONS, pool_bytes=10 * 7680))
    with pytest.raises(ValueError, match="pages of the pool"):
        small.submit(Request("a", prompt(300)))
    engine.submit(Request("a", (1,), greedy()))
    with pytest.raises(ValueError, match="already"):
        engine.submit(Request("a", (1,), greedy()))
    with pytest.raises(Full, match="waiting"):
        engine.submit(Request("b", (1,), greedy()))


@pytest.mark.parametrize(
    ("size", "says"), [({"context": 0}, "context"), ({"pool_tokens": 10**13}, "cannot be allocated")]
)
def test_an_engine_that_cannot_be_says_so(model: K3, size: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Engine(model, EngineOptions(**size))


def test_cancel_ends_a_request_wherever_it_is(model: K3) -> None:
    engine = Engine(model, dataclasses.replace(OPTIONS, max_batch=2))
    for name in "abc":
        engine.submit(Request(name, prompt(70), greedy()))
    engine.step()
    for name in ("a", "c", "unknown"):
        engine.cancel(name)
    engine.cancel("b", "stop")
    said = run(engine)
    assert {name: said[name][-1].finish for name in "abc"} == {"a": "cancelled", "b": "stop", "c": "cancelled"}
    assert engine.stats().pages_running == 0 and not engine.busy


def test_the_context_and_stop_ids_end_a_text(model: K3) -> None:
    engine = Engine(model, dataclasses.replace(OPTIONS, context=40))
    said = ask(engine, prompt(36), 20)
    assert len(text(said)) == 4 and said[-1].finish == "length"
    token = text(said)[1]
    engine.submit(Request("a", prompt(36), Sampling(temperature=0, stop_ids=frozenset({token}), ignore_eos=True)))
    said = run(engine)["a"]
    assert text(said)[-1] == token and said[-1].finish == "stop" and len(text(said)) == 2


def test_prompt_logprobs_are_the_forwards(model: K3) -> None:
    ids = prompt(100)
    engine = Engine(model, OPTIONS)
    ask(engine, ids)
    engine.submit(Request("a", ids, Sampling(max_tokens=0, prompt_logprobs=2)))
    (delta,) = run(engine)["a"]
    logp = oracle(model, list(ids))
    assert delta.finish == "length" and delta.tokens == () and delta.prompt_logprobs[0] is None
    assert len(delta.prompt_logprobs) == len(ids)
    for at in range(1, len(ids)):
        said = delta.prompt_logprobs[at]
        assert said.token == ids[at] and abs(said.logprob - float(logp[at - 1, ids[at]])) < 1e-4
        assert said.rank == 1 + int((logp[at - 1] > logp[at - 1, ids[at]]).sum())
        assert [i for i, _ in said.top] == logp[at - 1].topk(2).indices.tolist()


def test_off_switches_change_nothing_that_is_said(model: K3) -> None:
    prompts = [prompt(50) + prompt(20 + 7 * i, i) for i in range(5)]
    texts = []
    for change in ({}, {"prefix_cache": False}, {"max_batch": 1}, {"token_budget": 512}, {"checkpoint_every": 0}):
        engine = Engine(model, dataclasses.replace(OPTIONS, **change))
        for i, ids in enumerate(prompts):
            engine.submit(Request(f"r{i}", ids, greedy()))
        said = run(engine)
        texts.append([text(said[f"r{i}"]) for i in range(5)])
    assert all(t == texts[0] for t in texts)


def test_a_state_moves_between_engines(model: K3) -> None:
    """Prefill here, decode there: the continuation is the same, from the engine's or the plain cache's State."""
    here, there = Engine(model, OPTIONS), Engine(model, dataclasses.replace(OPTIONS, block_tokens=32))
    ids = prompt(75)
    here.submit(Request("a", ids, dataclasses.replace(greedy(1)), keep_state=True))
    (first,) = run(here)["a"]
    assert first.state.length == 75
    said = ask(there, (*ids, *first.tokens), 8, state=first.state)
    assert said[-1].usage.cached_tokens == 75
    assert_says(model, (*ids, *first.tokens), said)
    with pytest.raises(ValueError, match="at least one more"):
        there.submit(Request("b", ids, state=first.state))
    half = first.state.split(2)[0]
    with pytest.raises(ValueError, match="layer 0"):
        there.submit(Request("b", (*ids, 1), state=half))


@pytest.mark.parametrize("layers", [(), (0, 1, 2, 3)])
def test_models_of_one_kind_of_layer(layers: tuple[int, ...]) -> None:
    model = make(mla_layers=layers)
    engine = Engine(model, OPTIONS)
    for _ in range(2):
        said = ask(engine, prompt(70))
        assert_says(model, prompt(70), said)
    assert said[-1].usage.cached_tokens == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_types_are_as_near_the_truth_as_the_plain_forward(dtype: torch.dtype) -> None:
    """Chunked, batched, cached against the fp64 forward of the same weights. fp32: within 1e-4. bf16: the engine rounds
    at other places than the plain forward, so its root mean square error may be at most 1.5 times that one's."""
    model = make(dtype=dtype, initializer_range=0.1)
    exact = make(initializer_range=0.1)
    exact.load_state_dict(model.state_dict())
    engine = Engine(model, OPTIONS)
    prompts = {str(n): prompt(70) + prompt(n, n) for n in (1, 20, 40, 41, 64, 90)}
    errors, plain = [], []
    for _ in range(2):
        for name, ids in prompts.items():
            engine.submit(Request(name, ids, greedy(1)))
        said = run(engine)
        for name, ids in prompts.items():
            row = torch.empty(VOCAB, dtype=torch.float64)
            for v, p in said[name][0].logprobs[0].top:
                row[v] = p
            truth = oracle(exact, list(ids))[-1]
            errors.append(row - truth)
            plain.append(oracle(model, list(ids))[-1] - truth)
    if dtype == torch.float32:
        assert torch.stack(errors).abs().max() < 1e-4
    else:
        assert torch.stack(errors).square().mean().sqrt() < 1.5 * torch.stack(plain).square().mean().sqrt()


@pytest.mark.parametrize("drafts", [0, 2])
def test_logits_that_are_no_numbers_end_their_request_alone(drafts: int) -> None:
    """One token's embedding is broken; who never meets it is served on."""
    model = make()
    with torch.no_grad():
        model.embed_tokens.weight[7] = float("nan")
    engine = Engine(model, dataclasses.replace(OPTIONS, speculate=drafts, prefix_cache=False))
    fine = tuple(t for t in prompt(40) if t != 7)
    bias = {7: -1000.0}
    for name, ids in (("a", fine), ("b", (*fine, 7))):
        engine.submit(Request(name, ids, Sampling(max_tokens=9, seed=1, logit_bias=bias, ignore_eos=True)))
    said = run(engine)
    assert said["b"][-1].finish == "error" and "finite" in said["b"][-1].message
    assert said["a"][-1].finish == "length" and len(text(said["a"])) == 9
