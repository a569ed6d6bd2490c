"""The Connect protocol, version 1, JSON codec: unary calls are plain JSON, streams are envelopes {flags, length,
JSON}."""

import json
import struct
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from perilune.sandbox.errors import GuestError, InvalidRequest, SandboxError

END_STREAM = 2
MOST = 4 << 20  # bytes of one message
_STATUS = {
    "invalid_argument": 400, "not_found": 404, "already_exists": 409, "permission_denied": 403, "unauthenticated": 401,
    "failed_precondition": 400, "resource_exhausted": 429, "unavailable": 503, "deadline_exceeded": 504, "internal":
    500, "unknown": 500, "data_loss": 500,
}  # fmt: skip
_ERRNO = {
    1: "permission_denied", 2: "not_found", 13: "permission_denied", 17: "already_exists", 20: "invalid_argument",
    21: "invalid_argument", 22: "invalid_argument", 28: "resource_exhausted", 39: "failed_precondition",
}  # fmt: skip


def error(failure: BaseException) -> dict[str, str]:
    """An exception as a Connect error."""
    if isinstance(failure, GuestError):
        return {"code": _ERRNO.get(failure.errno, "unknown"), "message": str(failure)}
    code = failure.code if isinstance(failure, SandboxError) else "internal"
    return {"code": code, "message": str(failure)}


def limit(headers: Mapping[str, str]) -> float | None:
    """Seconds that a call may take, from `Connect-Timeout-Ms`; None for any time."""
    text = headers.get("Connect-Timeout-Ms", "")
    try:
        seconds = float(text or 0) / 1000
    except ValueError:
        raise InvalidRequest(f"Connect-Timeout-Ms must be a number, not {text!r}") from None
    return seconds if seconds > 0 else None


def refusal(failure: BaseException) -> web.Response:
    """A failed unary call."""
    body = error(failure)
    return web.json_response(body, status=_STATUS[body["code"]])


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    """One message of a stream."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def parse(data: bytes) -> dict[str, Any]:
    """The one message of a server-streaming request; InvalidRequest for anything else."""
    if len(data) < 5:
        raise InvalidRequest("the stream's first message is shorter than its envelope")
    flags, length = struct.unpack_from(">BI", data)
    if flags & 1:
        raise InvalidRequest("compressed messages are not supported")
    if length > MOST or len(data) - 5 < length:
        raise InvalidRequest(f"the envelope announces {length} bytes and {len(data) - 5} came")
    return message(data[5 : 5 + length])


def messages(data: bytes) -> list[dict[str, Any]]:
    """All messages of a client-streaming request."""
    found = []
    while data:
        found.append(parse(data))
        data = data[5 + struct.unpack_from(">BI", data)[1] :]
    return found


def message(data: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise InvalidRequest("the message is not JSON") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the message is not a JSON object")
    return body
