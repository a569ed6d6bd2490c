"""How sequences are cut into chunks: index tables, built once a packing and reused by every layer.

Chunks lie in time-major order: first the first chunk of every sequence, then the second of those that have one, and so
on, the sequences with most chunks first. So each step of the scan works on one contiguous slice, and no sequence is
padded beyond its own last chunk. An exported state is a chunk border: a sequence is cut there and the piece padded.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.ops.kept import kept


@dataclass(frozen=True)
class Plan:
    """N sequences in M chunks of C tokens.

    steps: (first chunk, chunks) of each step. tokens: the token of each chunk slot [M·C], None when no table is needed
    (equal lengths, whole chunks: slots are a view). slots: the inverse [B·T]. padded: which slots are padding [M,C], or
    None. rank: place of each sequence in a step [N]. after: where the state after each chunk lies [M], counting M rows
    of states before chunks, then N final ones. exports: the same for each exported state [E].
    """

    C: int
    M: int
    N: int
    steps: tuple[tuple[int, int], ...]
    tokens: Tensor | None
    slots: Tensor | None
    padded: Tensor | None
    rank: Tensor | None
    after: Tensor | None
    exports: Tensor | None


@kept(maxsize=32)
def plan_chunks(
    lengths: tuple[int, ...], C: int, export_at: tuple[tuple[int, int], ...] | None, device: torch.device
) -> Plan:
    """The plan of packed or batched sequences; `export_at` as (sequence, tokens of it) pairs."""
    N = len(lengths)
    if export_at is None and N and min(lengths) == max(lengths) and lengths[0] % C == 0 and lengths[0]:
        count = lengths[0] // C
        return Plan(C, count * N, N, tuple((t * N, N) for t in range(count)), None, None, None, None, None, None)

    piece_sequence, piece_length = _pieces(lengths, export_at or ())
    chunks = -(-piece_length // C)
    piece = np.repeat(np.arange(len(chunks)), chunks)
    within = np.arange(len(piece)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    sequence = piece_sequence[piece]
    valid = np.minimum(C, piece_length[piece] - C * within)
    start = np.cumsum(valid) - valid
    per_sequence = np.bincount(sequence, minlength=N)
    step = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)

    by_count = np.argsort(-per_sequence, kind="stable")
    rank = np.empty(N, dtype=np.int64)
    rank[by_count] = np.arange(N)
    counts = np.bincount(step)
    offsets = np.cumsum(counts) - counts
    row = offsets[step] + rank[sequence] if len(step) else np.zeros(0, dtype=np.int64)
    M = len(row)

    last = step + 1 == per_sequence[sequence]
    following = np.append(offsets, 0)[step + 1] + rank[sequence] if M else row
    after = np.empty(M, dtype=np.int64)
    after[row] = np.where(last, M + rank[sequence], following)

    slot = np.arange(C)
    tokens = np.empty((M, C), dtype=np.int64)
    tokens[row] = start[:, None] + np.minimum(slot, valid[:, None] - 1)
    padded = np.empty((M, C), dtype=bool)
    padded[row] = slot >= valid[:, None]
    slots = np.empty(sum(lengths), dtype=np.int64)
    slots[tokens[~padded]] = np.flatnonzero(~padded)

    exports = None
    if export_at is not None:
        ends = {(int(n), int(e)): after[r] for n, e, r in zip(sequence, _ends(sequence, valid, N), row, strict=True)}
        exports = np.array([ends[place] for place in export_at], dtype=np.int64)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device)

    return Plan(
        C,
        M,
        N,
        tuple((int(a), int(b)) for a, b in zip(offsets, counts, strict=True)),
        tensor(tokens.reshape(-1)),
        tensor(slots),
        tensor(padded) if padded.any() else None,
        tensor(rank),
        tensor(after),
        None if exports is None else tensor(exports),
    )


def chunk_size(lengths: tuple[int, ...], largest: int) -> int:
    """The power of two up to `largest` with the least work.

    A chunk costs its slots, its C×C matrices and a step of the scan: C·(96 + C) + 4096 in units that fit a CPU and 32
    to 64 channels. Short sequences waste slots, so they get smaller chunks.
    """
    longest = max((1, *lengths))
    spans = np.asarray(lengths or (1,))
    sizes = [c for c in (1, 2, 4, 8, 16, 32, 64, 128) if c <= largest]
    enough = [c for c in sizes if c // 2 < longest]
    return min(enough, key=lambda c: (float((-(-spans // c)).sum()) * (c * (96 + c) + 4096), -c))


def _pieces(lengths: tuple[int, ...], export_at: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Sequences cut at their exports: the sequence and the length of each non-empty piece."""
    if not export_at:
        spans = np.asarray(lengths, dtype=np.int64)
        present = np.flatnonzero(spans)
        return present, spans[present]
    cuts: dict[int, set[int]] = {}
    for n, count in export_at:
        cuts.setdefault(n, set()).add(count)
    sequence, length = [], []
    for n, whole in enumerate(lengths):
        done = 0
        for cut in sorted(cuts.get(n, set()) | {whole}):
            if cut > done:
                sequence.append(n)
                length.append(cut - done)
            done = cut
    return np.asarray(sequence, dtype=np.int64), np.asarray(length, dtype=np.int64)


def _ends(sequence: np.ndarray, valid: np.ndarray, N: int) -> np.ndarray:
    """Tokens of its sequence that lie at or before each chunk's end."""
    total = np.cumsum(valid)
    spans = np.bincount(sequence, weights=valid, minlength=N).astype(np.int64)
    return total - (np.cumsum(spans) - spans)[sequence]
