"""Token ids that the model writes -> reasoning, content and tool calls, as they come (report appendix F).

    output = reasoning  close think  [open response … close response]  [open tools call* close tools]  close message

The parser starts inside the channel that the prompt left open and forgives what models do: a channel opened without
closing the last one, missing closes at the end, calls outside the tools channel. Reasoning that is cut off is still
reasoning. Control ids never reach the text, whether or not tools were declared.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from perilune.chat.calls import CallWriter
from perilune.chat.lexer import Close, EndOfMessage, Lexeme, Lexer, Open, Text
from perilune.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the think channel."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the response channel."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; calls are numbered from 0 as they come."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end: "stop", "tool_calls", or whatever the engine said ("length", …)."""

    reason: str


Event = Reasoning | Content | CallStart | CallArguments | Finish

# Where text goes. "start": nothing seen yet; "gap": between think and response; "after": behind the answer.
_CHANNELS = ("think", "response", "tools")
_IN_CALL = ("call", "argument", "json")


class Parser:
    """`feed` ids as they are sampled, the terminator included, then `finish` once.

    How the ids are split between calls changes nothing, so the ids so far are all of the parser's state: to restore
    one, feed them to a new parser.
    """

    def __init__(self, tokenizer: Tokenizer, channel: str | None = "think") -> None:
        """`channel` is the one that the prompt left open (`Prompt.channel`)."""
        self._lexer = Lexer(tokenizer)
        self._place = channel or "start"
        self._begun = False
        self._call: CallWriter | None = None
        self._named = False  # a call without a name is read but not reported
        self._calls = 0
        self._blank: list[str] = []
        self._events: list[Event] = []
        self.reasoning_tokens = 0  # ids fed while in the think channel, its close included

    @property
    def ended(self) -> bool:
        """Whether the message was closed: nothing fed from here on counts."""
        return self._place == "ended"

    @property
    def channel(self) -> str | None:
        """The open channel: think, response, tools, or None between them."""
        place = "tools" if self._place in _IN_CALL else self._place
        return place if place in _CHANNELS else None

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """The events that these ids bring."""
        for token in ids:
            self.reasoning_tokens += self._place == "think"
            self._read(self._lexer.push(token))
        return self._take()

    def finish(self, reason: str | None = None) -> list[Event]:
        """Closes what is open. `reason` is the engine's; None means "stop" if the message was closed, else "length"."""
        self._read(self._lexer.close())
        reason = reason or ("stop" if self.ended else "length")
        self._end_call(cut=True)
        self._events.append(Finish("tool_calls" if reason == "stop" and self._calls else reason))
        return self._take()

    def _read(self, lexemes: list[Lexeme]) -> None:
        for lexeme in lexemes:
            if self.ended:
                return
            begun, self._begun = self._begun, True
            match lexeme:
                case Open("message") if not begun or self._place == "start":
                    pass  # the model repeats what the prompt had opened
                case Text(text):
                    self._text(text)
                case Open(tag, attributes):
                    self._open(tag, attributes)
                case Close(tag):
                    self._close(tag)
                case EndOfMessage():
                    self._end_message()

    def _text(self, text: str) -> None:
        match self._place:
            case "think":
                self._events.append(Reasoning(text))
            case "response":
                self._events.append(Content(text))
            case "start" | "gap":
                self._loose(text)
            case "argument" if self._call:
                self._arguments(self._call.text(text))
            case "json" if self._call:
                self._arguments(self._call.raw(text))
            # in tools, in a call or behind the answer no text belongs to anything

    def _loose(self, text: str) -> None:
        """Text before any channel: an answer without markup, unless it is only the blank before a tag."""
        self._blank.append(text)
        if not text.isspace():
            self._place = "response"
            self._events.append(Content("".join(self._blank)))
            self._blank.clear()

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        self._blank.clear()
        if tag == "message":
            self._end_message()  # unclosed, and the model goes on with somebody's next turn
        elif tag in _CHANNELS:
            self._end_call()
            self._place = tag
        elif tag == "call":
            self._end_call()
            self._start_call(attributes.get("tool"))
        elif tag in _IN_CALL and self._call is not None:
            self._arguments(self._call.close_argument())
            self._open_value(self._call, tag, attributes)

    def _start_call(self, name: str | None) -> None:
        self._place, self._call, self._named = "call", CallWriter(), bool(name)
        if name:
            self._events.append(CallStart(self._calls, name))

    def _open_value(self, call: CallWriter, tag: str, attributes: dict[str, str]) -> None:
        self._place = tag
        if tag == "argument":
            self._arguments(call.open_argument(attributes.get("key"), attributes.get("type", "string")))
        elif not call.open_json():
            self._place = "call"

    def _close(self, tag: str) -> None:
        if tag == "message":
            self._end_message()
        elif tag == self._place == "think":
            self._place = "gap"
        elif tag == self._place == "response":
            self._place = "after"
        elif tag == "tools" and (self._place == "tools" or self._call):
            self._end_call()
            self._place = "after"
        elif tag == "call" and self._call:
            self._end_call()
            self._place = "tools"
        elif tag == self._place and self._call:
            self._arguments(self._call.close_argument())
            self._place = "call"

    def _end_message(self) -> None:
        self._end_call()
        self._place = "ended"

    def _end_call(self, cut: bool = False) -> None:
        if self._call is None:
            return
        self._arguments(self._call.close(cut))
        self._calls += self._named
        self._call = None

    def _arguments(self, fragment: str) -> None:
        if fragment and self._named:
            self._events.append(CallArguments(self._calls, fragment))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return coalesce(events)


def coalesce(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind joined."""
    joined: list[Event] = []
    for _, run in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        first, *rest = run
        if rest and isinstance(first, Reasoning | Content | CallArguments):
            text = first.text + "".join(event.text for event in rest if isinstance(event, type(first)))
            first = replace(first, text=text)
        joined.append(first)
    return joined


@dataclass
class ToolCall:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str = ""


@dataclass
class Reply:
    """A whole assistant message; a channel that said nothing is None."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Reply":
        """The reply that all the events of a parser add up to."""
        reply = cls()
        for event in coalesce(events):
            reply._add(event)
        return reply

    def _add(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                self.reasoning = (self.reasoning or "") + text
            case Content(text):
                self.content = (self.content or "") + text
            case CallStart(_, name):
                self.tool_calls.append(ToolCall(name))
            case CallArguments(index, text):
                self.tool_calls[index].arguments += text
            case Finish(reason):
                self.finish_reason = reason

    def message(self, first_id: int = 0) -> dict[str, Any]:
        """The OpenAI message that puts this reply into a history; calls are named `call_N` from `first_id` on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": f"call_{n}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for n, call in enumerate(self.tool_calls, first_id)
            ]
        return message


def parse(ids: Iterable[int], tokenizer: Tokenizer, channel: str | None = "think", reason: str | None = None) -> Reply:
    """A finished output as one reply."""
    parser = Parser(tokenizer, channel)
    return Reply.of(parser.feed(ids) + parser.finish(reason))
