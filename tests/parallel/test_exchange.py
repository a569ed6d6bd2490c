"""The exchange against one device: values and every gradient, on a fabric of threads in fp64."""

import pytest
import torch
from parallel.moe import ACT, Layer, Result, alone, joined, layer, together
from parallel.threads import Threads, run
from torch.utils.checkpoint import checkpoint

from perilune.ops.mx import round_mxfp4
from perilune.parallel.exchange import Exchange
from perilune.parallel.experts import Experts
from perilune.parallel.routes import capacity


def close(got: Result, want: Result, tolerance: float = 1e-12) -> None:
    for name in Result.__dataclass_fields__:
        error = (getattr(got, name) - getattr(want, name)).norm() / getattr(want, name).norm().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


CASES = [
    {"ranks": 1, "local": 4, "top_k": 2, "tokens": [7]},
    {"ranks": 2, "local": 2, "top_k": 1, "tokens": [6, 6]},
    {"ranks": 2, "local": 8, "top_k": 4, "tokens": [16, 16]},
    {"ranks": 4, "local": 1, "top_k": 3, "tokens": [5, 5, 5, 5]},
    {"ranks": 4, "local": 2, "top_k": 2, "tokens": [9, 0, 13, 2]},
    {"ranks": 4, "local": 3, "top_k": 8, "tokens": [12, 12, 12, 12], "skew": 3.0},
    {"ranks": 8, "local": 2, "top_k": 4, "tokens": [6, 1, 0, 9, 4, 4, 4, 4]},
    {"ranks": 2, "local": 1, "top_k": 32, "tokens": [3, 3]},
]


@pytest.mark.parametrize(
    "options", [{}, {"align": 8}, {"tolerance": 4}, {"balanced": False}, {"num_slots": 0}], ids=str
)
@pytest.mark.parametrize("seed", range(len(CASES)))
def test_equals_one_device(seed: int, options: dict) -> None:
    shape = CASES[seed]
    case = layer(seed, **shape)
    close(joined(run(shape["ranks"], lambda fabric: together(fabric, case, **options))), alone(case))


def test_fixed_buffers_give_the_same() -> None:
    """tokens= fixes every shape; rows past the last segment are zeros of weight zero, and belong to the last group."""
    case = layer(3, 4, 2, 2, [9, 0, 13, 2])
    close(joined(run(4, lambda fabric: together(fabric, case, tokens=13, align=8))), alone(case))

    def program(fabric: Threads) -> None:
        exchange = Exchange(fabric, 8, 2, tokens=13, align=8)
        traffic = exchange.route(case.experts[fabric.rank])
        rows, weights = fabric.push(case.x[fabric.rank] + 1, case.weights[fabric.rank] + 1, traffic)
        used = torch.zeros(traffic.rows, dtype=torch.bool).index_fill(0, traffic.slot, True)
        assert len(rows) == len(weights) == traffic.rows == int(traffic.ends[-1]) > int(used.sum())
        assert not rows[~used].any()
        assert not weights[~used].any()

    run(4, program)


def test_two_layers_share_the_slots_and_fetch_again() -> None:
    """The first layer's borrowed experts are overwritten by the second's; its backward fetches them again, the last's
    not.
    """
    case = layer(5, 4, 2, 2, [8, 8, 8, 8])
    logs: dict[int, list[str]] = {}

    def program(fabric: Threads) -> Result:
        result = together(fabric, case, layers=2)
        logs[fabric.rank] = fabric.log
        return result

    got = joined(run(4, program))
    first = alone(case)
    twice = Layer([*first.y.split(8)], case.experts, case.weights, case.gate_up, case.down, case.dy)
    second = alone(twice)
    torch.testing.assert_close(got.y, second.y, rtol=1e-12, atol=1e-12)
    before = alone(Layer(case.x, case.experts, case.weights, case.gate_up, case.down, [*second.dx.split(8)]))
    torch.testing.assert_close(got.dx, before.dx, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.dgate_up, before.dgate_up + second.dgate_up, rtol=1e-12, atol=1e-12)
    assert all(log.count("prefetch") == 2 * 3 for log in logs.values())  # two tensors; forward twice, backward once


def test_under_activation_checkpointing() -> None:
    """The recomputed forward routes, dispatches and borrows again, in the same order on every rank."""
    case = layer(6, 4, 2, 2, [8, 8, 8, 8])

    def program(fabric: Threads) -> Result:
        r = fabric.rank
        exchange = Exchange(fabric, 8, 2)
        x, w = (t[r].clone().requires_grad_() for t in (case.x, case.weights))
        own = [p.clone().requires_grad_() for p in case.slice(r, 4)]
        run_layer = lambda x: exchange(x, case.experts[r], w, own, Experts(ACT))  # noqa: E731
        y = checkpoint(run_layer, x, use_reentrant=False)
        return Result(y.detach(), *torch.autograd.grad(y, (x, w, *own), case.dy[r]))

    close(joined(run(4, program)), alone(case))


def test_row_travels_once_per_host() -> None:
    """K entries of a token on one rank bring one payload: identity experts give K times the token."""
    ids = [torch.tensor([[0, 1, 1], [0, 0, 0]]), torch.tensor([[1, 0, 1], [0, 1, 0]])]

    def program(fabric: Threads) -> tuple:
        exchange = Exchange(fabric, 2, 3)
        traffic = exchange.route(ids[fabric.rank])
        x = torch.arange(1.0, 5.0).view(2, 2) + 10 * fabric.rank
        return traffic.payloads.send, fabric.pull(fabric.push(x, None, traffic)[0], None, traffic)[0], 3 * x

    for sent, y, expected in run(2, program):
        assert sum(sent) < 6
        assert torch.equal(y, expected)


def test_permuting_the_tokens_of_all_ranks_changes_nothing_but_the_order() -> None:
    case = layer(9, 4, 2, 2, [6, 6, 6, 6])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    cut = lambda parts: [*torch.cat(parts)[order].split(6)]  # noqa: E731
    moved = Layer(cut(case.x), cut(case.experts), cut(case.weights), case.gate_up, case.down, cut(case.dy))
    a, b = (joined(run(4, lambda fabric, c=c: together(fabric, c))) for c in (case, moved))
    torch.testing.assert_close(a.y[order], b.y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.dgate_up, b.dgate_up, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"balanced": False}], ids=str)
def test_twice_is_bit_equal(options: dict) -> None:
    case = layer(11, 4, 2, 3, [7, 7, 7, 7], dtype=torch.float32)
    a, b = (joined(run(4, lambda fabric: together(fabric, case, **options))) for _ in range(2))
    for name in Result.__dataclass_fields__:
        assert torch.equal(getattr(a, name), getattr(b, name))


def test_balanced_rows_are_the_same_on_every_rank_whatever_the_routing() -> None:
    for skew in (0.0, 1.0, 6.0):
        case = layer(13, 4, 4, 2, [8, 8, 8, 8], skew=skew)
        ids = [e.clamp(min=0) for e in case.experts]
        sizes = run(4, lambda fabric, ids=ids: Exchange(fabric, 16, 2, tokens=8).route(ids[fabric.rank]).rows)
        assert sizes == [16] * 4
    classic = run(4, lambda fabric: Exchange(fabric, 16, 2, balanced=False).route(ids[fabric.rank]).rows)
    assert max(classic) > 2 * 16  # the same routing without replicas


def test_capacity_holds_the_worst_padding() -> None:
    assert capacity(65536, 112, 112, 128) == 94080  # 65,536 + 224 segments of up to 127 more, rounded up
    assert capacity(3, 4, 4, 8) == 24  # three rows can open three segments at most
    assert capacity(100, 2, 2, 1) == 100


def test_gradients_by_finite_differences() -> None:
    case = layer(17, 2, 2, 2, [3, 3])
    want = joined(run(2, lambda fabric: together(fabric, case)))
    loss = lambda: sum(  # noqa: E731
        (r.y * dy).sum() for r, dy in zip(run(2, lambda fabric: together(fabric, case)), case.dy)
    )
    for tensor, grad, at in ((case.gate_up, want.dgate_up, (1, 3, 2)), (case.weights[0], want.dweights, (0, 1))):
        step = 1e-6
        tensor[at] += step
        up = loss()
        tensor[at] -= 2 * step
        down = loss()
        tensor[at] += step
        assert abs(float(up - down) / (2 * step) - float(grad[at])) < 1e-7


def misfit(fabric: Threads, tokens: int = 3, local: int = 2) -> torch.Tensor:
    ids, weights = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    compute = lambda rows, *_: rows  # noqa: E731
    return Exchange(fabric, 4, 2)(torch.zeros(tokens, 5), ids, weights, (torch.zeros(local, 5),), compute)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda fabric: Exchange(fabric, 5, 1), "5 experts cannot be divided over 2 ranks"),
        (lambda fabric: Exchange(fabric, 4, 2).route(torch.zeros(3, 1, dtype=torch.long)), r"must be \[tokens, 2\]"),
        (lambda fabric: Exchange(fabric, 4, 2).route(torch.full((3, 2), 4)), "expert 4 is not one of 4"),
        (lambda fabric: misfit(fabric, tokens=2), r"need x \[S, H\], experts and weights \[S, 2\]"),
        (lambda fabric: misfit(fabric, local=1), r"a rank owns 2 experts, got tensors of \[1\]"),
        (lambda fabric: Exchange(fabric, 4, 1, tokens=2).route(torch.zeros(3, 1, dtype=torch.long)), "at most 2"),
    ],
)
def test_bad_input_is_one_sentence(build, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run(2, build)
    assert "\n" not in str(error.value)


def test_bf16_within_its_rounding() -> None:
    """Rows travel and are summed per host in bf16, then fp32: near the fp64 layer."""
    case = layer(19, 4, 2, 4, [16, 16, 16, 16], dtype=torch.bfloat16)
    got = joined(run(4, lambda fabric: together(fabric, case)))
    exact = Layer(*([t.double() if t.is_floating_point() else t for t in part] if isinstance(part, list) else
                    part.double() for part in vars(case).values()))  # fmt: skip
    close(Result(*(getattr(got, f).double() for f in Result.__dataclass_fields__)), alone(exact), tolerance=0.02)


def test_mxfp4_experts_travel_packed_bit_for_bit() -> None:
    """On the grid, packed and whole give the same bits, values and gradients; a quarter of the bytes and a little
    travel.
    """
    case = layer(23, 4, 2, 2, [8, 8, 8, 8], dtype=torch.bfloat16, width=32)
    case = Layer(case.x, case.experts, case.weights, round_mxfp4(case.gate_up), round_mxfp4(case.down), case.dy)
    sent: dict[bool, int] = {}

    def program(fabric: Threads, mxfp4: bool) -> Result:
        result = together(fabric, case, layers=2, mxfp4=mxfp4)
        sent[mxfp4] = sent.get(mxfp4, 0) + fabric.bytes["prefetch"]
        return result

    whole, packed = (joined(run(4, lambda fabric, m=m: program(fabric, m))) for m in (False, True))
    for name in Result.__dataclass_fields__:
        assert torch.equal(getattr(packed, name), getattr(whole, name)), name
    assert sent[True] * 16 == sent[False] * 4.25 > 0


def test_off_the_grid_packing_is_noticed() -> None:
    """Negative control: without rounding first, packed experts are other experts."""
    case = layer(23, 4, 2, 2, [8, 8, 8, 8], dtype=torch.float32, width=32)
    whole, packed = (joined(run(4, lambda fabric, m=m: together(fabric, case, mxfp4=m))) for m in (False, True))
    assert not torch.equal(packed.y, whole.y)
