"""What a conversation's messages say, before any markup: tool calls, the order of their results, content parts."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from perilune.chat.request import Json
from perilune.chat.segments import ChatError


class Call(NamedTuple):
    """One past tool call: its opaque id, its function's name and the arguments as they came."""

    id: str | None
    name: str
    arguments: Any


def read_calls(turn: Json, path: str) -> list[Call]:
    """The tool calls of an assistant message."""
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatError(f"{path}.tool_calls", "must be an array")
    return [_read_call(call, f"{path}.tool_calls[{n}]") for n, call in enumerate(calls)]


def _read_call(call: Any, path: str) -> Call:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(f"{path}.function.name", "must be a string")
    return Call(_opaque(call.get("id")), function["name"], function.get("arguments"))


def read_arguments(call: Call, path: str) -> Json | str:
    """The arguments as an object, or the raw string where they are not JSON."""
    given = {} if call.arguments is None else call.arguments
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except RecursionError:
            raise ChatError(path, "is nested too deeply") from None
        except ValueError:
            return call.arguments
    if not isinstance(given, dict):
        raise ChatError(path, "must be a JSON object")
    return given


def in_call_order(messages: Sequence[Json]) -> list[tuple[str, Json]]:
    """(path, message) pairs with every run of tool results moved into the order of the calls that it answers."""
    ordered: list[tuple[str, Json]] = []
    calls: list[Call] = []
    numbered = [(f"messages[{n}]", turn) for n, turn in enumerate(messages)]
    for is_results, group in groupby(numbered, key=lambda item: item[1]["role"] == "tool"):
        run = list(group)
        ordered += _sorted_results(run, calls) if is_results else run
        for path, turn in run:
            calls = read_calls(turn, path) if turn["role"] == "assistant" else calls
    return ordered


def _sorted_results(run: list[tuple[str, Json]], calls: list[Call]) -> list[tuple[str, Json]]:
    """A run is moved only if every result finds its call; the call's name then beats a name stated in the result."""
    places: dict[str | None, int] = {}
    for place, call in enumerate(calls):
        places.setdefault(call.id, place)
    places.pop(None, None)
    answers = [_opaque(turn.get("tool_call_id", turn.get("id"))) for _, turn in run]
    if not all(answer in places for answer in answers):
        return run
    named = [
        (places[answer], (path, {**turn, "tool": calls[places[answer]].name}))
        for answer, (path, turn) in zip(answers, run)
    ]
    return [item for _, item in sorted(named, key=lambda placed: placed[0])]


def _opaque(identity: Any) -> str | None:
    return None if identity is None else str(identity)


def content_parts(content: Any, path: str) -> Iterator[str | Json]:
    """The parts of a message's content: strings, and image objects as they came."""
    if content is None or isinstance(content, str):
        yield content or ""
    elif not isinstance(content, list):
        raise ChatError(f"{path}.content", "must be a string or an array of parts")
    else:
        for n, part in enumerate(content):
            yield _part(part, f"{path}.content[{n}]")


def _part(part: Any, path: str) -> str | Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image", "image_url"):
        return part
    if kind != "text":
        raise ChatError(f"{path}.type", "must be text or image_url")
    if not isinstance(part.get("text"), str):
        raise ChatError(f"{path}.text", "must be a string")
    return part["text"]


def read_reasoning(turn: Json, path: str) -> str:
    """An assistant message's reasoning; blank reasoning counts as none."""
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise ChatError(f"{path}.reasoning_content", "must be a string")
    return reasoning if reasoning.strip() else ""
