"""`kda` against the golden vectors and its own laws."""

import json

import pytest
import torch
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from perilune.ops.kda import kda, kda_step
from perilune.ops.kda.api import IMPLS
from perilune.ops.kda.decay import decay_of

ALL = sorted(IMPLS)
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def vectors() -> tuple[dict, dict]:
    folder = golden("kda-ops")
    return load_file(folder / "cases.safetensors"), json.loads((folder / "README.json").read_text())


def names() -> list[str]:
    """Read when collected: an absent folder gives one test that skips and says why."""
    try:
        return sorted(json.loads((golden("kda-ops") / "README.json").read_text()))
    except pytest.skip.Exception:
        return ["absent"]


def run(case: dict, meta: dict, dtype: torch.dtype, impl: str):
    def get(key: str):
        return case[key].to(dtype) if key in case else None

    return kda(
        get("q"),
        get("k"),
        get("v"),
        get("g_raw"),
        get("beta_raw"),
        A_log=get("A_log"),
        dt_bias=get("dt_bias"),
        lower_bound=meta["lower_bound"],
        state=get("h0"),
        cu_seqlens=case.get("cu_seqlens"),
        impl=impl,
    )


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("name", names())
def test_golden_values(name: str, impl: str, vectors) -> None:
    tensors, metas = vectors
    case = {key.removeprefix(name + "."): x for key, x in tensors.items() if key.startswith(name + ".")}
    factor = 10 if "repeat" in metas[name]["mode"] else 1
    for dtype, tol_o, tol_h in ((torch.float64, 1e-7, 2e-7), (torch.float32, 1e-6 * factor, 5e-6 * factor)):
        o, ht, _ = run(case, metas[name], dtype, impl)
        assert o.dtype == dtype
        assert (o.double() - case["o"].double()).abs().max() <= tol_o
        assert (ht.double() - case["ht"].double()).abs().max() <= tol_h


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [n for n in names() if "grad" in n])
def test_golden_gradients(name: str, dtype: torch.dtype, impl: str, vectors) -> None:
    tensors, metas = vectors
    case = {key.removeprefix(name + "."): x for key, x in tensors.items() if key.startswith(name + ".")}
    leaves = {key.removeprefix("grad."): None for key in case if key.startswith("grad.")}
    for key in leaves:
        case[key] = case[key].to(dtype, copy=True).requires_grad_()
    o, ht, _ = run(case, metas[name], dtype, impl)
    torch.autograd.backward((o, ht), (case["do"].to(dtype), case["dht"].to(dtype)))
    for key in leaves:
        want = case["grad." + key].double()
        error = (case[key].grad.double() - want).norm() / want.norm()
        assert error <= (1e-5 if dtype == torch.float32 else 2e-7), f"{key}: {error:.2e}"


def draw(B=1, T=40, H=2, HV=2, K=16, V=16, G=None, dtype=torch.float64, seed=0) -> dict:
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    G = K if G is None else G
    return {
        "q": randn(B, T, H, K),
        "k": randn(B, T, H, K),
        "v": randn(B, T, HV, V),
        "gate": randn(B, T, HV, G) * 3 - 2,
        "beta": randn(B, T, HV),
        "A_log": randn(HV) * 0.3,
        "dt_bias": randn(HV, G),
    }


def sliced(x: dict, a: int, b: int) -> dict:
    return {key: y[:, a:b] if key not in ("A_log", "dt_bias") else y for key, y in x.items()}


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_step_is_one_token_of_the_sequence(lower_bound, delta) -> None:
    x = draw(B=3, T=5, HV=4)
    whole, final, _ = kda(**x, lower_bound=lower_bound, delta=delta, impl="reference")
    state = torch.zeros(3, 4, 16, 16, dtype=torch.float64)
    for t in range(5):
        token = {key: y[:, t] if key not in ("A_log", "dt_bias") else y for key, y in x.items()}
        o, state = kda_step(**token, lower_bound=lower_bound, state=state, delta=delta)
        torch.testing.assert_close(o, whole[:, t])
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("impl", ALL)
def test_exports_are_the_states_of_prefixes(impl: str) -> None:
    x = draw(T=80)
    lengths = [0, 37, 0, 43]
    cu = torch.tensor([0, 0, 37, 37, 80], dtype=torch.int32)
    state = torch.randn(4, 2, 16, 16, dtype=torch.float64)
    wanted = [69, 16, 37 + 16, 32]  # any order
    _, final, exports = kda(**x, lower_bound=-5.0, state=state, cu_seqlens=cu, export_at=wanted, impl=impl)
    for e, (n, a, b) in enumerate([(3, 37, 69), (1, 0, 16), (3, 37, 53), (1, 0, 32)]):
        _, want, _ = kda(**sliced(x, a, b), lower_bound=-5.0, state=state[n : n + 1], impl="reference")
        torch.testing.assert_close(exports[e], want[0])
    torch.testing.assert_close(final[[0, 2]], state[[0, 2]])
    _, again, _ = kda(**x, lower_bound=-5.0, state=state, lengths=lengths, impl=impl)
    torch.testing.assert_close(again, final)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": torch.zeros(1, 40, 2, 8)}, "k (1, 40, 2, 8) must have the shape of q"),
        ({"v": torch.zeros(1, 40, 3, 16)}, "not a multiple"),
        ({"gate": torch.zeros(1, 40, 2, 5)}, "gate must be"),
        ({"beta": torch.zeros(1, 40, 2, 1)}, "beta must have 3 axes"),
        ({"beta": torch.zeros(1, 40, 2, dtype=torch.float64)}, "beta is torch.float64"),
        ({"A_log": torch.zeros(4)}, "A_log must be [2]"),
        ({"dt_bias": torch.zeros(4)}, "dt_bias must be"),
        ({"lower_bound": 5.0}, "lower_bound must be negative"),
        ({"state": torch.zeros(1, 2, 16, 8)}, "state must be [1, 2, 16, 16]"),
        ({"state": torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16)}, "state must be torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 20, 30])}, "hold 30 tokens but T is 40"),
        ({"cu_seqlens": torch.tensor([0, 20, 10, 40])}, "must not decrease"),
        ({"cu_seqlens": torch.tensor([5, 40])}, "must start with 0"),
        ({"export_at": [8]}, "export_at 8 is not a multiple of 16"),
        ({"export_at": [48]}, "export_at 48 is past the last token"),
        ({"impl": "fast"}, "impl is 'fast'"),
    ],
)
def test_bad_input_is_named(change: dict, says: str) -> None:
    x = draw(dtype=torch.float32) | {"lower_bound": -5.0} | change
    with pytest.raises(ValueError) as error:
        kda(**x)
    assert says in str(error.value)


# Laws of the chunked form, against the recurrence in fp64.


def compare(x: dict, extra: dict, tol: float, grad_tol: float, weights_seed: int = 1) -> None:
    """Chunked in x's dtype against the recurrence in fp64: outputs, states, every gradient, by relative norm."""
    found = []
    for impl, dtype in (("chunk", x["q"].dtype), ("reference", torch.float64)):
        leaves = {key: y.to(dtype, copy=True).requires_grad_() for key, y in x.items()}
        o, final, exports = kda(**leaves, **extra, impl=impl)
        gen = torch.Generator().manual_seed(weights_seed)
        loss = torch.zeros((), dtype=dtype)
        for y in (o, final, exports):
            if y is not None:
                loss = loss + (y * torch.randn(y.shape, generator=gen, dtype=torch.float64).to(dtype)).sum()
        loss.backward()
        found.append(([o, final] + ([exports] if exports is not None else []), {k: y.grad for k, y in leaves.items()}))
    for got, want in zip(found[0][0], found[1][0], strict=True):
        assert torch.isfinite(got).all()
        assert (got.double() - want).norm() <= tol * want.norm() + 1e-12
    for key, want in found[1][1].items():
        got = found[0][1][key]
        assert torch.isfinite(got).all(), key
        error = float((got.double() - want).norm() / want.norm().clamp_min(1e-12))
        assert error <= grad_tol, f"{key}: {error:.1e}"


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("G", [None, 1])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("shift", [-8.0, 0.0, 6.0])
def test_chunks_equal_the_recurrence_in_fp64(shift, lower_bound, G, delta) -> None:
    x = draw(B=2, T=75, H=2, HV=4, K=16, V=32, G=G)
    x["gate"] = x["gate"] + shift
    x["state"] = torch.randn(2, 4, 16, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    compare(x, {"lower_bound": lower_bound, "delta": delta, "export_at": [16, 48, 75 + 64]}, 1e-11, 1e-9)


@pytest.mark.parametrize(
    "case", ["always at the bound", "softplus -20 a token", "A_log 60", "A_log 60 softplus", "fast then slow"]
)
def test_extreme_gates_in_fp32(case: str) -> None:
    x = draw(T=130, dtype=torch.float32)
    lower_bound: float | None = -5.0
    if case == "always at the bound":
        x["gate"] = torch.full_like(x["gate"], 20.0)
    elif case == "softplus -20 a token":
        lower_bound, x["gate"] = None, torch.full_like(x["gate"], 20.0) + x["gate"]
        x["A_log"] = torch.zeros(2)
        x["dt_bias"] = torch.zeros(2, 16)
    elif case == "fast then slow":
        x["gate"] = torch.cat([torch.full((1, 20, 2, 16), 20.0), torch.full((1, 110, 2, 16), -9.0)], 1)
    else:
        lower_bound = None if "softplus" in case else -5.0
        x["A_log"] = torch.full((2,), 60.0)
    x["state"] = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        got = kda(**x, lower_bound=lower_bound, impl="chunk")
        want = kda(**{k: y.double() for k, y in x.items()}, lower_bound=lower_bound, impl="reference")
    for a, b in zip(got[:2], want[:2], strict=True):
        assert (a.double() - b).abs().max() <= 1e-6 * max(1.0, float(b.abs().max()))
    leaves = {k: y.clone().requires_grad_() for k, y in x.items()}
    o, final, _ = kda(**leaves, lower_bound=lower_bound, impl="chunk")
    (o.sum() + final.sum()).backward()
    assert all(torch.isfinite(y.grad).all() for y in leaves.values())


def test_identical_keys_beta_near_one_slow_gates_stay_right() -> None:
    x = draw(T=700, dtype=torch.float32)
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    x["gate"], x["beta"] = torch.full_like(x["gate"], -12.0), torch.full_like(x["beta"], 8.0)
    compare(x, {"lower_bound": -5.0}, 2e-5, 2e-4)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=5), st.integers(0, 9))
def test_packed_equals_separate_values_and_gradients(lengths: list[int], seed: int) -> None:
    if sum(lengths) == 0:
        lengths = [*lengths, 3]
    x = draw(T=sum(lengths), seed=seed)
    x["state"] = torch.randn(len(lengths), 2, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    compare(x, {"lower_bound": -5.0, "lengths": lengths}, 1e-11, 1e-9)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_any_cut_equals_the_whole(pieces: list[int]) -> None:
    x = draw(T=sum(pieces))
    whole, final, _ = kda(**x, lower_bound=-5.0, impl="chunk")
    state, parts, start = None, [], 0
    for n in pieces:
        o, state, _ = kda(**sliced(x, start, start + n), lower_bound=-5.0, state=state, impl="chunk")
        parts.append(o)
        start += n
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, final)


def test_a_neighbours_nan_stays_there() -> None:
    x = draw(T=33, dtype=torch.float32)
    clean = kda(**sliced(x, 0, 17), lower_bound=-5.0, impl="chunk")
    for key in ("q", "k", "v", "gate", "beta"):
        x[key][:, 17:] = float("nan")
    o, final, _ = kda(**x, lower_bound=-5.0, lengths=[17, 16], impl="chunk")
    torch.testing.assert_close(o[:, :17], clean[0])
    torch.testing.assert_close(final[0], clean[1][0])


def test_strided_inputs_and_expanded_cotangents() -> None:
    x = draw(T=64)
    wide = {key: y.transpose(-1, -2).contiguous().transpose(-1, -2) if y.dim() > 2 else y for key, y in x.items()}
    state = torch.randn(1, 2, 16, 16, dtype=torch.float64).transpose(-1, -2)  # V-first storage
    got = kda(**wide, lower_bound=-5.0, state=state, impl="chunk")
    want = kda(**x, lower_bound=-5.0, state=state.contiguous(), impl="reference")
    torch.testing.assert_close(got[:2], want[:2])
    grads = []
    for impl in ("chunk", "reference"):
        leaves = {key: y.clone().requires_grad_() for key, y in x.items()}
        o, final, _ = kda(**leaves, lower_bound=-5.0, impl=impl)
        (o.sum() + final.sum()).backward()
        grads.append({key: y.grad for key, y in leaves.items()})
    torch.testing.assert_close(grads[0], grads[1])


def test_many_sequences_of_one_token() -> None:
    x = draw(T=3000, H=1, HV=1, dtype=torch.float32)
    o, final, _ = kda(**x, lower_bound=-5.0, lengths=[1] * 3000, impl="chunk")
    rows = {key: y.transpose(0, 1) if key not in ("A_log", "dt_bias") else y for key, y in x.items()}
    want = kda(**rows, lower_bound=-5.0, impl="reference")
    torch.testing.assert_close(o.transpose(0, 1), want[0])
    torch.testing.assert_close(final, want[1])


def test_bf16_is_computed_in_fp32() -> None:
    x = {key: y.bfloat16() if y.dim() > 2 else y for key, y in draw(T=64, dtype=torch.float32).items()}
    o, final, _ = kda(**x, lower_bound=-5.0, impl="chunk")
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    want = kda(**{k: y.double() for k, y in x.items()}, lower_bound=-5.0, impl="reference")
    assert (final.double() - want[1]).norm() <= 1e-6 * want[1].norm()
    assert (o.double() - want[0]).norm() <= 3e-3 * want[0].norm()


@pytest.mark.parametrize("sequences, length", [(8, 32), (4, 64), (16, 16), (3, 128), (1, 96)])
def test_equal_packed_sequences_of_several_chunks(sequences: int, length: int) -> None:
    """The packing of a training batch without document borders, which needs no index table."""
    x = draw(T=sequences * length, seed=3)
    x["state"] = torch.randn(sequences, 2, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    compare(x, {"lower_bound": -5.0, "lengths": [length] * sequences}, 1e-11, 1e-9)


def test_an_accelerator_is_never_read_back() -> None:
    """Meta tensors hold no values: a tile chosen by them would raise."""
    for lower_bound, tile in ((-5.0, 16), (None, 1)):
        assert decay_of(torch.empty(3, 64, 2, device="meta"), lower_bound).c == tile
