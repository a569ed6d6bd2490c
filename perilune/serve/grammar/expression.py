"""Languages as expressions, and their derivatives (Brzozowski 1964).

    ∂ₐ(x·y) = ∂ₐx·y | (ε ∈ x) ∂ₐy        ∂ₐ(x{m,n}) = ∂ₐx·x{m−1,n−1}        ∂ₐ(x|y) = ∂ₐx | ∂ₐy

The expression that is left after some symbols IS the state: an integer into an arena of interned nodes, so a state can
be kept, forked and returned to for nothing. A recursive rule is a node that unfolds when it is derived, which makes the
expression its own stack. Symbols are bytes 0 to 255 and, from 256 on, one for each control id of the vocabulary.
"""

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

Branches = list[tuple[int, int]]

NOTHING, EMPTY = 0, 1  # the language without words, and the one of the empty word
MOST = 1_000_000  # nodes and parts of one arena: about a second's work, so that no schema can stop a server
BYTES = (1 << 256) - 1
INFINITE = sys.maxsize


class TooLarge(ValueError):  # noqa: N818 - as Full
    """A grammar that would take too long to hold an answer to."""

    def __init__(self) -> None:
        super().__init__("The grammar is too large to hold an answer to.")


class Leaf(Protocol):
    """A language given by what it does: hashable, its derivatives leaves again."""

    def derive(self, symbol: int) -> "Leaf | None": ...

    @property
    def nullable(self) -> bool: ...

    @property
    def remaining(self) -> int | None: ...


class Arena:
    """Makes expressions and takes them apart. Equal expressions are one integer."""

    def __init__(self) -> None:
        self._nodes: list[tuple] = [("none",), ("empty",)]
        self._index: dict[tuple, int] = {node: n for n, node in enumerate(self._nodes)}
        self._rules: dict[str, int] = {}
        self._work = 0
        self._branches: dict[int, Branches] = {}
        self._deriving: set[int] = set()
        self._nullable: dict[int, bool] = {}
        self._shortest: dict[int, int] = {}
        self._searched: dict[int, int] = {}
        self._rule_lengths: dict[str, int] | None = None

    # ---------------------------------------------------------------- making

    def symbols(self, chosen: Iterable[int]) -> int:
        """One symbol out of `chosen`."""
        return self._set(sum(1 << symbol for symbol in set(chosen)))

    def text(self, text: str | bytes) -> int:
        """Exactly this text, as UTF-8."""
        return self.sequence(*(self._set(1 << byte) for byte in (text.encode() if isinstance(text, str) else text)))

    def sequence(self, *parts: int) -> int:
        whole = EMPTY
        for part in reversed(parts):
            whole = self._join(part, whole)
        return whole

    def either(self, *parts: int) -> int:
        """Any of the parts. Single symbols become one set; order and repetition do not matter."""
        self.spend(len(parts))
        flat: set[int] = set()
        symbols = 0
        for part in parts:
            kind, *rest = self._nodes[part]
            if kind == "either":
                flat.update(rest[0])
            elif kind != "none":
                flat.add(part)
        for part in [part for part in flat if self._nodes[part][0] == "set"]:
            flat.discard(part)
            symbols |= self._nodes[part][1]
        if symbols:
            flat.add(self._set(symbols))
        if len(flat) < 2:
            return flat.pop() if flat else NOTHING
        return self._node("either", tuple(sorted(flat)))

    def optional(self, part: int) -> int:
        return self.either(EMPTY, part)

    def repeat(self, part: int, least: int = 0, most: int | None = None) -> int:
        """`part`, `least` to `most` times (None: without end)."""
        if most is not None and (most < least or most == 0):
            return NOTHING if most < least else EMPTY
        if part in (NOTHING, EMPTY):
            return EMPTY if part == EMPTY or least == 0 else NOTHING
        if (least, most) == (1, 1):
            return part
        return self._node("repeat", part, least, most)

    def both(self, one: int, other: int) -> int:
        """Words of both languages. Neither may hold a rule."""
        if NOTHING in (one, other):
            return NOTHING
        return one if one == other else self._node("both", *sorted((one, other)))

    def outside(self, part: int) -> int:
        """Every word but those of `part`, which holds no rule."""
        return self._node("outside", part)

    def leaf(self, leaf: Leaf | None) -> int:
        return NOTHING if leaf is None else self._node("leaf", leaf)

    def rule(self, name: str) -> int:
        """A language that is defined later, perhaps by itself."""
        return self._node("rule", name)

    def define(self, name: str, body: int) -> None:
        self._rules[name] = body

    def is_defined(self, name: str) -> bool:
        return name in self._rules

    def _set(self, symbols: int) -> int:
        return self._node("set", symbols) if symbols else NOTHING

    def _join(self, one: int, other: int) -> int:
        if NOTHING in (one, other):
            return NOTHING
        if one == EMPTY or other == EMPTY:
            return other if one == EMPTY else one
        parts = []  # right-leaning, so that equal words left are equal nodes
        while self._nodes[one][0] == "sequence":
            _, part, one = self._nodes[one]
            parts.append(part)
        for part in reversed([*parts, one]):
            other = self._node("sequence", part, other)
        return other

    def _node(self, *node: object) -> int:
        self.spend(1)
        place = self._index.setdefault(node, len(self._nodes))
        if place == len(self._nodes):
            self._nodes.append(node)
        return place

    def spend(self, work: int) -> None:
        """Count work done for this grammar. Raises TooLarge when it has had its share."""
        self._work += work
        if self._work > MOST:
            raise TooLarge

    def exhaust(self) -> None:
        self._work = MOST + 1

    @property
    def spent(self) -> bool:
        """Whether this arena has had its share of work; its expressions can still be read, not derived."""
        return self._work > MOST

    # ---------------------------------------------------------------- taking apart

    def nullable(self, state: int) -> bool:
        """Whether the empty word belongs to it: nothing more is needed."""
        known = self._nullable.get(state)
        if known is None:
            self._nullable[state] = False  # a rule that reaches itself without a symbol adds no word
            known = self._nullable[state] = self._compute_nullable(*self._nodes[state])
        return known

    def _compute_nullable(self, kind: str, *rest: object) -> bool:
        match kind, rest:
            case "empty", _:
                return True
            case "sequence" | "both", (int(one), int(other)):
                return self.nullable(one) and self.nullable(other)
            case "either", (tuple(parts),):
                return any(self.nullable(part) for part in parts)
            case "repeat", (int(part), least, _):
                return least == 0 or self.nullable(part)
            case "outside", (int(part),):
                return not self.nullable(part)
            case "rule", (str(name),):
                return self.nullable(self._rules[name])
            case "leaf", (leaf,):
                return leaf.nullable  # type: ignore[attr-defined]
        return False

    def derive(self, state: int, symbol: int) -> int:
        """What may follow `symbol`; NOTHING if it may not come."""
        return next((left for symbols, left in self.branches(state) if symbols >> symbol & 1), NOTHING)

    def branches(self, state: int) -> Branches:
        """All its derivatives: disjoint sets of symbols (as bits), each with what may follow."""
        known = self._branches.get(state)
        if known is None:
            if state in self._deriving:
                raise ValueError("The schema refers to itself with nothing between: it would never end.")
            self._deriving.add(state)
            try:
                known = self._branches[state] = self._compute_branches(*self._nodes[state])
            finally:
                self._deriving.discard(state)
        return known

    def check(self) -> None:
        """Raises ValueError for a rule that begins with itself."""
        for body in self._rules.values():
            self.branches(body)

    def _compute_branches(self, kind: str, *rest: Any) -> Branches:
        match kind:
            case "set":
                return [(rest[0], EMPTY)]
            case "sequence":
                first = [(symbols, self._join(left, rest[1])) for symbols, left in self.branches(rest[0])]
                return self._union([first, self.branches(rest[1])]) if self.nullable(rest[0]) else first
            case "either":
                return self._union([self.branches(part) for part in rest[0]])
            case "repeat":
                part, least, most = rest
                again = self.repeat(part, max(least - 1, 0), None if most is None else most - 1)
                return [(symbols, self._join(left, again)) for symbols, left in self.branches(part)]
            case "both":
                one, other = map(self.branches, rest)
                pairs = [(m & n, self.both(left, right)) for m, left in one for n, right in other if m & n]
                return [(symbols, left) for symbols, left in pairs if left != NOTHING]
            case "outside":
                inner = self.branches(rest[0])
                others = BYTES & ~sum(symbols for symbols, _ in inner)
                return [*((symbols, self.outside(left)) for symbols, left in inner), (others, self.outside(NOTHING))]
            case "rule":
                return self.branches(self._rules[rest[0]])
            case "leaf":
                found = [(1 << symbol, self.leaf(rest[0].derive(symbol))) for symbol in range(ord("-"), ord("9") + 1)]
                return [(symbols, left) for symbols, left in found if left != NOTHING]
        return []

    def _union(self, parts: list[Branches]) -> Branches:
        """Branches of an alternation: cut so that the sets are disjoint, then joined where the same may follow."""
        cut: dict[int, list[int]] = {}
        for symbols, left in chain.from_iterable(parts):
            self.spend(len(cut))
            for other in [other for other in cut if other & symbols]:
                if alone := other & ~symbols:
                    cut[alone], cut[other & symbols] = cut[other].copy(), cut.pop(other)
                cut[other & symbols].append(left)
                symbols &= ~other
            if symbols:
                cut[symbols] = [left]
        joined: dict[int, int] = {}
        for symbols, lefts in cut.items():
            left = self.either(*lefts)
            joined[left] = joined.get(left, 0) | symbols
        return [(symbols, left) for left, symbols in joined.items()]

    def shortest(self, state: int) -> int:
        """Symbols of its shortest word: the least that is still to come. INFINITE if there is none."""
        if self._rule_lengths is None:
            self._rule_lengths = dict.fromkeys(self._rules, INFINITE)
            while True:  # least fixed point: each round can only shorten
                round_ = {name: self._length(body, {}) for name, body in self._rules.items()}
                if round_ == self._rule_lengths:
                    break
                self._rule_lengths = round_
        return self._length(state, self._shortest)

    def _length(self, state: int, known: dict[int, int]) -> int:
        spine = []  # a loop, for words may be long
        while state not in known and self._nodes[state][0] == "sequence":
            spine.append(state)
            state = self._nodes[state][2]
        if state not in known:
            known[state] = self._part_length(state, known)
        for whole in reversed(spine):
            known[whole] = _sum(self._length(self._nodes[whole][1], known), known[self._nodes[whole][2]])
        return known[spine[0] if spine else state]

    def _part_length(self, state: int, known: dict[int, int]) -> int:
        kind, *rest = self._nodes[state]
        match kind:
            case "none":
                return INFINITE
            case "empty":
                return 0
            case "set":
                return 1
            case "either":
                return min(self._length(part, known) for part in rest[0])
            case "repeat":
                part = self._length(rest[0], known) if rest[1] else 0
                return INFINITE if part == INFINITE else part * rest[1]
            case "rule":
                return self._rule_lengths[rest[0]] if self._rule_lengths else INFINITE
            case "leaf":
                return INFINITE if rest[0].remaining is None else rest[0].remaining
        return self._search(state)

    def _search(self, state: int) -> int:
        """Breadth first, for what has no formula: intersections and complements."""
        if state in self._searched:
            return self._searched[state]
        seen, edge, length = {state}, [state], 0
        while edge and not any(self.nullable(place) for place in edge):
            found = {left for place in edge for _, left in self.branches(place)}
            edge, length = sorted(found - seen), length + 1
            seen |= found
        self._searched[state] = length if edge else INFINITE
        return self._searched[state]


def _sum(one: int, other: int) -> int:
    return INFINITE if INFINITE in (one, other) else one + other
