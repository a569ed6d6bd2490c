"""Constrained output: what a mask lets through is exactly the language, and it always ends within the tokens given."""

import json
import pickle
import re
from fractions import Fraction

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.chat import Parser, read_request
from perilune.chat.parser import Reply
from perilune.serve.grammar import Constrain, Language, Vocabulary, json_schema, regex, tool_calls
from perilune.serve.grammar.number import Number
from perilune.serve.grammar.vocabulary import Landings
from perilune.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(['{"name": "value", "list": [1, 2, 3], "is": true} import os, sys; null é 日本'] * 20, 400)
VOCABULARY = Vocabulary.of(TOKENIZER)


def sample(language: Language, seed: int, left: int = 200) -> list[int]:
    """Ids drawn evenly from the masks, the end left out; it must come within `left` tokens."""
    rng, state, ids = np.random.default_rng(seed), language.start(), []
    for used in range(left):
        token = int(rng.choice(np.flatnonzero(language.mask(state, left - used))))
        if token == VOCABULARY.end:
            return ids
        state = language.advance(state, token)
        ids.append(token)
    raise AssertionError("the grammar was not finished within the tokens given")


def write(language: Language, seed: int, left: int = 200) -> str:
    return TOKENIZER.decode_bytes(sample(language, seed, left)).decode()


names = st.sampled_from(["a", "name", 'quo"te', "é", "back\\slash", "a b"])
leaves = st.one_of(
    st.builds(
        lambda lo, n: {"type": "string", "minLength": lo, "maxLength": lo + n}, st.integers(0, 3), st.integers(0, 3)
    ),
    st.builds(
        lambda lo, n: {"type": "integer", "minimum": lo, "maximum": lo + n}, st.integers(-300, 300), st.integers(0, 500)
    ),
    st.builds(
        lambda lo, n: {"type": "number", "exclusiveMinimum": lo, "maximum": lo + n},
        st.integers(-9, 9),
        st.integers(1, 9),
    ),
    st.sampled_from([{"type": ["null", "boolean"]}, {"enum": ["x", 1, None, {"k": [1.5, "y"]}]}, {"const": "é\n"}, {}]),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]+-?\\d{2}$"}, {"type": "string", "format": "date"}]),
    st.sampled_from(
        [{"type": "integer", "multipleOf": 7, "minimum": 50}, {"type": "string", "pattern": "é", "maxLength": 5}]
    ),
)


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    properties = st.dictionaries(names, inner, max_size=3)
    objects = st.builds(
        lambda p, n, extra, low: {
            "type": "object",
            "properties": p,
            "required": sorted(p)[:n] + (["other"] if extra and n else []),
            "additionalProperties": extra,
            "minProperties": low if extra else 0,
        },
        properties,
        st.integers(0, 3),
        st.one_of(st.booleans(), inner),
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda item, lo, n: {"type": "array", "items": item, "minItems": lo, "maxItems": lo + n},
        inner,
        st.integers(0, 3),
        st.integers(0, 2),
    )
    tuples = st.builds(lambda a, b: {"type": "array", "prefixItems": [a, b], "items": b, "minItems": 1}, inner, inner)
    unions = st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    return st.one_of(objects, arrays, tuples, unions)


schemas = st.recursive(leaves, containers, max_leaves=5)


@settings(max_examples=60, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_whatever_is_written_satisfies_the_schema(schema: dict, seed: int) -> None:
    jsonschema.validate(json.loads(write(json_schema(schema, VOCABULARY), seed)), schema)


@settings(max_examples=40, deadline=None)
@given(schemas, st.integers(0, 2**32))
def test_a_mask_is_what_advance_accepts(schema: dict, seed: int) -> None:
    language = json_schema(schema, VOCABULARY)
    ids = sample(language, seed)
    state = language.start()
    for token in ids[: seed % (len(ids) + 1)]:
        state = language.advance(state, token)
    mask = language.mask(state)
    for token in range(0, TOKENIZER.vocab_size, 7):
        try:
            language.advance(state, token)
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == mask[token], token


@pytest.mark.parametrize(
    "pattern",
    [
        "a|bc|",
        "[^a-y]{2,3}",
        r"\d+(\.\d{1,2})?",
        "(ab*){2}",
        "[à-ü日]+x?",
        r"\w+@\w+\.(com|org)",
        ".*end",
        "[\\u0400-\\U0001F600]",
    ],
)
def test_a_regular_expression_is_matched_from_end_to_end(pattern: str) -> None:
    language = regex(pattern, VOCABULARY)
    for seed in range(12):
        assert re.fullmatch(pattern, write(language, seed, 60), re.ASCII)


def test_a_pattern_is_searched_for_unless_anchored_part_by_part() -> None:
    language = json_schema({"type": "string", "pattern": "^ab|cd$"}, VOCABULARY)
    for text in ("ab", "abz", "cd", "zcd", "zab", "cdz", "a", ""):
        state = language.start()
        for token in TOKENIZER.encode(f'"{text}"', allow_special=False)[:-1]:
            state = language.advance(state, token)
        closed = language.mask(state)[TOKENIZER.encode('"', allow_special=False)[0]]
        assert closed == bool(re.search("^ab|cd$", text)), text


@settings(max_examples=60, deadline=None)
@given(st.decimals(-1000, 1000, places=2), st.decimals(0, 50, places=2), st.booleans(), st.booleans(), st.booleans())
def test_numbers_are_feasible_exactly_when_some_numeral_is(low, width, above, below, integer) -> None:
    low, high = Fraction(low), Fraction(low) + Fraction(width)
    number = Number(low, high, above, below, integer)
    grid = 1 if integer else 1000
    least, most = int(low * grid) - 1, int(high * grid) + 1
    inside = [Fraction(n, grid) for n in range(least, most + 1)]
    inside = [x for x in inside if low <= x <= high and not (above and x == low) and not (below and x == high)]
    assert (number.remaining is not None) == bool(inside)


def test_a_written_number_may_be_any_in_range() -> None:
    language = json_schema({"type": "number", "minimum": -1.25, "exclusiveMaximum": 10, "multipleOf": 0.25}, VOCABULARY)
    found = {Fraction(write(language, seed, 40)) for seed in range(200)}
    assert min(found) < 0 < max(found) < 10 and all(x % Fraction(1, 4) == 0 and x >= Fraction(-5, 4) for x in found)


TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}


def test_a_recursive_schema_nests_and_ends() -> None:
    language = json_schema(TREE, VOCABULARY)
    texts = [write(language, seed, 400) for seed in range(20)]
    for text in texts:
        jsonschema.validate(json.loads(text), TREE)
    assert max(text.count('"value"') for text in texts) > 2


def test_the_last_tokens_go_to_what_is_still_needed() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    language = json_schema(schema, VOCABULARY)
    least = len('{"a":"","b":true}') + 1  # one token a byte at worst, and the end
    for seed in range(10):
        jsonschema.validate(json.loads(write(language, seed, least)), schema)
    write(language, 0, least - 4)  # tokens of several bytes: the shortest way may still end in time


def test_an_extra_property_never_repeats_a_declared_one() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "boolean"}}
    language = json_schema(schema, VOCABULARY)
    state = language.start()
    for token in TOKENIZER.encode('{"b":true,"', allow_special=False):
        state = language.advance(state, token)
    with pytest.raises(ValueError, match="does not allow"):
        for token in TOKENIZER.encode('a":', allow_special=False):
            state = language.advance(state, token)


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "text"}, "'text' is none of JSON's"),
        ({"$ref": "#/$defs/none"}, "points to nothing"),
        ({"$ref": "#"}, "refers to itself"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "("}, "not a regular expression"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Nothing satisfies"),
        ({"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 2}, "Nothing satisfies"),
        (5, "must be an object"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself with nothing between"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}, "to itself"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}, "too large"),
        ({"enum": [f"v{n}" * 10 for n in range(50_000)]}, "too large"),
        ({"enum": 3}, "enum must be an array"),
        ({"type": "object", "required": [1]}, "required must be an array of names"),
        ({"type": "string", "minLength": "1"}, "minLength must be a whole number"),
        ({"type": "number", "multipleOf": 0}, "multipleOf must be a number above 0"),
        ({"const": "\ud800"}, "Nothing satisfies"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        json_schema(schema, VOCABULARY)


def test_a_large_enumeration_is_held_to_and_a_repeated_requirement_is_one() -> None:
    assert write(json_schema({"enum": [f"v{n}" for n in range(5000)]}, VOCABULARY), 0)[1:2] == "v"
    twice = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "a"]}
    assert json.loads(write(json_schema(twice, VOCABULARY), 0)) == {"a": None}


def test_a_grammar_that_grew_too_large_says_so_and_is_made_anew() -> None:
    constrain = Constrain(TOKENIZER)
    grown = constrain.text({"regex": "(a|b)*a(a|b){4}"})
    grown._arena.exhaust()
    with pytest.raises(ValueError, match="too large"):
        sample(grown, 0)
    assert TOKENIZER.decode(sample(constrain.text({"regex": "(a|b)*a(a|b){4}"}), 0))


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", 'The "Hague"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "where": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "grow", "parameters": TREE}},
    {"type": "function", "function": {"name": "now"}},
]


def read(ids: list[int], channel: str | None) -> Reply:
    parser = Parser(TOKENIZER, channel)
    return Reply.of(parser.feed([*ids, VOCABULARY.end]) + parser.finish())


@pytest.mark.parametrize("channel", ["think", "response", None])
def test_required_calls_come_and_their_arguments_are_valid(channel: str | None) -> None:
    language = tool_calls(TOOLS, VOCABULARY, channel=channel)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    seen = set()
    for seed in range(25):
        reply = read(sample(language, seed, 400), channel)
        assert reply.finish_reason == "tool_calls" and reply.tool_calls
        for call in reply.tool_calls:
            seen.add(call.name)
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert seen == set(schemas)


def test_one_call_when_parallel_ones_are_off() -> None:
    language = tool_calls(TOOLS, VOCABULARY, parallel=False)
    assert {len(read(sample(language, seed, 300), "think").tool_calls) for seed in range(15)} == {1}


def ask(**options) -> dict:
    return {"messages": [{"role": "user", "content": "Hi"}], **options}


def test_a_json_response_keeps_the_reasoning_free() -> None:
    body = ask(response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}})
    language = Constrain(TOKENIZER).chat(read_request(body), "think")
    assert language is not None
    for seed in range(10):
        reply = read(sample(language, seed, 300), "think")
        assert reply.finish_reason == "stop"
        jsonschema.validate(json.loads(reply.content or ""), WEATHER)


def test_strict_tools_may_be_left_alone_but_not_called_wrongly() -> None:
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS[:2]]
    constrain = Constrain(TOKENIZER)
    language = constrain.chat(read_request(ask(tools=tools)), "response")
    assert language is not None and constrain.chat(read_request(ask(tools=TOOLS)), "response") is None
    state = language.start()
    for token in TOKENIZER.encode("Paris", allow_special=False):
        state = language.advance(state, token)
    replies = [read(sample(language, seed, 60), "response") for seed in range(40)]
    assert any(not reply.tool_calls for reply in replies)
    for call in (call for reply in replies for call in reply.tool_calls):
        jsonschema.validate(json.loads(call.arguments), WEATHER if call.name == "get_weather" else TREE)


def test_a_named_function_is_the_one_called_and_grammars_are_kept() -> None:
    constrain = Constrain(TOKENIZER)
    body = ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
    language = constrain.chat(read_request(body), "think")
    assert language is not None and constrain.chat(read_request(body), "think") is language
    assert {call.name for call in read(sample(language, 1, 100), "think").tool_calls} == {"now"}


def test_plain_text_is_held_to_a_choice_or_a_pattern() -> None:
    constrain = Constrain(TOKENIZER)
    choice = constrain.text({"choice": ["yes", 'no, "never"']})
    assert choice is not None and {write(choice, seed, 30) for seed in range(20)} == {"yes", 'no, "never"'}
    with pytest.raises(ValueError, match="must hold a json schema, a regex or a choice"):
        constrain.text({"grammar": "root ::= x"})


def test_states_are_values() -> None:
    language = json_schema(TREE, VOCABULARY)
    ids = sample(language, 3)
    states = [language.start()]
    for token in ids:
        states.append(language.advance(states[-1], token))
    again = language.start()
    for token, state in zip(ids, states):  # after everything later has been derived
        assert again == state
        again = language.advance(again, token)
    assert language.accepting(again)


def test_what_grammars_remember_is_bounded_in_all() -> None:
    vocabulary = Vocabulary.of(TOKENIZER)
    vocabulary.landings = Landings(3)
    one, other = regex("(ab|cd){4}", vocabulary), regex("[x-z]{4}", vocabulary)
    walk = {}
    for _ in range(2):  # by turns, each pushing the other's out
        for name, language, text in (("one", one, b"abcd"), ("other", other, b"xyzx")):
            state, masks = language.start(), []
            for byte in text:
                masks.append(language.mask(state).tobytes())
                state = language.advance(state, TOKENIZER.ranks[bytes([byte])])
            assert walk.setdefault(name, masks) == masks
    assert len(vocabulary.landings) == 3
    there = pickle.loads(pickle.dumps(one))  # to another rank
    assert there.mask(there.start()).tobytes() == walk["one"][0]
