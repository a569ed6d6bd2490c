"""XTML written down: a message is a run of segments, each either a control token or ordinary text (report appendix F).

    element = <|open|> tag (" key" '="' value '"')* <|sep|>  body  <|close|> tag <|sep|>

A control segment is one special id; text is encoded with specials switched off, segment by segment. So BPE never merges
across a boundary, and marker-like text that a user typed stays text.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from perilune.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
_MEDIA = re.compile(r"(<\|media_(?:begin|content|pad|end)\|>)")


class ChatError(ValueError):
    """A request that cannot be rendered. `param` is the path of the offending key, as OpenAI errors name it."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


class Segment(NamedTuple):
    """One piece of a prompt; `target` marks what the model writes (the tokens a fine-tuning loss is taken on)."""

    text: str
    control: bool = False
    target: bool = False


def open_tag(tag: str, **attributes: object) -> Iterator[Segment]:
    """`<|open|>tag key="value"<|sep|>`; an attribute is FOUR segments, lest a value merge with its quotes."""
    yield Segment(OPEN, control=True)
    yield Segment(tag)
    for key, value in attributes.items():
        yield from (Segment(f" {key}"), Segment('="'), Segment(escape(str(value))), Segment('"'))
    yield Segment(SEP, control=True)


def close_tag(tag: str) -> Iterator[Segment]:
    """`<|close|>tag<|sep|>`."""
    yield from (Segment(CLOSE, control=True), Segment(tag), Segment(SEP, control=True))


def element(tag: str, body: Iterable[Segment], **attributes: object) -> Iterator[Segment]:
    """A whole element around `body`."""
    yield from open_tag(tag, **attributes)
    yield from body
    yield from close_tag(tag)


def message(body: Iterable[Segment], **attributes: object) -> Iterator[Segment]:
    """A whole message, with the terminator that stops generation."""
    yield from element("message", body, **attributes)
    yield Segment(END, control=True)


def escape(value: str) -> str:
    """An attribute value; only the two characters that could end it or start an escape are touched."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def image_prompt(width: int, height: int, tokens: int = 1) -> str:
    """What stands for one image in a prompt: its ORIGINAL size in pixels, then `tokens` pads for the vision tower."""
    return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD * tokens}{MEDIA_END}"


def media_segments(prompt: str) -> list[Segment]:
    """Segments of an image prompt: the media markers are control, all else is text."""
    return [Segment(piece, control=bool(_MEDIA.fullmatch(piece))) for piece in _MEDIA.split(prompt) if piece]


def encode(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Ids of a run of segments. Control ids come from control segments only."""
    return [token for segment in segments for token in _encode_one(segment, tokenizer)]


def encode_with_targets(segments: Iterable[Segment], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids, and for each id whether the model writes it (a fine-tuning loss mask)."""
    ids: list[int] = []
    targets: list[bool] = []
    for segment in segments:
        piece = _encode_one(segment, tokenizer)
        ids += piece
        targets += [segment.target] * len(piece)
    return ids, targets


def _encode_one(segment: Segment, tokenizer: Tokenizer) -> list[int]:
    if not segment.control:
        return tokenizer.encode(segment.text, allow_special=False)
    try:
        return [tokenizer.specials[segment.text]]
    except KeyError:
        raise ChatError("tokenizer", f"has no special token {segment.text}, which the chat format needs") from None
