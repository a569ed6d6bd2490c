"""Routing of a small K3 with 896 experts, 16 a token: python bench/routing_trace.py OUT.npz [--steps 300]

Trains two models of the same seed on the Python standard library's sources (bytes), one with router biases left at zero
and one with Quantile Balancing, then records what their MoE layers choose on later text. `bench/balance.py` reads the
file. Arrays `none` and `quantile`: int16 [layers, tokens, 16].
"""

import argparse
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from perilune.config import ModelConfig
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.ops.quantile import expert_counts, margin_histogram
from perilune.train.balance import QuantileBalancer, RouterTap

CONFIG = ModelConfig(
    vocab_size=256, hidden_size=64, num_hidden_layers=3, mla_layers=(2,), kda_num_heads=2, kda_head_dim=32,
    num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
    intermediate_size=128, num_experts=896, num_experts_per_token=16, num_shared_experts=2, moe_intermediate_size=16,
    routed_expert_hidden_size=32,
)  # fmt: skip
SEQUENCES, LENGTH = 32, 64


def text(limit: int = 6_000_000) -> Tensor:
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size > limit:
            break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).long()


def batch(data: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    at = torch.randint(len(data) - LENGTH - 1, (SEQUENCES,), generator=g)
    rows = torch.stack([data[i : i + LENGTH + 1] for i in at.tolist()])
    return rows[:, :-1].flatten(), rows[:, 1:].flatten()


def tap(route, bias: Tensor) -> RouterTap:  # type: ignore[no-untyped-def]
    histogram = margin_histogram(route.scores, route.threshold, bias)
    return RouterTap(expert_counts(route.idx, CONFIG.num_experts), histogram)


def train(mode: str, steps: int, data: Tensor) -> K3:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = K3(CONFIG)
    model.reset_parameters()
    biases = {i: layer.block_sparse_moe.gate.e_score_correction_bias
              for i, layer in enumerate(model.layers) if hasattr(layer, "block_sparse_moe")}  # fmt: skip
    balancer = QuantileBalancer(biases, CONFIG.num_experts_per_token, mode)  # type: ignore[arg-type]
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    layout, start = Layout.packed([LENGTH] * SEQUENCES), time.perf_counter()
    for step in range(steps):
        tokens, target = batch(data, g)
        out = model(tokens, layout)
        loss = F.cross_entropy(out.logits.float(), target)
        adam.zero_grad()
        loss.backward()
        adam.step()
        balancer.observe({i: tap(route, biases[i]) for i, route in out.routes.items()})
        load = balancer.update()
        if step % 25 == 0 or step == steps - 1:
            found = " ".join(f"{one.max_violation:.2f}" for one in load)
            print(f"{mode} step {step} loss {loss:.3f} maxvio {found} {time.perf_counter() - start:.0f} s", flush=True)
    return model


@torch.no_grad()
def record(model: K3, data: Tensor, tokens: int) -> np.ndarray:
    g, layout = torch.Generator().manual_seed(2), Layout.packed([LENGTH] * SEQUENCES)
    chosen = []
    for _ in range(tokens // (SEQUENCES * LENGTH)):
        routes = model(batch(data, g)[0], layout, logits="none").routes
        chosen.append(torch.stack([routes[i].idx for i in sorted(routes)]).to(torch.int16))
    return torch.cat(chosen, 1).numpy()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--tokens", type=int, default=262144)
    given = arguments.parse_args()
    data = text()
    held = len(data) // 10
    found = {}
    for mode in ("none", "quantile"):
        model = train(mode, given.steps, data[:-held])
        found[mode] = record(model, data[-held:], given.tokens)
        np.savez(given.out, **found)


if __name__ == "__main__":
    main()
