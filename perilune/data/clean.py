"""Which documents stay: rules, exact duplicates, near-duplicates, quality. Every removal is counted under its reason.

The rules suit prose and source code alike; their limits are in `DataConfig`. Near-duplicates are found with MinHash:
two sets of shingles agree in a minimum of a random hash with probability equal to their Jaccard similarity, so the
share of agreeing minima over 128 hashes estimates it; locality-sensitive hashing finds the candidates.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from perilune.data.options import DataConfig
from perilune.data.sources import Document

if TYPE_CHECKING:
    from datasketch import MinHash

HASHES, SHINGLE = 128, 5
_WORD_LIMIT = 16  # longer on average and the text is not split by spaces (Chinese, base64): characters are its words
_CONTROL = bytes(range(9)) + bytes([11, *range(14, 32), 127])  # no tab, newline, form feed, carriage return


@dataclass
class Removals:
    """Documents and bytes seen and kept, and documents removed for each reason."""

    seen: int = 0
    kept: int = 0
    seen_bytes: int = 0
    kept_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def clean(documents: Iterable[Document], config: DataConfig, removals: Removals) -> Iterator[Document]:
    """Streams the documents that pass every filter, in order."""
    filters = _filters(config)
    for document in documents:
        size = len(document.text.encode())
        removals.seen += 1
        removals.seen_bytes += size
        reason = next((reason for reason, rejects in filters if rejects(document.text)), None)
        if reason is None:
            removals.kept += 1
            removals.kept_bytes += size
            yield document
        else:
            removals.reasons[reason] += 1


Filter = tuple[str, Callable[[str], bool]]


def _filters(config: DataConfig) -> list[Filter]:
    """Reason and predicate of each filter, cheap ones first; the duplicate filters see only what passed the others."""
    filters: list[Filter] = [
        ("too short", lambda text: len(text.strip()) < max(config.min_chars, 1)),
        ("binary", looks_binary),
        ("long lines", lambda text: long_line_share(text, config.max_line) > 0.5),
        ("few letters", lambda text: alphabetic_share(text) < config.min_alphabetic),
        ("repeated lines", lambda text: repeated_share(text) > config.max_repeated),
    ]
    if config.exact_duplicates:
        filters.append(("duplicate", ExactDuplicates().seen))
    if config.quality_good:
        from perilune.data.quality import Quality  # trained here, from the user's own folders

        quality = Quality.from_sources(config.quality_good, config.quality_bad)
        filters.append(("low quality", lambda text: quality.score(text) < config.quality_threshold))
    if config.near_duplicates:
        filters.append(("near-duplicate", NearDuplicates(config.near_duplicates).seen))
    return filters


# ---------------------------------------------------------------------- rules


def looks_binary(text: str) -> bool:
    """More than one control or replacement character in 200."""
    content = text.encode()
    odd = len(content) - len(content.translate(None, _CONTROL)) + text.count("\ufffd")
    return odd * 200 > len(text)


def long_line_share(text: str, limit: int) -> float:
    """Share of the characters that stand in lines longer than `limit`."""
    return sum(len(line) for line in text.splitlines() if len(line) > limit) / max(len(text), 1)


def alphabetic_share(text: str) -> float:
    """Letters of any script over visible characters."""
    visible = "".join(text.split())
    return sum(map(str.isalpha, visible)) / max(len(visible), 1)


def repeated_share(text: str) -> float:
    """Share of the visible characters in lines that stood in the text before (indentation aside)."""
    lines = Counter(stripped for line in text.splitlines() if (stripped := line.strip()))
    total = sum(len(line) * count for line, count in lines.items())
    return sum(len(line) * (count - 1) for line, count in lines.items()) / max(total, 1)


# ---------------------------------------------------------------------- duplicates


def normal_hash(text: str) -> bytes:
    """A hash blind to case and white space."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=16).digest()


class ExactDuplicates:
    """Remembers sixteen bytes of each text."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def seen(self, text: str) -> bool:
        """Whether an equal text came before; remembers this one."""
        key = normal_hash(text)
        known = key in self._hashes
        self._hashes.add(key)
        return known


class NearDuplicates:
    """Remembers a MinHash signature of each text that was not similar to an earlier one."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash, MinHashLSH

        self.threshold = threshold
        self._empty = MinHash(num_perm=HASHES, seed=1, hashfunc=int)  # shingles come hashed already
        # Misses weigh nine times a false alarm: the signatures decide about alarms, a miss is for good. With 14 bands
        # of 9 (threshold 0.8) a pair at the threshold is found with probability 0.87, one at 0.9 with 0.999.
        self._index = MinHashLSH(threshold=min(threshold, 0.95), num_perm=HASHES, weights=(0.1, 0.9))
        self._signatures: list[np.ndarray] = []

    def seen(self, text: str) -> bool:
        """Whether a text at least this similar came before; remembers this one if not."""
        sketch = self._signature(text)
        signature = sketch.hashvalues
        # The index finds candidates with some false alarms; the signatures decide.
        candidates = self._index.query(sketch)
        if any(np.mean(self._signatures[i] == signature) >= self.threshold for i in candidates):
            return True
        self._index.insert(len(self._signatures), sketch, check_duplication=False)
        self._signatures.append(signature)
        return False

    def _signature(self, text: str) -> "MinHash":
        sketch = self._empty.copy()
        sketch.update_batch(shingles(text).tolist())
        return sketch


def shingles(text: str) -> np.ndarray:
    """Distinct 32-bit hashes, ascending, of every five neighbouring words (characters, where words are not spaced)."""
    words = text.casefold().split()
    if len(words) * _WORD_LIMIT < len(text):
        words = list("".join(words))
    codes = {word: zlib.crc32(word.encode()) for word in set(words)}
    hashed = np.array([codes[word] for word in words], np.uint64)
    width = min(SHINGLE, len(hashed))
    mixed = np.zeros(max(len(hashed) - width + 1, 0), np.uint64)
    for i in range(width):
        mixed = (mixed * np.uint64(0x9E3779B97F4A7C15)) ^ hashed[i : i + len(mixed)]
    return np.unique((mixed * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(32))
