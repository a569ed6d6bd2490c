"""The requests' fields with their types and ranges: what /docs shows and what a 400 is made from.

Messages, tools and the thinking controls are the chat format's own business (`perilune.chat.vet_request`), so they pass
through here as they came.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[Id], Field(min_length=1)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


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
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = Field(None, description="names a session: the router keeps it on one worker")
    cache_salt: str | None = Field(None, description="requests share cached prefixes only under the same salt")
    service_tier: str | None = Field(None, description="flex is the engine's batch class, anything else interactive")
    structured_outputs: Json | None = Field(None, description="one of json (a schema), regex, choice (texts)")
    return_token_ids: bool | None = Field(None, description="adds prompt_token_ids, and token_ids to each choice")


class ChatBody(SamplingFields):
    messages: list[Json] = Field(min_length=1)
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    thinking: Json | bool | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(SamplingFields):
    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=64)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: None = None
    best_of: Literal[1] | None = None


class TokenizeBody(BaseModel):
    """Text, or a chat request's messages and options."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool | None = Field(None, description="read the names of special tokens in `prompt` as ids")
