"""The API as the unmodified OpenAI client sees it, over a scripted engine: every field of an answer, both ways."""

import asyncio
import json
from typing import Any

import openai
import pytest
from serve.live import Live, Scripted, serving, soon, toy_tokenizer, written

from perilune.chat import read_request, render

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def says(*ids: int, **options: Any) -> Scripted:
    return Scripted(lambda _: ids, **options)


def rebuilt(chunks: list[Any]) -> dict[str, Any]:
    """A message added up from streamed deltas, by the rules of OpenAI's own documentation."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments
            message["finish"] = choice.finish_reason or message.get("finish")
    return message


def test_an_answer_with_reasoning() -> None:
    with serving(says(*written("I think 🌙", "你好 world"))) as live:
        answer = live.openai.chat.completions.create(model="toy", messages=HI)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("你好 world", "I think 🌙")
    assert (answer.choices[0].finish_reason, answer.object, answer.model) == ("stop", "chat.completion", "toy")


def test_the_stream_is_the_answer() -> None:
    calls = [{"name": "weather", "arguments": {"city": "Köln 🌙"}}, {"name": "weather", "arguments": {}}]
    with serving(says(*written("hm", "wait", *calls))) as live:
        ask = {"model": "toy", "messages": HI, "tools": [WEATHER]}
        whole = live.openai.chat.completions.create(**ask)
        usage = {"include_usage": True}
        chunks = list(live.openai.chat.completions.create(**ask, stream=True, stream_options=usage))
    message = whole.choices[0].message
    assert message.tool_calls is not None
    assert rebuilt(chunks) == {
        "content": message.content,
        "reasoning": message.reasoning_content,
        "calls": [[call.function.name, call.function.arguments] for call in message.tool_calls],
        "finish": "tool_calls",
    }
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln 🌙"}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_async_clients_are_answered_together() -> None:
    async def ask(live: Live) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any") as talk:
            answers = [talk.chat.completions.create(model="toy", messages=HI) for _ in range(20)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*answers)]

    with serving(says(*written("hm", "yes"))) as live:
        assert asyncio.run(ask(live)) == ["yes"] * 20


def test_usage_counts_as_the_hosted_api_does() -> None:
    with serving(says(*written("a b", "c"), cached=40)) as live:
        usage = live.openai.chat.completions.create(model="toy", messages=HI, n=2).usage
    prompt = render(read_request({"messages": HI}))
    stub = len(toy_tokenizer().encode("think")) + 2  # the open channel tag is not billed
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == len(prompt.ids(toy_tokenizer())) - stub
    assert usage.completion_tokens == 2 * len(written("a b", "c"))
    assert usage.completion_tokens_details is not None
    thought = toy_tokenizer().encode("a b") + toy_tokenizer().encode("think")
    assert usage.completion_tokens_details.reasoning_tokens == 2 * (len(thought) + 2)
    assert usage.prompt_tokens_details.cached_tokens == usage.cached_tokens == 40  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_never_leaks_and_frees_the_request(stream: bool) -> None:
    ids = [*written(None, "the moon is near and the END of it")[:-6], *[toy_tokenizer().encode("x")[0]] * 4000]
    engine = says(*ids, seconds=0.001)
    with serving(engine) as live:
        ask = {"model": "toy", "messages": HI, "stop": ["END", "unheard"], "extra_body": {"thinking": False}}
        answer = live.openai.chat.completions.create(**ask, stream=stream)
        if stream:
            told = rebuilt(list(answer))
            text, finish = told["content"], told["finish"]
        else:
            text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert (text, finish) == ("the moon is near and the ", "stop")
        assert soon(lambda: not engine.busy) and len(engine.cancelled) == 1


def test_stop_strings_leave_reasoning_alone() -> None:
    with serving(says(*written("the END comes", "now"))) as live:
        answer = live.openai.chat.completions.create(model="toy", messages=HI, stop="END").choices[0]
    assert (answer.message.reasoning_content, answer.message.content) == ("the END comes", "now")


def test_half_a_stop_string_is_shown_when_its_channel_ends() -> None:
    with serving(says(*written("hm", "so it EN"))) as live:
        assert (
            live.openai.chat.completions.create(model="toy", messages=HI, stop="END").choices[0].message.content
            == "so it EN"
        )


def test_log_probabilities_are_those_of_the_content() -> None:
    with serving(says(*written("hm", "moon 🌙 moon"))) as live:
        ask = {"model": "toy", "messages": HI, "logprobs": True, "top_logprobs": 2}
        whole = live.openai.chat.completions.create(**ask).choices[0]
        chunks = list(live.openai.chat.completions.create(**ask, stream=True))
    assert whole.logprobs is not None and whole.logprobs.content is not None
    spoken = b"".join(bytes(entry.bytes or ()) for entry in whole.logprobs.content)
    assert spoken.decode() == whole.message.content == "moon 🌙 moon"
    assert all(len(entry.top_logprobs) == 2 for entry in whole.logprobs.content)
    streamed = [entry for c in chunks for choice in c.choices for entry in (choice.logprobs or _NONE).content]
    assert streamed == whole.logprobs.content


class _NONE:
    content = ()


def test_log_probabilities_end_with_the_text_that_a_stop_string_cuts() -> None:
    with serving(says(*written("hm", "moon END moon"))) as live:
        ask = {"model": "toy", "messages": HI, "logprobs": True, "stop": "END"}
        answer = live.openai.chat.completions.create(**ask).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in answer.logprobs.content).decode() == "moon "


def test_truncated_reasoning_is_reasoning() -> None:
    with serving(says(*written("a long thought", "never said"))) as live:
        answer = live.openai.chat.completions.create(model="toy", messages=HI, max_tokens=5).choices[0]
    assert answer.finish_reason == "length" and answer.message.content == ""
    assert "a long thought".startswith(answer.message.reasoning_content)


@pytest.mark.parametrize("choice", ["none", None])
def test_a_call_nobody_allowed_is_dropped(choice: str | None) -> None:
    ids = written("hm", "no", {"name": "weather", "arguments": {"city": "Rome"}})
    ask: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice} if choice else {}
    with serving(says(*ids)) as live:
        answer = live.openai.chat.completions.create(model="toy", messages=HI, **ask).choices[0]
    assert (answer.message.tool_calls, answer.message.content, answer.finish_reason) == (None, "no", "stop")


def test_choices_differ_in_their_seeds_and_a_seed_fixes_them() -> None:
    engine = says(*written("hm", "yes"))
    with serving(engine) as live:
        for _ in range(2):
            answer = live.openai.chat.completions.create(model="toy", messages=HI, n=3, seed=7)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in engine.seen] == [7, 8, 9] * 2


def test_what_the_engine_is_asked() -> None:
    engine = says(*written("hm", "yes"))
    with serving(engine) as live:
        body = {"cache_salt": "tenant", "prompt_cache_key": "s", "top_k": 5, "min_p": 0.1, "service_tier": "flex"}
        live.openai.chat.completions.create(
            model="toy", messages=[*HI, {"role": "assistant", "content": "a"}, *HI], temperature=0, max_tokens=9,
            logit_bias={"3": -100}, extra_body=body,
        )  # fmt: skip
    request, end = engine.seen[0], toy_tokenizer().end_of_msg
    rules = request.sampling
    assert (rules.temperature, rules.top_p, rules.top_k, rules.min_p, rules.max_tokens) == (0, 0.95, 5, 0.1, 9)
    assert rules.stop_ids == {end, toy_tokenizer().eos} and dict(rules.logit_bias) == {3: -100}
    assert (request.salt, request.priority) == (b"tenant", "batch")
    assert [request.prompt[at - 1] for at in request.checkpoints] == [end] * 4 and len(request.checkpoints) == 4


def test_plain_completions() -> None:
    ids = toy_tokenizer().encode("the sea 🌊 is far")
    with serving(says(*ids)) as live:
        ask = {"model": "toy", "prompt": ["the moon", [70, 71]], "logprobs": 1, "echo": True, "n": 2}
        whole = live.openai.completions.create(**ask)
        chunks = list(live.openai.completions.create(**ask, stream=True))
    texts = [toy_tokenizer().decode([*prompt, *ids]) for prompt in (toy_tokenizer().encode("the moon"), [70, 71])]
    assert [choice.text for choice in whole.choices] == [texts[0]] * 2 + [texts[1]] * 2
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 4
    for index, choice in enumerate(whole.choices):
        assert "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index) == choice.text
        assert choice.logprobs is not None and choice.logprobs.text_offset is not None
        assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


def test_ids_on_request() -> None:
    with serving(says(*written("hm", "yes"))) as live:
        url = "/v1/chat/completions"
        body = {"messages": HI, "return_token_ids": True}
        whole = live.http.post(url, json=body).json()
        lines = live.http.post(url, json={**body, "stream": True}).text.split("\n\n")
    assert whole["choices"][0]["token_ids"] == written("hm", "yes")
    assert whole["prompt_token_ids"] == [render(read_request({"messages": HI})).ids(toy_tokenizer())]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [i for e in events for c in e["choices"] for i in c.get("token_ids", ())] == written("hm", "yes")
