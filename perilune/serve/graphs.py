"""Decoding as a recorded step: one replay a token instead of thousands of launches (report §5.4.2).

A graph holds addresses, so all that differs between steps lies in static buffers: page tables (`Paged`), and of each
batch size its rows, positions, accepted drafts and tokens. Batches are padded with nobody's row to one of a few sizes,
each recorded when it first occurs. The step advances its own positions and feeds itself the likeliest tokens: the host
writes again only what turned out otherwise, and waits once a step, for the tokens.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from perilune.model.moe import LatentMoE
from perilune.model.net import K3, MTP
from perilune.ops.dispatch import chained
from perilune.serve.paged import Paged

log = logging.getLogger(__name__)

Step = Callable[[], None]
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass
class Answer:
    """Of a step: logits [N·W, V] and features [N·W, hidden], until the next step; likeliest, of each of the N·W tokens
    the one that greedy decoding says next, or −1 where logits are not finite."""

    logits: Tensor
    features: Tensor
    likeliest: list[int]


def recordable(model: K3) -> bool:
    """Whether a step runs without a look at the host. The log says why not."""
    experts = any(isinstance(module, LatentMoE) for module in model.modules())
    if experts and model.embed_tokens.weight.dtype == torch.float64:
        log.warning(
            "Decoding is not recorded: experts in fp64 are multiplied one by one, as the host finds their rows."
        )
        return False
    return True


class Recorder:
    """Records a step as a CUDA graph. All graphs share their memory: one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        with chained():
            return self._recorded(step)

    def _recorded(self, step: Step) -> Step:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # kernels compile and libraries make their workspaces before the recording
            step()
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph.replay


class Graphs:
    """The decoding steps of one engine, by batch size and window."""

    def __init__(self, model: K3, paged: Paged, most: int, drafts: bool, record: Callable[[Step], Step]) -> None:
        """most: requests a batch. drafts: windows go on from accepted drafts. record: what makes a step repeatable."""
        self.model, self.paged, self.drafts, self._record = model, paged, drafts, record
        self._sizes = [*(n for n in SIZES if n < most), most]
        self._made: dict[tuple[int, int], Recorded] = {}

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        rows: Sequence[int],
        past: Sequence[int],
        accepted: Sequence[int] | None = None,
    ) -> Answer:
        """Decode tokens[i] (equally many of each) after the past[i] of row rows[i]."""
        count, width = len(tokens), len(tokens[0])
        key = next(n for n in self._sizes if n >= count), width
        if key not in self._made:
            self._made[key] = Recorded(self.model, self.paged, *key, self.drafts, self._record)
        return self._made[key].run(tokens, rows, past, accepted or [0] * count)


class DraftGraphs:
    """The draft layer's steps, by batch size and how many tokens they take in at most."""

    def __init__(self, model: K3, paged: Paged, most: int, record: Callable[[Step], Step]) -> None:
        self.model, self.paged, self._record = model, paged, record
        self._sizes = [*(n for n in SIZES if n < most), most]
        self._made: dict[tuple[int, int], RecordedDraft] = {}

    def step(
        self, tokens: Sequence[Sequence[int]], features: Tensor, rows: Sequence[int], past: Sequence[int], width: int
    ) -> tuple[Tensor, Tensor]:
        """(logits [N, V], features [N, hidden]) after the last of tokens[i], at most `width` of each row rows[i] after
        its past[i]; features [T, hidden] of all of them, end to end. Both answers hold until the next step."""
        key = next(n for n in self._sizes if n >= len(tokens)), width
        if key not in self._made:
            self._made[key] = RecordedDraft(self.model, self.paged, *key, self._record)
        return self._made[key].run(tokens, features, rows, past)


class RecordedDraft:
    """One step of the draft layer. Rows with fewer tokens than the width are padded with their last one: the latents
    that leaves behind lie in pages of the window to come, which writes them before anybody reads."""

    def __init__(self, model: K3, paged: Paged, size: int, width: int, record: Callable[[Step], Step]) -> None:
        self.model, self.paged, self.size, self.width = model, paged, size, width
        self.layer = cast(MTP, model.mtp[0])
        device, weight = paged.kda_pages.device, model.embed_tokens.weight
        self._staged = torch.zeros((3 + 2 * width) * size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = self._staged.to(device)
        self.rows, self.start, self.ends = self._inputs[: 3 * size].view(3, size)
        self.tokens, self.source = self._inputs[3 * size :].view(2, size * width)
        self.given = torch.zeros(size * width, weight.shape[1], dtype=weight.dtype, device=device)
        self.rows.fill_(paged.nobody)
        self.logits = self.features = torch.empty(0)
        self._replay = record(self._step)

    def _step(self) -> None:
        layout = self.paged.window(self.rows, self.start, self.width)
        embedded = self.model.embed_tokens(self.tokens)
        hidden, features, _ = self.layer.predict(embedded, self.given, layout, self.paged)
        self.logits, self.features = self.model.lm_head(hidden[self.ends]), features[self.ends]

    def run(
        self, tokens: Sequence[Sequence[int]], features: Tensor, rows: Sequence[int], past: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        count, width, spare = len(rows), self.width, self.size - len(rows)
        first = accumulate((len(some) for some in tokens), initial=0)
        each = [min(j, len(some) - 1) for some in tokens for j in range(width)]
        fed = [some[j] for some, j in zip((some for some in tokens for _ in range(width)), each)]
        source = [at + j for at, j in zip((at for at, _ in zip(first, tokens) for _ in range(width)), each)]
        ends = [i * width + len(some) - 1 for i, some in enumerate(tokens)]
        wanted = [*rows, *[self.paged.nobody] * spare, *past, *[0] * spare, *ends, *[0] * spare]
        wanted += [*fed, *[0] * (spare * width), *source, *[0] * (spare * width)]
        self._staged.copy_(torch.tensor(wanted))  # read by now: whoever drew from the last step's logits waited for it
        self._inputs.copy_(self._staged, non_blocking=True)
        used = count * width
        self.given[:used] = features[self.source[:used]]
        self._replay()
        return self.logits[:count], self.features[:count]


class Recorded:
    """One step: its buffers, and how to run it."""

    def __init__(
        self, model: K3, paged: Paged, size: int, width: int, drafts: bool, record: Callable[[Step], Step]
    ) -> None:
        self.model, self.paged, self.size, self.width = model, paged, size, width
        device = paged.kda_pages.device
        self._staged = torch.zeros((3 + width) * size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = self._staged.to(device)
        self.rows, self.start, accepted = self._inputs[: 3 * size].view(3, size)
        self.tokens = self._inputs[3 * size :].view(size, width)
        self.accepted = accepted if drafts else None
        self.rows.fill_(paged.nobody)
        self._known: list[int] | None = None  # what the buffers hold, if the host knows
        self.logits = self.features = self._likeliest = torch.empty(0)
        self._replay = record(self._step)

    def _step(self) -> None:
        layout = self.paged.window(self.rows, self.start, self.width, self.accepted)
        out = self.model(self.tokens.flatten(), layout, self.paged, logits="none")
        logits = self.model.lm_head(out.hidden)
        best, token = logits.max(-1)
        self.logits, self.features = logits, out.features
        self._likeliest = torch.where(torch.isfinite(best), token, -1)
        if self.width == 1:
            live = self.rows != self.paged.nobody
            self.start.add_(live)
            self.tokens.copy_(torch.where(live, token, 0).unsqueeze(1))

    def run(
        self, tokens: Sequence[Sequence[int]], rows: Sequence[int], past: Sequence[int], accepted: Sequence[int]
    ) -> Answer:
        count, spare = len(rows), self.size - len(rows)
        wanted = [*rows, *[self.paged.nobody] * spare, *past, *[0] * spare, *accepted, *[0] * spare]
        wanted += [t for some in tokens for t in some] + [0] * (spare * self.width)
        if wanted != self._known:
            self._staged.copy_(torch.tensor(wanted))
            self._inputs.copy_(self._staged, non_blocking=True)
        self._replay()
        used = count * self.width
        said = self._likeliest.tolist()  # the one wait of a step; what was staged has been read then
        self._known = self._advanced(wanted, said, count) if self.width == 1 else None
        return Answer(self.logits[:used], self.features[:used], said[:used])

    def _advanced(self, held: list[int], said: list[int], count: int) -> list[int]:
        """The buffers after a step of single tokens."""
        size, spare = self.size, [0] * (self.size - count)
        past = [p + 1 for p in held[size : size + count]]
        return [*held[:size], *past, *spare, *held[2 * size : 3 * size], *said[:count], *spare]
