"""Where a KDA call's time goes on one GPU: factors, chain, the whole, by number of segments; and the backward.

    python bench/kda_parts.py [--profile]

Medians of CUDA events over queued calls, K = V = 128, bf16 inputs, fp32 state in and out. `--profile` runs one forward
and one backward and nothing else, for `ncu --clock-control none` or `compute-sanitizer`.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from perilune.ops.kda import hopper, hopper_backward

D = 128
SHAPES = {
    "T8192 H96": ([8192], 96, (0,)),
    "T8192 H64": ([8192], 64, (0,)),
    "8 x 1024 H96": ([1024] * 8, 96, (0,)),
    "ragged six H96": ([1300, 547, 2048, 963, 271, 3063], 96, (0,)),
    "T8192 H16": ([8192], 16, (0, 1, 2, 3, 4, 6)),
    "T65536 H4": ([65536], 4, (0, 1, 4, 8, 16, 24, 32)),
}


def median(run: Callable[[], object], count: int = 20) -> float:
    """Milliseconds."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in pairs)[count // 2]


def inputs(T: int, heads: int, slow: bool) -> tuple[list[Tensor], Tensor]:
    """(q, k, gate, beta, A_log, dt_bias) and v."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, gate = (torch.randn(1, T, heads, D, generator=g, device="cuda").bfloat16() for _ in range(4))
    if slow:
        gate = gate * 0.5 - 7
    beta = torch.randn(1, T, heads, generator=g, device="cuda").bfloat16()
    spread = 0.0 if slow else 1.0
    A_log = torch.rand(heads, generator=g, device="cuda") * spread
    return [q, k, gate, beta, A_log, torch.rand(heads, D, generator=g, device="cuda") * spread], v


def problem(lengths: list[int], heads: int, segments: int) -> hopper.Problem:
    return hopper.Problem(tuple(lengths), (), D**-0.5, -5.0, sum(lengths), heads, heads, D, D, segments=segments)


def parts(x: list[Tensor], v: Tensor, state: Tensor, it: hopper.Problem) -> dict[str, float]:
    """Milliseconds of the whole forward, and of factors and chain alone where one panel holds the input."""
    made = it.plan(True)
    panel = made.panels[0]
    found = {"segments": len(panel.runs) / len(it.lengths), "all": median(lambda: hopper.forward(x, v, state, it))}
    if len(made.panels) == 1:
        chunks, tables = hopper.tables(it, True, v.device)
        to = hopper.Workspace.empty(panel.count, it.heads, D, v)
        o, final = torch.empty_like(v), torch.empty_like(state)
        found["factors"] = median(lambda: hopper.prepare(x, it, chunks, 0, panel.count, to))
        found["chain"] = median(lambda: hopper.chain(to, panel, tables[0], it, chunks, v, o, state, final, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    profile = parser.parse_args().profile
    for name, (lengths, heads, segments) in SHAPES.items():
        state = torch.randn(len(lengths), heads, D, D, device="cuda")
        for slow in (True,) if profile else (False, True):
            x, v = inputs(sum(lengths), heads, slow)
            if name == "T8192 H96":
                it = problem(lengths, heads, 0)
                borders = hopper.forward(x, v, state, it)[3]
                back = lambda: hopper_backward.backward(x, v, state, borders, it, v, None, None)  # noqa: B023, E731
                back()
                if profile:
                    torch.cuda.synchronize()
                    return
                print(f"{name:16} {'slow' if slow else 'fast'} backward {median(back, 5):.4g}", flush=True)
            for s in segments:
                found = parts(x, v, state, problem(lengths, heads, s))
                numbers = " ".join(f"{n} {t:.4g}" for n, t in found.items())
                print(f"{name:16} {'slow' if slow else 'fast'} {numbers}", flush=True)


if __name__ == "__main__":
    main()
