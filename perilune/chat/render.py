"""Messages -> segments: the prompt that the model reads (report appendix F).

global options   tool-declare, thinking-effort       they change rarely, and a change spoils the cached prefix anyway
input            system, user, assistant, tool, and tools loaded on the way
one-shot options tool-choice, response-format        last, so that changing them keeps the history's cache
prefix           an assistant message opened in the think channel, or in response when thinking is off
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.chat.request import ChatRequest, Json
from perilune.chat.segments import (
    END,
    MEDIA_PAD,
    ChatError,
    Segment,
    close_tag,
    element,
    encode,
    media_segments,
    message,
    open_tag,
)
from perilune.chat.turns import Call, content_parts, in_call_order, read_arguments, read_calls, read_reasoning
from perilune.tokenizer import Tokenizer

_DECLARE = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_DECLARE_MORE = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. `channel` is the channel it leaves open for the model (None: it ends with a whole message)."""

    segments: tuple[Segment, ...]
    channel: str | None

    @property
    def text(self) -> str:
        """The prompt as one string, markers spelled out: for people, never to be encoded."""
        return "".join(segment.text for segment in self.segments)

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids, segment by segment."""
        return encode(self.segments, tokenizer)


def pending_ids(prompt: Prompt, tokenizer: Tokenizer) -> int:
    """Ids of the channel tag a prompt leaves open. `usage.prompt_tokens` of the hosted API does not count them."""
    return len(encode(open_tag(prompt.channel), tokenizer)) if prompt.channel else 0


def render(request: ChatRequest, image_prompts: Sequence[str] | None = None) -> Prompt:
    """Renders a request.

    image_prompts: one string per image part, in the order of `image_parts` (see `segments.image_prompt`); None puts a
    single pad for each, which the model's own placeholder expansion takes.
    Raises ChatError, naming the message, where the request cannot be rendered.
    """
    parts = len(image_parts(request))
    if image_prompts is not None and len(image_prompts) != parts:
        raise ChatError("image_prompts", f"{len(image_prompts)} given for {parts} image parts")
    images = iter([MEDIA_PAD] * parts if image_prompts is None else image_prompts)
    *history, last = in_call_order(request.messages)
    prefill = last if last[1].get("partial") is True else None
    segments = [*_global_options(request), *_input(history if prefill else [*history, last], request.thinking, images)]
    segments += _one_shot_options(request)
    channel, prefix = _prefix(request, prefill, images)
    return Prompt((*segments, *prefix), channel)


def image_parts(request: ChatRequest) -> list[Json]:
    """The image parts of a request in the order they are rendered (tool results may move)."""
    return [
        part
        for path, turn in in_call_order(request.messages)
        if not _loads_tools(turn)
        for part in content_parts(turn.get("content"), path)
        if isinstance(part, dict)
    ]


def _global_options(request: ChatRequest) -> Iterator[Segment]:
    if request.tools:
        yield from _option("tool-declare", _DECLARE + _fenced(request.tools, "tools"))
    if request.thinking:
        yield from _option("thinking-effort", _EFFORT.format(request.effort))


def _one_shot_options(request: ChatRequest) -> Iterator[Segment]:
    # a named function adds nothing here: the hosted API's prompt has no words for it, the sampler enforces it
    if request.tool_choice in _CHOICE:
        yield from _option("tool-choice", _CHOICE[request.tool_choice])
    if request.response_format != "text":
        body = _FORMAT.format(request.response_format)
        if request.schema is not None:
            body += _SCHEMA + _fenced(request.schema, "response_format.json_schema.schema")
        yield from _option("response-format", body)


def _option(kind: str, body: str) -> Iterator[Segment]:
    return message([Segment(body)], role="system", type=kind)


def _fenced(schema: Any, path: str) -> str:
    """Compact JSON with keys sorted at every depth, so that equal declarations share a cached prefix."""
    return f"```json\n{_dump(schema, path, separators=(',', ':'), sort_keys=True)}\n```"


def _dump(value: Any, path: str, **style: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **style)
    except RecursionError:
        raise ChatError(path, "is nested too deeply") from None


def _input(turns: Iterable[tuple[str, Json]], thinking: bool, images: Iterator[str]) -> Iterator[Segment]:
    calls: list[Call] = []
    answered = 0
    for path, turn in turns:
        if turn["role"] == "assistant":
            calls, answered = read_calls(turn, path), 0
            yield from _assistant(turn, path, thinking, images)
        elif turn["role"] == "tool":
            # The index counts results since the assistant message, as the release does: where an earlier call has no
            # result it differs from the call's own index (vLLM's Rust renderer uses that one).
            answered += 1
            name = _result_name(turn, path, calls, answered)
            yield from message(_content(turn, path, images), role="tool", tool=name, index=answered)
        elif _loads_tools(turn):
            yield from _option("tool-declare", _DECLARE_MORE + _fenced(turn["tools"], f"{path}.tools"))
        else:
            role = "user" if turn["role"] == "user" else "system"
            yield from message(_content(turn, path, images), role=role, **_name(turn, path))


def _loads_tools(turn: Json) -> bool:
    return turn["role"] in ("system", "developer") and bool(turn.get("tools"))


def _name(turn: Json, path: str) -> dict[str, str]:
    name = turn.get("name") or ""
    if not isinstance(name, str):
        raise ChatError(f"{path}.name", "must be a string")
    return {"name": name} if name else {}


def _result_name(turn: Json, path: str, calls: list[Call], answered: int) -> str:
    stated = turn.get("tool", turn.get("name"))
    if stated is None and answered <= len(calls):
        return calls[answered - 1].name
    if not isinstance(stated, str):
        raise ChatError(path, "no preceding tool call answers to this result, and it names no tool")
    return stated


def _content(turn: Json, path: str, images: Iterator[str]) -> Iterator[Segment]:
    for part in content_parts(turn.get("content"), path):
        yield from [Segment(part)] if isinstance(part, str) else media_segments(next(images))


def _assistant(turn: Json, path: str, thinking: bool, images: Iterator[str]) -> Iterator[Segment]:
    """In thinking mode the think channel is always there, so that turns look alike; without, it is left out."""
    yield from open_tag("message", role="assistant", **_name(turn, path))
    if thinking:
        yield from open_tag("think")
        yield from _written([Segment(read_reasoning(turn, path)), *close_tag("think"), *open_tag("response")])
    else:
        yield from open_tag("response")
    yield from _written([*_content(turn, path, images), *close_tag("response")])
    calls = read_calls(turn, path)
    if calls:
        yield from _written(open_tag("tools"))
        for n, call in enumerate(calls):
            yield from _call(call, n + 1, f"{path}.tool_calls[{n}]")
        yield from _written(close_tag("tools"))
    yield from _written([*close_tag("message"), Segment(END, control=True)])


def _written(segments: Iterable[Segment]) -> Iterator[Segment]:
    return (segment._replace(target=True) for segment in segments)


def _prefix(
    request: ChatRequest, prefill: tuple[str, Json] | None, images: Iterator[str]
) -> tuple[str | None, list[Segment]]:
    """The open assistant message at the end, and its channel: empty, or holding what a `partial` message began."""
    if not request.generate and prefill is None:
        return None, []
    path, turn = prefill or ("", {"role": "assistant"})
    if turn["role"] != "assistant" or turn.get("tool_calls"):
        raise ChatError(f"{path}.partial", "needs an assistant message without tool_calls")
    begun = [*_content(turn, path, images)]
    # inferred: a partial message leaves open the last channel it has text for
    channel = "think" if request.thinking and not any(segment.text for segment in begun) else "response"
    prefix = [*open_tag("message", role="assistant", **_name(turn, path))]
    if request.thinking:
        prefix += [*open_tag("think"), Segment(read_reasoning(turn, path))]
    if channel == "response":
        prefix += [*(close_tag("think") if request.thinking else []), *open_tag("response"), *begun]
    return channel, prefix


def _call(call: Call, index: int, path: str) -> Iterator[Segment]:
    arguments = read_arguments(call, f"{path}.function.arguments")
    yield from _written(open_tag("call", tool=call.name, index=index))
    if isinstance(arguments, str):
        # the fallback block occurs in input only, so no loss is taken on it
        yield from element("json", [Segment(arguments)], type="object")
    else:
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _dump(value, f"{path}.function.arguments")
            yield from _written(element("argument", [Segment(text)], key=key, type=_type(value)))
    yield from _written(close_tag("call"))


def _type(value: Any) -> str:
    if isinstance(value, bool):  # before numbers: a bool is an int
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", dict: "object", list: "array", type(None): "null"}
    return kinds[type(value)]
