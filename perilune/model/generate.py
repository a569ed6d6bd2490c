"""Generation with the one forward: prefill, then a token at a time, on a Dense cache.

Sampling is temperature, then top-k, then top-p, from a generator of its own, so that a seed fixes the text.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.model.cache import Dense
from perilune.model.net import K3


class PromptError(ValueError):
    """A prompt the model cannot continue; the message is one sentence."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole; stop: ids that end the text."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "max_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, not {getattr(self, name)}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}.")


@torch.inference_mode()
def generate(model: K3, prompt: Sequence[int], sampling: Sampling, cache: Dense | None = None) -> Iterator[int]:
    """Continue `prompt` (token ids), yielding one id at a time; a stop id is not yielded.

    cache: a one-row Dense cache to go on from (it then holds everything fed so far); a fresh one by default.
    Raises PromptError for an empty prompt, an id outside the vocabulary or a prompt longer than the context.
    """
    device = model.embed_tokens.weight.device
    cache = cache or Dense(model.config, 1, dtype=model.embed_tokens.weight.dtype, device=device)
    _check(model, prompt, cache)
    generator = torch.Generator(device)
    if sampling.seed is not None:
        generator.manual_seed(sampling.seed)
    else:
        generator.seed()
    room = model.config.max_position_embeddings - cache.lengths[0] - len(prompt)
    feed = torch.tensor(list(prompt), device=device)
    for _ in range(min(sampling.max_tokens, room + 1)):
        logits = model(feed, cache.layout([len(feed)]), cache, logits="last").logits
        token = sample(logits[0], sampling, generator)
        if token in sampling.stop:
            return
        yield token
        feed = torch.tensor([token], device=device)


def _check(model: K3, prompt: Sequence[int], cache: Dense) -> None:
    limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
    if not prompt:
        raise PromptError("The prompt is empty; give at least one token.")
    if cache.lengths[0] + len(prompt) > limit:
        raise PromptError(f"The prompt is {cache.lengths[0] + len(prompt)} tokens long; the context holds {limit}.")
    if not all(0 <= token < vocab for token in prompt):
        raise PromptError(f"The prompt holds ids outside the vocabulary of {vocab}.")


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> int:
    """One id from logits [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits.float() / sampling.temperature, -1)
    probs = _top_p(_top_k(probs, sampling.top_k), sampling.top_p)
    return int(torch.multinomial(probs, 1, generator=generator))


def _top_k(probs: Tensor, k: int) -> Tensor:
    if not 0 < k < len(probs):
        return probs
    return probs.where(probs >= probs.topk(k).values[-1], 0.0)


def _top_p(probs: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely ids whose share of the mass reaches p."""
    if p >= 1:
        return probs
    ordered, index = probs.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    kept = ordered.where(before < p * ordered.sum(), 0.0)
    return torch.zeros_like(probs).scatter_(0, index, kept)
