"""Run by test_planner_triton in its own interpreter: TRITON_INTERPRET=1 must be set before Triton is imported."""

import sys

import numpy as np
import torch
from parallel.laws import random_case

from perilune.parallel.planner import plan
from perilune.parallel.planner_triton import plan_segments_triton
from perilune.parallel.routes import segments


def compare(counts: torch.Tensor, slots: int, tolerance: int, align: int) -> None:
    expected = plan(counts, num_slots=slots, tolerance=tolerance)
    rank = counts.shape[0] - 1
    got, layout, offsets = plan_segments_triton(counts, slots, tolerance, align, rank, 12345)
    for name in ("assigned", "replicas", "rows", "quotas"):
        a, b = getattr(got, name), getattr(expected, name)
        assert a.dtype == b.dtype and torch.equal(a, b), f"{name}: {a} is not {b}"
    for name in ("starts", "ends", "rows"):
        a, b = getattr(layout, name), getattr(segments(expected, align), name)
        assert a.dtype == b.dtype and torch.equal(a, b), f"segments.{name}: {a} is not {b}"
    assert torch.equal(got.counts, counts)
    assert offsets.tolist() == [*layout.ends[rank, :-1].tolist(), 12345]


def main(first: int, last: int) -> None:
    for seed in range(first, last):
        rng = np.random.default_rng(seed)
        case = random_case(rng)
        slots = case.local if rng.random() < 0.6 else int(rng.integers(0, case.local + 1))
        tolerance = int(rng.choice([0, 0, 1, 5]))
        try:
            compare(case.counts, slots, tolerance, int(rng.choice([1, 8])))
        except AssertionError as error:
            raise SystemExit(f"seed {seed}, slots {slots}, tolerance {tolerance}: {error}") from None
    print(f"equal {last - first}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
