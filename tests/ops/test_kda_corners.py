"""`kda` where an outside user takes it: nothing at all, tracers, autocast, results written in place, odd mixtures."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.test_kda import draw
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perilune.ops.kda import kda, kda_step

BOTH = ["chunk", "reference"]
torch.set_num_threads(1)


def leaves(x: dict) -> dict:
    return {key: y.clone().requires_grad_() for key, y in x.items()}


@pytest.mark.parametrize(
    ("batch", "lengths"), [(0, None), (1, None), (2, None), (1, [0]), (1, [0, 0]), (1, [])], ids=str
)
def test_nothing_at_all_has_a_value_and_gradients(batch: int, lengths: list[int] | None) -> None:
    sequences = batch if lengths is None else len(lengths)
    x = leaves(draw(B=batch, T=0, HV=4) | {"state": torch.randn(sequences, 4, 16, 16, dtype=torch.float64)})
    for impl in BOTH:
        o, final, exports = kda(**x, lower_bound=-5.0, lengths=lengths, export_at=[], impl=impl)
        assert o.shape == (batch, 0, 4, 16) and exports is not None and exports.shape == (0, 4, 16, 16)
        torch.testing.assert_close(final, x["state"])
        (grad,) = torch.autograd.grad(final.sum() + o.sum(), x["state"])
        assert torch.equal(grad, torch.ones_like(grad))
    found = torch.autograd.grad(kda(**x, lower_bound=-5.0, lengths=lengths)[0].sum(), [*x.values()])
    assert all(g.shape == y.shape and not g.any() for g, y in zip(found, x.values()))


@pytest.mark.parametrize("T", [32, 37])  # whole chunks, and chunks behind an index table
def test_results_may_be_written_in_place(T: int) -> None:
    x, y = (leaves(draw(T=T)) for _ in range(2))
    o, final, exports = kda(**x, lower_bound=-5.0, export_at=[16], impl="chunk")
    assert exports is not None
    loss = o.mul_(2.0).sum() + final.mul_(3.0).sum() + exports.neg_().sum()
    o, final, exports = kda(**y, lower_bound=-5.0, export_at=[16], impl="reference")
    assert exports is not None
    want = torch.autograd.grad(2 * o.sum() + 3 * final.sum() - exports.sum(), [*y.values()])
    torch.testing.assert_close(torch.autograd.grad(loss, [*x.values()]), want)


@pytest.mark.slow  # the tracer takes ten seconds
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the tracer looks at it
def test_a_compiled_layer_gives_the_same_numbers() -> None:
    def layer(q: Tensor, **rest: Tensor) -> Tensor:
        return kda(q * 2, lower_bound=-5.0, lengths=[30, 7], **rest)[0] * 3

    x, y = (leaves(draw(T=37, dtype=torch.float32)) for _ in range(2))
    torch.compiler.reset()
    got, want = torch.compile(layer, backend="aot_eager")(**x), layer(**y)
    assert torch.equal(got, want)
    pairs = zip(*(torch.autograd.grad(o.sum(), [*z.values()]) for o, z in ((got, x), (want, y))))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_fake_run_leaves_no_fake_tables_behind() -> None:
    """Memory estimators and exporters run a layer on fake tensors first."""
    x, lengths = draw(T=53, dtype=torch.float32), [33, 20]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {key: mode.from_tensor(y) for key, y in x.items()}
        o, final, _ = kda(**fake, lower_bound=-5.0, lengths=lengths)
        assert (o.shape, final.shape) == ((1, 53, 2, 16), (2, 2, 16, 16))
    o, _, _ = kda(**x, lower_bound=-5.0, lengths=lengths)
    assert type(o) is Tensor
    torch.testing.assert_close(o, kda(**x, lower_bound=-5.0, lengths=lengths, impl="reference")[0])


def test_autocast_changes_no_bit_on_a_cpu() -> None:
    x, state = draw(T=20, dtype=torch.float32), torch.randn(1, 2, 16, 16)
    token = {key: y[:, 0] if y.dim() > 2 else y for key, y in x.items()}
    calls = [lambda impl=impl: kda(**x, lower_bound=-5.0, state=state, impl=impl)[:2] for impl in BOTH]
    for call in (*calls, lambda: kda_step(**token, lower_bound=-5.0, state=state)):
        plain = call()
        with torch.autocast("cpu", torch.bfloat16):
            cast = call()
        assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(plain, cast))


def test_it_is_differentiable_once_and_says_so() -> None:
    x = leaves(draw(T=20))
    o, _, _ = kda(**x, lower_bound=-5.0, impl="chunk")
    (g,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        g.square().sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta", "A_log", "dt_bias", "state"])
def test_any_one_input_may_want_a_gradient(name: str) -> None:
    x = draw(T=37, HV=4) | {"state": torch.randn(1, 4, 16, 16, dtype=torch.float64)}
    x[name] = x[name].clone().requires_grad_() * 1  # not a leaf
    grads = []
    for impl in BOTH:
        o, final, _ = kda(**x, lower_bound=None, impl=impl)
        grads.append(torch.autograd.grad(o.sin().sum() + final.sum(), x[name])[0])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)


def test_inference_first_then_training() -> None:
    x = draw(T=41)
    with torch.inference_mode():
        kda(**x, lower_bound=-5.0, lengths=[20, 21], export_at=[16])
    y = leaves(x)
    o, _, _ = kda(**y, lower_bound=-5.0, lengths=[20, 21], export_at=[16])
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), [*y.values()]))


MIXTURES = st.tuples(*[st.sampled_from([torch.bfloat16, torch.float16, torch.float32])] * 7)


@settings(deadline=None, max_examples=25)
@given(
    MIXTURES,
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (1, 3), (2, 6)]),
    st.sampled_from([(1, 5), (16, 16), (24, 7)]),
    st.booleans(),
    st.sampled_from([-5.0, -0.5, None]),
    st.integers(0, 99),
)
def test_mixtures_of_dtypes_heads_and_packings(kinds, lengths, heads, sizes, by_head, lower_bound, seed) -> None:
    """Inputs of 16 or 32 bits each, any head sizes, value heads above key heads, empty sequences: against fp64."""
    (H, HV), (K, V) = heads, sizes
    x = draw(T=sum(lengths), H=H, HV=HV, K=K, V=V, G=1 if by_head else K, seed=seed)
    x = {key: y.to(kind) for (key, y), kind in zip(x.items(), kinds)}
    state = torch.randn(len(lengths), HV, K, V, generator=torch.Generator().manual_seed(seed))
    got = kda(**x, lower_bound=lower_bound, lengths=lengths, state=state, scale=1, impl="chunk")
    wide = {key: y.double() for key, y in x.items()}
    want = kda(**wide, lower_bound=lower_bound, lengths=lengths, state=state.double(), scale=1, impl="reference")
    assert got[0].dtype == x["v"].dtype and got[1].dtype == torch.float32
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-5}[x["v"].dtype]
    assert (got[0].double() - want[0]).norm() <= rounding * want[0].norm() + 1e-5
    assert (got[1].double() - want[1]).norm() <= 1e-5 * want[1].norm() + 1e-6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": [20.5, 19.5]}, "lengths must be a row of integers"),
        ({"lengths": [-4, 44]}, "fewer than 0 tokens"),
        ({"lengths": [20, 20], "cu_seqlens": torch.tensor([0, 10, 40])}, "disagree: 10, 30 and 20, 20"),
        ({"lengths": [40], "cu_seqlens": torch.tensor([0, 10, 40])}, "names 2 sequences, lengths 1"),
        ({"cu_seqlens": torch.tensor([0.0, 40.0])}, "cu_seqlens must be [N+1] integers"),
        ({"cu_seqlens": torch.tensor([False, True])}, "cu_seqlens must be [N+1] integers"),
        ({"export_at": [16.5]}, "export_at must be a row of integers"),
        ({"export_at": torch.tensor([[16]])}, "export_at must be a row of integers"),
        ({"export_at": [0]}, "export_at 0 is not a multiple"),
        ({"lower_bound": float("-inf")}, "lower_bound must be negative and finite"),
        ({"lower_bound": float("nan")}, "lower_bound must be negative and finite"),
        ({"A_log": torch.zeros(2, dtype=torch.int64)}, "A_log must be floating point"),
        ({"A_log": torch.zeros(2, device="meta")}, "A_log is on meta"),
        ({"dt_bias": torch.zeros(2, 16, device="meta")}, "dt_bias is on meta"),
        ({"state": torch.zeros(1, 2, 16, 16, device="meta")}, "state is on meta"),
        ({"q": torch.zeros(1, 40, 2, 16, dtype=torch.float8_e4m3fn)}, "q must be floating point of 16 bits"),
        ({"q": torch.zeros(1, 40, 2, 0), "k": torch.zeros(1, 40, 2, 0)}, "must not be empty"),
        ({"v": torch.zeros(1, 40, 0, 16)}, "v has 0 heads"),
        ({"impl": "fused"}, "there is no NVIDIA GPU"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_input_is_one_sentence(change: dict, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = draw(dtype=torch.float32) | {"lower_bound": -5.0}
    if "q" in change and change["q"].shape[-1] == 0:
        change = change | {"gate": torch.zeros(1, 40, 2, 1), "dt_bias": torch.zeros(2, 1)}
    with pytest.raises(ValueError) as error:
        kda(**x | change)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_step_names_itself() -> None:
    x = {key: y[:, 0] if y.dim() > 2 else y for key, y in draw(dtype=torch.float32).items()}
    with pytest.raises(ValueError, match=r"kda_step: v must have 3 axes, one token a sequence, got \(1, 1, 2, 16\)"):
        kda_step(**x | {"v": x["v"].unsqueeze(0)}, lower_bound=-5.0, state=torch.zeros(1, 2, 16, 16))
