"""What every request passes first: an id, the key, the size limit, one line in the log."""

import hmac
import logging
import time
import uuid

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.serve.http.errors import ApiError
from perilune.serve.http.options import ServeOptions

log = logging.getLogger("perilune.serve")
_OPEN = ("/health", "/metrics", "/live", "/", "/page.css", "/page.js", "/favicon.ico")
_KNOWN = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/v1/workers", "/v1/drain", *_OPEN)


class Gate:
    """Middleware of plain ASGI, so that a client's disconnect still reaches the handlers."""

    def __init__(self, app: ASGIApp, options: ServeOptions, requests: Counter) -> None:
        self._app, self._options, self._requests = app, options, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, begun, status = Headers(scope=scope), time.perf_counter(), 0
        id = _clean(headers.get("x-request-id")) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = id

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        try:
            self._admit(scope["path"], headers)
            await self._app(scope, await self._whole(receive), answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        finally:
            path = scope["path"] if scope["path"] in _KNOWN else "other"
            self._requests.labels(path, status or 499).inc()
            _write(scope, id, status, time.perf_counter() - begun)
        return None

    def _admit(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._options.max_body:
            raise self._too_large()
        if not self._options.api_keys or path in _OPEN:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
        if not any(hmac.compare_digest(given, known.encode()) for known in self._options.api_keys):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def _whole(self, receive: Receive) -> Receive:
        """Takes the body in, at most max_body of it, and plays it back; behind it only the disconnect is left."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "The client closed the connection.")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._options.max_body:
                raise self._too_large()
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._options.max_body} bytes.", code="request_too_large")


def _clean(id: str | None) -> str | None:
    return "".join(c for c in id if c.isascii() and c.isprintable())[:128] if id else None


def _write(scope: Scope, id: str, status: int, seconds: float) -> None:
    """One line: enough to find a client's request by its id, nothing of what it said."""
    job = scope["state"].get("job")
    words = "" if job is None else f" {job.id} prompt={job.prompt_tokens} session={job.session or '-'!r}"
    log.info("%s %s %s %d %.0fms%s", id, scope["method"], scope["path"], status or 499, seconds * 1e3, words)
