"""Which grammar a request is held to: response_format, tool_choice, strict tools, or `structured_outputs`.

`structured_outputs` (vLLM's name) is {"json": schema}, {"regex": pattern} or {"choice": [texts]}. Grammars are kept by
what made them: agents send the same tools with every turn.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from perilune.chat import ChatRequest, declared_tools
from perilune.serve.grammar.calls import answer, tool_calls
from perilune.serve.grammar.expression import Arena
from perilune.serve.grammar.schema import JsonSchema
from perilune.serve.grammar.text import pattern, plain, spelled
from perilune.serve.grammar.vocabulary import Language, Vocabulary
from perilune.tokenizer import Tokenizer

KEPT = 64  # grammars


class Constrain:
    """Grammars for one tokenizer. ValueError, one sentence, for what cannot be enforced; safe between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary = Vocabulary.of(tokenizer)
        self._kept: OrderedDict[str, Language] = OrderedDict()
        self._lock = threading.Lock()

    def chat(
        self, request: ChatRequest, channel: str | None, structured: Any = None, parallel: bool = True
    ) -> Language | None:
        """For a turn that starts in `channel` (the one its prompt left open)."""
        forced = request.tool_choice in ("required", "named")
        wanted = self._wanted(request, structured)
        tools = self._tools(request)
        if wanted is not None and not forced:
            key = ["answer", channel, parallel, wanted, tools]
            body = _body(wanted)
            return self._once(
                key, lambda: answer(body, self.vocabulary, channel=channel, tools=tools, parallel=parallel)
            )
        if not forced and not any(tool["function"].get("strict") for tool in tools):
            return None
        key = ["calls", channel, parallel, forced, tools]
        return self._once(
            key, lambda: tool_calls(tools, self.vocabulary, channel=channel, parallel=parallel, forced=forced)
        )

    def text(self, structured: Any) -> Language | None:
        """For a plain continuation."""
        if structured is None:
            return None

        def make() -> Language:
            arena = Arena()
            return Language(arena, _body(structured)(arena), self.vocabulary)

        return self._once(["text", structured], make)

    def _wanted(self, request: ChatRequest, structured: Any) -> Any:
        if request.response_format == "text":
            return structured
        return {"json": {"type": "object"} if request.schema is None else request.schema}

    def _tools(self, request: ChatRequest) -> list[Any]:
        if request.tool_choice == "none":
            return []
        tools = declared_tools(request)
        return [tool for tool in tools if request.forced_tool in (None, tool["function"]["name"])]

    def _once(self, key: Any, make: Callable[[], Language]) -> Language:
        name = json.dumps(key, sort_keys=True)
        with self._lock:
            if name not in self._kept or self._kept[name].spent:
                self._kept[name] = make()
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(name)
            return self._kept[name]


def _body(structured: Any) -> Callable[[Arena], int]:
    """What an answer may say, from a `structured_outputs` object."""
    match structured:
        case {"json": dict() | bool() as schema}:
            return lambda arena: JsonSchema(arena, schema).value()
        case {"regex": str(expression)}:
            return lambda arena: pattern(arena, expression, plain, whole=True)
        case {"choice": [_, *_] as texts} if all(isinstance(text, str) for text in texts):
            return lambda arena: arena.either(*(spelled(arena, plain, text) for text in texts))
    known = sorted(structured) if isinstance(structured, Mapping) else json.dumps(structured)[:80]
    raise ValueError(f"structured_outputs must hold a json schema, a regex or a choice of texts, not {known}.")
