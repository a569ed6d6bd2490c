"""A tokenizer of bytes: every id below 256 is that byte, so any text splits in the middle of characters.

Its special ids lie in no released order, which shows that the format takes them from the tokenizer.
"""

import re

from hypothesis import settings

from perilune.chat.segments import CLOSE, END, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, OPEN, SEP


class ToyTokenizer:
    def __init__(self) -> None:
        names = [MEDIA_PAD, END, "[EOS]", SEP, MEDIA_END, CLOSE, MEDIA_CONTENT, OPEN, MEDIA_BEGIN, "<|reserved|>"]
        self.specials = {name: 256 + n for n, name in enumerate(names)}
        self._names = {token: name for name, token in self.specials.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        if not allow_special:
            return list(text.encode())
        return [token for piece in self._split.split(text) for token in self._piece(piece)]

    def _piece(self, piece: str) -> list[int]:
        return [self.specials[piece]] if piece in self.specials else list(piece.encode())

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(bytes([token]) if token < 256 else self._names[token].encode() for token in ids)


TOY = ToyTokenizer()
unhurried = settings(deadline=None)  # the first example may wait for a core
