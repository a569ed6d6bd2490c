"""Random schedules: whatever is admitted, cancelled, forked, evicted or preempted in whatever order, the pool's books
balance after each step and every answer is the one the plain forward gives."""

import functools
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from serve.toy import make, prompt

from perilune.model.generate import Sampling as Plain
from perilune.model.generate import generate
from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions, Request, Sampling

MODEL = make(num_hidden_layers=2, mla_layers=(1,), num_experts=0, attn_res_block_size=None)  # the books need no more
LENGTH = 14
PREFIXES = [(), prompt(33), prompt(33) + prompt(31, 1), prompt(48), prompt(48) + prompt(50, 2)]
TAILS = [prompt(n, 50 + n) for n in (1, 15, 16, 17, 40)]


@functools.cache
def answer(ids: tuple[int, ...]) -> list[int]:
    return list(generate(MODEL, ids, Plain(temperature=0, max_tokens=LENGTH)))


class Schedules(RuleBasedStateMachine):
    """Prompts from a small tree of shared prefixes, on a pool of about three requests."""

    engine: Engine
    offload = st.sampled_from([0, 20_000, 10**6])
    speculate = st.sampled_from([0, 0, 1, 3])

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        pages = data.draw(st.integers(16, 40), "pages")
        options = EngineOptions(
            block_tokens=16,
            max_batch=data.draw(st.integers(1, 4), "max_batch"),
            token_budget=data.draw(st.sampled_from([1, 7, 16, 33, 200]), "budget"),
            checkpoint_every=data.draw(st.sampled_from([0, 16, 48]), "every"),
            offload_bytes=data.draw(self.offload, "offload"),
            speculate=data.draw(self.speculate, "speculate"),
        )
        geometry = Engine(MODEL, options).scheduler.geometry
        self.engine = Engine(MODEL, EngineOptions(**{**vars(options), "pool_bytes": pages * geometry.page_bytes}))
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: list[Any] = []
        self.count = 0

    def submit(self, ids: tuple[int, ...], n: int, heard: int | None = None, **more: Any) -> None:
        self.count += 1
        name = f"r{self.count}"
        rules = Sampling(temperature=0, max_tokens=n, ignore_eos=True, prompt_logprobs=heard)
        try:
            self.engine.submit(Request(name, ids, rules, **more))
        except ValueError as error:
            assert "pages of the pool" in str(error)
            return
        self.prompts[name], self.said[name] = ids, []

    @rule(
        prefix=st.sampled_from(range(5)), tail=st.sampled_from(range(5)), n=st.integers(1, LENGTH),
        priority=st.sampled_from(["interactive", "batch"]), salt=st.sampled_from([b"", b"x"]), keep=st.booleans(),
        heard=st.sampled_from([None, None, 0]),
    )  # fmt: skip
    def admit(self, prefix: int, tail: int, n: int, priority: str, salt: bytes, keep: bool, heard: Any) -> None:
        ends = (len(PREFIXES[prefix]),) if prefix else ()
        self.submit(
            PREFIXES[prefix] + TAILS[tail],
            n,
            priority=priority,
            salt=salt,
            checkpoints=ends,
            keep_state=keep,
            heard=heard,
        )

    @precondition(lambda self: self.engine.busy)
    @rule(n=st.integers(1, 6))
    def step(self, n: int) -> None:
        for _ in range(n):
            for delta in self.engine.step():
                self.hear(delta)
            self.books_balance()

    def hear(self, delta: Any) -> None:
        ids, said = self.prompts[delta.id], self.said[delta.id]
        said.extend(delta.tokens)
        assert said == answer(ids)[: len(said)]
        if delta.finish is not None:
            del self.prompts[delta.id]
            if delta.state is not None:
                self.ended.append((ids + tuple(said), delta.state))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.prompts))))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def go_on_from_a_state(self, data: st.DataObject) -> None:
        """Fork: the state of an ended request goes on with one more token of its own answer."""
        ids, state = self.ended[data.draw(st.integers(0, len(self.ended) - 1))]
        if len(ids) == state.length:  # cancelled before its last token was computed
            ids = (*ids, answer(ids)[0])
        self.submit(ids[: state.length + 1], 2, state=state)

    @rule()
    def forget(self) -> None:
        self.engine.flush()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        s = self.engine.scheduler
        s.pool.audit()
        if s.pool.below is not None:
            s.pool.below.audit()
            assert not s.pool.below.usage()["held"]
        held = Counter(b for q in s.running for b in [q.state, *q.pages, *(b for _, b in q.exports)])
        assert held == Counter({b: b.refs for b in s.pool._held}), "a block is held by nobody, or by somebody unknown"
        private = [q.state for q in s.running] + [q.pages[-1] for q in s.running if q.computed % 48]
        assert all(b.refs == 1 for b in private), "two requests write one page"
        assert len({q.row for q in s.running}) == len(s.running) and all(q.row < 0 for q in s.waiting)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            while self.engine.busy:
                self.step(1)
            assert self.engine.stats().pages_running == 0
            assert not self.prompts, "a request never ended"


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking re-runs whole schedules for minutes
TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=4, stateful_step_count=30, deadline=None, phases=PHASES)


class Long(Schedules):
    """The same, for thousands of steps."""


TestLong = pytest.mark.slow(Long.TestCase)
TestLong.settings = settings(max_examples=60, stateful_step_count=60, deadline=None, phases=PHASES)
