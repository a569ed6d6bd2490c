"""Running a Job: one JSON answer, or server-sent events; either way a client that goes away frees its requests."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from perilune import __version__
from perilune.serve.http.errors import ApiError, Reply, bad
from perilune.serve.http.schema import Json
from perilune.serve.http.service import Job, Service, unavailable
from perilune.serve.request import Delta, Full, Usage
from perilune.serve.worker import Stream, Unavailable

T = TypeVar("T")


async def answer(service: Service, job: Job, http: HttpRequest) -> Response:
    """The response to `job`. What the engine refuses is raised here, before the first byte."""
    http.state.job = job
    run = _Run(service, job)
    try:
        await until_gone(http, run.admit())
        if job.stream:
            return EventStream(run)
        return Reply(await until_gone(http, run.collect()))
    except BaseException:
        run.stream.close()
        raise


async def until_gone(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up. Raises ApiError 499 then (nobody reads it)."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client closed the connection.")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. The run is closed however the sending ends, not when a generator happens to be collected."""

    def __init__(self, run: "_Run") -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(run.events(), media_type="text/event-stream", headers=headers)
        self._run = run

    async def stream_response(self, send: Send) -> None:
        try:
            async with aclosing(self._run.events()) as events:
                self.body_iterator = events
                await super().stream_response(send)
        finally:
            self._run.stream.close()


class _Run:
    """A job on the engine, with its clock and its bill."""

    def __init__(self, service: Service, job: Job) -> None:
        self.service, self.job = service, job
        self.stream = Stream(service.worker)
        self.created = int(time.time())
        self._begun = time.perf_counter()
        self._first: dict[str, float] = {}
        self._usage: dict[str, Usage] = {}

    async def admit(self) -> None:
        for request in self.job.requests:
            try:
                await self.stream.add(request)
            except Full as error:
                raise unavailable(self.service, str(error), 429, "rate_limit_exceeded") from None
            except Unavailable as error:
                raise unavailable(self.service, str(error), 503, "unavailable") from None
            except ValueError as error:
                raise bad(
                    "messages" if self.job.kind.startswith("chat") else "prompt", str(error).rstrip(".")
                ) from None

    async def pieces(self) -> AsyncIterator[tuple[int, Json]]:
        """(choice, piece) as they come."""
        async for delta in self.stream:
            if delta.finish == "error":
                raise ApiError(500, delta.message or "The engine gave this request up.")
            choice = self.job.choice(delta.id)
            self._clock(delta)
            for piece in choice.feed(delta):
                yield choice.index, piece
            if choice.finish is not None:
                self.stream.cancel(delta.id)
                self._finish(delta.id, choice.finish, len(choice.ids))

    async def collect(self) -> Json:
        """The whole answer."""
        found: dict[int, list[Json]] = {choice.index: [] for choice in self.job.choices}
        async for index, piece in self.pieces():
            found[index].append(piece)
        choices = [{"index": choice.index, **choice.whole(found[choice.index])} for choice in self.job.choices]
        for shown, choice in zip(choices, self.job.choices):
            if self.job.prompts is not None:
                shown["token_ids"] = choice.ids
        return {**self._head(self.job.kind), "choices": choices, "usage": self._bill(), **self._prompt_ids()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, ending with [DONE]; a failure on the way is an event too."""
        chat = self.job.kind == "chat.completion"
        head = self._head("chat.completion.chunk" if chat else self.job.kind)
        told = {choice.index: 0 for choice in self.job.choices}
        try:
            if chat:
                for choice in self.job.choices:
                    delta = {"role": "assistant", "content": ""}
                    yield _event({**head, "choices": [{"index": choice.index, "delta": delta, "finish_reason": None}]})
            async for index, piece in self.pieces():
                shown = {"index": index, **piece}
                if self.job.prompts is not None:
                    ids = self.job.choices[index].ids
                    shown["token_ids"], told[index] = ids[told[index] :], len(ids)
                yield _event({**head, "choices": [shown]})
            if self.job.include_usage:
                yield _event({**head, "choices": [], "usage": self._bill(), **self._prompt_ids()})
        except ApiError as error:
            yield _event(error.body)
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> Json:
        name = self.service.options.name
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.created,
            "model": name,
            "system_fingerprint": f"perilune-{__version__}",
        }

    def _prompt_ids(self) -> Json:
        return {} if self.job.prompts is None else {"prompt_token_ids": [list(ids) for ids in self.job.prompts]}

    def _clock(self, delta: Delta) -> None:
        self._usage[delta.id] = delta.usage
        if delta.tokens and delta.id not in self._first:
            self._first[delta.id] = time.perf_counter()
            self.service.metrics.ttft.observe(self._first[delta.id] - self._begun)

    def _finish(self, id: str, reason: str, tokens: int) -> None:
        now, metrics = time.perf_counter(), self.service.metrics
        metrics.finished.labels(reason).inc()
        metrics.total.observe(now - self._begun)
        if tokens > 1 and id in self._first:
            metrics.tpot.observe((now - self._first[id]) / (tokens - 1))

    def _bill(self) -> Json:
        """Tokens as OpenAI counts them; cached_tokens twice, as OpenAI and as Moonshot name it."""
        job = self.job
        written = sum(len(choice.ids) for choice in job.choices)
        # a prompt is billed once, so what it found cached is what its first choice found
        firsts = (self._usage.get(request.id) for request in job.requests[:: job.per_prompt])
        cached = min(sum(usage.cached_tokens for usage in firsts if usage), job.prompt_tokens)
        bill: dict[str, Any] = {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": job.prompt_tokens + written,
            "cached_tokens": cached,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if job.kind == "chat.completion":
            thought = sum(choice.parser.reasoning_tokens for choice in job.choices)  # type: ignore[attr-defined]
            bill["completion_tokens_details"] = {"reasoning_tokens": thought}
        return bill


def _event(body: Json) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
