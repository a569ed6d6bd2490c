"""Refusals: OpenAI's shape, one sentence, the right status, before anything streams; and no 5xx whatever is sent."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve.live import Live, Scripted, serving, soon, written

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FN = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
AHEAD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}
LOOKS_AHEAD = {"type": "function", "function": {"name": "g", "parameters": AHEAD}}
UNIQUE = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array", "uniqueItems": True}}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(Scripted(lambda _: written("hm", "yes")), context=2000) as server:
        yield server


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refusal, checked for its shape and for being one sentence."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.fullmatch(r"[^\n]{8,400}\.", error["message"]), error["message"]
    return error


@pytest.mark.parametrize(
    "path, body, param",
    [
        (CHAT, {"temperature": 2.5}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 1000}, "n"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (CHAT, {"messages": [{"role": "user", "content": "moon " * 3000}]}, "messages"),
        (CHAT, {"tools": [FN, FN]}, "tools[1].function.name"),
        (CHAT, {"tool_choice": "bogus"}, "tool_choice"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [LOOKS_AHEAD], "tool_choice": "required"}, "tools"),
        (CHAT, {"response_format": UNIQUE}, "response_format"),
        (CHAT, {"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
        (TEXT, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        (CHAT, {"response_format": {"type": "bogus"}}, "response_format.type"),
        (CHAT, {"reasoning_effort": "medium"}, "thinking_effort"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"top_logprobs": 30, "logprobs": True}, "top_logprobs"),
        (CHAT, {"logit_bias": {"moon": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"400": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"4": 200}}, "logit_bias.4"),
        (CHAT, {"stop": ["a", ""]}, "stop"),
        (CHAT, {"stream_options": {"include_usage": "maybe"}}, "stream_options.include_usage"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [400]}, "prompt"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
        (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "x", "echo": 0}, "echo"),
        (TEXT, {"prompt": [[False]]}, "prompt"),
        (TEXT, {"prompt": "x", "max_tokens": "8"}, "max_tokens"),
        (CHAT, {"max_tokens": True}, "max_tokens"),
        ("/tokenize", {}, "prompt"),
    ],
)
def test_a_bad_key_is_named(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    full = {"messages": HI, **body} if path == CHAT else body
    for stream in (False, True):
        assert refused(live.http.post(path, json={**full, "stream": stream}), 400)["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"moon"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_body_that_is_no_object(live: Live, body: bytes) -> None:
    refused(live.http.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)


def test_other_refusals(live: Live) -> None:
    assert refused(live.http.post(CHAT, json={"messages": HI, "model": "gpt"}), 404)["code"] == "model_not_found"
    refused(live.http.get("/v1/nothing"), 404)
    refused(live.http.get(CHAT), 405)
    long = {"messages": [{"role": "user", "content": "moon " * 3000}]}
    assert refused(live.http.post(CHAT, json=long), 400)["code"] == "context_length_exceeded"


def test_a_lone_surrogate_is_answered(live: Live) -> None:
    for text in (r'{"messages": [{"role": "user", "content": "\ud83c"}]}', r'{"messages": [{"role": "\ud83c"}]}'):
        response = live.http.post(CHAT, content=text, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400)


def test_the_request_id_comes_back(live: Live) -> None:
    assert live.http.get("/health", headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    assert len(live.http.get("/nothing").headers["x-request-id"]) == 32


def test_a_key_opens_the_api_and_only_the_api_needs_it() -> None:
    with serving(Scripted(lambda _: written("hm", "yes")), api_keys=frozenset({"sesame", "other"})) as live:
        refused(live.http.get("/v1/models"), 401)
        refused(live.http.post(CHAT, json={"messages": HI}, headers={"authorization": "Bearer sesam"}), 401)
        assert live.http.get("/health").status_code == live.http.get("/").status_code == 200
        with openai.OpenAI(base_url=live.url + "/v1", api_key="sesame") as client:
            assert client.models.list().data[0].id == "toy"


def test_a_large_body_is_refused_whether_it_says_its_length_or_not() -> None:
    with serving(Scripted(lambda _: ()), max_body=1000) as live:
        refused(live.http.post(CHAT, content=b"x" * 1001), 413)
        refused(live.http.post(CHAT, content=(b"x" * 100 for _ in range(11))), 413)


def test_a_full_engine_is_429_with_a_time() -> None:
    engine = Scripted(lambda _: [70] * 10_000, seconds=0.001, slots=1)
    with (
        serving(engine) as live,
        live.http.stream("POST", TEXT, json={"prompt": "x", "stream": True, "max_tokens": 9999}),
    ):
        assert soon(lambda: engine.busy)
        response = live.http.post(TEXT, json={"prompt": "x", "n": 3})
        assert refused(response, 429)["type"] == "rate_limit_error"
        assert 1 <= int(response.headers["retry-after"]) <= 60


def test_a_limit_on_requests_in_flight() -> None:
    engine = Scripted(lambda _: [70] * 10_000, seconds=0.001)
    with serving(engine, max_requests=1) as live:
        with live.http.stream("POST", TEXT, json={"prompt": "x", "stream": True, "max_tokens": 9999}):
            refused(live.http.post(TEXT, json={"prompt": "x"}), 429)
        assert soon(lambda: not engine.busy)
        assert live.http.post(TEXT, json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_a_failed_engine_fails_its_requests_and_takes_no_more() -> None:
    with serving(Scripted(lambda _: [70] * 100, fails_at=5)) as live:
        lines = live.http.post(TEXT, json={"prompt": "x", "stream": True, "max_tokens": 50}).text.split("\n\n")
        assert "a wire came loose" in json.loads(lines[-3].removeprefix("data: "))["error"]["message"]
        refused(live.http.post(TEXT, json={"prompt": "x"}), 503)
        assert live.http.get("/health").status_code == 503


@pytest.mark.parametrize(
    "key, fine, wrong",
    [
        ("temperature", [0, 0.6, 1.0], [0.7, 1.1, 2.0]),
        ("top_p", [0.95], [0.8, 1.0]),
        ("presence_penalty", [0], [0.5]),
        ("frequency_penalty", [0], [0.5]),
        ("n", [1], [2]),
    ],
)
def test_strict_vendor_fixes_sampling(key: str, fine: list[float], wrong: list[float]) -> None:
    with serving(Scripted(lambda _: written("hm", "yes")), strict_vendor=True) as live:
        for value in (*fine, None):
            assert live.http.post(CHAT, json={"messages": HI, key: value}).status_code == 200
        for value in wrong:
            assert refused(live.http.post(CHAT, json={"messages": HI, key: value}), 400)["param"] == key


# ------------------------------------------------------------------ fuzz over the OpenAPI document

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_CONTENT = (
    st.text(max_size=20)
    | st.none()
    | st.lists(
        st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", ""]), "text": st.text()}), max_size=2
    )
    | _ANY
)
_CALL = st.fixed_dictionaries(
    {
        "id": st.text(max_size=4),
        "function": st.fixed_dictionaries({"name": st.text(max_size=5), "arguments": st.text(max_size=9) | _ANY}),
    }
)
_TOOL = (
    st.just(FN)
    | st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.text(max_size=5), "parameters": _ANY}),
        }
    )
    | _ANY
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"]), "content": _CONTENT},
    optional={
        "tools": st.lists(_TOOL, max_size=2),
        "tool_calls": st.lists(_CALL, max_size=2),
        "tool_call_id": _ANY,
        "name": _ANY,
        "partial": _ANY,
        "reasoning_content": _ANY,
    },
)
_KNOWN = {
    "messages": st.lists(_MESSAGE, max_size=3),
    "tools": st.lists(_TOOL, max_size=2),
    "model": st.just("toy"),
    "stream": st.booleans(),
}


def of_schema(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a JSON Schema as FastAPI writes it."""
    if "$ref" in schema:
        return of_schema(components[schema["$ref"].rpartition("/")[2]], components)
    if "anyOf" in schema:
        return st.one_of([of_schema(part, components) for part in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {key: _KNOWN.get(key, of_schema(value, components)) for key, value in schema["properties"].items()}
            needed = {key: fields.pop(key) for key in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=fields)
        case "object":
            return st.dictionaries(st.text(max_size=5), _ANY, max_size=2)
        case "array":
            return st.lists(of_schema(schema["items"], components), min_size=schema.get("minItems", 0), max_size=3)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=20)
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(schema.get("minimum", -1e9), schema.get("maximum", 1e9))
        case "null":
            return st.none()
    return _ANY


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_a_client_sends_is_a_5xx(live: Live, data: st.DataObject) -> None:
    document = live.http.get("/openapi.json").json()
    path = data.draw(st.sampled_from(sorted(p for p, ways in document["paths"].items() if "post" in ways)))
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = data.draw(of_schema(schema, document["components"]["schemas"]))
    for key in data.draw(st.lists(st.sampled_from([*body, "thinking", "extra"]), max_size=2)):
        body[key] = data.draw(_ANY)
    text = json.dumps(body)
    response = live.http.post(path, content=text, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 429), (path, text, response.text)
    assert_documented(document["paths"][path]["post"], response)


def assert_documented(operation: dict[str, Any], response: httpx.Response) -> None:
    """Status, media type and body are what the OpenAPI document says."""
    status, kind = str(response.status_code), response.headers["content-type"].split(";")[0]
    known = operation["responses"].get(status) or operation["responses"][status[0] + "XX"]
    schema = known["content"][kind]["schema"]
    if kind == "text/event-stream":
        for event in response.text.split("\n\n")[:-1]:
            jsonschema.validate({"data": event.removeprefix("data: ")}, schema)
    else:
        jsonschema.validate(response.json() if kind == "application/json" else response.text, schema)


def test_the_document_says_what_is_answered(live: Live) -> None:
    document = live.http.get("/openapi.json").json()
    for path, ways in document["paths"].items():
        if "get" in ways:
            assert_documented(ways["get"], live.http.get(path))
        other = live.http.request("TRACE", path)
        assert refused(other, 405) and set(other.headers["allow"].split(", ")) == {way.upper() for way in ways}
