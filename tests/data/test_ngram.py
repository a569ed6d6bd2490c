"""The baseline a model is compared with: both smoothings are distributions, and counted by hand on a small text."""

import importlib.util
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).resolve().parents[2] / "bench" / "ngram.py"
spec = importlib.util.spec_from_file_location("ngram", FILE)
assert spec and spec.loader
ngram = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ngram)

TEXTS = [b"the moon, the moon the lune", b"then the perilune", b"\x00\xff\x00the"]


@pytest.mark.parametrize("smoothing", ["kneser_ney", "witten_bell"])
@pytest.mark.parametrize("context", [b"the ", b"moon", b"", b"zzzz", b"th", b"\x00\xff"])
def test_probabilities_of_the_next_byte_sum_to_one(smoothing: str, context: bytes) -> None:
    orders = ngram.raw_orders(ngram.keys(TEXTS, 5), 5)
    if smoothing == "kneser_ney":
        orders = ngram.continuation_orders(orders)
    asked = np.array([ngram.keys([context + bytes([b])], 5)[-1] for b in range(256)])
    p = getattr(ngram, smoothing)(orders, asked)
    assert p.min() > 0 and p.sum() == pytest.approx(1, abs=1e-12)


def test_witten_bell_by_hand() -> None:
    """P(w | h) with counts by dictionary, one byte at a time."""
    counts = [Counter() for _ in range(3)]
    for text in TEXTS:
        padded = [-1, -1, *text]
        for i in range(2, len(padded)):
            for k in range(3):
                counts[k][tuple(padded[i - k : i]), padded[i]] += 1

    def probability(history: tuple[int, ...], byte: int) -> float:
        p = 1 / 256
        for k in range(3):
            h = history[len(history) - k :]
            after = {w: c for (g, w), c in counts[k].items() if g == h}
            if after:
                p = (after.get(byte, 0) + len(after) * p) / (sum(after.values()) + len(after))
        return p

    held_out = b"the lunar moon"
    padded = [-1, -1, *held_out]
    expected = [probability(tuple(padded[i - 2 : i]), padded[i]) for i in range(2, len(padded))]
    got = ngram.witten_bell(ngram.raw_orders(ngram.keys(TEXTS, 3), 3), ngram.keys([held_out], 3))
    assert got == pytest.approx(expected)


def test_continuation_counts_are_kinds_of_symbols_before() -> None:
    raw = ngram.raw_orders(ngram.keys([b"abcb", b"cb"], 2), 2)
    unigrams = ngram.continuation_orders(raw)[0]
    # a follows the beginning; b follows a and c; c follows b and the beginning
    assert {int(g) - 1: int(c) for g, c in zip(unigrams.grams, unigrams.counts)} == {97: 1, 98: 2, 99: 2}
