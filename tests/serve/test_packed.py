"""Checkpoints whose routed experts are MXFP4: kept packed in memory they say what they say unpacked."""

import itertools

import pytest
import torch
from serve.toy import assert_says, greedy, make, prompt, run, text

from perilune.model.layout import Layout
from perilune.model.moe import LatentMoE, PackedExperts
from perilune.model.weights import load_model, save
from perilune.ops.experts import Activation
from perilune.ops.mx import pack_mxfp4, round_mxfp8
from perilune.ops.packed import Packed, packed_experts
from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions, Request

WIDE = {"moe_intermediate_size": 64, "routed_expert_hidden_size": 32}
OPTIONS = EngineOptions(block_tokens=16, pool_tokens=1024, max_batch=4, token_budget=40)


@torch.no_grad()
def test_a_packed_checkpoint_stays_packed(tmp_path) -> None:
    model = make(**WIDE, expert_format="mxfp4", dtype=torch.float32)
    save(model, tmp_path, dtype="F32")
    wide, packed = (load_model(tmp_path, packed=packed) for packed in (False, True))
    kept = [m.experts for m in packed.modules() if isinstance(m, LatentMoE)]
    assert kept and all(isinstance(e, PackedExperts) for e in kept)
    assert not any(".experts.w" in name for name, _ in packed.named_parameters())
    assert kept[0].w13_codes.dtype == torch.uint8  # also after the cast of the rest
    ids = torch.tensor(prompt(50))
    one, other = (net.eval()(ids, Layout.packed([50])).logits for net in (wide, packed))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("partial", [False, True])
def test_activations_rounded_to_mxfp8(partial: bool) -> None:
    """The equation with both roundings; E4M3 keeps 4 significant bits, so the sum moves by percents, not more."""
    torch.manual_seed(0)
    E, inner, width, tokens = 4, 64, 32, 6
    draw = {"dtype": torch.float64}
    gate_up, down = (Packed(*pack_mxfp4(torch.randn(E, *s, **draw))) for s in ((2 * inner, width), (width, inner)))
    z, p = torch.randn(tokens, width, **draw), torch.rand(tokens, 2, **draw)
    idx, act = torch.stack([torch.randperm(E)[:2] for _ in range(tokens)]), Activation()
    if partial:
        idx[0, 0] = E
    with torch.no_grad():
        got = packed_experts(z, idx, p, gate_up, down, act, partial=partial, mxfp8=True)
        plain = packed_experts(z, idx, p, gate_up, down, act, partial=partial)
    want, wide, narrow = torch.zeros_like(z), gate_up.unpack(z.dtype), down.unpack(z.dtype)
    for t, i in itertools.product(range(tokens), range(2)):
        if (e := int(idx[t, i])) < E:
            a = act.forward(*(wide[e] @ round_mxfp8(z[t])).chunk(2))
            want[t] += p[t, i] * (narrow[e] @ round_mxfp8(a))
    torch.testing.assert_close(got, want)
    assert 1e-3 < (got - plain).norm() / plain.norm() < 5e-2


@pytest.mark.parametrize("rounded", [False, True])
def test_an_engine_decodes_from_packed_experts(rounded: bool) -> None:
    model = make(**WIDE).pack_experts()
    if rounded:
        model.round_activations()
    engine = Engine(model, OPTIONS)
    prompts = {f"r{i}": prompt(20 + 30 * i, i) for i in range(3)}
    for name, ids in prompts.items():
        engine.submit(Request(name, ids, greedy()))
    said = run(engine)
    for name, ids in prompts.items():
        assert_says(model, ids, said[name])
        assert len(text(said[name])) == 8


def test_only_packed_experts_round_activations() -> None:
    with pytest.raises(ValueError, match="this model has none"):
        make().round_activations()
