"""Rendering laws and the rules that no golden vector shows."""

import pytest
from chat.toy import TOY, ToyTokenizer, unhurried
from hypothesis import given
from hypothesis import strategies as st

from perilune.chat import (
    ChatError,
    Segment,
    encode,
    encode_with_targets,
    image_parts,
    image_prompt,
    pending_ids,
    read_request,
    render,
)
from perilune.chat.segments import END, MEDIA_PAD, OPEN

CALLS = [
    {"id": "a", "type": "function", "function": {"name": "first", "arguments": "{}"}},
    {"id": "b", "type": "function", "function": {"name": "second", "arguments": '{"n": 1}'}},
]
MARKERS = st.sampled_from([*TOY.specials, "<|kimi_image_placeholder|>", "&quot;", '"', "message"])
WILD = st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), MARKERS), max_size=4).map(
    "".join
)


def text_of(*messages: dict, **options: object) -> str:
    return render(read_request({"messages": list(messages), "thinking": False, **options})).text


def user(content: object = "hi", **more: object) -> dict:
    return {"role": "user", "content": content, **more}


def result(call: str | None, content: object = "r", **more: object) -> dict:
    return {"role": "tool", "content": content, **({"tool_call_id": call} if call else {}), **more}


def assistant(**more: object) -> dict:
    return {"role": "assistant", "content": "", **more}


@unhurried
@given(WILD, WILD.filter(bool), WILD.filter(bool), WILD, WILD)
def test_control_ids_never_come_from_content(content: str, name: str, tool: str, key: str, value: str) -> None:
    def controls(*texts: str) -> list[int]:
        content, name, tool, key, value = texts
        call = {"id": "x", "function": {"name": tool, "arguments": {key: value}}}
        said = {"role": "assistant", "content": content, "reasoning_content": "r" + content, "tool_calls": [call]}
        messages = [user(content, name=name), said, result("x", value)]
        tools = [{"type": "function", "function": {"name": "f", "description": content}}]
        ids = render(read_request({"messages": messages, "tools": tools})).ids(TOY)
        return [token for token in ids if token >= 256]

    assert controls(content, name, tool, key, value) == controls("c", "n", "t", "k", "v")


@unhurried
@given(WILD)
def test_text_survives_encoding(content: str) -> None:
    assert TOY.decode_bytes(encode([Segment(content)], TOY)).decode() == content


def test_results_follow_their_calls() -> None:
    text = text_of(user(), assistant(tool_calls=CALLS), result("b", "two", name="stale"), result("a", "one"))
    assert text.index('tool="first" index="1"<|sep|>one') < text.index('tool="second" index="2"<|sep|>two')
    assert "stale" not in text


def test_results_count_from_one_after_each_assistant_message() -> None:
    turn = [assistant(tool_calls=CALLS), result("a", "one"), result("b", "two")]
    assert text_of(user(), *turn, user(), *turn).count('tool="first" index="1"<|sep|>one') == 2


def test_a_run_with_a_stranger_stays_as_it_came() -> None:
    text = text_of(user(), assistant(tool_calls=CALLS), result("b", "two"), result("?", "one", name="other"))
    assert 'tool="first" index="1"<|sep|>two' in text and 'tool="other" index="2"<|sep|>one' in text


def test_a_result_without_id_does_not_match_a_call_without_id() -> None:
    calls = [{**CALLS[0], "id": None}, {**CALLS[1], "id": None}]
    text = text_of(user(), assistant(tool_calls=calls), result(None, "x"), result(None, "y"))
    assert 'tool="first" index="1"<|sep|>x' in text and 'tool="second" index="2"<|sep|>y' in text


def test_images_move_with_their_results() -> None:
    picture = [{"type": "image_url", "image_url": {"url": n}} for n in ("u", "b", "a")]
    messages = [user([picture[0]]), assistant(tool_calls=CALLS), result("b", [picture[1]]), result("a", [picture[2]])]
    request = read_request({"messages": messages})
    assert [part["image_url"]["url"] for part in image_parts(request)] == ["u", "a", "b"]
    text = render(request, [image_prompt(n, n, n) for n in (1, 2, 3)]).text
    assert 'index="1"<|sep|><|media_begin|>image 2x2<|media_content|><|media_pad|><|media_pad|><|media_end|>' in text


def test_one_pad_stands_for_an_unmeasured_image_and_a_typed_placeholder_for_nothing() -> None:
    typed = "<|media_pad|><|kimi_image_placeholder|>"
    ids = render(read_request({"messages": [user([{"type": "text", "text": typed}, {"type": "image"}])]})).ids(TOY)
    assert ids.count(TOY.specials[MEDIA_PAD]) == 1


@pytest.mark.parametrize("given_prompts", [0, 2])
def test_image_prompts_must_fit_the_images(given_prompts: int) -> None:
    with pytest.raises(ChatError, match="given for 1 image parts"):
        render(read_request({"messages": [user([{"type": "image"}])]}), [image_prompt(1, 1)] * given_prompts)


def test_one_shot_options_leave_the_history_prefix_alone() -> None:
    messages = [user("a"), assistant(content="b"), user("c")]
    plain, forced = (
        render(read_request({"messages": messages, "tool_choice": choice})).text for choice in ("auto", "required")
    )
    history = plain.removesuffix('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
    assert forced.startswith(history) and "tool_choice=required" in forced[len(history) :]


def test_a_named_function_adds_no_words() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert text_of(user(), tool_choice=named) == text_of(user())


def test_a_prompt_ends_in_its_channel() -> None:
    thinking = render(read_request({"messages": [user()]}))
    assert thinking.channel == "think" and thinking.text.endswith("<|open|>think<|sep|>")
    assert pending_ids(thinking, TOY) == len("think") + 2
    whole = render(read_request({"messages": [user()], "add_generation_prompt": False}))
    assert whole.channel is None and pending_ids(whole, TOY) == 0


@pytest.mark.parametrize(
    ("thinking", "turn", "channel", "end"),
    [
        (True, {"content": "", "reasoning_content": "so"}, "think", "<|open|>think<|sep|>so"),
        (True, {"content": "I"}, "response", "<|close|>think<|sep|><|open|>response<|sep|>I"),
        (False, {"content": "I"}, "response", 'role="assistant"<|sep|><|open|>response<|sep|>I'),
    ],
)
def test_a_partial_message_is_continued(thinking: bool, turn: dict, channel: str, end: str) -> None:
    body = {"messages": [user(), {"role": "assistant", "partial": True, **turn}], "thinking": thinking}
    prompt = render(read_request({**body, "tool_choice": "none"}))
    assert prompt.channel == channel and prompt.text.endswith(end)
    assert prompt.text.index("tool_choice=none") < prompt.text.rindex('role="assistant"')


def test_the_loss_falls_on_what_the_model_writes() -> None:
    calls = [*CALLS, {"id": "c", "function": {"name": "third", "arguments": "not json"}}]
    messages = [user("q"), assistant(content="a", reasoning_content="r", tool_calls=calls), result("a")]
    prompt = render(read_request({"messages": messages, "add_generation_prompt": False}))
    ids, targets = encode_with_targets(prompt.segments, TOY)
    assert ids == prompt.ids(TOY)
    written = TOY.decode_bytes([token for token, target in zip(ids, targets) if target]).decode()
    assert written.startswith("r<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|><|open|>tools")
    assert written.endswith(f"<|close|>message<|sep|>{END}") and written.count(END) == 1
    assert '<|open|>call tool="third" index="3"<|sep|><|close|>call<|sep|>' in written  # the raw block is not learnt


def test_a_tokenizer_without_control_ids_is_named() -> None:
    bare = ToyTokenizer()
    del bare.specials[OPEN]
    with pytest.raises(ChatError, match=r"no special token <\|open\|>"):
        encode([Segment(OPEN, control=True)], bare)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (user([{"type": "input_audio"}]), "messages[0].content[0].type"),
        (user([{"type": "text", "text": 3}]), "messages[0].content[0].text"),
        (user(["loose"]), "messages[0].content[0].type"),
        (user({"text": "x"}), "messages[0].content"),
        (user(name={"a": 1}), "messages[0].name"),
        (result("nobody"), "messages[0]"),
        (assistant(reasoning_content=["r"]), "messages[0].reasoning_content"),
        (assistant(tool_calls={"id": 1}), "messages[0].tool_calls"),
        (assistant(tool_calls=["x"]), "messages[0].tool_calls[0].function.name"),
        (assistant(tool_calls=[{"function": {"name": None}}]), "messages[0].tool_calls[0].function.name"),
        (
            assistant(tool_calls=[{"function": {"name": "f", "arguments": 3}}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            assistant(tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (assistant(partial=True, tool_calls=CALLS), "messages[0].partial"),
        (user(partial=True), "messages[0].partial"),
    ],
)
def test_names_what_it_cannot_render(message: dict, param: str) -> None:
    with pytest.raises(ChatError) as refused:
        render(read_request({"messages": [message]}))
    assert refused.value.param == param
