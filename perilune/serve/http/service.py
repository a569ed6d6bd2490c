"""What one server is made of, and how a body becomes engine requests (a Job).

The ids of a prompt, its sampling and its choices are decided here, before anything is streamed, so that whatever is
wrong with a request is a 400 and never a broken stream.
"""

import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from perilune.chat import ChatRequest, declared_tools, image_parts, pending_ids, render, vet_request
from perilune.serve.grammar import Constrain
from perilune.serve.http.choices import ChatChoice, Choice, TextChoice
from perilune.serve.http.errors import ApiError, bad
from perilune.serve.http.metrics import Metrics
from perilune.serve.http.options import ServeOptions
from perilune.serve.http.schema import ChatBody, CompletionBody, SamplingFields
from perilune.serve.request import Grammar, Request, Sampling
from perilune.serve.worker import Worker
from perilune.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    """A worker with its tokenizer and manners. context: tokens of the longest sequence."""

    worker: Worker
    tokenizer: Tokenizer
    context: int
    vocab_size: int
    options: ServeOptions = field(default_factory=ServeOptions)

    @cached_property
    def constrain(self) -> Constrain:
        return Constrain(self.tokenizer)

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(lambda: self.worker.stats)


@dataclass
class Job:
    """One API request, ready to run: an engine request a choice, in step."""

    id: str
    kind: str  # "chat.completion" or "text_completion"
    requests: list[Request]
    choices: list[Choice]
    prompt_tokens: int  # as billed
    per_prompt: int = 1  # choices of one prompt
    stream: bool = False
    include_usage: bool = False
    session: str | None = None
    prompts: list[tuple[int, ...]] | None = None  # to be returned with the ids, if asked for

    def placed_by(self, headers: Mapping[str, str]) -> None:
        """Take over what a router says: the request's class, and the session where the body names none."""
        self.session = self.session or headers.get("x-session-id")
        if kind := headers.get("x-request-class"):
            self.requests = [replace(request, priority=kind) for request in self.requests]

    def choice(self, request_id: str) -> Choice:
        return self.choices[int(request_id.rpartition("-")[2])]


def chat_job(service: Service, body: ChatBody) -> Job:
    """A chat request. Raises ApiError or ChatError."""
    request = vet_request(body.model_dump(exclude_unset=True))
    if image_parts(request):
        raise bad("messages", "image parts need a model with a vision tower, which this one is not")
    prompt = render(request)
    ids = tuple(prompt.ids(service.tokenizer))
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    scores = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs", "needs logprobs to be true")
    sampling = _sampling(service, body, len(ids), limit, scores, _chat_grammar(service, body, request, prompt.channel))
    end = service.tokenizer.end_of_msg
    turns = tuple(n + 1 for n, token in enumerate(ids) if token == end)
    calls = request.tool_choice != "none" and bool(declared_tools(request))
    job = _job(service, body, "chat.completion", [ids], sampling, turns)
    job.choices = [
        ChatChoice(n, service.tokenizer, _stops(body), prompt.channel, calls=calls, scores=scores is not None)
        for n in range(len(job.requests))
    ]
    job.prompt_tokens = len(ids) - pending_ids(prompt, service.tokenizer)
    return job


def completion_job(service: Service, body: CompletionBody) -> Job:
    """A plain continuation of one prompt or several. Raises ApiError."""
    prompts = _prompts(service, body.prompt)
    length = max(map(len, prompts))
    scores = body.logprobs
    limit = body.max_tokens if body.max_tokens is not None else 16
    sampling = _sampling(service, body, length, limit, scores, _text_grammar(service, body))
    if body.echo and scores is not None:
        sampling = replace(sampling, prompt_logprobs=scores)
    job = _job(service, body, "text_completion", prompts, sampling, ())
    job.choices = [
        TextChoice(n, service.tokenizer, _stops(body), scores, request.prompt if body.echo else ())
        for n, request in enumerate(job.requests)
    ]
    return job


def _chat_grammar(service: Service, body: ChatBody, request: ChatRequest, channel: str | None) -> Grammar | None:
    parallel = body.parallel_tool_calls is not False
    key = "response_format" if body.response_format else "structured_outputs" if body.structured_outputs else "tools"
    try:
        grammar = service.constrain.chat(request, channel, body.structured_outputs, parallel)
    except (ValueError, RecursionError) as error:
        raise _unenforceable(key, error) from None
    if grammar is not None and request.messages[-1].get("partial") is True and channel == "response":
        raise bad(key, "output that a partial message has begun cannot be constrained")
    return grammar


def _text_grammar(service: Service, body: CompletionBody) -> Grammar | None:
    try:
        return service.constrain.text(body.structured_outputs)
    except (ValueError, RecursionError) as error:
        raise _unenforceable("structured_outputs", error) from None


def _unenforceable(key: str, error: Exception) -> ApiError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
    return bad(key, reason[:1].lower() + reason[1:])


def _prompts(service: Service, prompt: str | list[int] | list[str | list[int]]) -> list[tuple[int, ...]]:
    many = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [tuple(service.tokenizer.encode(one) if isinstance(one, str) else one) for one in many]  # type: ignore[arg-type]
    for one in ids:
        if any(token >= service.vocab_size for token in one):
            raise bad("prompt", f"holds an id outside the vocabulary of {service.vocab_size}")
    return [one or (service.tokenizer.bos,) for one in ids]


def _stops(body: SamplingFields) -> Sequence[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or ()


def _sampling(
    service: Service,
    body: SamplingFields,
    length: int,
    limit: int | None,
    scores: int | None,
    grammar: Grammar | None,
) -> Sampling:
    options, room = service.options, service.context - length
    if options.strict_vendor:
        refuse_own_sampling(body)
    if room < 1:
        raise bad(
            "messages" if isinstance(body, ChatBody) else "prompt",
            f"the prompt is {length} tokens long and the context holds {service.context}",
            "context_length_exceeded",
        )
    ignore = bool(body.ignore_eos)
    ends = () if ignore else (service.tokenizer.eos, service.tokenizer.end_of_msg)
    return Sampling(
        temperature=options.temperature if body.temperature is None else body.temperature,
        top_p=options.top_p if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        seed=body.seed,
        logit_bias=_bias(service, body.logit_bias or {}),
        logprobs=scores,
        max_tokens=min(_first(limit, options.max_tokens, room), room),
        stop_ids=frozenset((*ends, *(body.stop_token_ids or ()))),
        ignore_eos=ignore,
        grammar=grammar,
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _bias(service: Service, given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not key.isascii() or not key.isdecimal() or int(key) >= service.vocab_size:
            raise bad("logit_bias", f"{key!r} is no id of this vocabulary of {service.vocab_size}")
    return {int(key): bias for key, bias in given.items()}


# What the hosted API's own verifier takes as its defaults; anything else it refuses.
_VENDOR = {
    "temperature": (None, 0, 0.6, 1),
    "top_p": (None, 0.95),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "n": (None, 1),
}


def refuse_own_sampling(body: SamplingFields) -> None:
    """--strict-vendor: the sampling parameters that the hosted API fixes."""
    for key, allowed in _VENDOR.items():
        if getattr(body, key) not in allowed:
            raise bad(key, f"is fixed by this model, at {' or '.join(str(value) for value in allowed[1:])}")


def _job(
    service: Service,
    body: SamplingFields,
    kind: str,
    prompts: list[tuple[int, ...]],
    sampling: Sampling,
    turns: tuple[int, ...],
) -> Job:
    choices = body.n or 1
    if choices > service.options.max_choices:
        raise bad("n", f"must be at most {service.options.max_choices}")
    id = f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}"
    # a seed fixes each choice, and no two choices alike
    seed = secrets.randbits(62) if body.seed is None else body.seed
    priority = "batch" if body.service_tier == "flex" else "interactive"
    salt = (body.cache_salt or "").encode("utf-8", "replace")
    requests = [
        Request(f"{id}-{n}", prompts[n // choices], replace(sampling, seed=(seed + n) % 2**63), priority, salt, turns)
        for n in range(len(prompts) * choices)
    ]
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return Job(
        id,
        kind,
        requests,
        [],
        sum(map(len, prompts)),
        choices,
        stream=bool(body.stream),
        include_usage=usage,
        session=body.prompt_cache_key or body.user,
        prompts=prompts if body.return_token_ids else None,
    )


def unavailable(service: Service, sentence: str, status: int, code: str) -> ApiError:
    """429 or 503, with the time to come back at."""
    return ApiError(status, sentence, code=code, headers={"retry-after": str(service.worker.retry_after())})
