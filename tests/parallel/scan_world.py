"""Checks of context parallelism among processes; run by test_worlds."""

import torch
from parallel.sequences import DOCUMENTS, alone, joined, part, sequences

from perilune.parallel.fabric import Collective
from perilune.parallel.shards import context, shard


def _gathered(fabric: Collective, mine: dict) -> dict:
    parts: list = [None] * fabric.size
    torch.distributed.all_gather_object(parts, mine, fabric.group)
    return joined(parts)


def check_loss_and_gradients_are_those_of_one_device(fabric: Collective) -> None:
    for seed, documents in enumerate(DOCUMENTS):
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-11)):
            case = sequences(seed, documents, dtype=dtype)
            got, want = _gathered(fabric, part(case, fabric)), alone(case)
            for name in want:
                error = float((got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-3))
                assert error <= tolerance, f"{documents} {dtype} {name}: relative error {error:.1e}"


def check_one_gather_each_way(fabric: Collective) -> None:
    """Forward sends one fragment, backward one gradient, whatever the length; nothing else."""
    sent: list[tuple[int, ...]] = []
    gather = fabric.gather
    fabric.gather = lambda x: (sent.append(tuple(x.shape)), gather(x))[1]  # type: ignore[method-assign]
    swap, fabric.swap = fabric.swap, None  # type: ignore[method-assign, assignment]
    try:
        part(sequences(1, [64]), fabric)
    finally:
        fabric.gather, fabric.swap = gather, swap  # type: ignore[method-assign]
    assert sent == [(2, 8, 8 + 6), (2, 8, 6)], sent


def check_context_of_latents(fabric: Collective) -> None:
    piece = shard([7, 30, 4], fabric.rank, fabric.size)
    x = torch.arange(41.0)[:, None].expand(-1, 3)
    got = context(x[piece.borders[piece.rank] : piece.borders[piece.rank + 1]].contiguous(), fabric, piece)
    assert torch.equal(got, x[piece.borders[piece.rank] - piece.carried : piece.borders[piece.rank + 1]])
