"""Checkpoints whose routed experts are MXFP4: kept packed in memory they say what they say unpacked."""

import torch
from serve.toy import assert_says, greedy, make, prompt, run, text

from perilune.model.layout import Layout
from perilune.model.moe import LatentMoE, PackedExperts
from perilune.model.weights import load_model, save
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


def test_an_engine_decodes_from_packed_experts() -> None:
    model = make(**WIDE).pack_experts()
    engine = Engine(model, OPTIONS)
    prompts = {f"r{i}": prompt(20 + 30 * i, i) for i in range(3)}
    for name, ids in prompts.items():
        engine.submit(Request(name, ids, greedy()))
    said = run(engine)
    for name, ids in prompts.items():
        assert_says(model, ids, said[name])
        assert len(text(said[name])) == 8
