"""The engine: requests in, one forward a step, tokens out.

    submit -> waiting -> prefill in chunks -> decode -> finished;   step = schedule, forward, sample, publish

Not thread safe: one thread owns it.
"""

import logging
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from perilune.model.cache import State
from perilune.model.kda import KDA
from perilune.model.net import K3, Output
from perilune.serve.graphs import Answer, DraftGraphs, Graphs, Recorder, Step, recordable
from perilune.serve.paged import Paged, windowed
from perilune.serve.pool import Geometry, Pool, default_block
from perilune.serve.request import Delta, EngineOptions, Finish, Full, Grammar, Request, Stats, TokenLogprob, Usage
from perilune.serve.sampling import Row, distribution, greedy, logprobs, sample
from perilune.serve.scheduler import Batch, Scheduler, Sequence
from perilune.serve.speculate import Draft, MTPDraft, verify
from perilune.serve.tokens import Shares

log = logging.getLogger(__name__)
_BROKEN = "The model's logits are not finite here."
_HEAD_ROWS = 256  # rows of logits at a time when a whole prompt wants its log-probabilities


@dataclass
class _Totals:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    last_batch: int = 0


class Engine:
    """Continuous batching of requests over one model and one paged pool. See `request` for the words it speaks."""

    def __init__(
        self,
        model: K3,
        options: EngineOptions | None = None,
        agree: Callable[[Any], Any] = lambda value: value,
        shares: Shares | None = None,
    ) -> None:
        """model: its weights are moved (`K3.settle`). agree: makes what was drawn the same on all ranks of a parallel
        engine. shares: of the tokens' latents, where its ranks share them out.

        Raises ValueError for options that this model cannot be served with.
        """
        self._agree = agree
        self.model, self.options = model.settle(), options or EngineOptions()
        weight, o = model.embed_tokens.weight, self.options
        self.device = weight.device
        self.context = min(o.context or model.config.max_position_embeddings, model.config.max_position_embeddings)
        wide = torch.promote_types(weight.dtype, torch.float32)
        block = o.block_tokens or default_block(model.config)
        geometry = Geometry(
            model.config, block, weight.dtype, wide, o.speculate > 0, 1 if shares is None else shares.size
        )
        if o.speculate and not (model.mtp and windowed(geometry)):
            raise ValueError("speculate needs a model with an MTP layer and KDA layers without ablations.")
        pool = _pool(geometry, o, self.device)
        layers = {m.layer: m for m in model.modules() if isinstance(m, KDA)}
        paged = Paged(pool, o.max_batch, self.context, layers, o.speculate, shares)
        self.scheduler = Scheduler(paged, o, self.context)
        self.draft: Draft | None = MTPDraft(model, paged) if o.speculate else None
        self.graphs: Graphs | None = None
        if o.cuda_graphs and self.device.type == "cuda" and windowed(geometry) and recordable(model):
            self.record(Recorder())
        self._here: dict[str, Sequence] = {}
        self._ended: list[Delta] = []
        self._totals = _Totals()

    def record(self, how: Callable[[Step], Step]) -> None:
        """From here on decoding steps, and the draft's, are made repeatable by `how` and repeated."""
        paged, most = self.scheduler.paged, self.options.max_batch
        self.graphs = Graphs(self.model, paged, most, self.draft is not None, how)
        if isinstance(self.draft, MTPDraft):
            self.draft.graphs = DraftGraphs(self.model, paged, most, how)

    # --- what others call -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._here or self._ended)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that can never run, Full when the queue's budget is spent."""
        self._check(request)
        if len(self.scheduler.waiting) >= self.options.max_waiting:
            raise Full(f"{len(self.scheduler.waiting)} requests are waiting; try again later.")
        seed = request.sampling.seed
        sequence = self.scheduler.add(request, secrets.randbits(63) if seed is None else seed)
        if request.sampling.grammar is not None:
            sequence.grammar = request.sampling.grammar.start()
        self._here[request.id] = sequence
        self._totals.prompt_tokens += len(request.prompt)

    def cancel(self, id: str, finish: Finish = "cancelled", message: str = "") -> None:
        """End a request now; the next step returns its last Delta with this reason. Unknown ids are ignored."""
        if id in self._here:
            self._ended.append(self._end(self._here[id], finish, message=message))

    def export(self, id: str) -> State:
        """A running request's past as a value. Raises KeyError when no pages are held for it now."""
        s = self._here[id]
        if s.row < 0:
            raise KeyError(f"{id!r} is waiting; it has no state yet.")
        return self._export(s)

    def stats(self) -> Stats:
        sched, usage = self.scheduler, self.scheduler.pool.usage()
        return Stats(
            running=len(sched.running),
            waiting=len(sched.waiting),
            pages=sum(usage.values()),
            pages_running=usage["held"],
            pages_cached=usage["cached"],
            pages_free=usage["free"],
            page_tokens=sched.geometry.page_tokens,
            match_tokens=sched.geometry.block_tokens,
            hit_tokens=sched.hit_tokens,
            offload_tokens=sched.offload_tokens,
            preemptions=sched.preemptions,
            evictions=sched.pool.evictions,
            **vars(self._totals),
        )

    def flush(self) -> None:
        """Forget every cached prefix: call it when the weights have changed. That must be in place: a recorded step
        reads them where they lay."""
        self.scheduler.pool.clear()

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One forward for one scheduled batch; what it added to each request, and what ended since the last step."""
        ended, self._ended = self._ended, []
        started = time.perf_counter()
        batch = self.scheduler.schedule(1 + self.options.speculate)
        if batch is not None:
            if batch.kind == "prefill":
                ended += self._run(batch)
            elif self.draft is not None:
                ended += self._run_window(batch)
            else:
                ended += self._run_one(batch)
            self._totals.steps += 1
            self._totals.last_batch = len(batch.sequences)
            self._totals.step_seconds = time.perf_counter() - started
        return ended

    # --- a step ---------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> list[Delta]:
        """A chunk of each prompt; a token for those that end in theirs."""
        out = self._forward(batch, [s.tokens[s.computed :][:n] for s, n in zip(batch.sequences, batch.lengths)])
        if self.draft is not None:
            self.draft.saw(batch.sequences, batch.lengths, out.features)
            self.draft.catch_up([s for s, n in zip(batch.sequences, batch.lengths) if s.pending > n + 1])
        ends = torch.tensor(batch.lengths).cumsum(0)
        done = []
        for s, n, end in zip(batch.sequences, batch.lengths, ends.tolist()):
            self._hear(s, out.hidden[end - n : end])
            self.scheduler.written(s, n)
            if s.pending == 0:
                done.append((s, end - 1))
        return self._sample([s for s, _ in done], out.hidden[[at for _, at in done]]) if done else []

    def _run_one(self, batch: Batch) -> list[Delta]:
        """One more token of each."""
        if self.graphs is None:
            return self._run(batch)
        sequences = batch.sequences
        feed = [s.tokens[-1:] for s in sequences]
        answer = self.graphs.step(feed, [s.row for s in sequences], [s.computed for s in sequences])
        for s in sequences:
            self.scheduler.written(s, 1)
        return self._sample(sequences, answer)

    def _window(self, sequences: list[Sequence], feed: list[list[int]]) -> tuple[Tensor, Tensor]:
        """(logits, features) of a window of each, after the accepted drafts of its last."""
        accepted, past = [s.replay for s in sequences], [s.computed for s in sequences]
        if self.graphs is not None:
            answer = self.graphs.step(feed, [s.row for s in sequences], past, accepted)
            return answer.logits, answer.features
        out = self._forward(Batch("decode", sequences, [len(f) for f in feed]), feed, accepted)
        return self.model.lm_head(out.hidden), out.features

    def _forward(self, batch: Batch, feed: list[list[int]], accepted: list[int] | None = None) -> Output:
        """The model on some tokens of each sequence, after what it has computed."""
        paged, past = self.scheduler.paged, [s.computed for s in batch.sequences]
        tokens = torch.tensor([t for some in feed for t in some], device=self.device)
        lengths = [len(f) for f in feed]
        starts = accumulate(lengths, initial=0)
        exports = [(a + end - s.computed, b) for a, s in zip(starts, batch.sequences) for end, b in s.exports]
        layout = paged.layout(lengths, [s.row for s in batch.sequences], past, accepted, exports)
        return self.model(tokens, layout, paged, logits="none")

    def _hear(self, s: Sequence, hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens that these positions (the next ones of s) predict."""
        top, prompt = s.request.sampling.prompt_logprobs, s.request.prompt
        if top is None:
            return
        s.heard = s.heard or [None]
        first, last = len(s.heard), min(len(prompt), s.computed + 1 + len(hidden))
        for at in range(first, last, _HEAD_ROWS):
            tokens = prompt[at : min(at + _HEAD_ROWS, last)]
            rows = hidden[at - 1 - s.computed :][: len(tokens)]
            s.heard += logprobs(self.model.lm_head(rows), tokens, top)

    def _sample(self, sequences: list[Sequence], last: Tensor | Answer) -> list[Delta]:
        """The next token of each sequence, from the hidden row of its last or what a recorded step made of it."""
        rows = [self._row(s) for s in sequences]
        said = self._unable(sequences, rows)
        ready = [i for i, s in enumerate(sequences) if s.request.id in self._here]
        if not ready:
            return said
        logits, tokens, broken = self._draw(last, ready, [rows[i] for i in ready])
        for at, (i, token) in enumerate(zip(ready, tokens)):
            if broken[at]:
                said.append(self._end(sequences[i], "error", message=_BROKEN))
                continue
            kept, finish = self._append(sequences[i], [token])
            said.append(self._tell(sequences[i], kept, finish, logits[at : at + 1]))
        return said

    def _draw(self, last: Tensor | Answer, ready: list[int], rows: list[Row]) -> tuple[Tensor, list[int], list[bool]]:
        """Of the ready ones: logits, tokens drawn from them, and whether they are no numbers."""
        if isinstance(last, Tensor):
            logits = self.model.lm_head(last[ready])
            return logits, self._agree(sample(logits, rows)), _broken(logits)
        likeliest = [last.likeliest[i] for i in ready]
        logits = last.logits if len(ready) == len(last.likeliest) else last.logits[ready]
        tokens = likeliest if greedy(rows) else sample(logits, rows)
        return logits, self._agree(tokens), [t < 0 for t in likeliest]

    def _unable(self, sequences: list[Sequence], rows: list[Row]) -> list[Delta]:
        """End those that want no token, and those whose grammar allows none."""
        said = []
        for s, row in zip(sequences, rows):
            if s.request.sampling.max_tokens == 0:
                said.append(self._end(s, "length"))
            elif row.barred:
                said.append(self._end(s, "error", message="The grammar allows no token here."))
        return said

    def _run_window(self, batch: Batch) -> list[Delta]:
        """Draft, verify in one pass, keep what was accepted."""
        assert self.draft is not None
        said = self._unable(batch.sequences, [self._row(s) for s in batch.sequences])
        sequences, width = [s for s in batch.sequences if s.request.id in self._here], batch.lengths[0]
        if not sequences:
            return said
        count = len(sequences)
        drafts = torch.empty(count, 0, dtype=torch.int64, device=self.device)
        q = torch.empty(count, 0, self.model.config.vocab_size, device=self.device)
        if width > 1:
            drafts, q = self.draft.propose(sequences, width - 1, self._row)
            drafts = self._agree(drafts)
        windows = [[s.tokens[-1], *d] for s, d in zip(sequences, drafts.tolist())]
        flat, features = self._window(sequences, windows)
        logits = flat.unflatten(0, (-1, width))
        rows = [[self._row(s, w[1 : 1 + i]) for i in range(width)] for s, w in zip(sequences, windows)]
        p = distribution(logits.flatten(0, 1), [row for some in rows for row in some]).unflatten(0, (-1, width))
        seeds, at = [s.seed for s in sequences], [len(s.tokens) for s in sequences]
        yields = self._agree(verify(p, q.to(p), drafts, seeds, at))
        features, broken = features.unflatten(0, (-1, width)), _broken(logits.flatten(1))
        for n, s in enumerate(sequences):
            if broken[n]:
                said.append(self._end(s, "error", message=_BROKEN))
                continue
            barred = next((i for i, row in enumerate(rows[n]) if row.barred), width)
            said.append(self._keep(s, yields[n][:barred], width - 1, logits[n], features[n]))
        return said

    def _keep(self, s: Sequence, tokens: list[int], drafted: int, logits: Tensor, features: Tensor) -> Delta:
        """What a window yielded: publish it, and remember how much of it the KDA states have yet to replay."""
        assert self.draft is not None
        kept, finish = self._append(s, tokens)
        s.drafted, s.accepted = s.drafted + drafted, s.accepted + len(kept) - 1
        self._totals.drafted += drafted
        self._totals.accepted += len(kept) - 1
        self.draft.saw([s], [len(kept)], features[: len(kept)])
        self.scheduler.written(s, len(kept), replay=len(kept) - 1)
        return self._tell(s, kept, finish, logits)

    def _row(self, s: Sequence, drafts: Seq[int] = ()) -> Row:
        """The sampling row after a sequence's tokens and some drafts. Where the grammar refuses a draft the rest does
        not matter: it is not reached."""
        rules, mask, barred = s.request.sampling, None, False
        if rules.grammar is not None:
            state = _advanced(rules.grammar, s.grammar, drafts)
            mask = _mask(rules.grammar, state, self._room(s) - len(drafts))
            barred = mask is None
        output = [*s.output, *drafts] if rules.penalised else ()
        position = len(s.tokens) + len(drafts)
        return Row(rules, s.seed, position, s.request.prompt, output, mask, barred)

    def _room(self, s: Sequence) -> int:
        """Tokens it may still write."""
        return min(s.request.sampling.max_tokens + len(s.request.prompt), self.context) - len(s.tokens)

    def _append(self, s: Sequence, tokens: list[int]) -> tuple[list[int], Finish | None]:
        """Append sampled tokens up to the first that ends the text; (those, why it ended)."""
        rules, room = s.request.sampling, self._room(s)
        stops = rules.stop_ids if rules.ignore_eos else rules.stop_ids | {self.model.config.eos_token_id}
        for i, token in enumerate(tokens):
            s.tokens.append(token)
            if rules.grammar is not None:
                s.grammar = rules.grammar.advance(s.grammar, token)
            if token in stops:
                return tokens[: i + 1], "stop"
            if i + 1 == room:
                return tokens[: i + 1], "length"
        return tokens, None

    def _tell(self, s: Sequence, tokens: list[int], finish: Finish | None, logits: Tensor) -> Delta:
        self._totals.completion_tokens += len(tokens)
        top = s.request.sampling.logprobs
        said = () if top is None else tuple(logprobs(logits[: len(tokens)], tokens, top))
        if finish is not None:
            return self._end(s, finish, tuple(tokens), said)
        return Delta(s.request.id, tuple(tokens), said, usage=_usage(s), prompt_logprobs=_heard(s))

    def _end(
        self,
        s: Sequence,
        finish: Finish,
        tokens: tuple[int, ...] = (),
        said: tuple[TokenLogprob, ...] = (),
        message: str = "",
    ) -> Delta:
        state = self._export(s) if s.request.keep_state and s.row >= 0 else None
        self.scheduler.finish(s)
        del self._here[s.request.id]
        return Delta(s.request.id, tokens, said, finish, message, _usage(s), _heard(s), state)

    def _export(self, s: Sequence) -> State:
        return self.scheduler.paged.export(s.state, s.pages, s.computed, s.row, s.replay)

    def _check(self, request: Request) -> None:
        vocab, prompt, state = self.model.config.vocab_size, request.prompt, request.state
        if not prompt:
            raise ValueError("The prompt is empty; give at least one token.")
        if len(prompt) > self.context:
            raise ValueError(f"The prompt is {len(prompt)} tokens long; the context holds {self.context}.")
        if not all(0 <= token < vocab for token in prompt):
            raise ValueError(f"The prompt holds ids outside the vocabulary of {vocab}.")
        if not all(0 <= token < vocab for token in request.sampling.logit_bias):
            raise ValueError(f"logit_bias names ids outside the vocabulary of {vocab}.")
        if request.id in self._here:
            raise ValueError(f"A request named {request.id!r} is already here.")
        if state is None:
            return
        if state.length >= len(prompt):
            raise ValueError(f"The state covers {state.length} tokens; the prompt must have at least one more.")
        if request.sampling.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs need the whole prompt computed, which an imported state leaves out.")
        self.scheduler.paged.check(state)


def _broken(logits: Tensor) -> list[bool]:
    """Rows that no token can be drawn from: weights or a state overflowed."""
    return (~torch.isfinite(logits).all(-1)).tolist()


def _advanced(grammar: Grammar, state: Any, tokens: Seq[int]) -> Any:
    """The grammar's state after tokens, or before the first that it refuses."""
    for token in tokens:
        try:
            state = grammar.advance(state, token)
        except ValueError:
            return state
    return state


def _mask(grammar: Grammar, state: Any, left: int) -> Tensor | None:
    """The ids a grammar allows, None if there are none: a grammar that fails ends its own request and no other."""
    try:
        mask = torch.as_tensor(grammar.mask(state, left))
    except (ValueError, RecursionError) as error:
        log.warning("a grammar failed: %s", error)
        return None
    return mask if bool(mask.any()) else None


def _usage(s: Sequence) -> Usage:
    prompt = len(s.request.prompt)
    return Usage(prompt, min(s.cached or 0, prompt), len(s.tokens) - prompt, s.drafted, s.accepted)


def _heard(s: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """The prompt's log-probabilities, once."""
    if s.request.sampling.prompt_logprobs is None or s.told:
        return None
    s.told = True
    return tuple(s.heard)


def _offload(g: Geometry, o: EngineOptions, device: torch.device) -> Pool | None:
    """Pages in CPU memory for what the pool evicts, pinned where a GPU copies to and from them."""
    pages = o.offload_bytes // g.page_bytes
    return Pool(g, 1 + pages, "cpu", pin=device.type == "cuda") if pages else None


def _pool(g: Geometry, o: EngineOptions, device: torch.device) -> Pool:
    """The pool and what stands behind it. Raises ValueError where there is no room for them."""
    pages = _pages(g, o)
    try:
        return Pool(g, pages, device, _offload(g, o, device))
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        size = f"{pages * g.page_bytes / 1e9:,.1f} GB and {o.offload_bytes / 1e9:,.1f} GB for offload"
        raise ValueError(
            f"A pool of {size} cannot be allocated; give fewer pool_tokens or a smaller max_batch."
        ) from None


def _pages(g: Geometry, o: EngineOptions) -> int:
    """Pages of the pool: as many as pool_bytes holds, or for pool_tokens of context and two states a request."""
    if o.pool_bytes is not None:
        return o.pool_bytes // g.page_bytes
    states = 2 * o.max_batch * g.pages("kda")
    return 1 + states + max(g.blocks_for(o.pool_tokens), o.max_batch) * g.pages("mla")
