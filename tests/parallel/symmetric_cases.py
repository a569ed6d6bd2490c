"""Run by test_symmetric in its own interpreter: the symmetric fabric's kernels on threads that share memory.

Every rank is a thread; its buffers are ordinary tensors and peers are reached through their addresses, as on GPUs.
Barriers are the threads'. Everything must equal the collectives' results bit for bit.
"""

import sys
import threading

import torch
from parallel import threads
from parallel.moe import Layer, Result, alone, layer, together
from parallel.threads import Threads

from perilune.ops.mx import round_mxfp4
from perilune.parallel import symmetric
from perilune.parallel.planner_triton import plan_segments_triton
from perilune.parallel.symmetric import Shared, Symmetric

LOCK = threading.Lock()  # Triton's interpreter runs one kernel at a time


def locked(function):
    def call(*args, **kwargs):
        with LOCK:
            return function(*args, **kwargs)

    return call


class ThreadHeap:
    def __init__(self, wires: Threads) -> None:
        self.wires = wires

    def shared(self, shape, dtype: torch.dtype) -> Shared:
        mine = torch.full(tuple(shape), 77, dtype=torch.uint8).to(dtype)  # stale contents must not matter
        if dtype == torch.int32 and len(shape) == 1 and shape[0] == 4:
            mine.zero_()
        return Shared(mine, self.wires.gather(torch.tensor(mine.data_ptr())))


class Simulated(Symmetric):
    """Counts its barriers; they are the threads'."""

    def __init__(self, wires: Threads) -> None:
        self.wires, self.phases = wires, []
        self._start(wires.rank, wires.size, ThreadHeap(wires), torch.device("cpu"), 1)

    def _barrier(self, phase: str, *reading: str) -> None:
        self.phases.append(phase)
        self._reading, self._lent = set(reading), ()
        self.wires.board.barrier.wait()

    def _launch(self, kernel, grid, *args, **constants) -> None:
        with LOCK:
            super()._launch(kernel, grid, *args, **constants)


def run(size: int, program) -> list:
    return threads.run(size, lambda wires: program(Simulated(wires)))


def equal(case: Layer, size: int, **options) -> None:
    got = run(size, lambda fabric: together(fabric, case, **options))
    want = threads.run(size, lambda fabric: together(fabric, case, **options))
    for a, b in zip(got, want):
        for name in Result.__dataclass_fields__:
            x, y = getattr(a, name), getattr(b, name)
            assert torch.equal(x, y), f"{name}: {float((x - y).abs().max())}"


def check_layer() -> None:
    for seed, (size, local, top_k, tokens, options) in enumerate([
        (2, 2, 2, [5, 5], {}),
        (4, 2, 3, [4, 0, 6, 2], {"align": 8}),
        (2, 4, 4, [7, 7], {"tolerance": 2}),
        (4, 1, 1, [3, 3, 3, 3], {}),
        (1, 3, 2, [4], {}),
    ]):  # fmt: skip
        case = layer(seed, size, local, top_k, tokens, torch.float32)
        equal(case, size, tokens=max(tokens), **options)


def check_half_precision() -> None:
    """Every host rounds its sum once, the token's own too."""
    equal(layer(17, 4, 2, 4, [6, 5, 0, 7], torch.float16), 4, tokens=7)


def check_many_blocks() -> None:
    """More entries than one block of the counting and addressing kernels holds."""
    equal(layer(7, 2, 3, 3, [90, 70], torch.float32), 2, tokens=90)


def check_two_layers() -> None:
    case = layer(9, 2, 2, 2, [6, 6], torch.float32)
    equal(case, 2, layers=2, tokens=6)


def check_packed() -> None:
    """Experts on the MXFP4 grid travel as codes and scales, and arrive as they were."""
    case = layer(25, 2, 2, 2, [5, 5], torch.float32, width=32)
    case = Layer(case.x, case.experts, case.weights, round_mxfp4(case.gate_up), round_mxfp4(case.down), case.dy)
    equal(case, 2, tokens=5, mxfp4=True)


def check_barriers() -> None:
    """Four barriers a layer forward; reusing a buffer needs none of its own."""
    case = layer(11, 2, 2, 2, [4, 4], torch.float32)
    seen = {}

    def program(fabric: Simulated) -> None:
        together(fabric, case, layers=2, tokens=4)
        seen[fabric.rank] = fabric.phases

    run(2, program)
    forward = ["counts", "dispatch", "combine"]
    back = ["dispatch", "gradient reduce", "combine"]
    assert seen[0] == seen[1] == [*forward, *forward, *back, "dispatch", "prefetch", *back[1:]], seen[0]


def check_near_the_equation() -> None:
    case = layer(13, 2, 2, 2, [6, 6], torch.float32)
    got = torch.cat([r.y for r in run(2, lambda fabric: together(fabric, case, tokens=6))])
    torch.testing.assert_close(got, alone(case).y, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    symmetric.COPY_PROGRAMS, symmetric.STAGE_PROGRAMS = 3, 2  # the interpreter runs them one after the other
    symmetric.plan_segments_triton = locked(plan_segments_triton)
    globals()[sys.argv[1]]()
    print("ok")
