"""Text as expressions over UTF-8 bytes: sets of characters, JSON strings, regular expressions.

A regular expression speaks of characters, a grammar of bytes, and inside a JSON string of escaped bytes; so a pattern
is compiled with the way its characters are written (`plain` or `quoted`).
"""

import re
import re._constants as op  # type: ignore[import-not-found]  # the parser of `re`: ECMA-262 patterns of real schemas
import re._parser as parser  # type: ignore[import-not-found]  # are within what it reads
from collections.abc import Callable, Iterable
from typing import Any

from perilune.serve.grammar.expression import EMPTY, NOTHING, Arena

Ranges = list[tuple[int, int]]  # code points, both ends in
Write = Callable[[Arena, Ranges], int]  # how one character out of a set is written

LAST = 0x10FFFF
ANY: Ranges = [(0, 0xD7FF), (0xE000, LAST)]  # surrogates are no characters
_CLASSES: dict[Any, Ranges] = {
    op.CATEGORY_DIGIT: [(0x30, 0x39)],
    op.CATEGORY_WORD: [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    op.CATEGORY_SPACE: [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0)],
}
_NOT_CLASSES = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
}
_ENDS = {op.AT_BEGINNING, op.AT_BEGINNING_STRING, op.AT_END, op.AT_END_STRING}


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint, without surrogates."""
    merged: Ranges = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return [(max(low, a), min(high, b)) for low, high in merged for a, b in ANY if max(low, a) <= min(high, b)]


def complement(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for low, high in normalise(ranges) for edge in (low, high)), LAST + 1]
    return normalise((low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2]) if low + 1 <= high - 1)


def plain(arena: Arena, ranges: Ranges) -> int:
    """One character, as UTF-8."""
    return arena.either(*(_utf8(arena, low, high) for low, high in ranges))


def quoted(arena: Arena, ranges: Ranges) -> int:
    """One character inside a JSON string: itself, or its short escape where JSON wants one; no other escapes, so that a
    value has one spelling."""
    bare = normalise(
        (max(low, a), min(high, b)) for low, high in ranges for a, b in _BARE if max(low, a) <= min(high, b)
    )
    escaped = [point for low, high in ranges for point in _ESCAPED if low <= point <= high]
    return arena.either(plain(arena, bare), *(arena.text(_ESCAPED[point]) for point in escaped))


_ESCAPED = {0x22: r"\"", 0x5C: r"\\"} | {ord(c): f"\\{name}" for c, name in zip("\b\f\n\r\t", "bfnrt")}
_ESCAPED |= {point: f"\\u{point:04x}" for point in range(0x20) if point not in _ESCAPED}
_BARE = complement([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])


def _utf8(arena: Arena, low: int, high: int) -> int:
    """One code point between `low` and `high`: cut where the encoding's length changes, then byte by byte."""
    for edge in (0x7F, 0x7FF, 0xFFFF):
        if low <= edge < high:
            return arena.either(_utf8(arena, low, edge), _utf8(arena, edge + 1, high))
    return _bytes(arena, chr(low).encode(), chr(high).encode())


def _bytes(arena: Arena, low: bytes, high: bytes) -> int:
    """Words of one length between two of them, each byte but the first running over 80 to BF."""
    if len(low) == 0:
        return EMPTY
    head = lambda a, b: arena.symbols(range(a, b + 1))  # noqa: E731
    if low[0] == high[0]:
        return arena.sequence(head(low[0], low[0]), _bytes(arena, low[1:], high[1:]))
    bottom, top = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    parts = []
    first, last = low[0], high[0]
    if low[1:] != bottom:
        parts.append(arena.sequence(head(first, first), _bytes(arena, low[1:], top)))
        first += 1
    if high[1:] != top:
        parts.append(arena.sequence(head(last, last), _bytes(arena, bottom, high[1:])))
        last -= 1
    if first <= last:
        parts.append(arena.sequence(head(first, last), _bytes(arena, bottom, top)))
    return arena.either(*parts)


def string(arena: Arena, write: Write, least: int = 0, most: int | None = None) -> int:
    """Any text of `least` to `most` characters."""
    return arena.repeat(write(arena, ANY), least, most)


def spelled(arena: Arena, write: Write, text: str) -> int:
    """Exactly this text. NOTHING where it holds a lone surrogate, which has no UTF-8."""
    try:
        return arena.text(text if write is plain else "".join(_ESCAPED.get(ord(c), c) for c in text))
    except UnicodeEncodeError:
        return NOTHING


def pattern(arena: Arena, regex: str, write: Write, whole: bool = False) -> int:
    """Texts in which `regex` is found, or which it matches from end to end (`whole`).

    ValueError for what no grammar can hold: look-around, back references, anchors in the middle.
    """
    try:
        tree = parser.parse(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"The pattern {regex!r} is not a regular expression: {error}.") from None
    return _Pattern(arena, regex, write).search(list(tree), whole)


class _Pattern:
    def __init__(self, arena: Arena, source: str, write: Write) -> None:
        self.arena, self.source, self.write = arena, source, write

    def search(self, items: list, whole: bool) -> int:
        """The parts of a top-level alternation are anchored one by one."""
        if len(items) == 1 and items[0][0] is op.BRANCH:
            return self.arena.either(*(self.search(list(part), whole) for part in items[0][1][1]))
        if len(items) == 1 and items[0][0] is op.SUBPATTERN:
            return self.search(list(items[0][1][3]), whole)
        starts = bool(items) and items[0] in ((op.AT, op.AT_BEGINNING), (op.AT, op.AT_BEGINNING_STRING))
        items = items[1:] if starts else items
        ends = bool(items) and items[-1] in ((op.AT, op.AT_END), (op.AT, op.AT_END_STRING))
        items = items[:-1] if ends else items
        anything = string(self.arena, self.write)
        before = EMPTY if starts or whole else anything
        after = EMPTY if ends or whole else anything
        return self.arena.sequence(before, self._all(items), after)

    def _all(self, items: Iterable) -> int:
        return self.arena.sequence(*(self._one(*item) for item in items))

    def _one(self, kind: Any, value: Any) -> int:
        if kind is op.BRANCH:
            return self.arena.either(*(self._all(part) for part in value[1]))
        if kind is op.SUBPATTERN:
            _, on, off, inner = value
            if on or off:
                raise ValueError(f"The pattern {self.source!r} sets flags inside, which a grammar cannot hold.")
            return self._all(inner)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            least, most, inner = value
            return self.arena.repeat(self._all(inner), least, None if most is op.MAXREPEAT else most)
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self.write(self.arena, self._characters(kind, value))
        raise ValueError(f"The pattern {self.source!r} uses {_name(kind)}, which a grammar cannot hold.")

    def _characters(self, kind: Any, value: Any) -> Ranges:
        if kind is op.ANY:
            return complement([(0x0A, 0x0A)])
        if kind is op.IN:
            negated = value[0] == (op.NEGATE, None)
            ranges = normalise(r for item in value[negated:] for r in self._characters(*item))
            return complement(ranges) if negated else ranges
        if kind is op.RANGE:
            return normalise([value])
        if kind is op.CATEGORY:
            return _CLASSES[value] if value in _CLASSES else complement(_CLASSES[_NOT_CLASSES[value]])
        one = normalise([(value, value)])
        return complement(one) if kind is op.NOT_LITERAL else one


def _name(kind: Any) -> str:
    names = {
        op.AT: "an anchor or word boundary in the middle",
        op.ASSERT: "look-around",
        op.ASSERT_NOT: "look-around",
        op.GROUPREF: "a back reference",
    }
    return names.get(kind, str(kind).lower())
