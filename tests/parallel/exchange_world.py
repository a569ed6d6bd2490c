"""Checks of the exchange among processes; run by test_worlds."""

import torch
from parallel.moe import Result, alone, layer, together
from parallel.threads import run

from perilune.parallel.exchange import Exchange
from perilune.parallel.fabric import Collective, FabricError, Swap
from perilune.parallel.planner import plan
from perilune.parallel.routes import count_rows

OPTIONS = [{}, {"align": 8}, {"tolerance": 3}, {"num_slots": 1}, {"balanced": False}, {"tokens": 12}]


def check_every_rank_has_the_same_plan(fabric: Collective) -> None:
    case = layer(1, fabric.size, 4, 2, [8] * fabric.size)
    counts = fabric.gather(count_rows(case.experts[fabric.rank], 4 * fabric.size))
    made = plan(counts)
    for tensor in (made.assigned, made.replicas, made.quotas):
        assert all(torch.equal(other, tensor) for other in fabric.gather(tensor))


def check_values_and_gradients_are_those_of_one_device(fabric: Collective) -> None:
    tokens = [(3 * r + 5) % 12 for r in range(fabric.size)]
    for seed, options in enumerate(OPTIONS):
        case = layer(seed, fabric.size, 2, 3, tokens, torch.float64)
        got, want = together(fabric, case, **options), alone(case)
        here = slice(sum(tokens[: fabric.rank]), sum(tokens[: fabric.rank + 1]))
        home = slice(2 * fabric.rank, 2 * fabric.rank + 2)
        for name in Result.__dataclass_fields__:
            part = getattr(want, name)[home if name in ("dgate_up", "ddown") else here]
            torch.testing.assert_close(getattr(got, name), part, rtol=1e-12, atol=1e-12)


def check_bit_equal_to_the_fabric_of_threads(fabric: Collective) -> None:
    """Orders of all sums belong to the exchange, not to the wires."""
    case = layer(21, fabric.size, 2, 4, [9] * fabric.size, torch.float32)
    want = run(fabric.size, lambda threads: together(threads, case))[fabric.rank]
    got = together(fabric, case)
    for name in Result.__dataclass_fields__:
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def check_dtypes_travel(fabric: Collective) -> None:
    case = layer(22, fabric.size, 2, 2, [6] * fabric.size)
    exchange = Exchange(fabric, 2 * fabric.size, 2)
    traffic = exchange.route(case.experts[fabric.rank])
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn):
        own = (torch.arange(2 * 16).view(2, 16) % 7 + fabric.rank).to(dtype)
        slots = torch.zeros(2, 16).to(dtype)
        fabric.lend([own], [slots], traffic)
        for slot, expert in enumerate(traffic.plan.replicas[fabric.rank].tolist()):
            home, local = divmod(expert, 2)
            want = (torch.arange(2 * 16).view(2, 16) % 7 + home)[local].to(dtype) if expert >= 0 else slots[slot]
            assert torch.equal(slots[slot].view(torch.uint8), want.view(torch.uint8))


def check_different_transfers_are_named(fabric: Collective) -> None:
    """Ranks that fall out of step say who does what instead of hanging."""
    try:
        fabric.gather(torch.zeros(1)) if fabric.rank else fabric.swap(
            torch.zeros(0), Swap([0] * fabric.size, [0] * fabric.size), "combine"
        )
    except FabricError as error:
        assert "rank 0: combine" in str(error) and f"rank {fabric.size - 1}: gather" in str(error), error
    else:
        raise AssertionError("different transfers went through")
