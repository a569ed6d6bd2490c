"""Token ids -> text, tags and the end of the message, one id at a time.

Structure is read from control ids alone, so text that merely looks like a marker stays text. A tag is only complete at
its <|sep|>; what never became a tag is given back as text if it cannot have been one, and dropped if it was cut short.
"""

import codecs
import re
from typing import NamedTuple

from perilune.chat.segments import CLOSE, END, OPEN, SEP, ChatError, unescape
from perilune.tokenizer import Tokenizer

TAGS = ("message", "think", "response", "tools", "call", "argument", "json")
_HOLD = 64  # characters after a marker by which a tag must be recognisable; then it may be as long as it likes
_TAG_LIKE = re.compile(rf'(?:{"|".join(TAGS)})\s|[\w-]+\s+[\w-]+="')
_NAME = re.compile(r"\s*([^\s=\"]*)")
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')
_CUT_SHORT = re.compile(rf'(?:{"|".join(TAGS)})(?:\s+[^\s="]+="[^"]*")*\s*(?:[^\s="]+(?:="?[^"]*)?)?')


class Text(NamedTuple):
    """Decoded text, in whatever place the last tag left us."""

    text: str


class Open(NamedTuple):
    """`<|open|>tag key="value"<|sep|>`."""

    tag: str
    attributes: dict[str, str]


class Close(NamedTuple):
    """`<|close|>tag<|sep|>`."""

    tag: str


class EndOfMessage(NamedTuple):
    """`<|end_of_msg|>`."""


Lexeme = Text | Open | Close | EndOfMessage


class Lexer:
    """Feed ids with `push`, then `close` once. Splitting the ids between calls changes nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = [name for name in (OPEN, CLOSE, SEP, END) if name not in tokenizer.specials]
        if missing:
            raise ChatError("tokenizer", f"has no special token {missing[0]}, which the chat format needs")
        self._names = {token: name for name, token in tokenizer.specials.items()}
        self._bytes = tokenizer.decode_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._marker: str | None = None  # OPEN or CLOSE while the pieces of a tag come in
        self._pieces: list[str] = []
        self._held = 0

    def push(self, token: int) -> list[Lexeme]:
        """The lexemes that one more id completes."""
        name = self._names.get(token)
        if name is None:
            return self._text(self._decoder.decode(self._bytes([token])))
        if name not in (OPEN, CLOSE, SEP, END):
            return []  # media, reserved and the like: nothing a reader should see
        return [*self._flush(), *self._control(name)]

    def close(self) -> list[Lexeme]:
        """What is still held when no more ids come."""
        return [*self._flush(), *self._abandon()]

    def _flush(self) -> list[Lexeme]:
        return self._text(self._decoder.decode(b"", final=True))

    def _text(self, text: str) -> list[Lexeme]:
        if not text:
            return []
        if self._marker is None:
            return [Text(text)]
        self._pieces.append(text)
        before, self._held = self._held, self._held + len(text)
        if before <= _HOLD < self._held and not _TAG_LIKE.match("".join(self._pieces)):
            return self._release()
        return []

    def _control(self, name: str) -> list[Lexeme]:
        if name == SEP:
            return [] if self._marker is None else [self._tag()]
        lexemes = self._abandon()
        if name == END:
            return [*lexemes, EndOfMessage()]
        self._marker = name
        return lexemes

    def _tag(self) -> Lexeme:
        marker, header = self._marker, self._take()
        tag = _NAME.match(header).group(1)  # type: ignore[union-attr]  # it matches anything
        if marker == CLOSE:
            return Close(tag)
        return Open(tag, {key: unescape(value) for key, value in _ATTRIBUTE.findall(header)})

    def _abandon(self) -> list[Lexeme]:
        """A tag that another control id, or the end, interrupted."""
        header = "".join(self._pieces)
        if any(tag.startswith(header) for tag in TAGS) or _CUT_SHORT.fullmatch(header):
            self._take()
            return []
        return self._release()

    def _release(self) -> list[Lexeme]:
        return [Text(self._take())]

    def _take(self) -> str:
        header = "".join(self._pieces)
        self._marker, self._held = None, 0
        self._pieces.clear()
        return header
