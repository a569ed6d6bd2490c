"""Checks among GPUs that reach each other, or among processes that share one GPU; run by test_gpu.

Two processes on one GPU take turns, so a barrier costs milliseconds and nothing crosses a wire; addresses, orders and
sums are those of two GPUs.
"""

import numpy as np
import torch
import torch.distributed as dist
from parallel.laws import random_case
from parallel.moe import Layer, Result, alone, layer, together

from perilune.parallel.exchange import Exchange
from perilune.parallel.fabric import Collective, FabricError, Swap
from perilune.parallel.planner import plan
from perilune.parallel.products_triton import lent_gradients, lent_product
from perilune.parallel.symmetric import Symmetric


class Staged(Collective):
    """gloo carries tensors of a GPU through the host."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return super().gather(x.cpu()).to(x.device)

    def swap(self, x: torch.Tensor, sizes: Swap, phase: str) -> torch.Tensor:
        return super().swap(x.cpu(), sizes, phase).to(x.device)


def _wires(fabric: Collective) -> Collective:
    return fabric if dist.get_backend() == "nccl" else Staged()


def _turns(of_two_gpus: int) -> int:
    return of_two_gpus if torch.cuda.device_count() > 1 else of_two_gpus // 20


def _on_gpu(case: Layer) -> Layer:
    move = lambda part: [t.cuda() for t in part] if isinstance(part, list) else part.cuda()  # noqa: E731
    return Layer(*(move(part) for part in vars(case).values()))


def check_planner_kernel(_: Collective) -> None:
    for seed in range(12):  # every shape is compiled; many are tried in the interpreter
        counts = random_case(np.random.default_rng(seed)).counts
        want, got = plan(counts), plan(counts.cuda())
        for name in ("assigned", "replicas", "rows", "quotas"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), f"seed {seed}: {name}"


def check_borrowed_products(_: Collective) -> None:
    """Whole and broken tiles, an idle slot between two used ones; rows and slots of others stay as they are."""
    compare_borrowed(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)


def compare_borrowed(on: torch.device, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g).to(on, dtype)  # noqa: E731
    for D, F in ((256, 512), (72, 40)):
        borders = [7, 300, 300, 301]
        x, dy, weights = new(301, D), new(301, F), new(3, F, D)
        out, grad = torch.full((301, F), 7.0, dtype=dtype, device=on), torch.full_like(weights, 7.0)
        want_out, want_grad = out.clone(), grad.clone()
        for b in (0, 2):
            rows = slice(borders[b], borders[b + 1])
            want_out[rows], want_grad[b] = x[rows] @ weights[b].mT, dy[rows].mT @ x[rows]
        at = torch.tensor(borders, dtype=torch.int32, device=on)
        lent_product(out, x, weights.mT, at)
        lent_gradients(grad, dy, x, at)
        for got, want in ((out, want_out), (grad, want_grad)):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=0.2)


def check_symmetric_equals_collectives_bit_for_bit(fabric: Collective) -> None:
    symmetric = Symmetric()
    for seed, tokens in enumerate(([64, 64], [200, 7], [128, 0])):
        case = _on_gpu(layer(seed, fabric.size, 4, 4, tokens[: fabric.size], torch.bfloat16))
        for layers in (1, 2):
            got = together(symmetric, case, layers=layers, tokens=max(tokens))
            want = together(_wires(fabric), case, layers=layers, tokens=max(tokens))
            torch.cuda.synchronize()
            symmetric.check()
            for name in Result.__dataclass_fields__:
                assert torch.equal(getattr(got, name), getattr(want, name)), f"{tokens} {layers} {name}"


def check_near_the_equation(fabric: Collective) -> None:
    case = layer(5, fabric.size, 4, 4, [64] * fabric.size, torch.float32)
    got = together(Symmetric(), _on_gpu(case), tokens=64)
    want = alone(case).y.split(64)[fabric.rank]
    assert (got.y.cpu() - want).norm() / want.norm() < 2e-3  # tf32 in the grouped products


def check_many_layers_in_a_row(fabric: Collective) -> None:
    """No wait hangs and no buffer is written too early: every result equals the first."""
    symmetric = Symmetric()
    case = _on_gpu(layer(3, fabric.size, 4, 4, [64] * fabric.size, torch.bfloat16))
    first = together(symmetric, case, tokens=64)
    for _ in range(_turns(1000)):
        again = together(symmetric, case, tokens=64)
        assert torch.equal(again.dgate_up, first.dgate_up) and torch.equal(again.y, first.y)
    symmetric.check()


def check_a_missing_rank_is_named(fabric: Collective) -> None:
    """Rank 0 enters a layer alone: it gives up in bounded time and says who is missing and where."""
    if fabric.size == 1:
        return
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
