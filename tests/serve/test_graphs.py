"""Recorded steps. Without a GPU the recording is a plain call, and what is tested is what a graph would rely on: static
buffers, padding, positions that advance by themselves. On a GPU the recording is real."""

import dataclasses

import pytest
import torch
from serve.toy import assert_says, greedy, make, prompt, run, text

from perilune.config import preset
from perilune.model.layout import Layout
from perilune.model.moe import LatentMoE
from perilune.model.net import K3
from perilune.serve.engine import Engine
from perilune.serve.graphs import recordable as recordable_step
from perilune.serve.parallel import _Cut, _OwnExperts, recordable
from perilune.serve.request import EngineOptions, Request, Sampling

OPTIONS = EngineOptions(block_tokens=16, pool_tokens=1024, max_batch=5, token_budget=40)


def recording(model: K3, options: EngineOptions, made: list) -> Engine:
    """An engine whose steps are recorded by name and called again."""

    def record(step):
        made.append(step)
        step()
        return step

    engine = Engine(model, options)
    engine.record(record)
    return engine


@pytest.mark.parametrize("drafts", [0, 2])
def test_batches_that_grow_and_shrink_say_what_the_forward_says(drafts: int) -> None:
    """One to five requests of different lengths; each size is recorded once; nobody's row leaves no trace."""
    made: list = []
    model = make()
    engine = recording(model, dataclasses.replace(OPTIONS, speculate=drafts), made)
    paged = engine.scheduler.paged
    for _ in range(2):
        prompts = {f"r{i}": prompt(20 + 9 * i, i) for i in range(5)}
        for i, (name, ids) in enumerate(prompts.items()):
            engine.submit(Request(name, ids, greedy(4 + 3 * i)))
        said = run(engine)
        for name, ids in prompts.items():
            assert_says(model, ids, said[name])
    steps = [*engine.graphs._made, *(engine.draft.graphs._made if drafts else ())]
    assert len(made) == len(steps)
    assert {width for _, width in steps} == ({1, 1 + drafts} if drafts else {1})
    assert {size for size, _ in engine.graphs._made} <= {1, 2, 3, 4, 5}
    assert (paged.kda_pages[:, paged.nobody] == -1).all()


@pytest.mark.parametrize("count", [1, 4])
def test_a_recorded_draft_proposes_what_a_plain_one_does(count: int) -> None:
    """The same drafts are accepted, of requests that come, are drawn at random, share a prefix and end early."""
    model, found = make(), []
    options = dataclasses.replace(OPTIONS, speculate=count, max_batch=3)
    for engine in (Engine(model, options), recording(model, options, [])):
        for i in range(5):
            rules = Sampling(temperature=i % 2 * 0.8, seed=i, max_tokens=30 - 5 * i, ignore_eos=True)
            engine.submit(Request(f"r{i}", prompt(50) + prompt(9 + i, i), rules))
        said = run(engine)
        found.append([[(text(said[f"r{i}"]), said[f"r{i}"][-1].usage) for i in range(5)], engine.stats().accepted])
        assert engine.stats().drafted > 0 and not engine.scheduler.pool.memory[0].any()
    assert found[0] == found[1]


def test_fp64_experts_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    assert not recordable_step(make()) and "experts in fp64" in caplog.text
    assert recordable_step(make(dtype=torch.float32)) and recordable_step(make(num_experts=0))


def test_the_host_writes_only_what_turned_out_otherwise() -> None:
    """Greedy steps of an unchanged batch are fed by the step before; another token, or another batch, is written."""
    model, copies = make(), []
    engine = recording(model, OPTIONS, [])
    engine.submit(Request("a", prompt(20), greedy(9)))
    for _ in range(3):
        engine.step()
    recorded = engine.graphs._made[1, 1]
    recorded._inputs = _Watched(recorded._inputs, copies)
    for _ in range(3):
        engine.step()
    assert not copies
    engine.submit(Request("b", prompt(10, 1), greedy(2)))
    said = run(engine)
    assert said["a"][-1].finish == "length"
    engine.submit(Request("c", prompt(30, 2), Sampling(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)))
    run(engine)
    assert copies


class _Watched:
    def __init__(self, inputs: torch.Tensor, copies: list) -> None:
        self.inputs, self.copies = inputs, copies

    def copy_(self, staged: torch.Tensor, **how: bool) -> None:
        self.copies.append(staged.tolist())
        self.inputs.copy_(staged, **how)


def test_preempted_sampled_and_ended_early() -> None:
    """With and without recording: the same draws of requests that come, go and are preempted."""
    model, texts = make(), []
    geometry = Engine(model, OPTIONS).scheduler.geometry
    options = dataclasses.replace(OPTIONS, pool_bytes=(1 + 3 * 2 + 7 * 2) * geometry.page_bytes)
    for engine in (Engine(model, options), recording(model, options, [])):
        for i in range(5):
            rules = Sampling(temperature=i % 2 * 1.1, seed=i, max_tokens=20 - 2 * i, ignore_eos=True)
            engine.submit(Request(f"r{i}", prompt(80 + i, i), rules))
        said = run(engine)
        assert engine.stats().preemptions > 0
        texts.append([text(said[f"r{i}"]) for i in range(5)])
    assert texts[0] == texts[1]


def test_logits_that_are_no_numbers_end_their_request_alone() -> None:
    model = make()
    with torch.no_grad():
        model.embed_tokens.weight[7] = float("nan")
    engine = recording(model, dataclasses.replace(OPTIONS, prefix_cache=False), [])
    fine = tuple(t for t in prompt(40) if t != 7)
    free = Sampling(max_tokens=9, seed=1, logit_bias={7: -1000.0}, ignore_eos=True)
    engine.submit(Request("a", fine, free))
    engine.submit(Request("b", fine[:20], dataclasses.replace(free, logit_bias={7: 1000.0})))
    said = run(engine)
    assert said["b"][-1].finish == "error" and "finite" in said["b"][-1].message
    assert said["a"][-1].finish == "length" and len(text(said["a"])) == 9


@pytest.mark.parametrize("packed", [False, True])
def test_what_looks_at_the_host_is_not_recorded(packed: bool) -> None:
    """A rank's experts find the rows of a large batch on the host, unless they are packed."""
    model = K3(preset("tiny"))
    if packed:
        model.pack_experts()
    for layer in [m for m in model.modules() if isinstance(m, LatentMoE)]:
        layer.experts = _OwnExperts(layer.experts, _Cut(0, 2, None))
    kept = [recordable(model, dataclasses.replace(OPTIONS, max_batch=n)).cuda_graphs for n in (1, 4096)]
    assert kept == [True, packed]


# --- on a GPU -------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_gpu(name: str, dtype: torch.dtype) -> K3:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = K3(preset(name).replace(num_nextn_predict_layers=1))
    model.reset_parameters()
    for key, p in model.named_parameters():  # zero queries would hide a wrong mixture
        if key.endswith("res_proj.weight"):
            torch.nn.init.normal_(p)
    return model.eval().to(dtype)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", ["tiny", "mini"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_recorded_equals_eager_equals_the_forward(name: str, drafts: int) -> None:
    """In fp32: greedy texts of three requests of different lengths, and each next token of the plain forward."""
    model, texts = on_gpu(name, torch.float32), []
    vocab = model.config.vocab_size
    prompts = [tuple((i * 37 + j * j * 11) % (vocab - 1) + 1 for j in range(40 + 50 * i)) for i in range(3)]
    for graphs in (True, False):
        options = EngineOptions(pool_tokens=4096, max_batch=4, speculate=drafts, cuda_graphs=graphs)
        engine = Engine(model, options)
        for i, ids in enumerate(prompts):
            engine.submit(Request(str(i), ids, Sampling(temperature=0, max_tokens=12 + i, ignore_eos=True)))
        said = run(engine)
        texts.append([text(said[str(i)]) for i in range(3)])
        if drafts and graphs:
            assert {width for _, width in engine.draft.graphs._made} == {1, 1 + drafts}
    assert texts[0] == texts[1]
    for ids, said in zip(prompts, texts[0], strict=True):
        whole = torch.tensor([*ids, *said], device="cuda")
        with torch.no_grad():
            logits = model(whole, Layout.packed([len(whole)], "cuda")).logits[len(ids) - 1 : -1]
        best, chosen = logits.max(-1).values, logits.gather(1, whole[len(ids) :].unsqueeze(1)).squeeze(1)
        assert (best - chosen).max() < 1e-3  # among equals to rounding any is right
