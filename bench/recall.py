"""Kimi Linear's Figure 4: what KDA, Gated DeltaNet and a Mamba-2-like layer can hold in their state.

    python bench/recall.py                                  # two cores, minutes: T = 32, heads of 32
    python bench/recall.py --device cuda --setting paper    # T = 1024, heads of 128, up to 20,000 steps
    python bench/recall.py --device cuda --setting paper --bf16 --rates 1e-3 --limit 100 --jobs 3 --threads 2

palindrome  x_1 … x_n | x_n … x_1          mqar  k v k v … | k v k v …          stack  push i v,  pop i v
Scored: the reversed copy, the value after each query, the value after each pop.
The three layers are one op: KDA; one decay a head (Gated DeltaNet); and that without the delta term (Mamba-2-like).
Accuracy is of the tokens scored, on sequences never trained on; the best learning rate of a sweep counts.
Inferred, not in the paper: AdamW at a constant rate, width, initial weights, batch, symbols, pairs, feed-forward.
A cell that meets its --limit keeps the accuracies it had; --jobs cells run at once, each a process, since one leaves a
GPU waiting for Python. KDA and Gated DeltaNet in bf16 take the fused kernels; Mamba-2-like's chunks are plain PyTorch.
Finished cells are kept in --out, one a (task, layer, rate, seed); delete the file to start over.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Cells

from perilune.config import ModelConfig
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.ops.cross_entropy import IGNORE, linear_cross_entropy
from perilune.ops.memory import keep_freed_memory
from perilune.train.machine import describe

LAYERS: dict[str, dict[str, Any]] = {
    "kda": {},
    "gdn": {"kda_decay": "head"},
    "mamba2": {"kda_decay": "head", "kda_delta": False},
}
# Peak accuracy in %, Kimi Linear technical report, figure 4: task -> layer -> length.
PAPER = {
    "palindrome": {
        "kda": {256: 100, 512: 100, 1024: 100, 2048: 42.2},
        "gdn": {256: 100, 512: 100, 1024: 97.0, 2048: 37.1},
        "mamba2": {256: 100, 512: 0, 1024: 0, 2048: 0},
    },
    "mqar": {
        "kda": {256: 100, 512: 100, 1024: 100, 2048: 47.6},
        "gdn": {256: 100, 512: 100, 1024: 78.7, 2048: 29.1},
        "mamba2": {256: 97.6, 512: 0, 1024: 0, 2048: 0},
    },
    "stack": {
        "kda": {256: 100, 512: 100, 1024: 100, 2048: 100},
        "gdn": {256: 100, 512: 100, 1024: 100, 2048: 100},
        "mamba2": {256: 100, 512: 100, 1024: 0, 2048: 0},
    },
}


@dataclass(frozen=True)
class Setting:
    """One size of the experiment; `width` features, `symbols` distinct tokens to remember."""

    length: int
    width: int
    head_dim: int
    symbols: int
    stacks: int
    batch: int
    steps: int
    every: int
    rates: tuple[float, ...]


SETTINGS = {
    "small": Setting(32, 64, 32, 64, 8, 32, 600, 50, (3e-3,)),
    "paper": Setting(1024, 256, 128, 512, 64, 64, 20000, 500, (5e-4, 1e-3)),
}


# --- tasks: token ids [n, T + 1] and what of them is scored ---------------------------------------------------------


def palindrome(rng: np.random.Generator, n: int, s: Setting) -> tuple[np.ndarray, np.ndarray]:
    half = s.length // 2
    x = rng.integers(0, s.symbols, (n, half))
    tokens = np.concatenate([x, np.full((n, 1), s.symbols), x[:, ::-1]], 1)
    scored = np.zeros(tokens.shape, bool)
    scored[:, half + 1 :] = True
    return tokens, scored


def mqar(rng: np.random.Generator, n: int, s: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys, each bound once and asked once, in another order. Values have ids of their own."""
    pairs = s.length // 4
    keys = rng.random((n, s.symbols)).argsort(1)[:, :pairs]
    values = rng.integers(0, s.symbols, (n, pairs)) + s.symbols
    order = rng.random((n, pairs)).argsort(1)
    bound = np.stack([keys, values], 2)
    asked = np.take_along_axis(bound, order[:, :, None], 1)
    tokens = np.concatenate([bound.reshape(n, -1), np.full((n, 1), 2 * s.symbols), asked.reshape(n, -1)], 1)
    scored = np.zeros(tokens.shape, bool)
    scored[:, 2 * pairs + 2 :: 2] = True
    return tokens, scored


def stack(rng: np.random.Generator, n: int, s: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Random pushes and pops; a pop of an empty stack becomes a push. ids: symbols, then stacks, push, pop."""
    moves, rows = s.length // 3, np.arange(n)
    held, height = np.zeros((n, s.stacks, moves), np.int16), np.zeros((n, s.stacks), np.int64)
    tokens, scored = np.empty((n, 3 * moves), np.int64), np.zeros((n, 3 * moves), bool)
    for move in range(moves):
        which = rng.integers(0, s.stacks, n)
        pop = (rng.random(n) < 0.5) & (height[rows, which] > 0)
        top = held[rows, which, np.maximum(height[rows, which] - 1, 0)]
        value = np.where(pop, top, rng.integers(0, s.symbols, n))
        pushed = rows[~pop]
        held[pushed, which[~pop], height[pushed, which[~pop]]] = value[~pop]
        height[rows, which] += np.where(pop, -1, 1)
        at = 3 * move
        tokens[:, at], tokens[:, at + 1], tokens[:, at + 2] = s.symbols + s.stacks + pop, s.symbols + which, value
        scored[:, at + 2] = pop
    return tokens, scored


TASKS = {"palindrome": palindrome, "mqar": mqar, "stack": stack}


POOL = 16  # batches made at a time


def made(task: str, s: Setting, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) of a pool of batches."""
    tokens, scored = TASKS[task](rng, s.batch * POOL, s)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(np.where(scored, tokens, IGNORE)[:, 1:])


def batches(task: str, s: Setting, seed: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (inputs, targets), flat [batch · T]; the next pool is made by a thread while this one is trained on."""
    rng = np.random.default_rng(seed)
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(made, task, s, rng)
        while True:
            x, y = (torch.from_numpy(a).to(device) for a in coming.result())
            coming = maker.submit(made, task, s, rng)
            yield from _cut(x, y, s)


def _cut(x: torch.Tensor, y: torch.Tensor, s: Setting) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for i in range(POOL):
        rows = slice(i * s.batch, (i + 1) * s.batch)
        yield x[rows].flatten(), y[rows].flatten()


# --- one cell -------------------------------------------------------------------------------------------------------


def config(layer: str, s: Setting, bound: float | None) -> ModelConfig:
    """Two KDA layers with a dense SwiGLU each, plain residuals."""
    return ModelConfig(
        vocab_size=2 * s.symbols + s.stacks + 2,
        hidden_size=s.width,
        num_hidden_layers=2,
        mla_layers=(),
        kda_num_heads=2,
        kda_head_dim=s.head_dim,
        gate_lower_bound=bound,
        use_full_rank_gate=False,
        intermediate_size=2 * s.width,
        hidden_act="silu",
        initializer_range=s.width**-0.5,
        **LAYERS[layer],
    )


def train(task: str, layer: str, rate: float, seed: int, s: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy in % by step, until the last step, perfect recall or the time limit."""
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    device, began = torch.device(args.device), time.perf_counter()
    torch.manual_seed(seed)
    model = K3(config(layer, s, args.bound))
    model.reset_parameters()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    data, unseen = batches(task, s, seed, device), batches(task, s, 10_000 + seed, device)
    curve: dict[int, float] = {}
    for step in range(1, s.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 100)
        x, y = next(data)
        loss = linear_cross_entropy(forward(model, x, s, args), model.lm_head.weight, y) / (y != IGNORE).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # The clock is read with the device idle, or a launch queue's length of steps would not be counted.
        late = step % 20 == 0 and _seconds(began, device) > args.limit
        if step % s.every == 0 or late:
            curve[step] = accuracy(model, [next(unseen) for _ in range(4)], s, args)
            seconds = _seconds(began, device)
            print(
                f"{task} {layer} lr {rate:g} seed {seed}: step {step}, {curve[step]:.1f}%, {seconds:.0f} s", flush=True
            )
            if curve[step] >= 99.95 or late:
                break
    return {"accuracy": curve, "seconds": round(_seconds(began, device), 1), "steps": step}


def _seconds(began: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def forward(model: K3, x: torch.Tensor, s: Setting, args: argparse.Namespace) -> torch.Tensor:
    layout = Layout.packed([len(x) // s.batch] * s.batch, x.device)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=args.bf16):
        return model(x, layout, logits="none").hidden


@torch.no_grad()
def accuracy(model: K3, found: list[tuple[torch.Tensor, torch.Tensor]], s: Setting, args: argparse.Namespace) -> float:
    right = total = 0
    for x, y in found:
        guess = model.lm_head(forward(model, x, s, args).float()).argmax(-1)
        right += int((guess == y).sum())
        total += int((y != IGNORE).sum())
    return round(100 * right / total, 2)


# --- the table ------------------------------------------------------------------------------------------------------


def best(found: dict[str, Any], task: str, layer: str, s: Setting, seeds: int) -> tuple[str, list[dict[str, Any]]]:
    """The rate with the highest mean peak over seeds, and its cells."""
    cells = {r: [found[f"{task}/{layer}/{r:g}/{seed}"] for seed in range(seeds)] for r in s.rates}
    # Ties go to the rate that got there in fewer steps.
    rate = max(cells, key=lambda r: (statistics.fmean(peak(c) for c in cells[r]), -sum(c["steps"] for c in cells[r])))
    return f"{rate:g}", cells[rate]


def peak(cell: dict[str, Any]) -> float:
    return max(cell["accuracy"].values())


def at(cell: dict[str, Any], step: int) -> float:
    """Accuracy at `step`; a cell that stopped early stays where it was."""
    curve = {int(k): v for k, v in cell["accuracy"].items()}
    return curve[max((k for k in curve if k <= step), default=min(curve))]


def table(found: dict[str, Any], tasks: list[str], layers: list[str], s: Setting, seeds: int) -> str:
    marks = sorted({max(s.every, round(s.steps * share / s.every) * s.every) for share in (0.1, 0.2, 0.4, 0.7, 1)})
    paper = s.length if s.length in PAPER["mqar"]["kda"] else None
    names = [f"{m} steps" for m in marks]
    lines = [
        f"| task | layer | rate | peak % | {' | '.join(names)} | paper, T={paper or '256 / 512 / 1024'} |",
        "|---|---|---|---|" + "---|" * (len(marks) + 1),
    ]
    for task, layer in itertools.product(tasks, layers):
        rate, cells = best(found, task, layer, s, seeds)
        theirs = PAPER[task][layer]
        shown = f"{theirs[paper]}" if paper else " / ".join(str(theirs[t]) for t in (256, 512, 1024))
        peaks = [peak(c) for c in cells]
        spread = f" ± {statistics.stdev(peaks):.1f}" if seeds > 1 else ""
        curve = " | ".join(f"{statistics.fmean(at(c, m) for c in cells):.1f}" for m in marks)
        lines.append(f"| {task} | {layer} | {rate} | {statistics.fmean(peaks):.1f}{spread} | {curve} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--bound", type=float, help="K3's bounded decay, -5; softplus as in the paper without it")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--seeds", type=int, default=1)
    for name in ("length", "steps", "every", "batch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--threads", type=int, default=2, help="of a cell")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, each a process")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of a cell")
    parser.add_argument("--out", type=Path, default=Path("recall.json"))
    args = parser.parse_args()
    given = {k: v for k in asdict(SETTINGS["small"]) if (v := getattr(args, k, None)) is not None}
    s = Setting(**asdict(SETTINGS[args.setting]) | given | ({"rates": tuple(args.rates)} if args.rates else {}))
    shared = {k: v for k, v in asdict(s).items() if k != "rates"} | {"bound": args.bound, "bf16": args.bf16}
    cells = Cells(args.out, shared)
    which = itertools.product(args.tasks, args.layers, s.rates, range(args.seeds))
    wanted = {
        f"{task}/{layer}/{rate:g}/{seed}": (task, layer, rate, seed, s, args) for task, layer, rate, seed in which
    }
    if args.jobs > 1:
        cells.fill(wanted, train, args.jobs, args.threads)
    else:
        for name, cell in wanted.items():
            cells.get(name, lambda cell=cell: train(*cell))  # type: ignore[misc]
    print(f"\n{describe(torch.device(args.device))}; {s}; decay bound {args.bound}; {args.seeds} seed(s)\n")
    print(table(cells.done, args.tasks, args.layers, s, args.seeds))


if __name__ == "__main__":
    main()
