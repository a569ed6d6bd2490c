"""Grouped experts against one expert after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.ops.experts import Activation, experts, experts_reference, grouped_mlp, order_rows


def draw(T=24, L=8, width=16, E=6, k=2, dtype=torch.float64, seed=0, spread=None) -> dict:
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    among = E if spread is None else spread
    idx = torch.stack([torch.randperm(among, generator=gen)[:k] for _ in range(T)]) if T else torch.zeros(0, k).long()
    return {
        "z": randn(T, L),
        "idx": idx,
        "weight": torch.rand(T, k, generator=gen, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32)),
        "gate_up": randn(E, 2 * width, L) * 0.5,
        "down": randn(E, L, width) * 0.5,
    }


@pytest.mark.parametrize("cotangent", ["random", "expanded"])
@pytest.mark.parametrize("act", [Activation(), Activation("swiglu"), Activation("situ", 1.0, None)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spread", [None, 3])  # 3: the last experts get no row
def test_values_and_gradients(spread, dtype, act, cotangent) -> None:
    case = draw(spread=spread, dtype=dtype)
    results = []
    for op, kind in ((experts, dtype), (experts_reference, torch.float64)):
        leaves = {key: x.to(kind, copy=True).requires_grad_() if key != "idx" else x for key, x in case.items()}
        out = op(**leaves, activation=act)
        target = out if cotangent == "expanded" else out * torch.linspace(-1, 1, out.numel()).view_as(out)
        target.sum().backward()
        results.append([out.detach().double()] + [x.grad.double() for key, x in leaves.items() if key != "idx"])
    tol = 1e-11 if dtype == torch.float64 else 3e-6
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= tol * want.norm()


def test_bf16() -> None:
    case = draw(dtype=torch.bfloat16, L=32, width=32)
    want = experts_reference(**{key: x.double() if key != "idx" else x for key, x in case.items()})
    got = experts(**case)
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() <= 1e-2 * want.norm()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 3))
def test_order_is_a_permutation_sorted_by_expert(tokens: int, among: int, k: int) -> None:
    idx = torch.randint(0, among, (tokens, k), generator=torch.Generator().manual_seed(tokens))
    order = order_rows(idx, 7)
    chosen = idx.flatten()[order.source]
    assert torch.equal(chosen, chosen.sort().values)
    assert torch.equal(order.source[order.place], torch.arange(tokens * k))
    assert torch.equal(order.ends.long(), torch.bincount(idx.flatten(), minlength=7).cumsum(0))


def test_rows_already_sorted() -> None:
    case = draw(k=1)
    order = order_rows(case["idx"], 6)
    rows = case["z"][order.source]
    y = grouped_mlp(rows, order.ends, case["weight"].flatten()[order.source], case["gate_up"], case["down"])
    torch.testing.assert_close(y[order.place], experts_reference(**case))


def test_a_shared_expert_adds_its_own_mlp() -> None:
    torch.manual_seed(0)
    z, p = torch.randn(5, 8, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    gate_up, down = torch.randn(4, 12, 8, dtype=torch.float64), torch.randn(4, 8, 6, dtype=torch.float64)
    own = torch.randn(20, 8, dtype=torch.float64), torch.randn(8, 10, dtype=torch.float64)
    idx, act = torch.stack([torch.randperm(4)[:2] for _ in range(5)]), Activation()
    with torch.no_grad():
        got = experts(z, idx, p, gate_up, down, act, shared=own)
    want = experts_reference(z, idx, p, gate_up, down, act) + act.forward(*(z @ own[0].T).chunk(2, -1)) @ own[1].T
    torch.testing.assert_close(got, want)


def test_bad_input_is_named() -> None:
    case = draw()
    with pytest.raises(ValueError, match=r"down must be \[6,8,16\]"):
        experts(**case | {"down": case["down"][:, :4]})
    with pytest.raises(ValueError, match=r"z must be \[T,8\]"):
        experts(**case | {"z": case["z"][:, :4]})
    with pytest.raises(ValueError, match="idx"):
        experts(**case | {"idx": case["idx"][:4]})
