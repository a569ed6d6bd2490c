"""Who runs next: continuous batching over one pool, with chunked prefill, classes, preemption and checkpoints.

A step is either prefill (chunks of prompts under a token budget) or decode (every sequence that has its prompt behind
it); the two take turns, so a long prompt delays a running answer by one chunk at most. Sequences are ordered by class,
then arrival. Who cannot grow takes pages from those ordered after it: they go back to the queue with their tokens, and
lose nothing but time. The first in order can always grow, so everything ends.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from perilune.ops.kda.api import EXPORT_MULTIPLE
from perilune.serve.paged import Paged
from perilune.serve.pool import Block, Pool
from perilune.serve.prefix import Chain, Hit, Prefix
from perilune.serve.request import EngineOptions, Request, TokenLogprob


@dataclass(eq=False)
class Sequence:
    """A request on its way. tokens: prompt and output. computed: how many of them are in the cache.

    marks: hash endpoints of the prompt that want a checkpoint, ascending. rolling: the checkpoint of the answer so far.
    primed: one forward has run since the pages were given. replay: how many of the computed tokens are accepted drafts
    that the state does not hold yet.
    """

    request: Request
    seed: int
    order: tuple[int, int]
    tokens: list[int]
    chain: Chain
    grammar: Any = None
    row: int = -1
    computed: int = 0
    state: Block | None = None
    pages: list[Block] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    rolling: Block | None = None
    exports: list[tuple[int, Block]] = field(default_factory=list)  # checkpoints the next forward writes, by their end
    primed: bool = False
    replay: int = 0
    features: Tensor | None = None  # of computed positions that the draft has not seen
    drafted_upto: int = 0  # positions that it has
    cached: int | None = None
    fetched: bool = False  # what CPU memory knew of it has been brought up while it waited
    heard: list[TokenLogprob | None] = field(default_factory=list)
    told: bool = False
    drafted: int = 0
    accepted: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def decoding(self) -> bool:
        return self.primed and self.pending == 1


@dataclass(frozen=True)
class Batch:
    """What one forward runs: the next lengths[i] tokens of each sequence."""

    kind: Literal["prefill", "decode"]
    sequences: list[Sequence]
    lengths: list[int]


class Scheduler:
    """Owns the queue, the rows and every block a sequence holds."""

    def __init__(self, paged: Paged, options: EngineOptions, context: int) -> None:
        self.paged, self.options, self.context = paged, options, context
        self.pool: Pool = paged.pool
        self.geometry = paged.geometry
        self.prefix = Prefix(self.pool)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._rows = list(range(options.max_batch - 1, -1, -1))
        self._arrivals = 0
        self._prefilled_last = False
        self.preemptions = self.hit_tokens = self.offload_tokens = 0

    # --- the queue ------------------------------------------------------------------------------------------

    def add(self, request: Request, seed: int) -> Sequence:
        """Queue a request. Raises ValueError when the whole pool could not hold it."""
        longest = min(self.context, len(request.prompt) + request.sampling.max_tokens)
        need, have = self.geometry.pages_for(longest), self.pool.pages - 1
        if need > have:
            raise ValueError(f"The request may need {need} pages of the pool, which has {have}.")
        classes = self.options.priorities
        rank = classes.index(request.priority) if request.priority in classes else len(classes) - 1
        self._arrivals += 1
        chain = Chain(self.geometry.block_tokens, request.salt)
        sequence = Sequence(request, seed, (rank, self._arrivals), list(request.prompt), chain)
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence; what is published of it stays in the pool."""
        if sequence.row < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def _leave(self, s: Sequence) -> None:
        self.running.remove(s)
        self.paged.release(s.row)
        self._rows.append(s.row)
        # The deepest page first: it is the least useful to others, and the first to be evicted.
        for block in reversed(s.pages):
            self.pool.drop(block)
        if s.state is not None:
            self.pool.drop(s.state)
        s.row, s.computed, s.state, s.pages, s.primed, s.replay, s.features = -1, 0, None, [], False, 0, None

    def _preempt(self, s: Sequence) -> None:
        self._leave(s)
        self.preemptions += 1
        bisect.insort(self.waiting, s, key=lambda s: s.order)

    # --- a step ---------------------------------------------------------------------------------------------

    def schedule(self, window: int = 1) -> Batch | None:
        """The next batch, every page it writes allocated. window: tokens each decoding sequence brings."""
        self._admit()
        decoding = [s for s in self.running if s.decoding]
        turn = len(decoding) < len(self.running) and not (decoding and self._prefilled_last)
        if turn and (batch := self._prefill()):
            self._prefilled_last = True
            return batch
        self._prefilled_last = False
        return self._decode(window)

    def _prefill(self) -> Batch | None:
        batch = Batch("prefill", [], [])
        budget = self.options.token_budget
        for s in self._in_order(s for s in self.running if not s.decoding):
            if s.row < 0 or not budget:
                continue
            end = self._chunk(s, budget)
            self._grow(s, end)
            end = min(end, self._capacity(s))
            if s.row >= 0 and end > s.computed:
                self._export(s, end)
                batch.sequences.append(s)
                batch.lengths.append(end - s.computed)
                budget -= end - s.computed
        return batch if batch.sequences else None

    def _chunk(self, s: Sequence, budget: int) -> int:
        """Where the next chunk ends. The forward can export states at multiples of 16 from its start: a chunk that
        starts on one runs over its marks and should end on one; another one ends at its first mark."""
        end = min(len(s.tokens), s.computed + budget)
        if s.computed % EXPORT_MULTIPLE:
            return min(end, *s.marks[:1]) if s.marks else end
        aligned = end - end % EXPORT_MULTIPLE
        return aligned if s.computed < aligned and end < len(s.tokens) else end

    def _export(self, s: Sequence, end: int) -> None:
        """Blocks for the checkpoints inside the chunk; one that finds no room is left out."""
        for mark in [m for m in s.marks if m < end]:
            s.marks.remove(mark)
            if not self.prefix.known(s.chain, mark) and (block := self.pool.take("kda")) is not None:
                s.exports.append((mark, block))

    def _decode(self, window: int) -> Batch | None:
        batch = Batch("decode", [], [])
        decoding = self._in_order(s for s in self.running if s.decoding)
        window = min([window, *(self.context - len(s.tokens) + 1 for s in decoding)])
        for s in decoding:
            if s.row >= 0 and self._grow(s, s.computed + window):
                batch.sequences.append(s)
                batch.lengths.append(window)
        return batch if batch.sequences else None

    def _in_order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        return sorted(sequences, key=lambda s: s.order)

    def _capacity(self, s: Sequence) -> int:
        """Tokens that the sequence's pages hold."""
        return len(s.pages) * self.geometry.page_tokens if self.geometry.mla_layers else self.context

    def _grow(self, s: Sequence, tokens: int) -> bool:
        """Pages for the first `tokens`, taken from those ordered after s if need be."""
        had = len(s.pages)
        while self._capacity(s) < tokens:
            block = self.pool.take("mla")
            if block is not None:
                s.pages.append(block)
                continue
            last = max(self.running, key=lambda s: s.order)
            if last is s:
                break
            self._preempt(last)
        self.paged.assign(s.row, None, s.pages[had:], had)
        return self._capacity(s) >= tokens

    # --- admission ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting sequences in order, until one does not fit."""
        for s in list(self.waiting):
            if self._rows and self._follows(s):
                continue
            while not (self._rows and self._start(s)):
                last = max(self.running, key=lambda r: r.order, default=None)
                if last is None or last.order[0] <= s.order[0]:
                    self._prefetch(s)
                    return
                self._preempt(last)  # a lower class makes room

    def _prefetch(self, s: Sequence) -> None:
        """The next in line waits: what it will reuse comes up from CPU memory meanwhile, into pages that are free."""
        if self.pool.below is None or s.fetched:
            return
        hit = self._hit(s)
        for found in hit:
            if found.pool is not self.pool and self.pool.free >= self.geometry.pages(found.block.kind):
                self.pool.drop(self._bring(found.block))
                s.fetched = True
        hit.release()

    def _follows(self, s: Sequence) -> bool:
        """Whether a prompt ahead of s is about to compute what both begin with: then s waits for it, and where they
        part gets a checkpoint."""
        if not self.options.prefix_cache or s.request.sampling.prompt_logprobs is not None:
            return False
        s.chain.extend(s.tokens, len(s.tokens))
        most = self.prefix.boundary(len(s.tokens) - 1)
        for r in self.running:
            if r.order > s.order or r.decoding:
                continue
            end = min(s.chain.common(r.chain), most)
            if end > r.computed:
                if self.geometry.kda_layers and end not in r.marks:
                    bisect.insort(r.marks, end)
                return True
        return False

    def _start(self, s: Sequence) -> bool:
        """Give a sequence its row and blocks, from a prefix where there is one; False when it must wait."""
        hit, imported = self._hit(s), s.request.state
        if imported is not None and imported.length >= hit.tokens:
            hit.release()
            hit = Hit(reach=hit.reach)
        if not self._fits(s, hit):
            hit.release()
            if self.running:
                return False
            hit, imported = Hit(), s.request.state  # alone, what pins itself out starts from nothing
        else:
            imported = imported if hit.tokens == 0 else None
        self.waiting.remove(s)
        self.running.append(s)
        s.row = self._rows.pop()
        s.state = self._take("kda") if self.geometry.kda_layers else None
        if imported is not None:
            s.pages = [self._take("mla") for _ in range(self.geometry.blocks_for(imported.length))]
            self.paged.load(imported, s.state, s.pages)
            s.computed = imported.length
        else:
            self._restore(s, hit)
        s.drafted_upto = s.computed
        self.paged.assign(s.row, s.state, s.pages)
        self._mark(s, hit.reach)
        if s.cached is None:
            s.cached = s.computed
        return True

    def _hit(self, s: Sequence) -> Hit:
        """What the pool knows of the sequence; at least its last token is left to compute."""
        wants_prompt = s.request.sampling.prompt_logprobs is not None and len(s.heard) < len(s.request.prompt)
        s.chain.extend(s.tokens, len(s.tokens))
        if not self.options.prefix_cache or wants_prompt:
            return Hit()
        return self.prefix.match(s.chain, len(s.tokens) - 1)

    def _fits(self, s: Sequence, hit: Hit) -> bool:
        """Whether the state and the first chunk find pages, leaving every running sequence one to grow into."""
        g = self.geometry
        past = max(hit.tokens, s.request.state.length if s.request.state is not None else 0)
        shared = sum(f.pool is self.pool for f in hit.pages[: hit.tokens // g.page_tokens])
        first = min(len(s.tokens), past + self.options.token_budget)
        need = g.pages("kda") + (g.blocks_for(first) - shared) * g.pages("mla")
        return self.pool.available >= need + len(self.running) * g.pages("mla")

    def _take(self, kind: Literal["kda", "mla"]) -> Block:
        block = self.pool.take(kind)
        assert block is not None, "admission counted wrongly"
        return block

    def _restore(self, s: Sequence, hit: Hit) -> None:
        """Share whole pages; copy the last, partly filled one and the checkpoint; start from nothing on a miss."""
        size = self.geometry.page_tokens
        for found in hit.pages[: hit.tokens // size if hit.tokens else 0]:
            s.pages.append(self.pool.hold(found.block) if found.pool is self.pool else self._bring(found.block))
        for found in hit.pages[len(s.pages) :]:
            s.pages.append(self._take("mla"))
            self.paged.copy_latents(found.block, s.pages[-1], hit.tokens % size, found.pool)
        if s.state is not None and hit.state is None:
            self.paged.clear(s.state)
        elif s.state is not None and hit.state is not None:
            self.pool.copy(hit.state.block, s.state, hit.state.pool)
        if s.fetched or any(found.pool is not self.pool for found in hit):
            self.offload_tokens += hit.tokens
        else:
            self.hit_tokens += hit.tokens
        s.computed = hit.tokens
        hit.release()

    def _bring(self, below: Block) -> Block:
        """A block of the pool below, copied up and findable here again."""
        assert self.pool.below is not None
        block = self._take(below.kind)
        self.pool.copy(below, block, self.pool.below)
        for key in below.keys:
            self.pool.publish(block, key)
        return block

    # --- after the forward ----------------------------------------------------------------------------------

    def written(self, s: Sequence, tokens: int, replay: int = 0) -> None:
        """The forward has written `tokens` more of s, the last `replay` of them as drafts beside the state: publish
        them, and take the checkpoints that fall due."""
        start, s.computed, s.primed, s.replay = s.computed, s.computed + tokens, True, replay
        if not self.options.prefix_cache:
            s.marks = []
            return
        s.chain.extend(s.tokens, s.computed)
        self.prefix.publish(s.chain, s.pages, start, s.computed)
        for mark, block in s.exports:
            self.pool.publish(block, s.chain.at(mark))
            self.pool.drop(block)
        s.exports = []
        end = self.prefix.boundary(s.computed)
        if s.state is None or end <= start or end < s.computed - replay:
            return  # no endpoint was passed, or the state has gone beyond it
        if s.marks and end >= s.marks[0]:
            s.marks = [m for m in s.marks if m > end]
            self._checkpoint(s, end)
        elif end >= len(s.request.prompt):
            self._roll(s, self._checkpoint(s, end))

    def _mark(self, s: Sequence, reach: int) -> None:
        """Where this prompt wants checkpoints: its end, its turns, a branch point, an interval; beyond what it has."""
        if not self.options.prefix_cache or not self.geometry.kda_layers:
            s.marks = []
            return
        n, every = len(s.request.prompt), self.options.checkpoint_every
        wanted = {n, n - 1, reach, *s.request.checkpoints, *(range(every, n, every) if every else ())}
        ends = {self.prefix.boundary(w) for w in wanted if 0 < w <= n}
        s.marks = sorted(m for m in ends if m > s.computed)

    def _checkpoint(self, s: Sequence, end: int) -> Block | None:
        """A copy of the state after `end` tokens, findable; None when there is one, or no room."""
        if s.state is None or self.prefix.known(s.chain, end):
            return None
        block = self.pool.take("kda")
        if block is not None:
            self.paged.checkpoint(s.state, block, s.row, s.replay - (s.computed - end))
            self.pool.publish(block, s.chain.at(end))
            self.pool.drop(block)
        return block

    def _roll(self, s: Sequence, block: Block | None) -> None:
        """The newest checkpoint of an answer supersedes the one before."""
        if block is None:
            return
        if s.rolling is not None and s.rolling.keys:
            self.pool.forget(s.rolling)
        s.rolling = block
