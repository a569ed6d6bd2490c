"""A chat request as clients send it (OpenAI's dialect and Moonshot's additions) -> the few values the renderer reads.

`read_request` resolves the options and refuses what cannot be rendered. `vet_request` adds the refusals that the hosted
API makes, so that a server can answer 400 with one sentence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perilune.chat.segments import ChatError

Json = dict[str, Any]

EFFORTS = ("low", "high", "max")  # the prompt's wording also lists medium; the release refuses it
ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")


@dataclass(frozen=True)
class ChatRequest:
    """What one prompt is made of.

    messages: OpenAI message objects; tools: the request's own declarations (those inside messages stay there);
    tool_choice: "auto", "none", "required" or "named" with `forced_tool`; response_format: "text", "json_object" or
    "json_schema" with `schema`; thinking: whether generation starts in the think channel; effort: one of EFFORTS;
    generate: whether the prompt ends with an open assistant message.
    """

    messages: list[Json]
    tools: list[Json]
    tool_choice: str = "auto"
    forced_tool: str | None = None
    response_format: str = "text"
    schema: Json | None = None
    thinking: bool = True
    effort: str = "max"
    generate: bool = True


def read_request(body: Json) -> ChatRequest:
    """Resolves a chat-completions body. Raises ChatError, naming the key."""
    if not isinstance(body, dict):
        raise ChatError("body", "must be a JSON object")
    thinking, effort = _thinking(body)
    choice, forced = _tool_choice(body.get("tool_choice"))
    kind, schema = _response_format(body.get("response_format"))
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=_tools(body.get("tools"), "tools"),
        tool_choice=choice,
        forced_tool=forced,
        response_format=kind,
        schema=schema,
        thinking=thinking,
        effort=effort,
        generate=bool(body.get("add_generation_prompt", True)),
    )


def declared_tools(request: ChatRequest) -> list[Json]:
    """Every tool the model may call: the request's own and those loaded by messages along the way."""
    loaded = [tool for message in request.messages for tool in message.get("tools") or []]
    return [*request.tools, *loaded]


def _messages(messages: Any) -> list[Json]:
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages", "must be a non-empty array of message objects")
    for n, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ChatError(f"messages[{n}].role", f"must be one of {', '.join(ROLES)}")
        _tools(message.get("tools"), f"messages[{n}].tools")
    return messages


def _tools(tools: Any, path: str) -> list[Json]:
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ChatError(path, "must be an array of tool objects")
    return tools


def _tool_choice(choice: Any) -> tuple[str, str | None]:
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", None
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return "named", function["name"]
    raise ChatError("tool_choice", "must be auto, none, required or an object that names a function")


def _response_format(wanted: Any) -> tuple[str, Json | None]:
    if wanted is None:
        return "text", None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise ChatError("response_format.type", "must be text, json_object or json_schema")
    if kind != "json_schema":
        return kind, None
    spec = wanted.get("json_schema")
    schema = spec.get("schema") if isinstance(spec, dict) else None
    if not isinstance(schema, dict):
        raise ChatError("response_format.json_schema.schema", "must be a JSON Schema object")
    return kind, schema


def _thinking(body: Json) -> tuple[bool, str]:
    """Native controls win over template arguments, both over OpenAI's `reasoning_effort`, whose "none" means off."""
    native, options = _native_thinking(body.get("thinking")), _thinking_options(body)
    kind = native.get("type")
    if kind not in (None, "enabled", "disabled"):
        raise ChatError("thinking.type", "must be enabled or disabled")
    on = _first(kind and kind == "enabled", options.get("thinking"), options.get("enable_thinking"))
    effort = _first(native.get("effort"), options.get("thinking_effort"))
    standard = options.get("reasoning_effort")
    if effort is None and standard == "none":
        return bool(on), "max"
    effort = _first(effort, standard, "max")
    if effort not in EFFORTS:
        raise ChatError("thinking_effort", f"must be one of {', '.join(EFFORTS)}, not {effort!r}")
    return on is None or bool(on), effort


def _native_thinking(thinking: Any) -> Json:
    if isinstance(thinking, dict):
        return thinking
    if not isinstance(thinking, bool | None):
        raise ChatError("thinking", "must be an object or a boolean")
    return {"type": {True: "enabled", False: "disabled", None: None}[thinking]}


def _thinking_options(body: Json) -> Json:
    """The switches as vLLM's clients send them: beside the messages or among the template arguments, which win."""
    options = {key: body.get(key) for key in ("enable_thinking", "thinking_effort", "reasoning_effort")}
    for key in ("template_kwargs", "chat_template_kwargs"):
        given = body.get(key) or {}
        if not isinstance(given, dict):
            raise ChatError(key, "must be an object")
        options |= given
    for key in ("thinking", "enable_thinking"):
        if not isinstance(options.get(key), bool | None):
            raise ChatError(key, "must be true or false")
    return options


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def vet_request(body: Json) -> ChatRequest:
    """`read_request` plus everything the hosted API refuses with 400."""
    request = read_request(body)
    names: set[str] = set()
    for path, tool in _declarations(request):
        _vet_tool(tool, path, names)
    for n, message in enumerate(request.messages):
        _vet_message(message, f"messages[{n}]")
    _vet_choice(request, names)
    _vet_options(body)
    return request


def _declarations(request: ChatRequest) -> Iterator[tuple[str, Json]]:
    for n, tool in enumerate(request.tools):
        yield f"tools[{n}]", tool
    for m, message in enumerate(request.messages):
        for n, tool in enumerate(message.get("tools") or []):
            yield f"messages[{m}].tools[{n}]", tool


def _vet_tool(tool: Json, path: str, names: set[str]) -> None:
    if tool.get("type") != "function":
        raise ChatError(f"{path}.type", "must be function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ChatError(f"{path}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ChatError(
            f"{path}.function.name", "must be 1 to 256 letters, digits, _ . or -, starting with a letter or _"
        )
    if name in names:
        raise ChatError(f"{path}.function.name", f"{name!r} is declared twice")
    if not isinstance(function.get("parameters"), dict | None):
        raise ChatError(f"{path}.function.parameters", "must be a JSON Schema object")
    names.add(name)


def _vet_message(message: Json, path: str) -> None:
    role = message["role"]
    if message.get("tools"):
        if role not in ("system", "developer"):
            raise ChatError(f"{path}.tools", f"only system messages may load tools, not {role}")
        if message.get("content"):
            raise ChatError(f"{path}.content", "must be empty in a message that loads tools")
    if role == "tool" and not message.get("tool_call_id"):
        raise ChatError(f"{path}.tool_call_id", "is required in a tool message")


def _vet_choice(request: ChatRequest, names: set[str]) -> None:
    if request.tool_choice == "required" and not names:
        raise ChatError("tool_choice", "required needs at least one declared tool")
    if request.forced_tool is not None and request.forced_tool not in names:
        raise ChatError("tool_choice", f"names {request.forced_tool!r}, which is not declared")


def _vet_options(body: Json) -> None:
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") != "disabled" and thinking.get("keep") not in (None, "all"):
        raise ChatError("thinking.keep", "must be all: past reasoning always stays in the prompt")
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        spec = wanted["json_schema"]
        if not isinstance(spec.get("name"), str) or not spec["name"]:
            raise ChatError("response_format.json_schema.name", "must be a non-empty string")
        if not isinstance(spec.get("strict"), bool | None):
            raise ChatError("response_format.json_schema.strict", "must be true or false")
