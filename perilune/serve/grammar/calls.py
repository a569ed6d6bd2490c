"""What an assistant may write in K3's format when it must call tools or answer in JSON (report appendix F).

    output = reasoning  close think  open response … close response  [open tools call+ close tools]  close message

The reasoning stays free. A tool's arguments are typed elements, one a property; a tool whose parameters are no plain
object takes one block of raw JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perilune.chat.segments import CLOSE, OPEN, SEP, escape
from perilune.serve.grammar.expression import EMPTY, NOTHING, Arena
from perilune.serve.grammar.schema import TYPES, JsonSchema
from perilune.serve.grammar.text import plain
from perilune.serve.grammar.vocabulary import Language, Vocabulary

MOST_CALLS = 16
_FREE = {
    "properties",
    "required",
    "type",
    "additionalProperties",
    "title",
    "description",
    "$defs",
    "definitions",
    "$schema",
    "$id",
}


class Writer:
    """Expressions for the parts of a message."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.arena, self._controls = Arena(), vocabulary.controls
        self.free = self.arena.repeat(self.arena.symbols(range(256)))

    def control(self, name: str) -> int:
        return self.arena.symbols([self._controls[name]])

    def open(self, tag: str, **attributes: object) -> int:
        text = tag + "".join(f' {key}="{escape(str(value))}"' for key, value in attributes.items())
        return self.arena.sequence(self.control(OPEN), self.arena.text(text), self.control(SEP))

    def close(self, tag: str) -> int:
        return self.arena.sequence(self.control(CLOSE), self.arena.text(tag), self.control(SEP))

    def element(self, tag: str, body: int, **attributes: object) -> int:
        return self.arena.sequence(self.open(tag, **attributes), body, self.close(tag))

    def message(self, channel: str | None, response: int, tools: int) -> int:
        """What follows in an open assistant message whose prompt left `channel` open; `tools` may be the empty word."""
        answer = self.arena.sequence(response, self.close("response"), tools, self.close("message"))
        if channel == "response":
            return answer
        opened = self.arena.sequence(self.open("response"), answer)
        return self.arena.sequence(self.free, self.close("think"), opened) if channel == "think" else opened

    def call(self, name: str, parameters: Any, index: int) -> int:
        return self.element("call", self.arguments(parameters), tool=name, index=index)

    def arguments(self, parameters: Any) -> int:
        schema = JsonSchema(self.arena, {} if parameters is None else parameters)
        document = schema.document
        if document in ({}, True):
            document = {"type": "object"}
        if not isinstance(document, Mapping) or not _is_plain_object(document):
            return self.element("json", schema.value(document), type="object")
        required = set(document.get("required", []))
        properties = dict.fromkeys(required, True) | dict(document.get("properties", {}))
        parts = [self.argument(schema, key, part) for key, part in properties.items()]
        return self.arena.sequence(
            *(part if key in required else self.arena.optional(part) for key, part in zip(properties, parts))
        )

    def argument(self, schema: JsonSchema, key: str, part: Any) -> int:
        kinds: dict[str, int] = {}
        for kind, body in schema.kinds(part, plain).items():
            kind = "number" if kind == "integer" else kind
            kinds[kind] = self.arena.either(kinds.get(kind, NOTHING), body)
        return self.arena.either(
            *(self.element("argument", kinds[kind], key=key, type=kind) for kind in TYPES if kind in kinds)
        )


def _is_plain_object(document: Mapping[str, Any]) -> bool:
    closed = document.get("additionalProperties") in (None, False)
    return document.get("type") == "object" and closed and set(document) <= _FREE


def tool_calls(
    tools: Sequence[Mapping[str, Any]],
    vocabulary: Vocabulary,
    *,
    channel: str | None = "think",
    parallel: bool = True,
    forced: bool = True,
) -> Language:
    """Calls of the declared functions after free reasoning and a free response: at least one if `forced`, at most one
    unless `parallel`.

    tools: OpenAI tool objects. ValueError names the function whose parameters cannot be held to.
    """
    writer = Writer(vocabulary)
    body = _tools(writer, tools, parallel)
    body = body if forced else writer.arena.optional(body)
    return Language(writer.arena, writer.message(channel, writer.free, body), vocabulary)


def _tools(writer: Writer, tools: Sequence[Mapping[str, Any]], parallel: bool) -> int:
    """The tools channel with one call or more."""
    calls = NOTHING
    for index in range(MOST_CALLS if parallel else 1, 0, -1):
        one = writer.arena.either(*(_named_call(writer, tool["function"], index) for tool in tools))
        calls = writer.arena.sequence(one, writer.arena.optional(calls))
    return writer.element("tools", calls)


def _named_call(writer: Writer, function: Mapping[str, Any], index: int) -> int:
    try:
        return writer.call(function["name"], function.get("parameters"), index)
    except ValueError as error:
        raise ValueError(f"The tool {function['name']!r} cannot be enforced: {error}") from None


def answer(
    body: Callable[[Arena], int],
    vocabulary: Vocabulary,
    *,
    channel: str | None = "think",
    tools: Sequence[Mapping[str, Any]] = (),
    parallel: bool = True,
) -> Language:
    """A message whose response is of the language that `body` makes, after free reasoning; or, where `tools` may be
    called, one that calls them after a free response."""
    writer = Writer(vocabulary)
    message = writer.message(channel, body(writer.arena), EMPTY)
    if tools:
        calls = writer.message(channel, writer.free, _tools(writer, tools, parallel))
        message = writer.arena.either(message, calls)
    return Language(writer.arena, message, vocabulary)
