"""The learning rate as a pure function of the step (report §3.2 and §3.3: cosine after 1% linear warm-up).

    warm-up   η(t) = η_max (t + 1) / W,                       t < W = max(1, ⌈0.01 T⌉)
    cosine    η(t) = η_min + (η_max − η_min)(1 + cos π u)/2,  u from 0 at the last warm-up step to 1 at step T − 1
    WSD       η_max until the last share of the steps, then linearly down to η_min

Inferred: the floor of 10% of the peak (Kimi K2 goes from 2e-4 to 2e-5).
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """`schedule(step)` is the learning rate of that step, counted from 0; past the end it stays at the floor."""

    peak: float
    steps: int
    kind: Literal["cosine", "wsd"] = "cosine"
    warmup_share: float = 0.01
    floor_share: float = 0.1  # of the peak
    decay_share: float = 0.2  # of the steps; WSD only

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"A schedule needs at least one step, not {self.steps}.")
        if self.kind not in ("cosine", "wsd"):
            raise ValueError(f"Unknown schedule {self.kind!r}: cosine or wsd.")
        for name in ("warmup_share", "floor_share", "decay_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"schedule.{name} must lie in [0, 1], not {getattr(self, name)}.")

    @property
    def warmup(self) -> int:
        """Steps of warm-up; the last of them has the peak rate."""
        return max(1, math.ceil(self.warmup_share * self.steps))

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        floor = self.floor_share * self.peak
        return floor + (self.peak - floor) * self._height(step)

    def _height(self, step: int) -> float:
        """1 at the peak, 0 at the floor."""
        if self.kind == "cosine":
            first = self.warmup - 1
        else:
            first = max(self.warmup, self.steps - math.ceil(self.decay_share * self.steps)) - 1
        if step >= self.steps - 1:
            return 0.0
        u = max(0, step - first) / (self.steps - 1 - first)
        return (1 + math.cos(math.pi * u)) / 2 if self.kind == "cosine" else 1 - u
