"""Speculation (report §5.4.2): a cheap draft proposes k tokens, one pass of the model verifies them, nothing is lost.

    accept d ~ q with probability min(1, p(d)/q(d));   at the first refusal draw from (p − q)+;   after k, one from p

p and q are the distributions that tokens are really drawn from, with temperature, filters, penalties and grammar, so
what comes out is distributed as without a draft, and is the same when greedy. Rolling back costs nothing: latents of
refused tokens are overwritten; a KDA layer keeps the state after the certain token and the projected inputs of the
drafts, of which the next window replays the accepted ones; a grammar's states are values.
"""

from collections.abc import Sequence as Seq
from typing import Protocol, cast

import torch
from torch import Tensor

from perilune.model.net import K3, MTP
from perilune.serve.graphs import DraftGraphs
from perilune.serve.paged import Paged
from perilune.serve.sampling import Row, distribution, draw, uniform
from perilune.serve.scheduler import Sequence


class Rows(Protocol):
    """How the engine makes the sampling row of a sequence that has `drafts` after its tokens."""

    def __call__(self, s: Sequence, drafts: Seq[int] = ()) -> Row: ...


class Draft(Protocol):
    """What proposes tokens."""

    def saw(self, sequences: Seq[Sequence], lengths: Seq[int], features: Tensor) -> None:
        """The model has computed lengths[i] more tokens of each sequence, with these features [T, hidden]; of a window,
        only what was accepted."""
        ...

    def catch_up(self, sequences: Seq[Sequence]) -> None:
        """Take in what was seen of prompts that go on."""
        ...

    def propose(self, sequences: Seq[Sequence], count: int, row: Rows) -> tuple[Tensor, Tensor]:
        """(tokens [N, count], the distributions they were drawn from [N, count, V])."""
        ...


class MTPDraft:
    """The multi-token-prediction layer: a position's features and the next token's embedding give the one after.

    Its latents lie in pages like any MLA layer's. They run one position behind the model: the last position waits for
    its next token. After a prefix hit the entry before the boundary belongs to another continuation; that can cost an
    acceptance, never correctness.
    """

    def __init__(self, model: K3, paged: Paged, graphs: DraftGraphs | None = None) -> None:
        self.model, self.paged, self.layer, self.graphs = model, paged, cast(MTP, model.mtp[0]), graphs

    def saw(self, sequences: Seq[Sequence], lengths: Seq[int], features: Tensor) -> None:
        for s, new in zip(sequences, features.split(list(lengths))):
            s.features = new.clone() if s.features is None else torch.cat([s.features, new])

    def catch_up(self, sequences: Seq[Sequence]) -> None:
        """So that no more than a chunk of features is kept."""
        if sequences:
            self._run(*self._waiting(sequences))

    def propose(self, sequences: Seq[Sequence], count: int, row: Rows) -> tuple[Tensor, Tensor]:
        logits, features = self._step(*self._waiting(sequences), width=count + 1)
        drafts: list[list[int]] = [[] for _ in sequences]
        chosen = []
        for i in range(count):
            q = distribution(logits, [row(s, d) for s, d in zip(sequences, drafts)])
            chosen.append(q)
            picked = draw(q, [uniform(s.seed, len(s.tokens) + i, "draft") for s in sequences])
            for d, token in zip(drafts, picked):
                d.append(token)
            if i + 1 < count:
                past = [s.computed + i for s in sequences]
                logits, features = self._step([[t] for t in picked], features, sequences, past)
        return torch.tensor(drafts, device=features.device), torch.stack(chosen, 1)

    def _waiting(self, sequences: Seq[Sequence]) -> tuple[list[list[int]], Tensor, Seq[Sequence], list[int]]:
        """What `_run` takes of the positions whose features wait; they do no longer."""
        waiting = [s.features for s in sequences if s.features is not None]
        past = [s.drafted_upto for s in sequences]
        following = [s.tokens[p + 1 : p + 1 + len(f)] for s, p, f in zip(sequences, past, waiting)]
        for s, f in zip(sequences, waiting):
            s.features, s.drafted_upto = None, s.drafted_upto + len(f)
        return following, torch.cat(waiting), sequences, past

    def _step(
        self, following: Seq[Seq[int]], features: Tensor, sequences: Seq[Sequence], past: Seq[int], width: int = 1
    ) -> tuple[Tensor, Tensor]:
        """(logits, features) of each sequence's last position; recorded where none has more than `width`."""
        lengths = [len(some) for some in following]
        if self.graphs is not None and max(lengths) <= width:
            return self.graphs.step(following, features, [s.row for s in sequences], past, width)
        hidden, features = self._run(following, features, sequences, past)
        last = torch.tensor(lengths, device=hidden.device).cumsum(0) - 1
        return self.model.lm_head(hidden[last]), features[last]

    def _run(
        self, following: Seq[Seq[int]], features: Tensor, sequences: Seq[Sequence], past: Seq[int]
    ) -> tuple[Tensor, Tensor]:
        layout = self.paged.layout([len(f) for f in following], [s.row for s in sequences], past)
        tokens = torch.tensor([t for some in following for t in some], device=features.device)
        hidden, features, _ = self.layer.predict(self.model.embed_tokens(tokens), features, layout, self.paged)
        return hidden, features


def verify(p_NWV: Tensor, q_NkV: Tensor, drafts_Nk: Tensor, seeds: Seq[int], at: Seq[int]) -> list[list[int]]:
    """The tokens each window yields: its accepted drafts and one more.

    p [N, k+1, V]: what the model would draw from after each token of the window. at: position of the first draft.
    """
    k = drafts_Nk.shape[1]
    index = drafts_Nk.unsqueeze(-1)
    p, q = p_NWV[:, :k].gather(-1, index).squeeze(-1).tolist(), q_NkV.gather(-1, index).squeeze(-1).tolist()
    counts = []
    for n, (seed, first) in enumerate(zip(seeds, at)):
        refused = (i for i in range(k) if uniform(seed, first + i, "accept") * q[n][i] >= p[n][i])
        counts.append(next(refused, k))
    rows = range(len(counts))
    rest = p_NWV[rows, counts]
    if k:
        refusing = torch.tensor(counts, device=rest.device) < k
        less = q_NkV[rows, [min(c, k - 1) for c in counts]]
        rest = torch.where(refusing.unsqueeze(1), (rest - less).clamp(min=0), rest)
    last = draw(rest, [uniform(seed, first + c, "draw") for seed, first, c in zip(seeds, at, counts)])
    return [[*d[:c], t] for d, c, t in zip(drafts_Nk.tolist(), counts, last)]
