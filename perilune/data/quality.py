"""A small quality classifier: logistic regression on hashed words and word pairs, trained on two folders of examples.

    P(good | text) = sigmoid(w . x + b),   x = sqrt(counts of hashed unigrams and bigrams), scaled to length 1

Sixty-four thousand weights, a second of training; deterministic. For those who have examples of what they want.
"""

import hashlib
import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from perilune.data.options import DataError
from perilune.data.sources import Skips, documents

BUCKETS = 1 << 16
MAX_CHARS = 20_000  # the beginning of a document tells enough
EPOCHS, RATE, DECAY = 30, 2.0, 1e-5

Features = tuple[np.ndarray, np.ndarray]


class Quality:
    """The trained classifier. `weights` is float64 `[BUCKETS]`."""

    def __init__(self, weights: np.ndarray, bias: float) -> None:
        self.weights, self.bias = weights, bias

    @classmethod
    def from_sources(cls, good: Sequence[str], bad: Sequence[str]) -> "Quality":
        """Trains on the documents of two lists of sources."""
        texts = [[document.text for document in documents(sources, Skips())] for sources in (good, bad)]
        for name, found in zip(("quality_good", "quality_bad"), texts):
            if not found:
                raise DataError(f"data.{name} holds no readable document")
        return cls.train(*texts)

    @classmethod
    def train(cls, good: Sequence[str], bad: Sequence[str]) -> "Quality":
        """Gradient descent, a document at a time, both classes weighing the same."""
        weight = {1: 0.5 / len(good), 0: 0.5 / len(bad)}
        examples = [(text, 1) for text in good] + [(text, 0) for text in bad]
        examples.sort(key=lambda example: hashlib.blake2b(example[0].encode()).digest())  # a fixed, mixed order
        rows = [(features(text), label, weight[label] * len(examples)) for text, label in examples]
        weights, bias = np.zeros(BUCKETS), 0.0
        for epoch in range(EPOCHS):
            rate = RATE / (1 + epoch)
            for (indices, values), label, scale in rows:
                error = rate * scale * (label - _sigmoid(float(weights[indices] @ values) + bias))
                weights[indices] += error * values - rate * DECAY * weights[indices]
                bias += 0.1 * error
        return cls(weights, bias)

    def score(self, text: str) -> float:
        """Probability that the text is of the good kind."""
        indices, values = features(text)
        return _sigmoid(float(self.weights[indices] @ values) + self.bias)


def features(text: str) -> Features:
    """Distinct bucket indices and their values, of length 1 together."""
    words = text[:MAX_CHARS].casefold().split()
    grams = words + [f"{a} {b}" for a, b in pairwise(words)]
    buckets = np.array([zlib.crc32(gram.encode()) % BUCKETS for gram in grams], np.int64)
    indices, counts = np.unique(buckets, return_counts=True)
    values = np.sqrt(counts)
    return indices, values / max(np.linalg.norm(values), 1.0)


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(x, -40, 40))))
