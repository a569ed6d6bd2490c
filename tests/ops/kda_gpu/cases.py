"""Inputs in both gate regimes, and the fp64 recurrence they are held against."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.kda.reference import reference


@dataclass
class Case:
    """Leaves q, k, v, gate, beta, A_log, dt_bias, state and how to run them."""

    leaves: list[Tensor]
    lower_bound: float | None
    lengths: list[int] | None
    exports: list[tuple[int, int]]

    @property
    def keywords(self) -> dict:
        q = self.leaves[0]
        return {
            "A_log": self.leaves[5],
            "dt_bias": self.leaves[6],
            "lower_bound": self.lower_bound,
            "scale": q.shape[-1] ** -0.5,
            "state": self.leaves[7],
            "lengths": self.lengths,
            "export_at": self.exports,
            "delta": True,
        }

    def by_head(self) -> "Case":
        """The same with one decay a head: the first channel's."""
        narrow = [x[..., :1] if i in (3, 6) else x for i, x in enumerate(self.leaves)]
        leaves = [x.detach().clone().requires_grad_() for x in narrow]
        return Case(leaves, self.lower_bound, self.lengths, self.exports)

    def in_fp64(self) -> "Case":
        wide = [x.detach().double().requires_grad_(x.requires_grad) for x in self.leaves]
        return Case(wide, self.lower_bound, self.lengths, self.exports)

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        o, final, exports = reference(*self.leaves[:5], **self.keywords)
        assert exports is not None
        return o, final, exports


def case(
    lengths: Sequence[int], heads: int = 2, values: int | None = None, key: int = 64, value: int = 64, *,
    slow: bool = True, lower_bound: float | None = -5.0, exports: Sequence[tuple[int, int]] = (), batch: int = 1,
    device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Case:  # fmt: skip
    """Packed sequences (batch 1) or `batch` equal ones. Slow gates: mean log-decay about -0.006; fast: -3.2."""
    g = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).to(to)

    HV, T = values or heads, sum(lengths) // batch
    q, k, v = randn(batch, T, heads, key), randn(batch, T, heads, key), randn(batch, T, HV, value)
    gate = randn(batch, T, HV, key) * (0.5 if slow else 1.0) - (7.0 if slow else 0.0)
    spread = 0.0 if slow else 1.0
    A_log = torch.rand(HV, generator=g, device=device) * spread
    bias = torch.rand(HV, key, generator=g, device=device) * spread
    state = randn(len(lengths), HV, value, key, to=torch.float32).transpose(2, 3) * 0.3
    leaves = [q, k, v, gate, randn(batch, T, HV), A_log, bias, state]
    return Case(
        [x.requires_grad_() for x in leaves], lower_bound, list(lengths) if batch == 1 else None, list(exports)
    )  # fmt: skip


def error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖, NaN if anything is not finite."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))
