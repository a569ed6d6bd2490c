"""One request through the router: place it, wait for its budget, send it on, and try the secondary while it still can.

A request may be sent again as long as the client has seen nothing of an answer. So the first events of a stream, which
only open the message, are kept back until one that says something follows.
"""

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from perilune.serve.http.errors import UNPARSED, ApiError
from perilune.serve.router.admission import Class, Cost, Refused
from perilune.serve.router.placement import placed, session_of
from perilune.serve.router.policy import Policy
from perilune.serve.router.worker import Upstream

log = logging.getLogger("perilune.route")
_FORWARDED = ("authorization", "content-type", "accept", "x-request-id", "x-session-id")
_RETURNED = ("content-type", "cache-control", "retry-after")
_RETRIED = (429, 500, 502, 503, 504)  # of the primary's answers: nothing was shown yet, the secondary may do better
_MOST_OUTPUT = 1 << 31
_OUTPUT = 512  # tokens of output where a request names no limit


@dataclass(frozen=True)
class Errand:
    """A request to be sent on, and what is known about it."""

    path: str
    body: bytes
    headers: dict[str, str]
    session: str
    prompt: float  # tokens, estimated
    output: float
    batch: bool

    @classmethod
    def of(cls, path: str, body: bytes, headers: Mapping[str, str], cost: Cost) -> "Errand":
        """Raises ApiError for what is not a JSON object."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            raise ApiError(400, UNPARSED) from None
        if not isinstance(asked, dict):
            raise ApiError(400, UNPARSED)
        kept = {key: headers[key] for key in _FORWARDED if key in headers}
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or _OUTPUT
        limit = min(max(limit, 0), _MOST_OUTPUT) if isinstance(limit, int) else _OUTPUT  # the worker refuses the rest
        output = limit * _count(asked.get("n"))
        batch = asked.get("service_tier") == "flex"
        return cls(path, body, kept, session_of(asked, headers), _tokens(asked, cost), output, batch)


def _count(n: Any) -> int:
    return n if isinstance(n, int) and 1 <= n <= 128 else 1


def _tokens(asked: Mapping[str, Any], cost: Cost) -> float:
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    text = [prompt, asked.get("messages"), asked.get("tools")]
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")) / cost.bytes_per_token


class Router:
    """Policy over `workers`. wait: seconds a request may wait for its budget."""

    def __init__(self, workers: Sequence[Upstream], cost: Cost, wait: float) -> None:
        self.workers, self.policy, self.wait = {worker.url: worker for worker in workers}, Policy(cost), wait
        self.failovers = 0

    async def send(self, errand: Errand) -> Response:
        """The answer of the primary, or of the secondary. Raises ApiError."""
        candidates = [self.workers[url] for url in placed(errand.session, list(self.workers))]
        usable = [worker for worker in candidates if worker.usable]
        if not usable:
            raise ApiError(503, "Neither of this session's workers is up.", code="unavailable", headers=_LATER)
        answer: Response | None = None
        for worker in self.policy.roomiest_first(errand, usable):
            try:
                answer = await self._try(errand, worker)
            except httpx.HTTPError as error:
                log.warning("%s: %s: %s", worker.url, type(error).__name__, error)
                worker.healthy = isinstance(error, httpx.ReadTimeout)
                self.failovers += 1
                continue
            if answer.status_code not in _RETRIED:
                break
        if answer is None:
            raise ApiError(
                502, "The session's workers failed before the first token.", code="unavailable", headers=_LATER
            )
        return answer

    async def _try(self, errand: Errand, worker: Upstream) -> Response:
        kind, cost = self.policy.price(errand, worker)
        try:
            charge = await worker.budget.take(kind.name, cost, self.wait)
        except Refused as error:
            later = {"retry-after": str(error.retry_after)}
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=later).response()
        hold = _Hold(worker, kind.name, charge)
        try:
            return await self._forward(errand, worker, kind, hold)
        except BaseException:
            await hold.close()
            raise

    async def _forward(self, errand: Errand, worker: Upstream, kind: Class, hold: "_Hold") -> Response:
        told = {**errand.headers, "x-request-class": kind.name}
        headers = {key.encode(): value.encode("latin-1", "replace") for key, value in told.items()}  # as they came
        request = worker.client.build_request("POST", errand.path, content=errand.body, headers=headers)
        upstream = await worker.client.send(request, stream=True)
        hold.upstream = upstream
        kept = {
            key: upstream.headers[key]
            for key in ("content-type", "cache-control", "retry-after")
            if key in upstream.headers
        }
        if upstream.status_code != 200 or not kept.get("content-type", "").startswith("text/event-stream"):
            content = await upstream.aread()
            await hold.close()
            if upstream.status_code == 200:
                worker.sessions[errand.session] = errand.prompt
            return Response(content, upstream.status_code, headers=kept)
        pieces = upstream.aiter_raw()
        opening = await until_spoken(pieces)
        worker.sessions[errand.session] = errand.prompt
        return Relay(opening, pieces, hold, kept)


_LATER = {"retry-after": "5"}


class _Hold:
    """A started request's charge and connection, given back once however it ends."""

    def __init__(self, worker: Upstream, kind: str, charge: float) -> None:
        self.worker = worker
        self.upstream: httpx.Response | None = None
        self._kind, self._charge, self._open = kind, charge, True
        worker.requests += 1

    def release(self) -> None:
        if self._open:
            self._open = False
            self.worker.requests -= 1
            self.worker.budget.give_back(self._kind, self._charge)

    async def close(self) -> None:
        self.release()
        if self.upstream is not None:
            await self.upstream.aclose()


async def until_spoken(pieces: AsyncIterator[bytes]) -> bytes:
    """The stream up to the first event that says something. Raises httpx.HTTPError where it breaks before."""
    opening = b""
    async for piece in pieces:
        opening += piece
        *events, _ = opening.split(b"\n\n")
        if any(not _only_opens(event) for event in events):
            return opening
    return opening


def _only_opens(event: bytes) -> bool:
    try:
        choices = json.loads(event.removeprefix(b"data: "))["choices"]
        return all(choice["delta"] == {"role": "assistant", "content": ""} for choice in choices)
    except (ValueError, KeyError, TypeError):
        return False


class Relay(StreamingResponse):
    """A stream passed on. Once it has begun, a worker's failure is told in the stream: nobody may say it twice."""

    def __init__(self, opening: bytes, rest: AsyncIterator[bytes], hold: _Hold, headers: Mapping[str, str]) -> None:
        super().__init__(self._pass(opening, rest), headers=headers)
        self._parts, self._hold = (opening, rest), hold

    async def _pass(self, opening: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield opening
        try:
            async for piece in rest:
                yield piece
        except httpx.HTTPError:
            self._hold.worker.healthy = False
            error = ApiError(502, "The worker failed in the middle of this answer.", code="unavailable")
            yield b"data: " + json.dumps(error.body).encode() + b"\n\n"

    async def stream_response(self, send: Send) -> None:
        try:
            async with aclosing(self._pass(*self._parts)) as pieces:  # type: ignore[type-var]
                self.body_iterator = pieces
                await super().stream_response(send)
        finally:
            await self._hold.close()
