"""KDA on one GPU against fla and cuDNN: time beside error, two gate regimes, peak memory.

    python bench/kda.py --out runs/kda        writes kda.json and, where matplotlib is, kda.png

CUDA events around each call, median; K = V = 128, bf16 inputs, fp32 state in and out, norms, gate and β inside.
`fast`: the gates every peer benchmarks, which forget in a chunk or two. `slow`: mean log-decay −0.006 a token.
Errors are ‖x − fp64‖ / ‖fp64‖ of o at T = 1024, H = 8, by the fp64 recurrence. Peers run where they are importable.
"""

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from perilune.ops.kda import kda
from perilune.ops.kda.decode import Drafts, decode
from perilune.ops.kda.reference import reference

SHAPES = {
    "T8192 H96": ([8192], 96),
    "T8192 H64": ([8192], 64),
    "ragged six H96": ([1300, 547, 2048, 963, 271, 3063], 96),
    "8 x 1024 H96": ([1024] * 8, 96),
    "T65536 H4": ([65536], 4),
    "T8192 H16": ([8192], 16),
}
REACH = {  # milliseconds asked for, both gate regimes
    ("forward", "T8192 H96"): 0.70, ("forward", "T8192 H64"): 0.50, ("forward", "ragged six H96"): 0.65,
    ("forward", "8 x 1024 H96"): 0.60, ("forward", "T65536 H4"): 0.60, ("forward", "T8192 H16"): 0.35,
    ("forward+backward", "T8192 H96"): 4.5,
}  # fmt: skip
D, LOWER = 128, -5.0
Inputs = dict[str, Tensor]


class Report:
    """Rows, printed and written as they come: a run that is cut short leaves what it measured."""

    def __init__(self, path: Path, errors: dict) -> None:
        self.path = path
        self.made: dict = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "errors": errors, "rows": [],
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict) -> None:
        row |= {
            f"error_{peer}": e[row["gates"]]
            for peer, e in self.made["errors"].items()
            if peer in row and row["gates"] in e
        }
        if (reach := REACH.get((row["work"], row["shape"]))) is not None:
            row["reach"] = reach
        self.made["rows"].append(row)
        numbers = " ".join(f"{n} {v:.4g}" for n, v in row.items() if not isinstance(v, str))
        print(f"{row['work']:17} {row['shape']:40} {row['gates']:5} {numbers}", flush=True)
        self.path.write_text(json.dumps(self.made, indent=1))


def inputs(lengths: list[int], heads: int, slow: bool) -> Inputs:
    g = torch.Generator("cuda").manual_seed(0)
    T, spread = sum(lengths), 0.0 if slow else 1.0

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    made = {name: randn(1, T, heads, D) for name in ("q", "k", "v", "gate")}
    if slow:
        made["gate"] = made["gate"] * 0.5 - 7
    made["beta"] = randn(1, T, heads)
    made["A_log"] = torch.rand(heads, generator=g, device="cuda") * spread
    made["dt_bias"] = torch.rand(heads, D, generator=g, device="cuda") * spread
    made["state"] = torch.randn(len(lengths), heads, D, D, generator=g, device="cuda") * 0.1
    made["cu"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda", dtype=torch.int32)
    return made


def ours(x: Inputs, lengths: list[int]) -> tuple[Tensor, Tensor]:
    o, final, _ = kda(
        x["q"], x["k"], x["v"], x["gate"], x["beta"], A_log=x["A_log"], dt_bias=x["dt_bias"], lower_bound=LOWER,
        state=x["state"], lengths=lengths,
    )  # fmt: skip
    return o, final


def fla(x: Inputs, lengths: list[int]) -> tuple[Tensor, Tensor]:
    packed = {} if len(lengths) == 1 else {"cu_seqlens": x["cu"].long()}
    return importlib.import_module("fla.ops.kda").chunk_kda(
        x["q"], x["k"], x["v"], x["gate"], x["beta"], initial_state=x["state"], output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        lower_bound=LOWER, A_log=x["A_log"], dt_bias=x["dt_bias"].flatten(), **packed,
    )  # fmt: skip


def cudnn(x: Inputs, _lengths: list[int]) -> tuple[Tensor, Tensor]:
    run = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
    o, final, *_ = run(
        x["q"][0], x["k"][0], x["v"][0], x["gate"][0], x["beta"][0], x["cu"], scale=D**-0.5, initial_state=x["state"],
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
        gate_lower_bound=LOWER, a_log=x["A_log"], dt_bias=x["dt_bias"], plan_name="kda_hopper_cuda",
    )  # fmt: skip
    return o.unsqueeze(0), final.transpose(-1, -2)


def median(run: Callable[[], object], count: int) -> float:
    """Milliseconds by the device's clock, an event around each call; the calls are queued, so the host runs ahead."""
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


def tune_little() -> None:
    """Keeps Triton's tuner, and so fla, to 2 or 4 warps and 2 or 3 stages: a third of its minutes."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.prune_configs

    def few(self: Autotuner, *given: object) -> list:
        every = whole(self, *given)
        return [c for c in every if c.num_warps in (2, 4) and c.num_stages <= 3] or every[:2]

    Autotuner.prune_configs = few


def peers(wanted: list[str]) -> dict[str, Callable]:
    """Ours, and whichever wanted peer answers a small call; says why the others do not."""
    found = {"perilune": ours}
    small = inputs([256], 4, True)
    for name, run in (("fla", fla), ("cudnn", cudnn)):
        if name not in wanted:
            continue
        try:
            run(small, [256])
            found[name] = run
        except Exception as why:  # a peer may fail in any way; it is then left out and named
            print(f"{name} left out: {type(why).__name__}: {str(why)[:160]}", flush=True)
    return found


def error_of(run: Callable, slow: bool) -> float:
    x = inputs([1024], 8, slow)
    if run is cudnn:  # its state is value-first
        x["state"] = x["state"].transpose(-1, -2).contiguous()
    o = run(x, [1024])[0].double()
    if run is cudnn:
        x["state"] = x["state"].transpose(-1, -2)
    wide = {n: t.double() for n, t in x.items() if n != "cu"}
    want, _, _ = reference(
        wide["q"], wide["k"], wide["v"], wide["gate"], wide["beta"], A_log=wide["A_log"], dt_bias=wide["dt_bias"],
        lower_bound=LOWER, scale=D**-0.5, state=wide["state"], lengths=[1024], export_at=None, delta=True,
    )  # fmt: skip
    return float((o - want).norm() / want.norm())


def replayed(run: Callable[[], object], count: int) -> float:
    """Milliseconds of a captured call: what is left where the host does not hold it up."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median(graph.replay, count)


def forward_rows(runs: dict[str, Callable], count: int, report: Report) -> None:
    for name, (lengths, heads) in SHAPES.items():
        for slow in (False, True):
            x = inputs(lengths, heads, slow)
            row: dict = {"work": "forward", "shape": name, "gates": "slow" if slow else "fast"}
            for peer, run in runs.items():
                with torch.no_grad():
                    row[peer] = median(lambda r=run, x=x, n=lengths: r(x, n), count)
            with torch.no_grad():
                row["perilune_graph"] = replayed(lambda x=x, n=lengths: ours(x, n), count)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.no_grad():
                kept = ours(x, lengths)
            row["workspace_bytes"] = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in kept)
            row["workspace_bytes_per_token_head"] = row["workspace_bytes"] / (sum(lengths) * heads)
            report.add(row)


def training_step(run: Callable, x: Inputs, leaves: list[Tensor], seed: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(run(x, [8192])[0], leaves, seed, allow_unused=True)


def training_rows(runs: dict[str, Callable], count: int, report: Report) -> None:
    """Forward and backward of everything at T8192 H96. cuDNN is not run: its gradients stop at gate and norms."""
    for slow in (False, True):
        x = inputs([8192], 96, slow)
        leaves = [x[n].requires_grad_() for n in ("q", "k", "v", "gate", "beta", "A_log", "dt_bias", "state")]
        row: dict = {"work": "forward+backward", "shape": "T8192 H96", "gates": "slow" if slow else "fast"}
        seed = torch.randn_like(x["v"])
        for peer in ("perilune", "fla"):
            if peer in runs:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                row[peer] = median(training_step(runs[peer], x, leaves, seed), count)
                row[f"peak_bytes_{peer}"] = torch.cuda.max_memory_allocated() - before
        report.add(row)


def copy_rate(nbytes: int = 1 << 31) -> float:
    """TB/s of a copy on this device, bytes read and written."""
    a = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * nbytes / median(lambda: b.copy_(a), 10) / 1e9


def decode_rows(count: int, report: Report) -> None:
    copy = copy_rate()
    report.made["copy_TB_per_s"] = copy
    for first in ("value", "key"):
        for requests, window in ((1, 1), (32, 1), (64, 1), (256, 1), (32, 4)):
            H, C = 96, 3 * 96 * D
            bf = lambda *s: torch.randn(*s, device="cuda").bfloat16()  # noqa: E731
            state = torch.randn(requests, H, D, D, device="cuda") * 0.1
            x = (bf(requests, window, C), bf(requests, window, H, D), bf(requests, window, H))
            keep = {
                "conv_weight": torch.randn(C, 4, device="cuda"), "A_log": torch.rand(H, device="cuda"),
                "dt_bias": torch.rand(H, D, device="cuda"), "norm_weight": torch.rand(D, device="cuda"),
                "lower_bound": LOWER, "tail": bf(requests, C, 3),
                "state": state.transpose(2, 3) if first == "key" else state,
                "slots": torch.arange(requests, device="cuda", dtype=torch.int32),
            }  # fmt: skip
            if window > 1:
                keep["drafts"] = Drafts.empty(requests, window - 1, *x)
                keep["accepted"] = torch.full((requests,), window - 1, device="cuda", dtype=torch.int32)
            z = bf(requests, window, H, D)
            decode(*x, z, **keep)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(4):
                    decode(*x, z, **keep)
            ms = median(graph.replay, count) / 4
            moved = 2 * state.nbytes / ms / 1e9
            name = f"B{requests} H96 window {window}, {first} axis contiguous"
            row = {"work": "decode", "shape": name, "gates": "any", "perilune": ms, "state_TB_per_s": moved}
            report.add(row | {"of_copy": moved / copy})


def plot(rows: list[dict], path: Path) -> None:
    try:
        plt = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    rows = [r for r in rows if r["work"] == "forward"]
    _, axes = plt.subplots(figsize=(9, 4))
    for j, peer in enumerate([p for p in ("perilune", "cudnn", "fla") if p in rows[0]]):
        axes.bar([i + 0.27 * j for i in range(len(rows))], [r[peer] for r in rows], 0.25, label=peer)
    axes.set_xticks(range(len(rows)), [f"{r['shape']} {r['gates']}" for r in rows], rotation=60, ha="right", fontsize=7)
    axes.set_ylabel("ms")
    axes.legend()
    plt.tight_layout()
    plt.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/kda"))
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--peers", default="fla,cudnn", help="fla tunes itself for minutes before its first number")
    parser.add_argument("--tune-little", action="store_true", help="a third of it, and perhaps a slower fla")
    args = parser.parse_args()
    if args.tune_little:
        tune_little()
    runs = peers(args.peers.split(","))
    errors = {p: {g: error_of(r, g == "slow") for g in ("fast", "slow")} for p, r in runs.items()}
    print("errors of o:", json.dumps(errors), flush=True)
    report = Report(args.out / "kda.json", errors)
    forward_rows(runs, args.count, report)
    decode_rows(args.count, report)
    training_rows(runs, max(5, args.count // 4), report)
    plot(report.made["rows"], args.out / "kda.png")


if __name__ == "__main__":
    main()
