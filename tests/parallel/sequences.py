"""Packed KDA inputs, run whole and cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from parallel.threads import run
from torch import Tensor

from perilune.ops.kda import kda
from perilune.parallel import scan
from perilune.parallel.fabric import Collective
from perilune.parallel.shards import Shard, shard

DOCUMENTS = [[40], [16, 16], [3, 30, 7], [5, 5, 5, 5, 5, 5, 5, 5], [1, 38, 1], [24, 2, 1, 1, 4]]
TENSORS = ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "state")
PACKED = ("q", "k", "v", "gate", "beta")


@dataclass
class Sequences:
    documents: list[int]
    inputs: dict[str, Tensor]
    do: Tensor
    dfinal: Tensor
    options: dict[str, Any]

    def leaves(self) -> dict[str, Tensor]:
        return {n: t.clone().requires_grad_() for n, t in self.inputs.items()}

    def call(self, fabric: Collective, piece: Shard) -> tuple[Tensor, Tensor]:
        return scan.kda_parallel(**self.inputs, fabric=fabric, piece=piece, **self.options)


def sequences(
    seed: int, documents: list[int], *, lower_bound: float | None = -5.0, delta: bool = True, given: bool = True,
    value_heads: int = 2, dtype: torch.dtype = torch.float64, K: int = 8, V: int = 6,
) -> Sequences:  # fmt: skip
    """Slow gates, so that states carry far; `given` initial states for every document."""
    g = torch.Generator().manual_seed(seed)
    T, N, H, HV = sum(documents), len(documents), 2, value_heads
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    inputs = {
        "q": new(1, T, H, K), "k": new(1, T, H, K), "v": new(1, T, HV, V), "gate": new(1, T, HV, K) - 4,
        "beta": new(1, T, HV), "A_log": new(HV) * 0.1, "dt_bias": new(HV, K) * 0.1,
    }  # fmt: skip
    if given:
        inputs["state"] = new(N, HV, K, V)
    options = {"lower_bound": lower_bound, "delta": delta}
    return Sequences(documents, inputs, new(1, T, HV, V), new(N, HV, K, V), options)


def alone(case: Sequences) -> dict[str, Tensor]:
    leaves = case.leaves()
    o, final, _ = kda(**leaves, lengths=case.documents, **case.options)
    grads = torch.autograd.grad((o, final), list(leaves.values()), (case.do, case.dfinal))
    loss = (o * case.do).sum() + (final * case.dfinal).sum()
    return {"loss": loss.detach(), "o": o.detach(), "final": final.detach()} | dict(zip(leaves, grads))


def part(case: Sequences, fabric: Collective) -> dict[str, Tensor]:
    """This rank's outputs, final states of documents that end here, and gradients."""
    piece = shard(case.documents, fabric.rank, fabric.size)
    here = slice(*piece.borders[piece.rank : piece.rank + 2])
    ends = torch.tensor(case.documents).cumsum(0)
    touched = [d for d, e in enumerate(ends.tolist()) if e > here.start and e - case.documents[d] < here.stop]
    mine = {n: (t[:, here] if n in PACKED else t).clone().requires_grad_() for n, t in case.inputs.items()}
    local = {n: t[touched] if n == "state" else t for n, t in mine.items()}
    o, final = scan.kda_parallel(**local, fabric=fabric, piece=piece, **case.options)
    dfinal = case.dfinal[touched].clone()
    if piece.continues:
        dfinal[-1] = 0  # not the end of that document
    leaves = list(mine.values())
    grads = torch.autograd.grad((o, final), leaves, (case.do[:, here], dfinal))
    loss = (o * case.do[:, here]).sum() + (final * dfinal).sum()
    finished = final.detach()[: len(touched) - piece.continues]
    return {"loss": loss.detach(), "o": o.detach(), "final": finished} | dict(zip(mine, grads))


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    whole = {n: torch.cat([p[n] for p in parts], 1 if n in (*PACKED, "o") else 0)
             for n in parts[0] if n in (*PACKED, "o", "final")}  # fmt: skip
    summed = {n: torch.stack([p[n] for p in parts]).sum(0) for n in parts[0] if n not in whole}
    return {n: (whole | summed)[n] for n in parts[0]}


def together(case: Sequences, size: int, spoil: bool = False) -> dict[str, Tensor]:
    kept = scan.compose
    if spoil:
        scan.compose = lambda f, piece, K: kept(f.flip(0).contiguous(), piece, K)  # type: ignore[assignment]
    try:
        return joined(run(size, lambda fabric: part(case, fabric)))
    finally:
        scan.compose = kept
