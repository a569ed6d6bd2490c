"""What a model must beat: bits per byte of a byte 5-gram and of `xz -9` on the held-out split of the same corpus.

    python bench/ngram.py [DATA] [--order 5]        DATA: a directory made by `prepare`; without it, the default corpus

The n-gram predicts each byte from the four before it, within the document, in two standard smoothings:

    Kneser-Ney, interpolated and modified (three discounts an order, continuation counts below the highest order)
    Witten-Bell:  P(w | h) = (c(hw) + t(h) P(w | h')) / (c(h) + t(h)),   t(h) = kinds of bytes seen after h

`xz -9` compresses the held-out text alone, and given the training text: size(train + held-out) - size(train), with a
dictionary that covers both. "as scored" leaves out the bytes of each document's first token, which a model without a
token for the beginning of a document does not predict.
"""

import argparse
import lzma
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perilune.data import DataConfig, Prepared, Shard, open_shards, prepare

SYMBOLS = 257  # 0 stands before the first byte of a document, byte b is b + 1


@dataclass(frozen=True)
class Order:
    """Counts of k-grams: `grams` ascending with `counts`; per context its `total` and kinds seen once, twice, more."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    total: np.ndarray
    kinds: np.ndarray  # [contexts, 3]

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray) -> "Order":
        contexts, where = np.unique(grams // SYMBOLS, return_inverse=True)
        total = np.bincount(where, counts)
        kinds = np.stack([np.bincount(where[mask], minlength=len(contexts)) for mask in classes(counts)], axis=1)
        return cls(grams, counts, contexts, total, kinds)

    def look_up(self, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count, total of the context and its kinds for each gram asked; zeros where unseen."""
        count, seen = find(self.grams, grams), find(self.contexts, grams // SYMBOLS)
        zero = np.zeros(1)
        return (
            np.append(self.counts, zero)[count],
            np.append(self.total, zero)[seen],
            np.concatenate([self.kinds, np.zeros((1, 3))])[seen],
        )


def classes(counts: np.ndarray) -> list[np.ndarray]:
    return [counts == 1, counts == 2, counts >= 3]


def find(table: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Index of each asked key in an ascending table, its length where absent."""
    at = np.minimum(np.searchsorted(table, asked), len(table) - 1)
    return np.where(table[at] == asked, at, len(table))


def keys(texts: list[bytes], order: int) -> np.ndarray:
    """The `order`-gram that ends at each byte, oldest symbol in the highest digit. int64 [bytes]"""
    border = np.zeros(order - 1, np.int64)
    parts = [part for text in texts for part in (border, np.frombuffer(text, np.uint8).astype(np.int64) + 1)]
    symbols = np.concatenate(parts)
    grams = np.zeros(len(symbols), np.int64)
    for back in range(order):
        grams[back:] += symbols[: len(symbols) - back] * SYMBOLS**back
    return grams[symbols > 0]


def raw_orders(grams: np.ndarray, order: int) -> list[Order]:
    """How often each k-gram stands in the text, k = 1..order."""
    return [Order.of(*np.unique(grams % SYMBOLS**k, return_counts=True)) for k in range(1, order + 1)]


def continuation_orders(raw: list[Order]) -> list[Order]:
    """Below the highest order, count how many different symbols stand before a k-gram."""
    made = [
        Order.of(*np.unique(raw[k].grams % SYMBOLS**k, return_counts=True))  # raw[k] holds the (k + 1)-grams
        for k in range(1, len(raw))
    ]
    return [*made, raw[-1]]


def kneser_ney(orders: list[Order], grams: np.ndarray) -> np.ndarray:
    """Probability of the last byte of each gram; float64."""
    p = np.full(len(grams), 1 / 256)
    for k, order in enumerate(orders, start=1):
        n1, n2, n3, n4 = (max(int((order.counts == n).sum()), 1) for n in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        discount = np.clip([1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0.05, [0.95, 1.9, 2.85])
        count, total, kinds = order.look_up(grams % SYMBOLS**k)
        kept = count - sum(d * mask for d, mask in zip(discount, classes(count)))
        seen = total > 0
        p[seen] = ((kept + (kinds @ discount) * p) / np.maximum(total, 1))[seen]
    return p


def witten_bell(orders: list[Order], grams: np.ndarray) -> np.ndarray:
    """Probability of the last byte of each gram; float64."""
    p = np.full(len(grams), 1 / 256)
    for k, order in enumerate(orders, start=1):
        count, total, kinds = order.look_up(grams % SYMBOLS**k)
        types, seen = kinds.sum(axis=1), total > 0
        p[seen] = ((count + types * p) / np.maximum(total + types, 1))[seen]
    return p


def texts_of(shard: Shard, data: Prepared) -> list[bytes]:
    tokenizer = data.tokenizer()
    return [tokenizer.decode_bytes(shard.document(i)[:-1].tolist()) for i in range(shard.n_documents)]


def scored(shard: Shard, texts: list[bytes]) -> np.ndarray:
    """Which bytes of the joined texts a model is scored on: all but those of each document's first token."""
    mask = np.ones(sum(map(len, texts)), bool)
    starts = np.cumsum([0, *map(len, texts)])
    for i in range(shard.n_documents):
        mask[starts[i] : starts[i] + shard.token_bytes[shard.document(i)[0]]] = False
    return mask


def xz(content: bytes) -> int:
    size = max(1 << 26, 1 << len(content).bit_length())
    return len(lzma.compress(content, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": size}]))


def report(data: Prepared, order: int) -> None:
    train, held_out = texts_of(data.train, data), texts_of(data.held_out, data)
    n_train, n_held = sum(map(len, train)), sum(map(len, held_out))
    print(f"train {n_train / 1e6:.2f} MB, held out {n_held / 1e6:.3f} MB; {platform.machine()}, {platform.platform()}")
    start = time.perf_counter()
    raw, asked, mask = raw_orders(keys(train, order), order), keys(held_out, order), scored(data.held_out, held_out)
    for name, p in (
        ("Kneser-Ney", kneser_ney(continuation_orders(raw), asked)),
        ("Witten-Bell", witten_bell(raw, asked)),
    ):
        bits = -np.log2(p)
        print(f"{order}-gram {name:12s} {bits.mean():.4f} bits per byte, as scored {bits[mask].mean():.4f}")
    print(f"  ({time.perf_counter() - start:.1f} s)")
    start = time.perf_counter()
    alone, known = xz(b"".join(held_out)), xz(b"".join(train + held_out)) - xz(b"".join(train))
    print(f"xz -9 alone          {alone * 8 / n_held:.4f} bits per byte")
    print(f"xz -9 given train    {known * 8 / n_held:.4f} bits per byte")
    print(f"  ({time.perf_counter() - start:.1f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--order", type=int, default=5, choices=range(1, 8))
    args = parser.parse_args()
    if args.data:
        report(open_shards(args.data), args.order)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(prepare(DataConfig(), None, Path(folder) / "data"), args.order)


if __name__ == "__main__":
    main()
