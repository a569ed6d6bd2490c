"""A small model with every kind of layer, and an oracle: what the plain forward says of a whole sequence."""

import torch
from torch import Tensor

from perilune.config import preset
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.serve.engine import Engine
from perilune.serve.request import Delta, Sampling

VOCAB = 61
CONFIG = preset("tiny").replace(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, mla_layers=(1, 3), kda_num_heads=2, kda_head_dim=16,
    num_attention_heads=2, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    intermediate_size=48, num_experts=6, num_experts_per_token=2, moe_intermediate_size=16,
    routed_expert_hidden_size=16, initializer_range=0.2, max_position_embeddings=512, num_nextn_predict_layers=1,
)  # fmt: skip


def make(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> K3:
    """In fp64, where a wrong state cannot hide behind rounding."""
    torch.manual_seed(seed)
    model = K3(CONFIG.replace(**changes))
    model.reset_parameters()
    for name, p in model.named_parameters():  # zero queries would hide a wrong mixture
        if name.endswith("res_proj.weight"):
            torch.nn.init.normal_(p)
    return model.eval().to(dtype)


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def greedy(n: int = 8, **more: object) -> Sampling:
    """Says the log-probability of every token of the vocabulary at each step."""
    return Sampling(temperature=0, max_tokens=n, ignore_eos=True, logprobs=VOCAB, **more)


def run(engine: Engine, audit: bool = True) -> dict[str, list[Delta]]:
    """Steps until idle; the pool is audited after each."""
    said: dict[str, list[Delta]] = {}
    while engine.busy:
        for delta in engine.step():
            said.setdefault(delta.id, []).append(delta)
        if audit:
            engine.scheduler.pool.audit()
    return said


def text(deltas: list[Delta]) -> list[int]:
    return [t for d in deltas for t in d.tokens]


@torch.no_grad()
def oracle(model: K3, tokens: list[int]) -> Tensor:
    """Log-probabilities [T, V] after each token of a whole sequence."""
    logits = model(torch.tensor(tokens), Layout.packed([len(tokens)])).logits
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)


def assert_says(model: K3, ids: tuple[int, ...], deltas: list[Delta], atol: float = 1e-9) -> None:
    """Every distribution the engine reported equals the plain forward's over the whole sequence."""
    said = text(deltas)
    logp = oracle(model, [*ids, *said])
    for at, token in enumerate(t for d in deltas for t in d.logprobs):
        row = torch.empty(VOCAB, dtype=logp.dtype)
        for v, p in token.top:
            row[v] = p
        torch.testing.assert_close(row, logp[len(ids) + at - 1], atol=atol, rtol=0)
        assert token.token == said[at] == int(logp[len(ids) + at - 1].argmax())
