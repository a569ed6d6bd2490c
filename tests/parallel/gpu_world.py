"""Checks among GPUs that reach each other; run by test_gpu."""

import numpy as np
import torch
import torch.distributed as dist
from parallel.laws import random_case
from parallel.moe import Layer, Result, alone, layer, together

from perilune.parallel.exchange import Exchange
from perilune.parallel.fabric import Collective, FabricError
from perilune.parallel.planner import plan
from perilune.parallel.symmetric import Symmetric


def _on_gpu(case: Layer) -> Layer:
    move = lambda part: [t.cuda() for t in part] if isinstance(part, list) else part.cuda()  # noqa: E731
    return Layer(*(move(part) for part in vars(case).values()))


def check_planner_kernel(_: Collective) -> None:
    for seed in range(12):  # every shape is compiled; many are tried in the interpreter
        counts = random_case(np.random.default_rng(seed)).counts
        want, got = plan(counts), plan(counts.cuda())
        for name in ("assigned", "replicas", "rows", "quotas"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), f"seed {seed}: {name}"


def check_symmetric_equals_nccl_bit_for_bit(fabric: Collective) -> None:
    symmetric = Symmetric()
    for seed, tokens in enumerate(([64, 64], [200, 7], [128, 0])):
        case = _on_gpu(layer(seed, fabric.size, 4, 4, tokens[: fabric.size], torch.bfloat16))
        for layers in (1, 2):
            got = together(symmetric, case, layers=layers, tokens=max(tokens))
            want = together(fabric, case, layers=layers, tokens=max(tokens))
            torch.cuda.synchronize()
            symmetric.check()
            for name in Result.__dataclass_fields__:
                assert torch.equal(getattr(got, name), getattr(want, name)), f"{tokens} {layers} {name}"


def check_near_the_equation(fabric: Collective) -> None:
    case = layer(5, fabric.size, 4, 4, [64] * fabric.size, torch.float32)
    got = together(Symmetric(), _on_gpu(case), tokens=64)
    want = alone(case).y.split(64)[fabric.rank]
    assert (got.y.cpu() - want).norm() / want.norm() < 2e-3  # tf32 in the grouped products


def check_thousand_layers_in_a_row(fabric: Collective) -> None:
    """No wait hangs and no buffer is written too early: every result equals the first."""
    symmetric = Symmetric()
    case = _on_gpu(layer(3, fabric.size, 4, 4, [64] * fabric.size, torch.bfloat16))
    first = together(symmetric, case, tokens=64)
    for _ in range(1000):
        again = together(symmetric, case, tokens=64)
        assert torch.equal(again.dgate_up, first.dgate_up) and torch.equal(again.y, first.y)
    symmetric.check()


def check_a_missing_rank_is_named(fabric: Collective) -> None:
    """Rank 0 enters a layer alone: it gives up in bounded time and says who is missing and where."""
    symmetric = Symmetric(patience=1 << 18)
    ids = torch.zeros(4, 2, dtype=torch.long, device="cuda")
    Exchange(symmetric, 2 * fabric.size, 2, tokens=4).route(ids)  # all: buffers are allocated together
    torch.cuda.synchronize()
    dist.barrier()
    if fabric.rank == 0:
        Exchange(symmetric, 2 * fabric.size, 2, tokens=4).route(ids)
        torch.cuda.synchronize()
        try:
            symmetric.check()
        except FabricError as error:
            assert "rank 1 did not reach" in str(error), error
        else:
            raise AssertionError("a barrier passed without rank 1")
    dist.barrier()
