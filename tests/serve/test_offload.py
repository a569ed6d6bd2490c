"""Evicted prefixes come back from CPU memory, states and latents together."""

import dataclasses

import pytest
from serve.toy import assert_says, greedy, make, prompt, run

from perilune.serve.engine import Engine
from perilune.serve.prefix import Chain
from perilune.serve.request import EngineOptions, Request

MODEL = make()
OPTIONS = EngineOptions(block_tokens=16, max_batch=2, token_budget=64, pool_bytes=24 * 7680)


@pytest.mark.parametrize("offload, back", [(10**6, True), (0, False), (7 * 7680, None), (1, False)])
def test_an_evicted_prefix_comes_back(offload: int, back: bool | None) -> None:
    """Also with room for hardly a request below (what comes back then depends on the order), and for none."""
    engine = Engine(MODEL, dataclasses.replace(OPTIONS, offload_bytes=offload))
    prompts = [prompt(90 + i, i) for i in range(4)]
    for ids in (*prompts, *prompts, prompts[0] + prompt(20, 9)):
        engine.submit(Request("a", ids, greedy(3)))
        said = run(engine)["a"]
        assert_says(MODEL, ids, said)
        if engine.scheduler.pool.below is not None:
            engine.scheduler.pool.below.audit()
    assert engine.stats().evictions > 0
    assert back is None or (engine.stats().offload_tokens > 0) == back
    assert back is None or (said[-1].usage.cached_tokens > 0) == back


def test_what_waits_is_fetched_before_its_turn() -> None:
    """One request runs, another waits whose prefix was evicted: its pages are up before the first one ends."""
    options = dataclasses.replace(OPTIONS, max_batch=1, pool_bytes=40 * 7680, offload_bytes=10**6)
    engine = Engine(MODEL, options)
    pool, long = engine.scheduler.pool, prompt(90, 0)
    for i in range(12):  # the others push the first out
        engine.submit(Request("a", prompt(90, i), greedy(1)))
        run(engine)
    free = [pool.take("mla") for _ in range(pool.available // 2)]  # idle prefixes give way; some room comes back
    for block in free:
        pool.drop(block)
    engine.submit(Request("first", prompt(20, 77), greedy(12)))
    engine.submit(Request("next", long + prompt(10, 9), greedy(3)))
    assert pool.find("kda", _last(engine, long)) is None
    said = []
    while engine.busy:
        said += engine.step()
        pool.audit()
        if engine.scheduler.waiting and len(said) > 3:
            assert pool.find("kda", _last(engine, long)) is not None
    answer = [d for d in said if d.id == "next"]
    assert_says(MODEL, long + prompt(10, 9), answer)
    assert answer[-1].usage.cached_tokens == 80 and engine.stats().offload_tokens >= 80


def _last(engine: Engine, ids: tuple[int, ...]) -> bytes:
    """The hash of a prompt's last whole block."""
    chain = Chain(engine.scheduler.geometry.block_tokens)
    chain.extend(ids, len(ids))
    return chain.hashes[-1]


def test_flush_forgets_below_too() -> None:
    engine = Engine(MODEL, dataclasses.replace(OPTIONS, offload_bytes=10**6))
    for i in range(4):
        engine.submit(Request("a", prompt(90, i), greedy(1)))
        run(engine)
    engine.flush()
    engine.submit(Request("a", prompt(90, 0), greedy(1)))
    assert run(engine)["a"][-1].usage.cached_tokens == 0
