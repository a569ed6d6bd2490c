"""Refusals in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, the message one clear sentence."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

UNPARSED = "The body must be a JSON object that parses."
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Becomes a response of `status`. param: the offending key; code: OpenAI's word where it has one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> "Reply":
        return Reply(self.body, self.status, headers=self.headers)


class Reply(Response):
    """JSON. A lone surrogate, which a client may send and we may quote, has no UTF-8: it becomes a question mark."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def bad(param: str, problem: str, code: str | None = None) -> ApiError:
    """400: `param` is what `problem` says."""
    return ApiError(400, f"{param}: {problem}.", param=param, code=code)


# Keys that take several kinds of value: pydantic would report on each kind it tried.
_KINDS = {
    "stop": "must be a string, or at most 16 of them, none empty or longer than 1024 characters",
    "prompt": "must be text, token ids, or an array of 1 to 64 of either",
    "tool_choice": "must be auto, none, required or an object that names a function",
    "thinking": "must be an object or a boolean",
}


def of_validation(error: RequestValidationError) -> ApiError:
    """The first thing pydantic found, as one sentence."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" or not place:
        return ApiError(400, UNPARSED)
    key = str(place[0])
    if key in _KINDS and first["type"] != "missing":
        return bad(key, _KINDS[key])
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    return bad(param, first["msg"].removeprefix("Input ").removeprefix("Value error, "))
