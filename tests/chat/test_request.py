"""Options: who wins, and what is refused."""

import pytest
from chat.toy import unhurried
from hypothesis import given
from hypothesis import strategies as st

from perilune.chat import ChatError, declared_tools, read_request, render, vet_request

HI = [{"role": "user", "content": "hi"}]


def tool(name: object = "f", **more: object) -> dict:
    return {"type": "function", "function": {"name": name, **more}}


def loading(*tools: object, **more: object) -> dict:
    return {"role": "system", "content": "", "tools": list(tools), **more}


@pytest.mark.parametrize(
    ("body", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, "max"),
        ({"thinking": {"type": "disabled"}}, False, "max"),
        ({"thinking": {"keep": "all"}}, True, "max"),
        ({"thinking": {"type": "enabled", "effort": "low"}, "reasoning_effort": "high"}, True, "low"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, True, "high"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True, "max"),
        ({"thinking": False, "reasoning_effort": "high"}, False, "high"),
        ({"chat_template_kwargs": {"thinking": False}}, False, "max"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, "max"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True, "max"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, True, "max"),
        ({"chat_template_kwargs": {"thinking_effort": "low", "reasoning_effort": "high"}}, True, "low"),
        ({"thinking_effort": "high", "reasoning_effort": "none"}, True, "high"),
    ],
)
def test_who_decides_on_thinking(body: dict, thinking: bool, effort: str) -> None:
    request = read_request({"messages": HI, **body})
    assert (request.thinking, request.effort) == (thinking, effort)


def test_dynamic_tools_count_as_declared() -> None:
    request = vet_request({"messages": [loading(tool("g")), *HI], "tools": [tool("f")], "tool_choice": "required"})
    assert [entry["function"]["name"] for entry in declared_tools(request)] == ["f", "g"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [None]}, "messages[0].role"),
        ({"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [None]}, "tools"),
        ({"tools": [{"type": "bogus", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("1bad")]}, "tools[0].function.name"),
        ({"tools": [tool("bad@name")]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a" * 257)]}, "tools[0].function.name"),
        ({"tools": [tool(None)]}, "tools[0].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"messages": [loading({"type": "function"}), *HI]}, "messages[0].tools[0].function"),
        ({"messages": [loading(tool()), loading(tool()), *HI]}, "messages[1].tools[0].function.name"),
        ({"tools": [tool()], "messages": [loading(tool()), *HI]}, "messages[0].tools[0].function.name"),
        ({"messages": [loading(tool(), content="text"), *HI]}, "messages[0].content"),
        ({"messages": [loading(tool(), role="user"), *HI]}, "messages[0].tools"),
        ({"messages": [loading(tool(), role="assistant"), *HI]}, "messages[0].tools"),
        ({"messages": [{"role": "system", "tools": {"type": "function"}}, *HI]}, "messages[0].tools"),
        ({"messages": [{"role": "tool", "content": "r"}, *HI]}, "messages[0].tool_call_id"),
        ({"tool_choice": "bogus"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]}, "tool_choice"),
        ({"thinking": "yes"}, "thinking"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"keep": "none"}}, "thinking.keep"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"reasoning_effort": "medium"}, "thinking_effort"),
        ({"reasoning_effort": ["low"]}, "thinking_effort"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "bogus"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
    ],
)
def test_refuses_what_the_hosted_api_refuses(body: dict, param: str) -> None:
    with pytest.raises(ChatError) as refused:
        vet_request({"messages": HI, **body})
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ") and "\n" not in str(refused.value)


WORDS = st.sampled_from(["system", "tool", "f", "required", "text", "image"])
FIELDS = [
    *("role", "content", "tools", "type", "function", "name", "tool_calls", "arguments", "id"),
    *("json_schema", "schema", "text", "effort", "partial"),
]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["messages", "tools", "tool_choice", "response_format", "thinking", "reasoning_effort", "chat_template_kwargs"]


@unhurried
@given(st.dictionaries(st.sampled_from(KEYS), JUNK), st.lists(st.dictionaries(st.just("role"), st.just("user")) | JUNK))
def test_junk_is_refused_in_words_or_rendered(body: dict, messages: list) -> None:
    """Whatever a client sends, the only error is ChatError."""
    for candidate in (body, {**body, "messages": messages}):
        try:
            render(vet_request(candidate))
        except ChatError as refused:
            assert refused.param
