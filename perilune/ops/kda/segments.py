"""Which program runs which tokens: chunks, panels, and the exact scan over segments (technical report §5.1.1, eq. 17).

A segment acts on the state that enters it as S ← M S + B, and M and B are known before S is. So a long sequence with
few heads is cut into segments: `scan` finds every (M, B) at once, `merge` chains them, `run` repeats the segments from
their true states. Splitting the value axis comes first, because it is free.

Everything is decided on the host from lengths alone, so a captured CUDA graph keeps its plan.

    chunk   up to 64 tokens of one sequence; starts anew at a sequence start and after every export
    piece   consecutive chunks, all full but the last, with an export or nothing after it
    run     consecutive pieces that one program walks through, state in registers
    panel   the chunks whose factors are in the workspace at once: its size is what bounds memory
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

CHUNK = 64
PANEL = 16384  # (chunk, head) pairs: 66 KB each at K = 128, so a workspace of 1.1 GB whatever the length

ZERO, INITIAL, FINAL, CARRY = range(4)  # where a run finds its state


@dataclass(frozen=True)
class Shape:
    """What a plan depends on besides the lengths."""

    heads: int
    key: int
    value: int
    has_state: bool
    processors: int = 132


@dataclass
class Panel:
    """Tables of one panel. A run is (first piece, last piece, source, index in it, target or −1)."""

    first: int
    count: int = 0
    block: int = 64
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)  # token, tokens, chunk in panel, export row
    scans: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    merges: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # source, index, scan, carry, count
    runs: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    carries: int = 0
    walks: list[tuple[int, int, int]] = field(default_factory=list)  # all pieces of one sequence: first, last, which


@dataclass
class Plan:
    chunks: list[tuple[int, int]]  # first token on the flattened axis, tokens
    panels: list[Panel]


@dataclass(frozen=True)
class Cost:
    """Microseconds on an H200, measured: a chunk of the chain by value columns, a merge, two more launches."""

    half: float = 1.2
    whole: float = 1.8
    merge: float = 7.5
    launch: float = 40.0


def segments_for(chunks: int, sequences: int, shape: Shape, block: int, cost: Cost = Cost()) -> int:
    """How many segments to cut sequences of `chunks` chunks into; 1 unless the scan wins by a tenth."""
    lanes = sequences * shape.heads
    run_units = lanes * math.ceil(shape.value / block)
    scan_units = lanes * (math.ceil(shape.value / 128) + math.ceil(shape.key / 128))

    def waves(units: int) -> int:
        return math.ceil(units / shape.processors)

    def time(s: int) -> float:
        steps = math.ceil(chunks / s)
        run = steps * (cost.half if block == 64 else cost.whole) * waves(s * run_units)
        if s == 1:
            return run
        return run + steps * cost.whole * waves((s - 1) * scan_units) + s * cost.merge + cost.launch

    best = min(range(1, min(64, max(1, chunks // 4)) + 1), key=time)
    return best if time(best) < 0.9 * time(1) else 1


def block_for(lanes: int, shape: Shape) -> int:
    """Value columns a program takes: halves while they fit nine tenths of the chip.

    Beyond it, reading every factor twice from the level-2 cache (5.4 TB/s at 128 programs) costs what halves save.
    """
    return 64 if shape.value == 64 or lanes * (shape.value // 64) <= 0.9 * shape.processors else 128


def cut(lengths: Sequence[int], exports: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Chunks (token, tokens, export row or −1) of every sequence. `exports` holds distinct (sequence, tokens of it)."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for row, (n, at) in enumerate(exports):
        rows.setdefault(n, []).append((at, row))
    out, start = [], 0
    for n, length in enumerate(lengths):
        chunks, done = [], 0
        for at, row in [*sorted(rows.get(n, ())), (length, -1)]:
            for t in range(done, at, CHUNK):
                tokens = min(CHUNK, at - t)
                chunks.append((start + t, tokens, row if t + tokens == at else -1))
            done = at
        out.append(chunks)
        start += length
    return out


def _pieces(panel: Panel, chunks: Sequence[tuple[int, int, int]], offset: int) -> tuple[int, int]:
    """Appends the pieces of consecutive chunks, the first of which is chunk `offset` of the panel."""
    first = len(panel.pieces)
    begin = 0
    for j, (token, tokens, row) in enumerate(chunks):
        if row >= 0 or tokens < CHUNK or j + 1 == len(chunks):
            head = chunks[begin][0]
            panel.pieces.append((head, token + tokens - head, offset + begin, row))
            begin = j + 1
    return first, len(panel.pieces)


def _place(
    panel: Panel, n: int, chunks: Sequence[tuple[int, int, int]], source: tuple[int, int], segments: int
) -> None:
    """Adds one sequence's chunks to the panel, as one run or as segments."""
    offset = panel.count
    panel.count += len(chunks)
    piece = len(panel.pieces)
    _runs(panel, n, chunks, offset, source, segments)
    panel.walks.append((piece, len(panel.pieces), n))


def _runs(
    panel: Panel, n: int, chunks: Sequence[tuple[int, int, int]], offset: int, source: tuple[int, int], segments: int
) -> None:
    if segments == 1 or len(chunks) < 2 * segments:
        panel.runs.append((*_pieces(panel, chunks, offset), *source, n))
        return
    step = math.ceil(len(chunks) / segments)
    spans = []
    for begin in range(0, len(chunks), step):
        spans.append(_pieces(panel, chunks[begin : begin + step], offset + begin))
    panel.merges.append((*source, len(panel.scans), panel.carries, len(spans) - 1))
    for j, span in enumerate(spans):
        if j + 1 < len(spans):
            panel.scans.append((*span, ZERO, 0, len(panel.scans)))
        at = source if j == 0 else (CARRY, panel.carries + j - 1)
        panel.runs.append((*span, *at, n if j + 1 == len(spans) else -1))
    panel.carries += len(spans) - 1


@functools.lru_cache(maxsize=64)
def plan(
    lengths: tuple[int, ...], exports: tuple[tuple[int, int], ...], shape: Shape, limit: int = PANEL, segments: int = 0
) -> Plan:
    """Tables for sequences of these lengths; `segments` > 0 overrides the planner (tests and benchmarks)."""
    sequences = cut(lengths, exports)
    room = max(1, limit // shape.heads)
    longest = max((len(c) for c in sequences), default=0)
    busy = sum(1 for c in sequences if 2 * len(c) > longest)
    panel = Panel(0)
    panels = [panel]
    for n, chunks in enumerate(sequences):
        source = (INITIAL if shape.has_state else ZERO, n)
        done = 0
        while True:
            if panel.count == room and len(chunks) > done:
                panel = Panel(panel.first + panel.count)
                panels.append(panel)
            part = chunks[done : done + room - panel.count]
            block = block_for(busy, shape)
            many = segments or segments_for(len(part), max(1, busy), shape, block)
            _place(panel, n, part, source, many if 2 * len(part) > min(longest, room) else 1)
            done += len(part)
            if done >= len(chunks):
                break
            source = (FINAL, n)
    for p in panels:
        p.block = block_for(max(1, len(p.runs)) * shape.heads, shape)
    return Plan([(t, m) for chunks in sequences for t, m, _ in chunks], panels)
