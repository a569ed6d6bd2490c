"""The engine's answers against the plain forward."""

import pytest
import torch

from perilune.config import preset
from perilune.model.generate import Sampling as Plain
from perilune.model.generate import generate
from perilune.model.net import K3
from perilune.serve.engine import Engine
from perilune.serve.request import Delta, EngineOptions, Full, Request, Sampling

TINY = preset("tiny").replace(vocab_size=97, hidden_size=48, initializer_range=0.2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def model() -> K3:
    torch.manual_seed(0)
    model = K3(TINY)
    model.reset_parameters()
    return model.eval()


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(1, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def run(engine: Engine) -> dict[str, list[Delta]]:
    said: dict[str, list[Delta]] = {}
    while engine.busy:
        for delta in engine.step():
            said.setdefault(delta.id, []).append(delta)
    return said


def text(deltas: list[Delta]) -> list[int]:
    return [t for d in deltas for t in d.tokens]


GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_batch_of_strangers_says_what_each_says_alone(model: K3) -> None:
    engine = Engine(model, EngineOptions(max_batch=3, token_budget=40))
    prompts = {f"r{i}": prompt(5 + 9 * i, i) for i in range(7)}
    for name, ids in prompts.items():
        engine.submit(Request(name, ids, GREEDY))
    said = run(engine)
    for name, ids in prompts.items():
        assert text(said[name]) == list(generate(model, ids, Plain(temperature=0, max_tokens=12)))
        assert said[name][-1].finish == "length"
        assert said[name][-1].usage.completion_tokens == 12


def test_what_can_never_run_is_refused_in_one_sentence(model: K3) -> None:
    engine = Engine(model, EngineOptions(max_waiting=1))
    for ids, says in (((), "empty"), ((97,), "vocabulary"), (prompt(513), "context")):
        with pytest.raises(ValueError, match=says):
            engine.submit(Request("a", ids, GREEDY))
    engine.submit(Request("a", (1,), GREEDY))
    with pytest.raises(ValueError, match="already"):
        engine.submit(Request("a", (1,), GREEDY))
    with pytest.raises(Full, match="waiting"):
        engine.submit(Request("b", (1,), GREEDY))


def test_cancel_ends_a_request_and_says_so(model: K3) -> None:
    engine = Engine(model)
    engine.submit(Request("a", prompt(9), GREEDY))
    engine.submit(Request("b", prompt(9), GREEDY))
    engine.step()
    engine.cancel("a")
    engine.cancel("unknown")
    said = run(engine)
    assert [d.finish for d in said["a"]] == ["cancelled"]
    assert said["b"][-1].finish == "length"
    assert engine.stats().running == 0
