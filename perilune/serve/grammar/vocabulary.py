"""Tokens against expressions: which ids may come next, and what is left after one.

The vocabulary is a trie, kept level by level in arrays; a state walks all of it at once, one vectorised table look-up
a level, so that even 160,000 tokens take milliseconds and only states that occur are ever derived. How many symbols a
state still needs at the least is known, so a mask can also keep to what fits the tokens left: every byte is a token.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain

import numpy as np

from perilune.chat.segments import CLOSE, OPEN, SEP
from perilune.serve.grammar.expression import INFINITE, NOTHING, Arena, TooLarge
from perilune.tokenizer import Tokenizer

_FAR = np.iinfo(np.int32).max
_BYTES = 1 << 29  # of landings, all grammars together; at 160,000 tokens a state takes 640 KB
_ROW = 20  # work that a state counts for: a row of the table is 1 KB
UNKNOWN = -1


class Landings:
    """The landings asked for last, `room` of them, for every grammar of a vocabulary; safe between threads."""

    def __init__(self, room: int) -> None:
        self._room, self._lock = max(room, 1), threading.Lock()
        self._known: OrderedDict[tuple[object, int], np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __reduce__(self) -> tuple[type["Landings"], tuple[int]]:
        """A copy for another rank begins empty."""
        return Landings, (self._room,)

    def get(self, key: tuple[object, int], make: Callable[[], np.ndarray]) -> np.ndarray:
        """`key`'s, made (outside the lock) where it is not known."""
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        made = make()
        with self._lock:
            self._known[key] = made
            while len(self._known) > self._room:
                self._known.popitem(last=False)
        return made


class Vocabulary:
    """The tokens of one tokenizer: bytes for ordinary ones, one symbol each for the control ids named in `controls`."""

    def __init__(self, tokens: Mapping[int, bytes], controls: Mapping[str, int], end: int, size: int) -> None:
        self.size, self.end = size, end
        self.controls = {name: 256 + n for n, name in enumerate(controls)}
        self.words = {token: tuple(word) for token, word in tokens.items() if word}
        self.words |= {token: (self.controls[name],) for name, token in controls.items() if token != end}
        self.landings = Landings(_BYTES // (4 * size))

    @classmethod
    def of(cls, tokenizer: Tokenizer, end: int | None = None) -> "Vocabulary":
        """`end` (default <|end_of_msg|>) is the id that ends a turn: no symbol, but allowed where a word may end."""
        tokens = {token: word for word, token in tokenizer.ranks.items()}
        controls = {name: tokenizer.specials[name] for name in (OPEN, CLOSE, SEP)}
        return cls(tokens, controls, tokenizer.end_of_msg if end is None else end, tokenizer.vocab_size)

    @cached_property
    def levels(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Per depth: each node's parent (its place one level up), its symbol, and the tokens that end here with the
        places they end at."""
        tokens = np.array(list(self.words), np.int64)
        lengths = np.array([len(word) for word in self.words.values()], np.int64)
        symbols = np.fromiter(chain.from_iterable(self.words.values()), np.int64, int(lengths.sum()))
        firsts = np.cumsum(lengths) - lengths
        levels, depth = [], 0
        at = np.zeros(len(tokens), np.int64)  # each word's place one level up
        while len(tokens):
            steps, at = np.unique(at * 2**16 + symbols[firsts + depth], return_inverse=True)
            depth += 1
            ends = lengths == depth
            levels.append((steps >> 16, steps & 0xFFFF, tokens[ends], at[ends]))
            tokens, lengths, firsts, at = tokens[~ends], lengths[~ends], firsts[~ends], at[~ends]
        return levels


class Language:
    """A grammar over a vocabulary (`serve.request.Grammar`). States are integers, and none is ever forgotten, so any
    may be returned to."""

    def __init__(self, arena: Arena, start: int, vocabulary: Vocabulary) -> None:
        arena.check()
        if arena.shortest(start) == INFINITE:
            raise ValueError("Nothing satisfies this grammar.")
        self._arena, self._vocabulary = arena, vocabulary
        width = 256 + len(vocabulary.controls)
        self._table = np.full((64, width), UNKNOWN, np.int32)
        self._table[0] = 0  # row 0: nothing
        self._need = np.full(64, _FAR, np.int32)  # symbols still to come at the least
        self._expressions, self._rows = [NOTHING], {NOTHING: 0}
        self._name = object()  # in the vocabulary's landings
        self._start = self._row(start)
        self.mask(self._start)  # what cannot be held to is found before a request waits for it

    def start(self) -> int:
        return self._start

    @property
    def spent(self) -> bool:
        """Whether it has grown too large to go on; states that are known still work."""
        return self._arena.spent

    def accepting(self, state: int) -> bool:
        """Whether the turn may end here."""
        return bool(self._need[state] == 0) and self._arena.nullable(self._expressions[state])

    def mask(self, state: int, left: int | None = None) -> np.ndarray:
        """bool [V]: the ids that may come next. With `left` tokens to go, this one and the end included, only ids after
        which the rest still fits, byte by byte; where that is none, only those that shorten the rest the most. Raises
        TooLarge (a ValueError) when the grammar has grown beyond what one may take."""
        landing = self._land(state)  # it may make new states, so their needs are read after
        needs = self._need[landing]
        allowed = needs < _FAR
        if left is not None:
            allowed &= needs <= max(left - 2, 0 if self.accepting(state) else needs.min())
        allowed[self._vocabulary.end] = self.accepting(state)
        return allowed

    def advance(self, state: int, token: int) -> int:
        """The state after `token`; the end leaves it where it is. Raises ValueError when the token is not allowed."""
        if token == self._vocabulary.end and self.accepting(state):
            return state
        for symbol in self._vocabulary.words.get(token, (-1,)):
            state = self._step(state, symbol) if symbol >= 0 else 0
        if state == 0:
            raise ValueError(f"The grammar does not allow token {token} here.")
        return state

    def _land(self, state: int) -> np.ndarray:
        """int32 [V]: the state that each token leads to, 0 where it may not come."""
        try:
            return self._vocabulary.landings.get((self._name, state), lambda: self._walk(state))
        except RecursionError:  # what was half done is not to be trusted
            self._arena.exhaust()
            raise TooLarge from None

    def _walk(self, state: int) -> np.ndarray:
        landing = np.zeros(self._vocabulary.size, np.int32)
        places = np.array([state], np.int32)
        for parents, symbols, tokens, ends in self._vocabulary.levels:
            places = self._steps(places[parents], symbols)
            landing[tokens] = places[ends]
            if not places.any():
                break
        return landing

    def _steps(self, states: np.ndarray, symbols: np.ndarray) -> np.ndarray:
        for state in np.unique(states):
            self._fill(int(state))
        return self._table[states, symbols]

    def _step(self, state: int, symbol: int) -> int:
        self._fill(state)
        return int(self._table[state, symbol])

    def _fill(self, state: int) -> None:
        """A state's row: where each symbol leads."""
        if self._table[state, 0] != UNKNOWN:
            return
        row = np.zeros(self._table.shape[1], np.int32)
        for symbols, left in self._arena.branches(self._expressions[state]):
            bits = np.frombuffer(symbols.to_bytes((len(row) + 7) // 8, "little"), np.uint8)
            row[np.unpackbits(bits, count=len(row), bitorder="little") == 1] = self._row(left)
        self._table[state] = row

    def _row(self, expression: int) -> int:
        row = self._rows.get(expression)
        if row is None:
            need = self._arena.shortest(expression)
            row = 0 if need == INFINITE else self._new_row(expression, need)
            self._rows[expression] = row
        return row

    def _new_row(self, expression: int, need: int) -> int:
        row = len(self._expressions)
        self._arena.spend(_ROW)
        self._expressions.append(expression)
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.full_like(self._table, UNKNOWN)])
            self._need = np.concatenate([self._need, np.full_like(self._need, _FAR)])
        self._need[row] = min(need, _FAR - 1)
        return row
