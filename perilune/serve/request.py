"""What the engine is asked and what it answers: plain frozen values, no torch needed to make one.

Server, router, rollouts and tests speak to `engine.Engine` in these words only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from perilune.model.cache import State

Finish = Literal["stop", "length", "cancelled", "error"]


class Full(RuntimeError):  # noqa: N818 - what it says, not what went wrong
    """The queue's budget is spent; the same request can be sent again later."""


class Grammar(Protocol):
    """What constrains sampling. Its state is an immutable value: requests fork, are preempted and roll a speculative
    window back by keeping the old one."""

    def start(self) -> Any: ...

    def mask(self, state: Any, left: int | None = None) -> Any:
        """bool [V] (numpy or torch): ids that may come next; an end-of-turn id exactly when accepting. With `left`
        tokens to go, the end included, only ids after which the rest still fits (if any do)."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """The state after `token`. Raises ValueError when the mask forbids it."""
        ...

    def accepting(self, state: Any) -> bool: ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, and when to stop.

    Applied in this order: logit_bias, repetition_penalty (tokens of prompt and output), presence_penalty and
    frequency_penalty (tokens of the output), grammar, temperature (0 is greedy), min_p, top_k (0 is off), top_p.

    seed: draws depend on it and on the position alone, never on what else is in the batch; None picks one at submit.
    logprobs: with each token its log-probability and those of the n likeliest, under the model's own distribution
        (temperature 1, nothing applied). prompt_logprobs: the same for the prompt, which is then computed whole.
    stop_ids: beside the model's end-of-turn id, which ignore_eos leaves out. Stop strings are the server's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, ok, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0, "at least 0"),
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
        ):
            if not ok:
                raise ValueError(f"{name} must be {rule}, not {getattr(self, name)}.")
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise ValueError("logit_bias must hold finite numbers.")

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    priority: its class; the engine's options order the classes. salt: mixed into the prefix hashes, so that tenants
    share nothing. checkpoints: token offsets of the prompt worth a KDA checkpoint (turn ends).
    state: an imported past that covers the first state.length prompt tokens, at least one fewer than the prompt.
    keep_state: the finishing Delta carries the exported State.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: str = "interactive"
    salt: bytes = b""
    checkpoints: tuple[int, ...] = ()
    state: State | None = None
    keep_state: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, its rank (1 is the likeliest), and the likeliest tokens with theirs."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request so far. cached: of the prompt, not computed. drafted, accepted: by speculation."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Delta:
    """What a step added to one request. A stop id is the last of `tokens`. finish: why it ended, None while it runs.

    prompt_logprobs come with the first Delta, None standing for the first prompt token; state with the last.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    message: str = ""
    usage: Usage = field(default_factory=lambda: Usage(0))
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    state: State | None = None


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and switches of an engine; every optimisation can be turned off.

    pool_tokens: context tokens of all requests the pool is sized for, when pool_bytes is None.
    block_tokens: the prefix-hash block, a multiple of 16; None is 512, less for models of a short context. The physical
        page is a multiple of it that the config decides.
    context: longest sequence; None is the model's. token_budget: new prompt tokens a step.
    max_batch: running requests. max_waiting: requests in the queue before `Full`.
    checkpoint_every: tokens between KDA checkpoints in a long prompt, beside turn ends and branch points; 0 is none.
    offload_bytes: CPU memory for evicted prefixes. speculate: drafts a step by the MTP layer.
    cuda_graphs: on a GPU, decoding steps are recorded once a batch size and replayed.
    priorities: request classes, most urgent first. Unknown classes count as the last.
    """

    pool_tokens: int = 65536
    pool_bytes: int | None = None
    block_tokens: int | None = None
    context: int | None = None
    token_budget: int = 2048
    max_batch: int = 32
    max_waiting: int = 1024
    checkpoint_every: int = 8192
    prefix_cache: bool = True
    offload_bytes: int = 0
    speculate: int = 0
    cuda_graphs: bool = True
    priorities: tuple[str, ...] = ("interactive", "batch")

    def __post_init__(self) -> None:
        if self.block_tokens is not None and (self.block_tokens < 16 or self.block_tokens % 16):
            raise ValueError(f"block_tokens must be a positive multiple of 16, not {self.block_tokens}.")
        for name in ("pool_tokens", "token_budget", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.context is not None and self.context < 1:
            raise ValueError(f"context must be at least 1, not {self.context}.")
        for name in ("max_waiting", "checkpoint_every", "offload_bytes", "speculate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}.")


@dataclass(frozen=True)
class Stats:
    """The engine at one moment. Pages by use add up to `pages`; *_tokens and counts are totals since the start."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_running: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    page_tokens: int = 0
    match_tokens: int = 0  # unit of a prefix hit
    prompt_tokens: int = 0
    hit_tokens: int = 0  # found in the pool
    offload_tokens: int = 0  # brought back from CPU memory
    completion_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    step_seconds: float = 0.0  # of the last step
    last_batch: int = 0
