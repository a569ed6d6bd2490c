"""The engine: requests in, one forward a step, tokens out.

    submit -> waiting -> prefill -> decode, a token a step -> finished

Not thread safe: one thread owns it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perilune.model.cache import Dense, State
from perilune.model.net import K3
from perilune.serve.request import Delta, EngineOptions, Finish, Full, Request, Stats, TokenLogprob, Usage
from perilune.serve.sampling import Row, logprobs, sample


@dataclass
class _Sequence:
    request: Request
    seed: int
    slot: int = -1
    computed: int = 0
    output: list[int] = field(default_factory=list)
    grammar: Any = None

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.output]


class Engine:
    """Continuous batching over rows of one cache. See `request` for the words it speaks."""

    def __init__(self, model: K3, options: EngineOptions | None = None) -> None:
        self.model, self.options = model, options or EngineOptions()
        weight = model.embed_tokens.weight
        self.device = weight.device
        self.context = self.options.context or model.config.max_position_embeddings
        self.cache = Dense(model.config, self.options.max_batch, dtype=weight.dtype, device=self.device)
        self._free = list(range(self.options.max_batch))
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._ended: list[Delta] = []
        self._totals = {"prompt_tokens": 0, "completion_tokens": 0, "steps": 0}
        self._last = (0.0, 0)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that can never run, Full when the queue is."""
        vocab = self.model.config.vocab_size
        if not request.prompt:
            raise ValueError("The prompt is empty; give at least one token.")
        if len(request.prompt) > self.context:
            raise ValueError(f"The prompt is {len(request.prompt)} tokens long; the context holds {self.context}.")
        if not all(0 <= token < vocab for token in request.prompt):
            raise ValueError(f"The prompt holds ids outside the vocabulary of {vocab}.")
        if request.id in self._running or any(s.request.id == request.id for s in self._waiting):
            raise ValueError(f"A request named {request.id!r} is already here.")
        if len(self._waiting) >= self.options.max_waiting:
            raise Full(f"{len(self._waiting)} requests are waiting; try again later.")
        seed = request.sampling.seed
        sequence = _Sequence(request, int(torch.seed() % 2**63) if seed is None else seed)
        if request.sampling.grammar is not None:
            sequence.grammar = request.sampling.grammar.start()
        self._waiting.append(sequence)

    def cancel(self, id: str, finish: Finish = "cancelled") -> None:
        """End a request now; the next step returns its last Delta with this reason. Unknown ids are ignored."""
        for sequence in [s for s in (*self._waiting, *self._running.values()) if s.request.id == id]:
            self._ended.append(self._end(sequence, (), (), finish))

    def export(self, id: str) -> State:
        """A running request's past as a value. Raises KeyError when it is not running."""
        return self.cache.export(self._running[id].slot)

    def stats(self) -> Stats:
        seconds, batch = self._last
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            step_seconds=seconds,
            last_batch=batch,
            **self._totals,
        )

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One forward: a prefill while requests wait and rows are free, else a token for every running one."""
        ended, self._ended = self._ended, []
        started = time.perf_counter()
        batch = self._admit() or list(self._running.values())
        if batch:
            ended += self._forward(batch)
            self._totals["steps"] += 1
            self._last = (time.perf_counter() - started, len(batch))
        return ended

    def _admit(self) -> list[_Sequence]:
        batch: list[_Sequence] = []
        budget = self.options.token_budget
        while self._waiting and self._free and (not batch or len(self._waiting[0].request.prompt) <= budget):
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop()
            self.cache.reset(sequence.slot)
            if sequence.request.state is not None:
                self.cache.load(sequence.slot, sequence.request.state)
                sequence.computed = sequence.request.state.length
            self._running[sequence.request.id] = sequence
            self._totals["prompt_tokens"] += len(sequence.request.prompt)
            budget -= len(sequence.request.prompt)
            batch.append(sequence)
        return batch

    def _forward(self, batch: list[_Sequence]) -> list[Delta]:
        news = [s.tokens[s.computed :] for s in batch]
        layout = self.cache.layout([len(n) for n in news], [s.slot for s in batch])
        feed = torch.tensor([t for n in news for t in n], device=self.device)
        out = self.model(feed, layout, self.cache, logits="last")
        assert out.logits is not None
        rows = [self._row(s) for s in batch]
        tokens = sample(out.logits, rows)
        return [self._accept(s, len(n), t, out.logits[i]) for i, (s, n, t) in enumerate(zip(batch, news, tokens))]

    def _row(self, s: _Sequence) -> Row:
        grammar = s.request.sampling.grammar
        mask = None if grammar is None else torch.as_tensor(grammar.mask(s.grammar))
        position = len(s.request.prompt) + len(s.output)
        return Row(s.request.sampling, s.seed, position, s.request.prompt, s.output, mask)

    def _accept(self, s: _Sequence, new: int, token: int, logits_V: Tensor) -> Delta:
        rules = s.request.sampling
        s.computed += new
        if rules.max_tokens == 0:
            return self._end(s, (), (), "length")
        s.output.append(token)
        self._totals["completion_tokens"] += 1
        if rules.grammar is not None:
            s.grammar = rules.grammar.advance(s.grammar, token)
        said = () if rules.logprobs is None else tuple(logprobs(logits_V.unsqueeze(0), [token], rules.logprobs))
        if token in rules.stop_ids or (token == self.model.config.eos_token_id and not rules.ignore_eos):
            return self._end(s, (token,), said, "stop")
        if len(s.output) >= rules.max_tokens or len(s.tokens) >= self.context:
            return self._end(s, (token,), said, "length")
        return Delta(s.request.id, (token,), said, usage=self._usage(s))

    def _usage(self, s: _Sequence) -> Usage:
        return Usage(len(s.request.prompt), completion_tokens=len(s.output))

    def _end(self, s: _Sequence, tokens: tuple[int, ...], said: tuple[TokenLogprob, ...], finish: Finish) -> Delta:
        state = self.cache.export(s.slot) if s.request.keep_state and s.slot >= 0 else None
        if s.slot >= 0:
            self._free.append(s.slot)
            del self._running[s.request.id]
        else:
            self._waiting.remove(s)
        return Delta(s.request.id, tokens, said, finish, usage=self._usage(s), state=state)
