"""What each part of the architecture and recipe is worth at tiny scale: one flag away from the baseline at a time.

    python bench/ablate.py                                     # 16 variants x 3 seeds x 600 steps: a night on two cores
    python bench/ablate.py --steps 60 --seeds 1                # minutes; ranks only the largest gaps
    python bench/ablate.py --only baseline adamw --seeds 5     # a closer look
    python bench/ablate.py --steps 60 --jobs 16 --threads 1    # 48 cells at once on 16 cores

A seed fixes initial weights and the order of the data, so the difference to the baseline is taken seed by seed, and its
spread is that of the pairs. Learning rates are the baseline's: a variant that wants another is at a disadvantage.
Preset `tiny` on Python's standard library unless --sources says otherwise. Finished cells stay in OUT/cells.json, their
curves in OUT/VARIANT-SEED (`perilune report` draws them); a killed cell continues from its last checkpoint.
Writes OUT/ablations.md.
"""

import argparse
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cells import Cells

from perilune.config import ModelConfig, preset, three_to_one
from perilune.data import DataConfig, Prepared, prepare
from perilune.recipe import to_table
from perilune.train.loop import Trainer
from perilune.train.machine import describe
from perilune.train.metrics import read_metrics
from perilune.train.options import TrainConfig

LAYERS = preset("tiny").num_hidden_layers
Changes = dict[str, Any]

# name -> (ModelConfig fields, TrainConfig fields, what changes)
VARIANTS: dict[str, tuple[Changes, Changes, str]] = {
    "baseline": ({}, {}, "preset tiny: K K K M, Block AttnRes, Per-Head Muon, Quantile Balancing"),
    "plain": ({"attn_res_block_size": None}, {}, "ordinary residuals"),
    "full-attnres": ({"attn_res_full": True}, {}, "every sublayer is a source"),
    "all-mla": ({"mla_layers": tuple(range(LAYERS))}, {}, "no KDA layer"),
    "kda-1-1": ({"mla_layers": three_to_one(LAYERS, 2)}, {}, "K M K M"),
    "all-kda": ({"mla_layers": ()}, {}, "no MLA layer"),
    "scalar-decay": ({"kda_decay": "head"}, {}, "one decay a head: Gated DeltaNet"),
    "no-delta": ({"kda_decay": "head", "kda_delta": False}, {}, "scalar decay, no delta term: Mamba-2-like"),
    "softplus": ({"gate_lower_bound": None}, {}, "unbounded softplus decay"),
    "no-gate": ({"kda_output_gate": False, "mla_use_output_gate": False}, {}, "no output gate on KDA and MLA"),
    "no-latent": ({"routed_expert_hidden_size": None}, {}, "experts read the full width (more parameters)"),
    "no-norm": ({"latent_moe_use_norm": False}, {}, "no RMSNorm after the experts' sum"),
    "swiglu": ({"hidden_act": "silu"}, {}, "SwiGLU for SiTU-GLU"),
    "muon-whole": ({}, {"optimizer": "whole"}, "Muon without the split into heads"),
    "adamw": ({}, {"optimizer": "adamw"}, "AdamW for every parameter"),
    "sign": ({}, {"balance": "sign"}, "sign rule, γ = 1e-3, for Quantile Balancing"),
}


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one cell and keep its figures; the weights are not kept."""
    torch.set_num_threads(args.threads)
    data = corpus(args)
    model_changes, train_changes, _ = VARIANTS[name]
    directory = args.out / f"{name}-{seed}"
    options = TrainConfig(
        **{
            "steps": args.steps,
            "seed": seed,
            "device": args.device,
            "eval_every": args.steps,
            "inspect_every": max(1, args.steps // 10),
            "peak_flops": 1e12,  # not shown, and measuring it in many processes at once would measure them
            "sample_prompts": ("def ",),
            "keep": 1,
            **train_changes,
        }
    )
    trainer = Trainer(config(model_changes, data), options, data, directory, recipe(name, model_changes, options))
    trainer.run()
    for heavy in ("checkpoints", "weights"):
        shutil.rmtree(directory / heavy, ignore_errors=True)
    return figures(directory, sum(p.numel() for p in trainer.model.parameters()), trainer.active)


def corpus(args: argparse.Namespace) -> Prepared:
    """Tokenised by whoever comes first, read by the others."""
    sources = {"sources": tuple(args.sources)} if args.sources else {}
    return prepare(DataConfig(vocab_size=preset("tiny").vocab_size, **sources), None, args.out / "data")


def config(changes: Changes, data: Prepared) -> ModelConfig:
    tokenizer = data.tokenizer()
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    return preset("tiny").replace(vocab_size=data.vocab_size, **ids, **changes)


def recipe(name: str, changes: Changes, options: TrainConfig) -> dict[str, Any]:
    return {"name": name, "model": {"preset": "tiny", **to_table(changes)}, "train": to_table(options)}


def figures(directory: Path, total: int, active: int) -> dict[str, Any]:
    """The end of a run in numbers: balance is the worst layer's, over the last fifth of the steps."""
    metrics = read_metrics(directory / "metrics.jsonl")
    late = metrics[-max(1, len(metrics) // 5) :]
    return {
        "val_bpb": metrics[-1]["val_bpb"],
        "loss": statistics.fmean(r["loss"] for r in late),
        "max_violation": statistics.fmean(max(r["max_violation"], default=0.0) for r in late),
        "dead": statistics.fmean(max(r["dead"], default=0.0) for r in late),
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in metrics),
        "skipped": metrics[-1]["skipped"],
        "total": total,
        "active": active,
    }


# --- the table ------------------------------------------------------------------------------------------------------


def table(done: dict[str, Any], seeds: int) -> str:
    lines = [
        "| variant | held-out bpb | − baseline | MaxVio | dead | tokens/s | parameters, active* | what changes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = {
        n: [done[f"{n}/{s}"] for s in range(seeds)] for n in VARIANTS if all(f"{n}/{s}" in done for s in range(seeds))
    }
    base = rows.get("baseline")
    # The most harmful change last.
    for name, cells in sorted(rows.items(), key=lambda row: (row[0] != "baseline", mean(row[1], "val_bpb"))):
        gaps = [c["val_bpb"] - b["val_bpb"] for c, b in zip(cells, base)] if base and name != "baseline" else []
        columns = [
            name,
            spread([c["val_bpb"] for c in cells], ".3f"),
            spread(gaps, "+.3f") if gaps else "",
            f"{mean(cells, 'max_violation'):.2f}",
            f"{mean(cells, 'dead'):.1%}",
            f"{mean(cells, 'tokens_per_second'):,.0f}",
            f"{cells[0]['total'] / 1e6:.2f}M, {cells[0]['active'] / 1e6:.2f}M",
            VARIANTS[name][2],
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def mean(cells: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(c[key] for c in cells)


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± sample standard deviation."""
    middle = f"{statistics.fmean(values):{form}}"
    return f"{middle} ± {statistics.stdev(values):.3f}" if len(values) > 1 else middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--sources", nargs="*", default=[], help="folders and files instead of the standard library")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of a cell")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, each a process")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    corpus(args)
    cells = Cells(args.out / "cells.json", {"steps": args.steps, "sources": args.sources, "device": args.device})
    # Seed by seed, so that a run cut short has all variants.
    wanted = {f"{name}/{seed}": (name, seed, args) for seed in range(args.seeds) for name in args.only}
    if args.jobs > 1:
        cells.fill(wanted, run, args.jobs, args.threads)
    else:
        for key, (name, seed, _) in wanted.items():
            print(f"{name}, seed {seed}", flush=True)
            cells.get(key, lambda name=name, seed=seed: run(name, seed, args))  # type: ignore[misc]
    shown = {key: cell for key, cell in cells.done.items() if key.split("/")[0] in args.only}
    where = f"{describe(torch.device(args.device))}; {args.steps} steps of 4,096 tokens; {args.seeds} seed(s)"
    note = "\\* without the embedding and the head; ± is the standard deviation over seeds."
    text = f"{where}\n\n{table(shown, args.seeds)}\n\n{note}\n"
    (args.out / "ablations.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
