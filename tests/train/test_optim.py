"""Per-Head Muon: the plan, the orthogonal update, batching, exact state; QK-Clip's invariants."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.train.clip import qk_clip, qk_clip_model
from perilune.train.optim import MOMENTUM, NEWTON_SCHULZ, Optimizer, ParamPlan, plan

HEADS = SimpleNamespace(kda_num_heads=4, num_attention_heads=3, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=5)

# The released layout of one KDA and one MLA layer at a small size; experts stacked.
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (32, 16),
    "model.layers.0.self_attn.q_proj.weight": (32, 16),
    "model.layers.0.self_attn.k_proj.weight": (32, 16),
    "model.layers.0.self_attn.v_proj.weight": (32, 16),
    "model.layers.0.self_attn.g_proj.weight": (32, 16),
    "model.layers.0.self_attn.b_proj.weight": (4, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 32),
    "model.layers.0.self_attn.q_conv1d.weight": (32, 1, 4),
    "model.layers.0.self_attn.A_log": (4,),
    "model.layers.0.self_attn.dt_bias": (32,),
    "model.layers.0.self_attn.o_norm.weight": (8,),
    "model.layers.0.self_attention_res_proj.weight": (1, 16),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.1.self_attn.q_a_proj.weight": (12, 16),
    "model.layers.1.self_attn.q_b_proj.weight": (24, 12),
    "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": (10, 16),
    "model.layers.1.self_attn.kv_b_proj.weight": (33, 8),
    "model.layers.1.block_sparse_moe.gate.weight": (5, 16),
    "model.layers.1.block_sparse_moe.experts.w13": (5, 16, 12),
    "model.layers.1.block_sparse_moe.experts.w2": (5, 12, 8),
    "lm_head.weight": (32, 16),
}


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


def give_grads(named: dict[str, torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    for i, (name, p) in enumerate(sorted(named.items())):
        p.grad = scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * seed + i))
        assert name


def by_name(plans: list[ParamPlan]) -> dict[str, ParamPlan]:
    return {p.name.removeprefix("model."): p for p in plans}


def reference_update(grads: list[Tensor]) -> Tensor:
    """The unscaled Muon update of one block after these gradients, straight from the equations, fp64."""
    a, b, c = NEWTON_SCHULZ
    M = torch.zeros_like(grads[0], dtype=torch.float64)
    for G in grads:
        M = MOMENTUM * M + G.double()
    X = grads[-1].double() + MOMENTUM * M
    X = X / X.norm()
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return 0.2 * math.sqrt(max(X.shape)) * X


# --- the plan -----------------------------------------------------------------------------------------------------


def test_plan_splits_heads_stacks_experts_and_keeps_the_rest_whole() -> None:
    plans = by_name(plan(parameters().items(), HEADS))
    muon = {n: p.blocks for n, p in plans.items() if p.kind == "muon"}
    assert muon == {
        "layers.0.self_attn.q_proj.weight": 4,
        "layers.0.self_attn.k_proj.weight": 4,
        "layers.0.self_attn.v_proj.weight": 4,
        "layers.0.self_attn.g_proj.weight": 1,
        "layers.0.self_attn.b_proj.weight": 1,
        "layers.0.self_attn.o_proj.weight": 1,
        "layers.1.self_attn.q_a_proj.weight": 1,
        "layers.1.self_attn.q_b_proj.weight": 3,
        "layers.1.self_attn.kv_a_proj_with_mqa.weight": 1,
        "layers.1.self_attn.kv_b_proj.weight": 3,
        "layers.1.block_sparse_moe.gate.weight": 1,
        "layers.1.block_sparse_moe.experts.w13": 10,
        "layers.1.block_sparse_moe.experts.w2": 5,
    }


def test_plan_decays_matrices_and_embeddings_only() -> None:
    plans = by_name(plan(parameters().items(), HEADS))
    undecayed = {n for n, p in plans.items() if p.weight_decay == 0.0}
    assert undecayed == {
        "layers.0.self_attn.A_log",
        "layers.0.self_attn.dt_bias",
        "layers.0.self_attn.o_norm.weight",
        "layers.0.self_attention_res_proj.weight",
        "layers.0.input_layernorm.weight",
    }
    assert all(plans[n].kind == "adamw" for n in undecayed)
    assert {p.weight_decay for n, p in plans.items() if n not in undecayed} == {0.1}


def test_q_proj_without_a_bottleneck_is_split_by_the_heads_of_its_own_layer() -> None:
    named = {
        "layers.0.self_attn.q_proj.weight": torch.zeros(24, 16),
        "layers.0.self_attn.kv_b_proj.weight": torch.zeros(33, 8),
        "layers.1.self_attn.q_proj.weight": torch.zeros(24, 16),
    }
    plans = plan([(n, p.requires_grad_()) for n, p in named.items()], HEADS)
    assert [p.blocks for p in plans] == [3, 3, 4]


def test_modes_change_blocks_and_kinds() -> None:
    whole = by_name(plan(parameters().items(), HEADS, mode="whole"))
    assert whole["layers.0.self_attn.q_proj.weight"].blocks == 1
    assert whole["layers.1.block_sparse_moe.experts.w13"].blocks == 10
    adamw = plan(parameters().items(), HEADS, mode="adamw", adamw_lr_scale=0.3)
    assert {p.kind for p in adamw} == {"adamw"} and {p.lr_scale for p in adamw} == {0.3}
    assert by_name(adamw)["layers.0.self_attn.q_proj.weight"].weight_decay == 0.1


@pytest.mark.parametrize(
    ("name", "shape"), [("x.conv.weight", (4, 4, 3)), ("layers.0.self_attn.k_proj.weight", (30, 16))]
)
def test_plan_names_a_parameter_it_has_no_rule_for(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=name):
        plan([(name, torch.nn.Parameter(torch.zeros(shape)))], HEADS)


# --- Muon ---------------------------------------------------------------------------------------------------------


def test_every_block_is_updated_as_by_the_equations_alone() -> None:
    """Stacked over the model, transposed where tall, split by head: equal to a loop over blocks in fp64."""
    named = parameters()
    start = {n: p.detach().clone() for n, p in named.items()}
    plans = plan(named.items(), HEADS, weight_decay=0.0)
    optimizer = Optimizer(plans)
    history: dict[str, list[Tensor]] = {n: [] for n in named}
    total = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in named.items()}
    for step in range(3):
        give_grads(named, step, scale=10.0**-step)
        for p in plans:
            if p.kind == "muon":
                history[p.name].append(p.param.grad.clone())  # type: ignore[union-attr]
                blocks = zip(*(g.reshape(p.blocks, -1, g.shape[-1]) for g in history[p.name]), strict=True)
                total[p.name] += torch.cat([reference_update(list(b)) for b in blocks]).reshape(p.param.shape)
        optimizer.step(0.05, max_norm=None)
    for p in plans:
        if p.kind == "muon":
            moved = (start[p.name] - p.param.detach()).double()
            torch.testing.assert_close(moved, 0.05 * total[p.name], rtol=1e-4, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 24), st.integers(1, 24), st.integers(0, 10**6), st.sampled_from([1e-12, 1.0, 1e8])
)
def test_each_block_of_an_update_is_nearly_orthogonal(
    blocks: int, rows: int, cols: int, seed: int, scale: float
) -> None:
    """Every singular value of W_before - W_after lies in (0.6, 1.3) times η 0.2 √max, whatever the gradient's scale."""
    torch.manual_seed(seed)
    r = min(rows, cols)
    U, _ = torch.linalg.qr(torch.randn(blocks, rows, r))
    V, _ = torch.linalg.qr(torch.randn(blocks, cols, r))
    singular = torch.rand(blocks, 1, r) + 0.25  # well conditioned: five steps leave tiny singular values small
    weight = torch.nn.Parameter(torch.zeros(blocks * rows, cols))
    weight.grad = scale * ((U * singular) @ V.mT).reshape(weight.shape)
    Optimizer([ParamPlan("w", weight, "muon", blocks)]).step(1.0, max_norm=None)
    unit = 0.2 * math.sqrt(max(rows, cols))
    values = torch.linalg.svdvals(weight.detach().view(blocks, rows, cols)) / unit
    assert values.min() > 0.6 and values.max() < 1.3


def test_heads_do_not_see_each_other() -> None:
    """One head's gradient a millionfold: no head's update changes; with the matrix whole the others' do."""
    torch.manual_seed(3)
    grad, updates = torch.randn(32, 16), {}
    for blocks in (4, 1):
        for loud in (1.0, 1e6):
            weight = torch.nn.Parameter(torch.zeros(32, 16))
            weight.grad = grad.clone()
            weight.grad[:8] *= loud
            Optimizer([ParamPlan("w", weight, "muon", blocks)]).step(1.0, max_norm=None)
            updates[blocks, loud] = weight.detach()
    torch.testing.assert_close(updates[4, 1.0], updates[4, 1e6], rtol=1e-4, atol=1e-5)
    assert (updates[1, 1.0][8:] - updates[1, 1e6][8:]).norm() > 0.5 * updates[1, 1.0][8:].norm()


def test_per_head_equals_one_optimiser_a_head() -> None:
    torch.manual_seed(4)
    whole = torch.nn.Parameter(torch.randn(32, 16))
    heads = [torch.nn.Parameter(h.clone()) for h in whole.detach().split(8)]
    together = Optimizer([ParamPlan("w", whole, "muon", 4, weight_decay=0.1)])
    apart = [Optimizer([ParamPlan("w", h, "muon", weight_decay=0.1)]) for h in heads]
    for _ in range(3):
        whole.grad = torch.randn(32, 16)
        for h, g in zip(heads, whole.grad.split(8), strict=True):
            h.grad = g.clone()
        together.step(0.1, max_norm=None)
        for optimizer in apart:
            optimizer.step(0.1, max_norm=None)
    torch.testing.assert_close(whole.detach(), torch.cat([h.detach() for h in heads]), rtol=1e-5, atol=1e-6)


def test_zero_gradients_shrink_weights_and_nothing_else() -> None:
    named = parameters()
    start = {n: p.detach().clone() for n, p in named.items()}
    for p in named.values():
        p.grad = torch.zeros_like(p)
    plans = plan(named.items(), HEADS)
    Optimizer(plans).step(0.5)
    for p in plans:
        torch.testing.assert_close(p.param.detach(), start[p.name] * (1 - 0.5 * p.weight_decay))


def test_a_parameter_without_a_gradient_stays() -> None:
    named = parameters()
    give_grads(named, 0)
    silent = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attention_res_proj.weight"]
    start = {n: named[n].detach().clone() for n in silent}
    loud = named["model.layers.0.self_attn.q_proj.weight"].detach().clone()
    for n in silent:
        named[n].grad = None
    Optimizer(plan(named.items(), HEADS)).step(0.1)
    assert all(torch.equal(named[n].detach(), start[n]) for n in silent)
    assert not torch.equal(named["model.layers.0.self_attn.q_proj.weight"].detach(), loud)


# --- clipping, skipping, state ------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(1e-2, 1e2))
def test_clipping_bounds_the_norm_and_keeps_the_direction(scale: float, max_norm: float) -> None:
    named = parameters()
    give_grads(named, 1, scale)
    before = torch.cat([p.grad.flatten() for p in named.values()])  # type: ignore[union-attr]
    report = Optimizer(plan(named.items(), HEADS)).step(0.0, max_norm=max_norm)
    after = torch.cat([p.grad.flatten() for p in named.values()])  # type: ignore[union-attr]
    assert report.grad_norm == pytest.approx(float(before.norm()), rel=1e-5)
    assert float(after.norm()) == pytest.approx(min(report.grad_norm, max_norm), rel=1e-5)
    torch.testing.assert_close(after * (before.norm() / after.norm()), before)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_says_so(
    poison: float, caplog: pytest.LogCaptureFixture
) -> None:
    named = parameters()
    optimizer = Optimizer(plan(named.items(), HEADS))
    give_grads(named, 0)
    optimizer.step(0.1)
    weights = {n: p.detach().clone() for n, p in named.items()}
    state = {n: t.clone() for n, t in optimizer.state_dict().items() if n != "skipped"}
    give_grads(named, 1)
    named["model.layers.0.self_attn.A_log"].grad[2] = poison  # type: ignore[index]
    with caplog.at_level(logging.WARNING):
        report = optimizer.step(0.1)
    assert report.skipped and optimizer.skipped == 1 and "Step skipped" in caplog.text
    assert all(torch.equal(named[n].detach(), w) for n, w in weights.items())
    assert all(torch.equal(optimizer.state_dict()[n], t) for n, t in state.items())


@pytest.mark.parametrize("mode", ["per_head", "whole", "adamw"])
def test_a_saved_state_continues_bit_for_bit_under_any_order_of_parameters(mode: str) -> None:
    named = parameters()
    optimizer = Optimizer(plan(named.items(), HEADS, mode=mode))  # type: ignore[arg-type]
    for step in range(2):
        give_grads(named, step)
        optimizer.step(0.1)
    saved = {n: t.clone() for n, t in optimizer.state_dict().items()}
    other = {n: torch.nn.Parameter(p.detach().clone()) for n, p in reversed(named.items())}
    resumed = Optimizer(plan(other.items(), HEADS, mode=mode))  # type: ignore[arg-type]
    resumed.load_state_dict(saved)
    for step in range(2, 5):
        for parameters_, stepping in ((named, optimizer), (other, resumed)):
            give_grads(parameters_, step)
            stepping.step(0.1)
    assert all(torch.equal(p, other[n]) for n, p in named.items())


def test_a_state_from_another_model_is_refused_by_name() -> None:
    optimizer = Optimizer(plan(parameters().items(), HEADS))
    state = dict(optimizer.state_dict())
    lacking = {n: t for n, t in state.items() if n != "muon.lm_head.weight" and not n.endswith("A_log")}
    with pytest.raises(ValueError, match=r"A_log is missing"):
        optimizer.load_state_dict(lacking)
    with pytest.raises(ValueError, match=r"muon\.ghost is unknown"):
        optimizer.load_state_dict(state | {"muon.ghost": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"q_proj\.weight has shape \(4, 4\)"):
        optimizer.load_state_dict(state | {"muon.model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)})


# --- QK-Clip ------------------------------------------------------------------------------------------------------


def logits(q: Tensor, kv_b: Tensor, x_TL: Tensor, c_TC: Tensor, r_TR: Tensor) -> Tensor:
    """MLA's scaled scores [H, T, T] from the weights that QK-Clip touches."""
    H, nope, rope, v = 3, 6, 2, 5
    q_THD = (x_TL @ q.T).view(-1, H, nope + rope)
    k_THD = (c_TC @ kv_b.T).view(-1, H, nope + v)[..., :nope]
    scores = torch.einsum("thd,shd->hts", q_THD[..., :nope], k_THD)
    return (scores + torch.einsum("thd,sd->hts", q_THD[..., nope:], r_TR)) / math.sqrt(nope + rope)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 50.0))
def test_qk_clip_scales_a_loud_heads_logits_to_tau_and_leaves_the_others(seed: int, tau: float) -> None:
    torch.manual_seed(seed)
    q, kv_b = torch.randn(24, 12, dtype=torch.float64), torch.randn(33, 8, dtype=torch.float64)
    data = [torch.randn(7, n, dtype=torch.float64) for n in (12, 8, 2)]
    before, values = logits(q, kv_b, *data), kv_b.view(3, 11, 8)[:, 6:].clone()
    gamma = qk_clip(q, kv_b, before.amax((1, 2)), nope=6, rope=2, v=5, tau=tau)
    after = logits(q, kv_b, *data)
    torch.testing.assert_close(after, before * gamma.double().view(3, 1, 1), rtol=1e-5, atol=1e-5)
    assert after.amax() <= tau * (1 + 1e-5)
    assert (gamma[before.amax((1, 2)) <= tau * (1 - 1e-6)] == 1).all()
    assert torch.equal(kv_b.view(3, 11, 8)[:, 6:], values)


def test_qk_clip_finds_the_weights_of_each_layer_by_name() -> None:
    named = parameters()
    start = {n: p.detach().clone() for n, p in named.items()}
    qk_clip_model(named.items(), {1: torch.tensor([400.0, -3.0, 100.0])}, HEADS)
    changed = {n for n, p in named.items() if not torch.equal(p.detach(), start[n])}
    assert changed == {"model.layers.1.self_attn.q_b_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight"}
    q, old = (
        named["model.layers.1.self_attn.q_b_proj.weight"].detach(),
        start["model.layers.1.self_attn.q_b_proj.weight"],
    )
    torch.testing.assert_close(q[:6], old[:6] * 0.5)
    torch.testing.assert_close(q[6:8], old[6:8] * 0.25)
    assert torch.equal(q[8:], old[8:])


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    """A layer that a loss does not reach, alone in its stack and beside others."""
    torch.manual_seed(0)
    named = {f"layers.{i}.mlp.up_proj.weight": torch.nn.Parameter(torch.randn(4, 6 + i)) for i in range(2)}
    optimizer = Optimizer(plan(named.items(), SimpleNamespace(kda_num_heads=1, num_attention_heads=1)))
    before = {name: p.detach().clone() for name, p in named.items()}
    named["layers.0.mlp.up_proj.weight"].grad = torch.randn(4, 6)
    optimizer.step(0.1)
    assert not torch.equal(named["layers.0.mlp.up_proj.weight"], before["layers.0.mlp.up_proj.weight"])
    assert torch.equal(named["layers.1.mlp.up_proj.weight"], before["layers.1.mlp.up_proj.weight"])
