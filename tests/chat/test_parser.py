"""The streaming parser: laws over random id streams, the round trip, and the slips that models are known to make."""

import json
from itertools import pairwise
from typing import Any

import pytest
from chat.toy import TOY, ToyTokenizer, unhurried
from hypothesis import example, given
from hypothesis import strategies as st

from perilune.chat import (
    CallArguments,
    CallStart,
    ChatError,
    Content,
    Finish,
    Parser,
    Prompt,
    Reasoning,
    Reply,
    Segment,
    encode,
    encode_with_targets,
    parse,
    read_request,
    render,
)
from perilune.chat.segments import CLOSE, END, OPEN, SEP
from perilune.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ASCII = st.text(st.characters(codec="ascii"), max_size=12)
LOOKALIKE = st.lists(
    st.one_of(TEXT, st.sampled_from([*TOY.specials, "&amp;", "&quot;", '"', "think", " "])), max_size=3
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | LOOKALIKE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LOOKALIKE, inner, max_size=3),
    max_leaves=6,
)
CALL = st.tuples(LOOKALIKE.filter(bool), st.dictionaries(LOOKALIKE, JSON, max_size=3))


def ids(text: str) -> list[int]:
    return TOY.encode(text, allow_special=True)


def said(text: str, channel: str | None = "think", reason: str | None = None) -> tuple[Any, ...]:
    reply = parse(ids(text), TOY, channel, reason)
    return (
        reply.reasoning,
        reply.content,
        [(call.name, call.arguments) for call in reply.tool_calls],
        reply.finish_reason,
    )


# ---------------------------------------------------------------- laws


@unhurried
@given(LOOKALIKE, LOOKALIKE, st.lists(CALL, max_size=3), st.booleans())
@example("r", "c", [("a&quot;b", {"&amp;quot;": "&quot;"})], True)
def test_what_was_rendered_is_parsed_back(reasoning: str, content: str, calls: list, thinking: bool) -> None:
    prompt = whole(spoken(reasoning, content, calls), thinking)
    reply = parse(written(prompt, TOY), TOY, "think" if thinking else "response")
    assert reply.reasoning == (reasoning if thinking and reasoning.strip() else None)
    assert reply.content == (content or None)
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == calls
    assert reply.finish_reason == ("tool_calls" if calls else "stop")
    assert whole(reply.message(), thinking).ids(TOY) == prompt.ids(TOY)


@unhurried
@given(LOOKALIKE, LOOKALIKE, st.lists(CALL, max_size=2), st.booleans(), st.data())
def test_forgotten_closes_change_nothing(
    reasoning: str, content: str, calls: list, thinking: bool, data: st.DataObject
) -> None:
    """Every place ends where the next begins, as long as the message ends."""
    prompt = whole(spoken(reasoning, content, calls), thinking)
    segments = [segment for segment in prompt.segments if segment.target]
    closes = [n for n, segment in enumerate(segments) if segment == Segment(CLOSE, control=True, target=True)]
    forgotten = data.draw(st.sets(st.sampled_from(closes)))
    kept = [segment for n, segment in enumerate(segments) if not forgotten & {n, n - 1, n - 2}]
    channel = "think" if thinking else "response"
    assert parse(encode(kept, TOY), TOY, channel) == parse(encode(segments, TOY), TOY, channel)


@unhurried
@given(ASCII, ASCII, st.lists(CALL, max_size=2), st.booleans(), st.data())
def test_a_cut_output_says_the_beginning_of_the_same(
    reasoning: str, content: str, calls: list, thinking: bool, data: st.DataObject
) -> None:
    output = written(whole(spoken(reasoning, content, calls), thinking), TOY)
    channel = "think" if thinking else "response"
    full = parse(output, TOY, channel)
    cut = parse(output[: data.draw(st.integers(0, len(output) - 1))], TOY, channel)
    assert (full.reasoning or "").startswith(cut.reasoning or "")
    assert (full.content or "").startswith(cut.content or "")
    assert cut.content is None or cut.reasoning == full.reasoning  # no thought ends up in the answer
    for one, other in zip(cut.tool_calls, full.tool_calls):
        got, wanted = json.loads(one.arguments), json.loads(other.arguments)
        assert one.name == other.name and list(got) == list(wanted)[: len(got)]
        assert [got[key] for key in list(got)[:-1]] == [wanted[key] for key in list(got)[:-1]]


def spoken(reasoning: str, content: str, calls: list) -> dict:
    named = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": named}


def whole(message: dict, thinking: bool) -> Prompt:
    body = {"messages": [message], "thinking": thinking, "add_generation_prompt": False}
    return render(read_request(body))


def written(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    ids, targets = encode_with_targets(prompt.segments, tokenizer)
    return [token for token, target in zip(ids, targets) if target]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    texts = ["It rains in Hangzhou. " * 20, "message think response tools call argument role type key index " * 20]
    return Tokenizer.train(texts, 400)


def test_a_tokenizer_trained_here_serves_as_well(trained: Tokenizer) -> None:
    """The control ids are where that tokenizer has them: at the top of its own vocabulary."""
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "look", "arguments": '{"city": "杭州", "days": 1}'},
    }
    message = {"role": "assistant", "content": "Wait <|open|>", "reasoning_content": "雨?", "tool_calls": [call]}
    prompt = whole(message, thinking=True)
    assert prompt.ids(trained).count(trained.open) == prompt.text.count(OPEN) - 1
    reply = parse(written(prompt, trained), trained)
    assert (reply.reasoning, reply.content) == ("雨?", "Wait <|open|>")
    assert whole(reply.message(), thinking=True).ids(trained) == prompt.ids(trained)
    assert trained.open < 400


CONTROL = st.sampled_from([OPEN, CLOSE, SEP, END, "[EOS]", "<|media_pad|>"])
HEADERS = st.sampled_from(
    [
        *("think", "response", "tools", "call", "argument", "json", "message", "other", "thi", "call x", ""),
        *(
            'call tool="f" index="1"',
            'call tool=""',
            'call tool="f',
            'argument key="k" type="string"',
            'argument type="x"',
        ),
        *('argument key="n" type="number"', 'argument key="o" type="object"', 'json type="object"'),
        *('message role="assistant"', 'message role="user"'),
    ]
)
TAG = st.tuples(st.sampled_from([OPEN, CLOSE]), HEADERS).map(lambda pair: "".join(pair) + SEP)
WORDS = st.sampled_from(["hello", " ", "\n", "1.5", "[1, 2]", "NaN", '{"a": 1}', "é€🌧", "key=", '"', "x" * 70])
STREAM = st.lists(st.one_of(TAG, TAG, CONTROL, HEADERS, WORDS), max_size=25).map("".join).map(ids)
BYTES = st.lists(st.integers(0, 255 + len(TOY.specials)), max_size=60)
CHANNEL = st.sampled_from(["think", "response", None])


@unhurried
@given(STREAM | BYTES, CHANNEL, st.data())
def test_any_split_of_the_ids_gives_the_same_reply(stream: list[int], channel: str | None, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    parser, events = Parser(TOY, channel), []
    for start, stop in pairwise([0, *sorted(cuts), len(stream)]):
        events += parser.feed(stream[start:stop])
    assert Reply.of(events + parser.finish()) == parse(stream, TOY, channel)


@unhurried
@given(STREAM | BYTES, CHANNEL, st.sampled_from([None, "stop", "length"]))
def test_whatever_the_model_writes_the_events_are_well_formed(
    stream: list[int], channel: str | None, why: str | None
) -> None:
    parser = Parser(TOY, channel)
    events = [event for token in stream for event in parser.feed([token])] + parser.finish(why)
    assert [event for event in events if isinstance(event, Finish)] == events[-1:]
    started = [event.index for event in events if isinstance(event, CallStart)]
    assert started == list(range(len(started)))
    open_call = None
    for event in events:
        if isinstance(event, CallStart):
            open_call = event.index
        elif isinstance(event, CallArguments):
            assert event.index == open_call  # no fragment reaches a call that is already over
        assert getattr(event, "text", "x")  # no empty deltas
    reply = Reply.of(events)
    assert (reply.finish_reason == "tool_calls") == (
        bool(started) and (why or ("stop" if parser.ended else "")) == "stop"
    )


@unhurried
@given(STREAM, CHANNEL)
def test_no_marker_leaks(stream: list[int], channel: str | None) -> None:
    reply = parse(stream, TOY, channel)
    shown = [reply.reasoning, reply.content, *(call.name + call.arguments for call in reply.tool_calls)]
    assert not any("<|" in text or "|>" in text or "EOS" in text for text in shown if text)


@unhurried
@given(st.lists(st.one_of(TAG.filter(lambda tag: "json" not in tag), CONTROL, HEADERS, WORDS), max_size=25), CHANNEL)
def test_typed_arguments_always_end_as_one_json_object(pieces: list[str], channel: str | None) -> None:
    for call in parse(ids("".join(pieces)), TOY, channel).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


@unhurried
@given(BYTES.map(lambda stream: [token for token in stream if token < 256]))
def test_content_is_the_decoded_text(stream: list[int]) -> None:
    assert (parse(stream, TOY, "response").content or "") == bytes(stream).decode("utf-8", "replace")


# ---------------------------------------------------------------- what models do

CALL_F = '<|open|>call tool="f" index="1"<|sep|>'
X = '<|open|>argument key="x" type="number"<|sep|>1'
S = '<|open|>argument key="s" type="string"<|sep|>ab'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("why<|open|>response<|sep|>hi", "why", "hi", []),
        ("why<|close|>think<|sep|>hi", "why", "hi", []),
        ("why<|close|>think<|sep|>\n<|open|>response<|sep|>hi", "why", "hi", []),
        (f"why<|open|>tools<|sep|>{CALL_F}", "why", None, [("f", "{}")]),
        (f"why{CALL_F}{X}", "why", None, [("f", "{}")]),
        (f"{CALL_F}{X}<|close|>call<|sep|>", None, None, [("f", '{"x":1}')]),
        (f"{CALL_F}{X}{S}", None, None, [("f", '{"x":1,"s":"ab"}')]),
        (f"{CALL_F}{X}{CALL_F}{S}<|end_of_msg|>", None, None, [("f", '{"x":1}'), ("f", '{"s":"ab"}')]),
        (f"{CALL_F}{X}<|close|>message<|sep|>junk", None, None, [("f", '{"x":1}')]),
        (f"{CALL_F}{X}<|open|>response<|sep|>late", None, "late", [("f", '{"x":1}')]),
        ("a<|open|>response<|sep|>b<|close|>response<|sep|>c<|open|>response<|sep|>d", "a", "bd", []),
        ("a<|close|>thi", "a", None, []),
        ("a<|open|>response", "a", None, []),
        ('a<|open|>call tool="f" ind', "a", None, []),
        ("a<|open|>", "a", None, []),
        ("a<|close|> b is text", "a b is text", None, []),
        ("a<|open|>message from home", "amessage from home", None, []),
        ("a<|open|>" + "b" * 70, "a" + "b" * 70, None, []),
        ('a<|open|>verse of="' + "b" * 70 + '"<|sep|>c', "ac", None, []),
        ("a<|open|>verse<|sep|>b<|close|>verse<|sep|>c", "abc", None, []),
        ('a<|open|>message role="user"<|sep|>b', "a", None, []),
        ('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>a', "a", None, []),
        ("a<|end_of_msg|>b", "a", None, []),
        ("a[EOS]<|media_pad|>b<|sep|>c", "abc", None, []),
        (f"{CALL_F}noise<|close|>call<|sep|>noise<|close|>tools<|sep|>noise", None, None, [("f", "{}")]),
        ('<|open|>call index="1"<|sep|>' + X + f"<|close|>call<|sep|>{CALL_F}", None, None, [("f", "{}")]),
        (f'{CALL_F}<|open|>argument type="number"<|sep|>1<|close|>call<|sep|>', None, None, [("f", "{}")]),
        (f"{CALL_F}{X}<|open|>json<|sep|>{{}}<|close|>call<|sep|>", None, None, [("f", '{"x":1}')]),
        (f'{CALL_F}<|open|>json<|sep|> {{"a":  1}}<|close|>json<|sep|>{X}', None, None, [("f", ' {"a":  1}')]),
        (f"{CALL_F}<|open|>json<|sep|>\n<|close|>json<|sep|>", None, None, [("f", "{}")]),
    ],
)
def test_slips_are_forgiven(text: str, reasoning: str | None, content: str | None, calls: list) -> None:
    assert said(text)[:3] == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("kind", "value", "json_text"),
    [
        ("number", "1.0", "1.0"),
        ("number", " 12 ", "12"),
        ("number", "9" * 5000, "9" * 5000),
        ("number", "NaN", '"NaN"'),
        ("number", "one", '"one"'),
        ("object", '{"a": [1 ]}', '{"a": [1 ]}'),
        ("array", "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ("string", "1", '"1"'),
        ("string", 'a"\n\\é', '"a\\"\\n\\\\é"'),
        ("boolean", "true", "true"),
        ("null", "null", "null"),
        ("integer", "3", "3"),
    ],
)
def test_arguments_keep_their_type_and_spelling(kind: str, value: str, json_text: str) -> None:
    text = f'{CALL_F}<|open|>argument key="k" type="{kind}"<|sep|>{value}<|close|>argument<|sep|><|close|>call<|sep|>'
    assert said(text)[2] == [("f", f'{{"k":{json_text}}}')]


def test_blanks_before_a_tag_are_nobody_s() -> None:
    assert said("\n<|open|>think<|sep|>a<|close|>think<|sep|>b", None)[:2] == ("a", "b")
    assert said("\n b", None)[:2] == (None, "\n b")


def test_a_character_that_a_tag_cuts_in_half_stays_on_its_side() -> None:
    reply = parse([*b"a", *"é".encode()[:1], *ids("<|open|>response<|sep|>b")], TOY)
    assert (reply.reasoning, reply.content) == ("a\ufffd", "b")


def test_prose_after_a_stray_marker_is_not_held_back_for_long() -> None:
    parser = Parser(TOY)
    assert parser.feed(ids("<|open|>" + "b" * 64)) == []
    assert parser.feed(ids("b")) == [Reasoning("b" * 65)]


def test_a_call_is_over_before_the_next_channel_speaks() -> None:
    events = Parser(TOY).feed(ids(f"{CALL_F}{S}<|open|>response<|sep|>late"))
    assert events == [CallStart(0, "f"), CallArguments(0, '{"s":"ab"}'), Content("late")]


def test_deltas_come_as_early_as_they_are_sure() -> None:
    parser = Parser(TOY, "think")
    assert parser.feed(ids("Hm")) == [Reasoning("Hm")]
    assert parser.feed(ids("<|close|>think<|sep|><|open|>response<|sep|>")) == []
    assert parser.feed("é".encode()[:1]) == []
    assert parser.feed("é".encode()[1:]) == [Content("é")]
    assert parser.feed(ids(f"<|open|>tools<|sep|>{CALL_F}")) == [CallStart(0, "f")]
    assert parser.feed(ids(S)) == [CallArguments(0, '{"s":"ab')]
    assert parser.feed(ids("<|close|>argument<|sep|>")) == [CallArguments(0, '"')]
    assert parser.feed(ids(X)) == []
    assert parser.feed(ids("<|close|>argument<|sep|>")) == [CallArguments(0, ',"x":1')]
    assert parser.channel == "tools" and not parser.ended
    assert parser.finish("stop") == [CallArguments(0, "}"), Finish("tool_calls")]


@pytest.mark.parametrize(
    ("text", "reason", "finish"),
    [
        ("a", None, "length"),
        ("a<|end_of_msg|>", None, "stop"),
        ("a<|close|>message<|sep|>", None, "stop"),
        ("a", "stop", "stop"),
        (CALL_F, "stop", "tool_calls"),
        (CALL_F, "length", "length"),
        (CALL_F + "<|end_of_msg|>", None, "tool_calls"),
        ("a<|end_of_msg|>", "cancelled", "cancelled"),
    ],
)
def test_why_it_ended(text: str, reason: str | None, finish: str) -> None:
    assert said(text, "response", reason)[3] == finish


def test_thought_is_counted_with_its_close() -> None:
    parser = Parser(TOY)
    parser.feed(ids("abc<|close|>think<|sep|>answer"))
    assert parser.reasoning_tokens == len("abc") + len("think") + 2


def test_a_tokenizer_without_control_ids_is_named() -> None:
    bare = ToyTokenizer()
    del bare.specials[SEP]
    with pytest.raises(ChatError, match=r"no special token <\|sep\|>"):
        Parser(bare)


def test_long_outputs_take_linear_time() -> None:
    """A quadratic join would need minutes for this many ids."""
    n = 50_000
    assert said(f"{CALL_F}{S}" + "x" * n)[2] == [("f", '{"s":"ab' + "x" * n + '"}')]
    assert said(" " * n, None)[1] is None
    assert said('<|open|>call tool="' + "x" * n)[2] == []
