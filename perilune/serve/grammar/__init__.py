"""Constrained output: JSON Schema, regular expressions and tool calls, enforced token by token.

    vocabulary = Vocabulary.of(tokenizer)
    grammar = json_schema(schema, vocabulary)              # or regex(...), tool_calls(...), answer(...)
    state = grammar.start(); grammar.mask(state, left=100); state = grammar.advance(state, token)

Every grammar is finished within the tokens left, so output is valid even from weights that have learned nothing.
"""

from typing import Any

from perilune.serve.grammar.calls import answer, tool_calls
from perilune.serve.grammar.constrain import Constrain
from perilune.serve.grammar.expression import Arena
from perilune.serve.grammar.schema import JsonSchema
from perilune.serve.grammar.text import pattern, plain
from perilune.serve.grammar.vocabulary import Language, Vocabulary

__all__ = ["Constrain", "Language", "Vocabulary", "answer", "json_schema", "regex", "tool_calls"]


def json_schema(schema: Any, vocabulary: Vocabulary) -> Language:
    """One JSON value that satisfies `schema`. Raises ValueError, one sentence, for what cannot be enforced."""
    arena = Arena()
    return Language(arena, JsonSchema(arena, schema).value(), vocabulary)


def regex(expression: str, vocabulary: Vocabulary) -> Language:
    """Text that `expression` matches from end to end."""
    arena = Arena()
    return Language(arena, pattern(arena, expression, plain, whole=True), vocabulary)
