"""Numbers within bounds, digit by digit, exactly: a prefix may stand while some number of that beginning is allowed.

A prefix without a point, of digits d, leads to the numbers of [d·10ᵏ, (d+1)·10ᵏ) for every k ≥ 0; with f digits behind
the point, to those of [d, d + 10⁻ᶠ). No exponents are written and no more than 20 characters, so the states are few.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, floor, gcd

LONGEST = 20
_PREFIX = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?)?")


@dataclass(frozen=True)
class Number:
    """Decimal numerals of values in [low, high] (None: open), whole ones if `integer`, multiples of `step` if given.

    An excluded bound is given as such by `above` and `below`.
    """

    low: Fraction | None = None
    high: Fraction | None = None
    above: bool = False
    below: bool = False
    integer: bool = False
    step: Fraction | None = None
    text: str = ""

    @property
    def nullable(self) -> bool:
        """Whether what is written is a number and allowed."""
        return self.remaining == 0

    def derive(self, symbol: int) -> "Number | None":
        text = self.text + chr(symbol) if ord("-") <= symbol <= ord("9") else ""
        if not text or len(text) > LONGEST or not _PREFIX.fullmatch(text) or (self.integer and "." in text):
            return None
        longer = replace(self, text=text)
        return None if longer.remaining is None else longer

    @cached_property
    def remaining(self) -> int | None:
        """Characters still to come at the least; None if nothing that begins so is allowed."""
        costs = [cost for form in self._forms() if (cost := self._cost(*form)) is not None]
        if not self.text and (negative := replace(self, text="-").remaining) is not None:
            costs.append(1 + negative)
        return min(costs, default=None)

    def _forms(self) -> Iterator[tuple[int, Fraction, Fraction]]:
        """(digits added before any point, first value, width) of each magnitude that the text can grow into."""
        digits = self.text.lstrip("-")
        if "." in digits:
            yield 0, Fraction(digits.rstrip(".")), Fraction(1, 10 ** len(digits.partition(".")[2]))
            return
        for first in [digits] if digits else "0123456789":
            for more in range(1 if first == "0" else LONGEST - len(self.text) + 1):
                yield more + (not digits), Fraction(int(first) * 10**more), Fraction(10**more)

    def _cost(self, added: int, start: Fraction, width: Fraction) -> int | None:
        """Characters to the nearest allowed number of ±[start, start + width), its far end out."""
        sign = -1 if self.text.startswith("-") else 1
        low, high = sorted((sign * start, sign * (start + width)))
        open_low, open_high = sign < 0, sign > 0
        if self.low is not None and self.low >= low:
            low, open_low = self.low, self.above or (open_low and self.low == low)
        if self.high is not None and self.high <= high:
            high, open_high = self.high, self.below or (open_high and self.high == high)
        if low > high or (low == high and (open_low or open_high)):
            return None
        _, point, tail = self.text.partition(".")
        for more in range(not tail, LONGEST) if point else range(1 if self.integer else LONGEST):
            cost = more if point else added + (more and more + 1)
            if len(self.text) + cost > LONGEST:
                return None
            if _holds(low, high, open_low, open_high, self._grid(len(tail) + more)):
                return cost
        return None

    def _grid(self, places: int) -> Fraction:
        """What numbers of so many places behind the point are multiples of, `step` included."""
        if self.step is None:
            return Fraction(1, 10**places)
        return Fraction(self.step.numerator, gcd(10**places, self.step.denominator))


def _holds(low: Fraction, high: Fraction, open_low: bool, open_high: bool, grid: Fraction) -> bool:
    """Whether a multiple of `grid` lies between `low` and `high`."""
    least, most = ceil(low / grid) * grid, floor(high / grid) * grid
    least += grid if open_low and least == low else 0
    most -= grid if open_high and most == high else 0
    return least <= most
