"""KDA on a CPU: the chunked form against the recurrence, and a training step's share.

    python bench/kda_cpu.py [--threads 2] [--repeats 15]

Prints median and best wall clock of `repeats`: the forward at T=2048, B=1, H=4, K=V=32 both ways and their ratio, and
forward plus backward of 16 sequences of 256 tokens, for a slow gate (mean log-decay −0.03) and a fast one (−2.5).
"""

import argparse
import json
import platform
import time
from collections.abc import Callable

import torch

from perilune.ops.kda import kda
from perilune.ops.memory import keep_freed_memory


def draw(B: int, T: int, H: int, K: int, shift: float) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    heads = {"A_log": torch.zeros(H), "dt_bias": randn(H, K)}
    x = {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, K)}
    return x | heads | {"gate": randn(B, T, H, K) + shift, "beta": randn(B, T, H)}


def clock(f: Callable[[], object], repeats: int) -> dict[str, float]:
    """Milliseconds, after two calls to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        f()
        times.append((time.perf_counter() - start) * 1e3)
    kept = sorted(times[2:])
    return {"median_ms": round(kept[len(kept) // 2], 2), "best_ms": round(kept[0], 2)}


def forward(x: dict[str, torch.Tensor], impl: str) -> None:
    with torch.no_grad():
        kda(**x, lower_bound=-5.0, impl=impl)


def training(x: dict[str, torch.Tensor], cotangent: torch.Tensor) -> None:
    o, _, _ = kda(**x, lower_bound=-5.0, impl="chunk")
    o.backward(cotangent)
    for y in x.values():
        y.grad = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps({"machine": platform.processor() or platform.machine(), "torch": torch.__version__,
                      "threads": options.threads, "heap kept": keep_freed_memory()}))  # fmt: skip
    for name, shift in (("slow gate", -6.0), ("fast gate", 0.0)):
        x = draw(1, 2048, 4, 32, shift)
        fast = clock(lambda x=x: forward(x, "chunk"), options.repeats)
        loop = clock(lambda x=x: forward(x, "reference"), 3)
        ratio = round(loop["median_ms"] / fast["median_ms"], 1)
        print(
            json.dumps({"case": f"forward T2048 B1 H4 D32, {name}", "chunk": fast, "recurrence": loop, "ratio": ratio})
        )
    for name, shift in (("slow gate", -6.0), ("fast gate", 0.0)):
        x = {key: y.requires_grad_() for key, y in draw(16, 256, 4, 32, shift).items()}
        cotangent = torch.randn(16, 256, 4, 32)
        inference = clock(lambda x=x: forward(x, "chunk"), options.repeats)
        step = clock(lambda x=x, w=cotangent: training(x, w), options.repeats)
        print(json.dumps({"case": f"16x256 H4 D32, {name}", "forward": inference, "forward+backward": step}))


if __name__ == "__main__":
    main()
