"""The requests' fields with their types and ranges: what /docs shows and what a 400 is made from.

Messages, tools and the thinking controls are the chat format's own business (`perilune.chat.vet_request`), so they pass
through here as they came.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, field_validator

Json = dict[str, Any]
Text = Annotated[str, Field(min_length=1, max_length=1024)]


def _number(value: Any) -> Any:
    """JSON's true is no 1 and its "1" none either, though pydantic would take them."""
    if isinstance(value, bool | str):
        raise ValueError("should be a number")
    return value


Id = Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_number)]
Ids = Annotated[list[Id], Field(min_length=1)]
_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens", "n", "max_completion_tokens", "top_logprobs",
)  # fmt: skip


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


class SamplingFields(BaseModel):
    """What /v1/chat/completions and /v1/completions share. Unknown keys are ignored, as OpenAI's SDKs expect."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    ignore_eos: StrictBool | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    n: int | None = Field(None, ge=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = Field(None, description="names a session: the router keeps it on one worker")
    cache_salt: str | None = Field(None, description="requests share cached prefixes only under the same salt")
    service_tier: str | None = Field(None, description="flex is the engine's batch class, anything else interactive")
    structured_outputs: Json | None = Field(None, description="one of json (a schema), regex, choice (texts)")
    return_token_ids: StrictBool | None = Field(None, description="adds prompt_token_ids, and token_ids to each choice")

    _numbers = field_validator(*_NUMBERS, mode="before", check_fields=False)(_number)


class ChatBody(SamplingFields):
    messages: list[Json] = Field(min_length=1)
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: Json | None = None
    thinking: Json | bool | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(SamplingFields):
    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=64)]
    echo: StrictBool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: None = None
    best_of: Literal[1] | None = None

    _logprobs = field_validator("logprobs", mode="before")(_number)  # in chats it is a bool


class TokenizeBody(BaseModel):
    """Text, or a chat request's messages and options."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: StrictBool | None = Field(
        None, description="read the names of special tokens in `prompt` as ids"
    )


# --- what comes back, for the document ------------------------------------------------------------------------------


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING, _COUNT, _LIST = {"type": "string"}, {"type": "integer"}, {"type": "array"}
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT, cached_tokens=_COUNT)
_ANSWER = _object(id=_STRING, object=_STRING, created=_COUNT, model=_STRING, choices=_LIST, usage=_USAGE)
_ERROR = _object(error=_object(message=_STRING, type=_STRING, param={}, code={}))
REFUSALS: dict[int | str, Json] = {
    "4XX": {"description": "Refused; the message says why", "content": {"application/json": {"schema": _ERROR}}},
    "503": {"description": "Draining, or the engine failed", "content": {"application/json": {"schema": _ERROR}}},
}


def answers(schema: Json, kind: str = "application/json", streamed: bool = False) -> dict[int | str, Json]:
    """An operation's responses: 200 of this schema, or events that each are of the other; refusals."""
    events: Json = {"text/event-stream": {"schema": _object(data=_STRING)}} if streamed else {}
    return {200: {"description": "OK", "content": {kind: {"schema": schema}, **events}}, **REFUSALS}


ANSWER = answers(_ANSWER, streamed=True)
MODELS = answers(_object(object=_STRING, data=_LIST))
TOKENS = answers(_object(count=_COUNT, max_model_len=_COUNT, tokens=_LIST))
HEALTH = answers(_object(status=_STRING)) | {"503": {"description": "Draining or failed"}}
METRICS = answers(_STRING, "text/plain")
LIVE = answers(_object(running=_COUNT, waiting=_COUNT, model=_STRING, context=_COUNT))
