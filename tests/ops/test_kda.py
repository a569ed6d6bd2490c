"""`kda` against the golden vectors and its own laws."""

import json

import pytest
import torch
from golden import golden
from safetensors.torch import load_file

from perilune.ops.kda import kda, kda_step
from perilune.ops.kda.api import IMPLS

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
