"""Structured output over the wire from weights that have learned nothing: calls and JSON are valid all the same."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
import torch
from serve.live import Live, serving, toy_model, toy_tokenizer, written

from perilune.chat import read_request
from perilune.model.net import K3
from perilune.model.weights import save
from perilune.serve.engine import Engine
from perilune.serve.grammar import Constrain
from perilune.serve.request import EngineOptions
from perilune.talk import open_model

HI = [{"role": "user", "content": "hi"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def live() -> Any:
    with serving(Engine(toy_model(), EngineOptions(pool_tokens=8192, token_budget=512))) as server:
        yield server


def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a_required_call_is_made_and_valid(live: Live, thinking: str) -> None:
    answer = client(live).chat.completions.create(
        model="toy", messages=HI, tools=TOOLS, tool_choice="required", max_tokens=260, seed=1,
        extra_body={"thinking": {"type": thinking}},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls or ():
        jsonschema.validate(json.loads(call.function.arguments), PLACE if call.function.name == "weather" else {})


def test_a_named_call_streams_the_same(live: Live) -> None:
    options: dict[str, Any] = {
        "model": "toy", "messages": HI, "tools": TOOLS, "max_tokens": 300, "seed": 5, "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    whole = client(live).chat.completions.create(**options).choices[0].message.tool_calls
    deltas = [c.choices[0].delta for c in client(live).chat.completions.create(**options, stream=True) if c.choices]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert whole is not None and len(whole) == 1 and whole[0].function.name == "weather"
    assert "".join(piece.function.arguments or "" for piece in pieces) == whole[0].function.arguments


class Place(pydantic.BaseModel):
    city: str
    days: int | None
    near: list["Place"] = pydantic.Field(default_factory=list, max_length=1)


def test_the_client_parses_its_own_model(live: Live) -> None:
    answer = client(live).chat.completions.parse(model="toy", messages=HI, response_format=Place, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_a_json_object_and_a_pattern(live: Live) -> None:
    answer = client(live).chat.completions.create(
        model="toy", messages=HI, max_tokens=100, response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    text = client(live).completions.create(
        model="toy", prompt="x", max_tokens=20, extra_body={"structured_outputs": {"regex": r"(ab|c)+\d"}}
    )
    assert text.choices[0].text[-1].isdigit() and set(text.choices[0].text[:-1]) <= set("abc")


def test_with_tools_and_a_format_the_answer_is_json_or_a_call() -> None:
    request = read_request({"messages": HI, "tools": TOOLS, "response_format": {"type": "json_object"}})
    grammar = Constrain(toy_tokenizer()).chat(request, "response")
    assert grammar is not None

    def allowed(ids: list[int]) -> bool:
        state = grammar.start()
        try:
            for token in ids:
                state = grammar.advance(state, token)
        except ValueError:
            return False
        return grammar.accepting(state)

    assert allowed(written(None, '{"city": "Paris"}'))
    assert allowed(written(None, "let me see", {"name": "now", "arguments": {}}))
    assert not allowed(written(None, "let me see"))
    assert not allowed(written(None, '{"city": "Paris"', {"name": "gone", "arguments": {}}))


def test_an_argument_may_hold_its_own_kind() -> None:
    """A schema whose root refers to itself, moved under one property, as wrappers of tools do."""
    node = {"type": "object", "properties": {"name": {"type": "string"}, "child": {"$ref": "#/$defs/node"}}}
    parameters = {
        "type": "object", "properties": {"value": {"$ref": "#/$defs/node"}}, "required": ["value"],
        "$defs": {"node": {**node, "required": ["name"]}},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "keep", "parameters": parameters}}
    request = read_request({"messages": HI, "tools": [tool], "tool_choice": "required"})
    assert Constrain(toy_tokenizer()).chat(request, "response") is not None
    loop = {**parameters, "$defs": {"node": {"$ref": "#/$defs/node"}}}
    with pytest.raises(ValueError, match="refers to itself and nothing else"):
        tool["function"]["parameters"] = loop
        Constrain(toy_tokenizer()).chat(request, "response")


def test_a_vocabulary_padded_beyond_the_tokenizer_is_served(tmp_path: Path) -> None:
    """Ids that no tokenizer knows are reserved: they decode to nothing, and a grammar bars them."""
    torch.manual_seed(0)
    save(K3(toy_model().config.replace(vocab_size=toy_tokenizer().vocab_size + 64)), tmp_path)
    toy_tokenizer().save(tmp_path)
    model, tokenizer = open_model(tmp_path)
    assert tokenizer.vocab_size == model.config.vocab_size and tokenizer.open == toy_tokenizer().open
    body = {"messages": HI, "thinking": False, "max_tokens": 12, "seed": 0}
    with serving(Engine(model, EngineOptions(max_batch=2, pool_tokens=1024)), tokenizer=tokenizer) as live:
        assert live.http.post("/v1/chat/completions", json=body).status_code == 200
        answer = live.http.post("/v1/chat/completions", json=body | {"response_format": {"type": "json_object"}})
        assert isinstance(json.loads(answer.json()["choices"][0]["message"]["content"]), dict)


def test_a_schema_that_never_ends_is_refused_and_the_next_request_served(live: Live) -> None:
    """It once stopped the engine, and a long enumeration the whole server."""
    hostile = [
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"enum": 3},
        {"enum": [f"value {n}" for n in range(90_000)]},
    ]
    for schema in hostile:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = live.http.post("/v1/chat/completions", json={"messages": HI, "response_format": wanted})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
    assert live.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 2}).status_code == 200
