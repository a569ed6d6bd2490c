"""The fused kernels on a GPU against the fp64 recurrence: values, gradients, and the cases users report."""

import pytest
import torch
from ops.kda_gpu.cases import Case, case, error

from perilune.ops.kda import kda
from perilune.ops.kda.decode import decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
SHAPES = {
    "wide": ([300], {"heads": 2, "key": 128, "value": 128}),
    "grouped": ([64, 130], {"heads": 1, "values": 4, "key": 128, "value": 64}),
    "packed": ([0, 100, 1, 0, 64, 65, 0], {"heads": 2, "exports": [(1, 16), (1, 64), (1, 96), (4, 64)]}),
    "short": ([17, 16], {"heads": 2, "key": 64, "value": 128}),
    "empty": ([0, 0, 37], {"heads": 1, "key": 128, "value": 128}),
}


def fused(it: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from perilune.ops.kda.fused import fused  # needs Triton

    return fused(*it.leaves[:5], **it.keywords)


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(name: str, lower_bound: float | None, slow: bool) -> None:
    lengths, shape = SHAPES[name]
    it = case(lengths, **shape, slow=slow, lower_bound=lower_bound, **BF16)
    got, wide = fused(it), it.in_fp64()
    want = wide.truth()
    n = 3 if it.exports else 2
    assert [e for e in map(error, got[:n], want) if not e <= 0.005] == []
    seeds = [torch.randn_like(x) for x in got[:n]]
    grads = torch.autograd.grad(got[:n], it.leaves, seeds)
    true = torch.autograd.grad(want[:n], wide.leaves, [s.double() for s in seeds])
    # A_log: a scalar a head, a sum that cancels. β: 0.006 as a rule, but 37 tokens of one head scatter.
    limits = [0.008, 0.008, 0.008, 0.015, 0.02, None, 0.015, 0.008]
    assert [error(a, b) for a, b, m in zip(grads, true, limits) if m and error(a, b) > m] == []


def test_one_decay_a_head() -> None:
    it = case([64, 130], heads=2, values=2, key=128, value=128, lower_bound=None, **BF16).by_head()
    args, keywords = it.leaves[:5], {k: v for k, v in it.keywords.items() if k not in ("export_at", "delta")}
    o, final, _ = kda(*args, **keywords, impl="fused")
    wide = it.in_fp64()
    want = wide.truth()[:2]
    seeds = [torch.randn_like(x) for x in (o, final)]
    grads = torch.autograd.grad((o, final), it.leaves, seeds)
    true = torch.autograd.grad(want, wide.leaves, [s.double() for s in seeds])
    assert error(o, want[0]) < 0.005 and error(final, want[1]) < 0.005
    assert [e for a, b in zip(grads[:4], true) if (e := error(a, b)) > 0.015] == []


def test_many_identical_keys_with_slow_gates() -> None:
    """16,384 times the same key, β near 1: a power series for the inverse would be NaN here."""
    it = case([16384], heads=1, key=128, value=128, **BF16)
    _, k, _, gate, beta = (x.detach() for x in it.leaves[:5])
    k[:], gate[:], beta[:] = k[:, :1].clone(), -12.0, 8.0
    o, final, _ = fused(it)
    want = it.in_fp64().truth()
    # U are differences of neighbours here and their roundings add up over a chunk: 2% of o, 3% of the state.
    found = error(o, want[0]), error(final, want[1])
    assert max(found) < 0.04, found


def test_steep_gates_stay_finite() -> None:
    for lower_bound, level in ((-5.0, 60.0), (None, 3.0)):
        it = case([200], heads=1, key=128, value=128, slow=False, lower_bound=lower_bound, **BF16)
        it.leaves[5].data.fill_(level)
        out = fused(it)
        grads = torch.autograd.grad(out[0].float().square().sum() + out[1].sum(), it.leaves)
        assert all(x.isfinite().all() for x in (*out, *grads))
        assert error(out[0], it.in_fp64().truth()[0]) < 0.005


def test_nan_next_door_stays_there() -> None:
    it = case([17, 16], heads=1, key=128, value=128, **BF16)
    clean = [x.detach().clone() for x in fused(it)]
    for x in it.leaves[:5]:
        x.data[:, 17:] = float("nan")
    o, final, _ = fused(it)
    assert torch.equal(o[:, :17], clean[0][:, :17]) and torch.equal(final[0], clean[1][0])


def test_in_pieces_equals_whole() -> None:
    """64 chained calls against one, both state layouts."""
    it = case([64 * 48], heads=2, key=128, value=128, **BF16)
    with torch.no_grad():
        o, final, _ = fused(it)
        state, outs = it.leaves[7].detach().contiguous(), []
        for t in range(0, 64 * 48, 48):
            piece = [x[:, t : t + 48] for x in it.leaves[:5]]
            y, state, _ = kda(
                *piece, A_log=it.leaves[5], dt_bias=it.leaves[6], lower_bound=-5.0, state=state, lengths=[48]
            )
            outs.append(y)
    assert error(torch.cat(outs, 1), o) < 0.006 and error(state, final) < 0.006


def test_segments_change_nothing_that_matters() -> None:
    from perilune.ops.kda import hopper

    it = case([4096], heads=2, key=128, value=128, **BF16)
    q, k, v, gate, beta, A_log, bias, state = (x.detach() for x in it.leaves)
    one, many = (
        hopper.forward(
            (q, k, gate, beta, A_log, bias), v, state,
            hopper.Problem((4096,), (), 128**-0.5, -5.0, 4096, 2, 2, 128, 128, segments=s),
        )
        for s in (1, 7)
    )  # fmt: skip
    found = error(many[0], one[0]), error(many[1], one[1])
    assert max(found) < 0.005, found


def test_deterministic_and_captured_by_a_graph() -> None:
    it = case([500], heads=2, key=128, value=128, **BF16)
    with torch.no_grad():
        first = fused(it)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = fused(it)[0]
        again.zero_()
        graph.replay()
    assert torch.equal(first, again)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the tracer looks at it
def test_compiles_with_gradients_and_strided_inputs() -> None:
    it = case([130], heads=2, key=64, value=64, **BF16)
    wide = torch.randn(1, 130, 3 * 2 * 64 + 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, 64)) for y in x[..., :384].split(128, -1))
        o, _, _ = kda(
            q,
            k,
            v,
            it.leaves[3],
            x[..., 386:388],
            A_log=it.leaves[5],
            dt_bias=it.leaves[6],
            lower_bound=-5.0,
            lengths=[130],
        )
        return o.float().square().sum()

    plain, quick = run(wide), torch.compile(run, fullgraph=False)(wide)
    torch.testing.assert_close(plain, quick, rtol=1e-6, atol=0)  # a compiled sum adds in another order
    (g,), (h,) = torch.autograd.grad(plain, wide), torch.autograd.grad(quick, wide)
    assert error(h, g) < 1e-3


def test_seventy_thousand_sequences_of_one_token() -> None:
    it = case([1] * 70000, heads=1, **BF16)
    with torch.no_grad():
        o, final, _ = fused(it)
        want = it.in_fp64()
        small = Case(
            [*[x[:, :50] for x in want.leaves[:5]], *want.leaves[5:7], want.leaves[7][:50]], -5.0, [1] * 50, []
        )
        assert error(o[:, :50], small.truth()[0]) < 0.005 and o.isfinite().all() and final.isfinite().all()


def test_more_elements_than_int32() -> None:
    T, H = 140000, 128  # T·H·K = 2.3e9
    x = torch.zeros(1, T, H, 128, device="cuda", dtype=torch.bfloat16)
    x[:, -64:] = torch.randn(64, H, 128, device="cuda", dtype=torch.bfloat16)
    beta = torch.zeros(1, T, H, device="cuda", dtype=torch.bfloat16)
    A_log, bias = torch.zeros(H, device="cuda"), torch.zeros(H, 128, device="cuda")
    keep = {"A_log": A_log, "dt_bias": bias, "lower_bound": -5.0}
    with torch.no_grad():
        o, final, _ = kda(x, x, x, x, beta, lengths=[T], **keep)
        tail = x[:, -64:].contiguous()
        want, end, _ = kda(tail, tail, tail, tail, beta[:, -64:], lengths=[64], **keep)
    assert error(o[:, -64:], want) < 1e-3 and error(final, end) < 1e-3


@pytest.mark.parametrize("value_first", [False, True])
@pytest.mark.parametrize("batch", [1, 200])
def test_decode(batch: int, value_first: bool) -> None:
    torch.manual_seed(0)
    H = K = V = 128
    H, C = 4, 3 * 4 * 128
    bf = lambda *s: torch.randn(*s, device="cuda").bfloat16()  # noqa: E731
    state = torch.randn(batch + 2, H, V, K, device="cuda").transpose(2, 3)
    state = state if value_first else state.contiguous()
    tail = bf(batch + 2, C, 3)
    slots = torch.randperm(batch + 2, device="cuda")[:batch].int()
    slots[0] = -1
    x = (bf(batch, 1, C), bf(batch, 1, H, K), bf(batch, 1, H), bf(batch, 1, H, V))
    weights = {
        "conv_weight": torch.randn(C, 4, device="cuda"), "A_log": torch.rand(H, device="cuda"),
        "dt_bias": torch.rand(H, K, device="cuda"), "norm_weight": torch.rand(V, device="cuda"), "lower_bound": -5.0,
    }  # fmt: skip
    s, t = state.clone(), tail.clone()
    want = decode(*x, state=s, tail=t, slots=slots, impl="reference", **weights)
    o = decode(*x, state=state, tail=tail, slots=slots, **weights)
    torch.testing.assert_close(state, s, rtol=1e-4, atol=1e-4)
    assert torch.equal(t, tail) and error(o, want) < 0.005
