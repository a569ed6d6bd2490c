"""A fabric of threads: every rank of a world in one process, for quick tests in fp64."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perilune.parallel.fabric import Collective, Swap


class Board:
    """What the ranks put on the table in the current round."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=240)
        self.items: list[Any] = [None] * size


class Threads(Collective):
    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.size, self.board, self.log = rank, len(board.items), board, list[str]()
        self.bytes: Counter[str] = Counter()  # sent, by phase

    def _exchange(self, item: Any) -> list[Any]:
        self.board.items[self.rank] = item
        self.board.barrier.wait()
        seen = list(self.board.items)
        self.board.barrier.wait()
        return seen

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x.detach().clone()))

    def swap(self, x: Tensor, sizes: Swap, phase: str) -> Tensor:
        self.log.append(phase)
        self.bytes[phase] += x.numel() * x.element_size()
        parts = self._exchange((phase, x.detach().clone().split(sizes.send)))
        assert {p for p, _ in parts} == {phase}, f"ranks are in different phases: {[p for p, _ in parts]}"
        got = torch.cat([pieces[self.rank] for _, pieces in parts])
        assert [pieces[self.rank].shape[0] for _, pieces in parts] == sizes.receive
        return got


def run(size: int, program: Callable[[Threads], Any]) -> list[Any]:
    """`program(fabric)` on every rank; the results by rank. The first failure is raised here."""
    board, results, failures = Board(size), [None] * size, list[BaseException]()

    def body(rank: int) -> None:
        try:
            results[rank] = program(Threads(rank, board))
        except BaseException as error:
            failures.append(error)
            board.barrier.abort()

    workers = [threading.Thread(target=body, args=(r,)) for r in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    return results
