"""Times one optimiser step over parameters of the size of preset `tiny`: python bench/optimizer_step.py

Prints the time of a step by part. The shapes are those of preset `tiny` (d 128, 5 layers, 16 experts of 64 x 64).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from perilune.train.optim import Optimizer, plan

HEADS = SimpleNamespace(kda_num_heads=4, num_attention_heads=4)


def tiny_shapes() -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes of preset `tiny` in the released layout, experts stacked."""
    d, shapes = 128, {"model.embed_tokens.weight": (2048, 128), "lm_head.weight": (2048, 128)}
    for layer in range(5):
        at, ffn = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.block_sparse_moe."
        if layer in (3, 4):
            mla = {"q_a_proj": (64, d), "q_b_proj": (192, 64), "kv_a_proj_with_mqa": (64, d), "kv_b_proj": (256, 48)}
            shapes |= {f"{at}{n}.weight": s for n, s in (mla | {"g_proj": (d, d), "o_proj": (d, d)}).items()}
        else:
            shapes |= {f"{at}{n}_proj.weight": (d, d) for n in "qkvgo"} | {f"{at}b_proj.weight": (4, d)}
            shapes |= {f"{at}f_a_proj.weight": (32, d), f"{at}f_b_proj.weight": (d, 32), f"{at}dt_bias": (d,)}
            shapes |= {f"{at}{n}_conv1d.weight": (d, 1, 4) for n in "qkv"}
        shapes |= {f"model.layers.{layer}.{n}.weight": (d,) for n in ("input_layernorm", "post_attention_layernorm")}
        if layer == 0:
            shapes |= {f"model.layers.0.mlp.{n}_proj.weight": (384, d) for n in ("gate", "up")}
            shapes["model.layers.0.mlp.down_proj.weight"] = (d, 384)
            continue
        shapes |= {f"{ffn}experts.w{i}": (16, 64, 64) for i in (1, 2, 3)} | {f"{ffn}gate.weight": (16, d)}
        shapes |= {f"{ffn}shared_experts.{n}_proj.weight": (128, d) for n in ("gate", "up", "down")}
        shapes |= {f"{ffn}routed_expert_down_proj.weight": (64, d), f"{ffn}routed_expert_up_proj.weight": (d, 64)}
    return shapes


def times(f: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and least of the wall times, in ms."""
    f()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found), min(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    named = {n: torch.nn.Parameter(0.02 * torch.randn(s)) for n, s in tiny_shapes().items()}
    for p in named.values():
        p.grad = torch.randn_like(p) * 1e-3
    total = sum(p.numel() for p in named.values())
    print(f"{total / 1e6:.2f}M parameters, {torch.get_num_threads()} threads")
    for mode in ("per_head", "whole", "adamw"):
        optimizer = Optimizer(plan(named.items(), HEADS, mode=mode))  # type: ignore[arg-type]
        median, least = times(lambda o=optimizer: o.step(1e-3), args.repeats)  # type: ignore[misc]
        muon = sum(p.param.numel() for p in optimizer.plans if p.kind == "muon")
        print(f"{mode:9s} {muon / 1e6:.2f}M on Muon: median {median:.1f} ms, least {least:.1f} ms")
        if args.profile:
            with torch.profiler.profile() as profile:
                for _ in range(10):
                    optimizer.step(1e-3)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


if __name__ == "__main__":
    main()
