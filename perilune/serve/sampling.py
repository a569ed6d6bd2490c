"""From logits to tokens: adjust, filter, draw. Batched over requests, but no row's outcome depends on another's.

    p = filter(softmax((ℓ + bias − penalties − ∞·forbidden) / temperature)),   token = first v with Σ_{w≤v} p_w > u Σ p

u is a hash of the request's seed, the token's position and the purpose of the draw, not the next number of a stream:
a request that is preempted, forked or rolled back draws the same again.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.serve.request import Sampling, TokenLogprob


@dataclass
class Row:
    """One position to sample: the request's rules and what came before. mask: bool [V] of ids a grammar allows; barred:
    it allows none (mask is then None, and what is drawn here must not be used)."""

    sampling: Sampling
    seed: int
    position: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    mask: Tensor | None = None
    barred: bool = False


def uniform(seed: int, position: int, purpose: str) -> float:
    """A number in [0, 1), a function of its arguments alone."""
    digest = hashlib.blake2b(struct.pack("<Qq", seed % 2**64, position) + purpose.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def distribution(logits_NV: Tensor, rows: Sequence[Row]) -> Tensor:
    """What each row's token is drawn from: fp32 [N, V], rows sum to 1; greedy rows are one-hot."""
    logits = _wide(logits_NV)
    if any(r.mask is not None or r.sampling.logit_bias or r.sampling.penalised for r in rows):
        logits = torch.stack([_adjust(x, row) for x, row in zip(logits, rows)])
    cold = [i for i, r in enumerate(rows) if r.sampling.temperature == 0]
    if len(cold) == len(rows):
        return _one_hot(logits)
    warm = [r.sampling.temperature or 1.0 for r in rows]
    if any(t != 1 for t in warm):
        logits = logits / torch.tensor(warm, dtype=logits.dtype, device=logits.device).unsqueeze(1)
    probs = torch.softmax(logits, -1)
    probs = _filter(probs, [r.sampling for r in rows])
    if cold:
        probs[cold] = _one_hot(logits[cold])
    return probs


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _one_hot(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _adjust(logits_V: Tensor, row: Row) -> Tensor:
    """Bias, penalties and the grammar's mask, in that order."""
    s, x = row.sampling, logits_V
    if s.logit_bias:
        ids = torch.tensor(list(s.logit_bias), device=x.device)
        x = x.index_add(0, ids, torch.tensor(list(s.logit_bias.values()), dtype=x.dtype, device=x.device))
    if s.penalised:
        x = _penalise(x, row)
    if row.mask is not None:
        x = x.masked_fill(~row.mask.to(x.device), -torch.inf)
    return x


def _penalise(x: Tensor, row: Row) -> Tensor:
    s = row.sampling
    counts = Counter(row.output)
    if s.repetition_penalty != 1:
        ids = torch.tensor(sorted({*counts, *row.prompt}), dtype=torch.int64, device=x.device)
        seen = x[ids]
        x = x.index_copy(0, ids, torch.where(seen > 0, seen / s.repetition_penalty, seen * s.repetition_penalty))
    if counts:
        ids = torch.tensor(list(counts), device=x.device)
        times = torch.tensor(list(counts.values()), dtype=x.dtype, device=x.device)
        x = x.index_add(0, ids, -s.presence_penalty - s.frequency_penalty * times)
    return x


def _filter(probs: Tensor, rules: Sequence[Sampling]) -> Tensor:
    """min_p, top_k, then top_p over what they left; the mass that remains is scaled to 1."""
    if all(s.min_p == 0 and s.top_k == 0 and s.top_p == 1 for s in rules):
        return probs
    size, device = probs.shape[-1], probs.device
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    floor = torch.tensor([s.min_p for s in rules], dtype=probs.dtype, device=device).unsqueeze(1) * ordered[:, :1]
    most = torch.tensor([s.top_k or size for s in rules], device=device).unsqueeze(1)
    kept = ordered.where((ordered >= floor) & (torch.arange(size, device=device) < most), 0.0)
    mass = torch.tensor(
        [s.top_p if s.top_p < 1 else torch.inf for s in rules], dtype=probs.dtype, device=device
    ).unsqueeze(1)
    before = kept.cumsum(-1) - kept
    kept = kept.where(before < mass * kept.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter_(-1, index, kept / kept.sum(-1, keepdim=True))


def draw(probs_NV: Tensor, uniforms: Sequence[float]) -> list[int]:
    """One id a row by inversion of the cumulative distribution, in fp64 so that a rare id keeps its share."""
    running = probs_NV.double().cumsum(-1)
    u = torch.tensor(uniforms, dtype=torch.float64, device=probs_NV.device).unsqueeze(1)
    total = running[:, -1:].contiguous()
    picked = torch.searchsorted(running, u * total, right=True).squeeze(1)
    # u·Σp can round up to Σp itself: then the last id with any mass.
    last = torch.searchsorted(running, total).squeeze(1)
    return torch.minimum(picked, last).clamp(max=running.shape[-1] - 1).tolist()


def greedy(rows: Sequence[Row]) -> bool:
    """Whether the likeliest token of untouched logits is what each row says."""
    return all(
        r.sampling.temperature == 0 and r.mask is None and not (r.sampling.logit_bias or r.sampling.penalised)
        for r in rows
    )


def sample(logits_NV: Tensor, rows: Sequence[Row]) -> list[int]:
    """One id a row."""
    if greedy(rows):
        return logits_NV.argmax(-1).tolist()
    return draw(distribution(logits_NV, rows), [uniform(r.seed, r.position, "draw") for r in rows])


def logprobs(logits_NV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Each token under the model's own distribution, and the `top` likeliest."""
    logp = torch.log_softmax(_wide(logits_NV), -1)
    ids = torch.tensor(tokens, device=logp.device).unsqueeze(1)
    own = logp.gather(1, ids)
    ranks = (logp > own).sum(-1) + 1
    best = logp.topk(min(top, logp.shape[-1]), -1) if top else None
    tops = [()] * len(tokens) if best is None else [tuple(zip(i, v)) for v, i in zip(*(b.tolist() for b in best))]
    return [TokenLogprob(*row) for row in zip(tokens, own.squeeze(1).tolist(), ranks.tolist(), tops)]
