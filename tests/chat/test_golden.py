"""Oracle: the released renderer's texts and ids, vLLM's parser cases and the vendor's token counts."""

import json
from typing import Any

import pytest
from golden import golden

from perilune.chat import ChatError, Parser, Reply, parse, pending_ids, read_request, render
from perilune.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    return Tokenizer.load(golden("tokenizer") / "tiktoken.model")


def cases(file: str) -> dict[str, Any]:
    return json.loads((golden("xtml") / file).read_text())


def names(file: str, *path: str) -> list[str]:
    try:
        found = cases(file)
    except pytest.skip.Exception:
        return []
    for key in path:
        found = found[key]
    return list(found)


RENDER = names("render.json")


@pytest.mark.parametrize("name", [name for name in RENDER if not name.startswith("error_")])
def test_renders_the_released_prompt(name: str, released: Tokenizer) -> None:
    case = cases("render.json")[name]
    prompt = render(read_request(case["request"]), case["image_prompts"])
    assert prompt.text == case["text"]
    assert prompt.ids(released) == case["ids"]


@pytest.mark.parametrize("name", [name for name in RENDER if name.startswith("error_")])
def test_refuses_with_one_sentence(name: str) -> None:
    with pytest.raises(ChatError) as refused:
        render(read_request(cases("render.json")[name]["request"]))
    sentence = str(refused.value)
    assert sentence.startswith(refused.value.param) and "\n" not in sentence


@pytest.mark.parametrize("name", names("parse.json", "cases"))
@pytest.mark.parametrize("chunk", [1, 3, 7, 10_000])
def test_parses_the_engines_cases(name: str, chunk: int, released: Tokenizer) -> None:
    case = cases("parse.json")["cases"][name]
    ids = released.encode(case["completion"], allow_special=True)
    channel = None if case["start_channel"] == "none" else case["start_channel"]
    parser, events = Parser(released, channel), []
    for start in range(0, len(ids), chunk):
        events += parser.feed(ids[start : start + chunk])
    reply = Reply.of(events + parser.finish())
    assert (reply.reasoning, reply.content) == (case["reasoning"], case["content"])
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in reply.tool_calls]
    assert calls == case["tool_calls"]
    if "arguments_text" in case:
        assert reply.tool_calls[0].arguments == case["arguments_text"]
    assert reply == parse(ids, released, channel)


@pytest.mark.parametrize("name", names("token_anchors.json", "anchors"))
def test_counts_prompt_tokens_as_the_vendor_does(name: str, released: Tokenizer) -> None:
    case = cases("token_anchors.json")["anchors"][name]
    options = {key: case[key] for key in ("add_generation_prompt", "thinking") if key in case}
    prompt = render(read_request(case["payload"] | options))
    assert prompt.text == case["rendered_text"]
    assert len(prompt.ids(released)) == case["rendered_n_ids"]
    assert len(prompt.ids(released)) - pending_ids(prompt, released) == case["vendor_prompt_tokens"]


def test_counts_a_json_schema_as_the_vendor_does(released: Tokenizer) -> None:
    """119: the same question as the anchor of 36, with a schema of one boolean."""
    question = cases("token_anchors.json")["anchors"]["rf_without"]["payload"]
    schema = {"type": "object", "properties": {"capital": {"type": "boolean"}}, "required": ["capital"]}
    wanted = {"name": "capital_answer", "schema": {**schema, "additionalProperties": False}}
    prompt = render(read_request(question | {"response_format": {"type": "json_schema", "json_schema": wanted}}))
    assert len(prompt.ids(released)) - pending_ids(prompt, released) == 119


def test_the_worked_example_has_405_ids(released: Tokenizer) -> None:
    """The released prompt: declaration 114 ids, whole prompt 405; the effort message 67 at max, 68 at low and high."""
    case = cases("render.json")["tools_history_and_required"]
    assert len(render(read_request(case["request"])).ids(released)) == 405
    counts = [
        len(render(read_request(cases("render.json")[n]["request"])).ids(released)) for n in ("hi_default", "hi_low")
    ]
    assert [n - 12 - 10 for n in counts] == [67, 68]
