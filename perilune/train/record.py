"""What a run left in its directory, read back and thinned for drawing.

    half-life of a KDA channel = ln 2 / |g| tokens,  g its mean log-decay;    relative load of an expert = E · share

`metrics.jsonl` has a record a step, `inspect.jsonl` one every so many steps, `run.json` what the run is.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perilune.train.metrics import read_metrics

POINTS = 1200  # of a curve on the page; longer ones are averaged in bins
COLUMNS = 120  # of a heat map, fewer where many experts would make it more than CELLS
CELLS = 2_000_000
FOREVER = 1e7  # tokens; a channel that forgets more slowly is drawn here


class ReportError(ValueError):
    """A directory no page can be made of; the message is one sentence."""


@dataclass(frozen=True)
class Run:
    """What a run's directory says; `metrics` is never empty, the other two may be."""

    name: str
    metrics: list[dict[str, Any]]
    inspections: list[dict[str, Any]]
    about: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> "Run":
        if not directory.is_dir():
            raise ReportError(f"{directory} is not a directory, so there is no run to report.")
        metrics = read_metrics(directory / "metrics.jsonl")
        if not metrics:
            raise ReportError(f"{directory} has no finished step in a metrics.jsonl: nothing to report yet.")
        about = directory / "run.json"
        where = directory.resolve()
        return cls(
            where.parent.name if where.name == "pretrain" else where.name,  # a stage is named by its run
            metrics,
            read_metrics(directory / "inspect.jsonl"),
            json.loads(about.read_text(encoding="utf-8")) if about.exists() else {},
        )

    @cached_property
    def seconds(self) -> list[float]:
        """Time spent in steps, up to the end of each record (stops between resumes are left out)."""
        total, before, spent = 0.0, 0, []
        for record in self.metrics:
            rate = record.get("tokens_per_second") or 0
            total += (record["tokens"] - before) / rate if rate else 0
            before = record["tokens"]
            spent.append(total)
        return spent

    @cached_property
    def rate(self) -> float:
        """Median tokens/s."""
        return statistics.median(r.get("tokens_per_second") or 0 for r in self.metrics)

    def last(self, key: str) -> Any:
        """The latest value that is not null, or None."""
        return next((r[key] for r in reversed(self.metrics) if r.get(key) is not None), None)


# --- what the charts draw -----------------------------------------------------------------------------------------


def payload(run: Run, earlier: Sequence[Run] = ()) -> dict[str, Any]:
    """Everything the script draws, as JSON values."""
    return {
        "runs": [curves(r) for r in (run, *earlier)],
        "steps": [r["step"] for r in binned(run.metrics)],
        "scalars": {
            k: [r.get(k) for r in binned(carried(run.metrics, "max_logit"))]
            for k in ("lr", "grad_norm", "tokens_per_second", "max_logit")
        },
        "balance": balance(run),
        "loads": loads(run),
        "retention": retention(run),
        "attn_res": attn_res(run),
    }


def carried(records: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The records with the latest known `key` in each: what is looked at every few steps holds until the next look."""
    held, filled = None, []
    for record in records:
        held = held if record.get(key) is None else record[key]
        filled.append({**record, key: held})
    return filled


def curves(run: Run) -> dict[str, Any]:
    """A run's loss and bpb against step, tokens and seconds: raw, smoothed, and the held-out points."""
    records = [
        {"seconds": s, **{k: r.get(k) for k in ("step", "tokens", "loss", "bpb", "val_bpb")}}
        for r, s in zip(run.metrics, run.seconds)
    ]
    for key in ("loss", "bpb"):
        for record, value in zip(records, smooth([r[key] for r in records], len(records) / 50)):
            record[key + "_smooth"] = value
    held_out = [r for r in records if r["val_bpb"] is not None]
    axes = ("step", "tokens", "seconds")
    points = binned(records)
    return {
        "name": run.name,
        **{k: [digits(r[k]) for r in points] for k in (*axes, "loss", "bpb", "loss_smooth", "bpb_smooth")},
        "held_out": {k: [digits(r[k]) for r in thin(held_out, POINTS)] for k in (*axes, "val_bpb")},
    }


def balance(run: Run) -> dict[str, Any] | None:
    """MaxVio and dead share of each MoE layer at the binned steps."""
    records = [r for r in run.metrics if r.get("layers")]
    if not records:
        return None
    layers = records[-1]["layers"]
    flat = [
        {"step": r["step"]}
        | {f"v{j}": v for j, v in zip(r["layers"], r["max_violation"])}
        | {f"d{j}": v for j, v in zip(r["layers"], r["dead"])}
        for r in records
    ]
    points = binned(flat)
    return {
        "layers": layers,
        "steps": [p["step"] for p in points],
        "max_violation": [[digits(p.get(f"v{j}")) for p in points] for j in layers],
        "dead": [[digits(p.get(f"d{j}")) for p in points] for j in layers],
    }


def loads(run: Run) -> dict[str, Any] | None:
    """Relative load [layer][expert][column] over time."""
    seen = [i for i in run.inspections if i.get("loads")]
    if not seen:
        return None
    layers = list(seen[-1]["loads"])
    seen = thin(seen, max(2, min(COLUMNS, CELLS // sum(len(shares) for shares in seen[-1]["loads"].values()))))
    return {
        "layers": layers,
        "steps": [i["step"] for i in seen],
        "relative": [_relative([i["loads"][j] for i in seen]) for j in layers],
    }


def _relative(shares_TE: list[list[float]]) -> list[list[float | None]]:
    """[step][expert] shares -> [expert][step] loads relative to an even split."""
    return [[digits(len(row) * row[e], 3) for row in shares_TE] for e in range(len(shares_TE[0]))]


def retention(run: Run) -> dict[str, Any] | None:
    """Half-lives in tokens: first and last by [layer][head][channel], quartiles by layer over time."""
    seen = thin([i for i in run.inspections if i.get("decay") and _finite(i["decay"])], COLUMNS)
    if not seen:
        return None
    layers = list(seen[-1]["decay"])
    lives = [[[half_lives(head) for head in i["decay"][j]] for j in layers] for i in seen]
    flat = [[[x for head in layer for x in head] for layer in moment] for moment in lives]
    return {
        "layers": layers,
        "steps": [i["step"] for i in seen],
        "first": lives[0],
        "last": lives[-1],
        "median": [[digits(statistics.median(moment[j])) for moment in flat] for j in range(len(layers))],
    }


def _finite(decay: Mapping[str, Any]) -> bool:
    return all(math.isfinite(g) for layer in decay.values() for head in layer for g in head)


def half_lives(log_decays: Sequence[float]) -> list[float]:
    """ln 2 / |g| tokens each, at most FOREVER."""
    return [float(f"{math.log(2) / max(-g, math.log(2) / FOREVER):.3g}") for g in log_decays]


def attn_res(run: Run) -> dict[str, Any] | None:
    """Mean weights [moment][read][source] and names of reads and sources."""
    seen = thin([i for i in run.inspections if i.get("attn_res")], COLUMNS)
    if not seen:
        return None
    reads = seen[-1]["attn_res"]
    return {
        "steps": [i["step"] for i in seen],
        "reads": read_names(len(reads)),
        "full": all(len(read) == i + 2 for i, read in enumerate(reads)),  # every sublayer is a source
        "weights": [[[digits(w, 3) for w in read] for read in i["attn_res"]] for i in seen],
    }


def read_names(reads: int) -> list[str]:
    """Of the reads in order of depth: before each layer's attention and feed-forward, then the head.

    Layer 0's attention has one source, so it does not mix and is no read: 2 L in all.
    """
    between = [f"{layer} {part}" for layer in range(reads // 2 + 1) for part in ("attention", "feed-forward")]
    return [*between[1:reads], "head"]


# --- small things -------------------------------------------------------------------------------------------------


def thin(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def binned(records: Sequence[Mapping[str, Any]], most: int = POINTS) -> list[dict[str, Any]]:
    """Means of consecutive records, at most `most` bins; nulls are left out of a mean, texts and lists dropped."""
    width = math.ceil(len(records) / most)
    return [_mean(records[i : i + width]) for i in range(0, len(records), max(1, width))]


def _mean(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in records[-1]:
        values = [r[key] for r in records if isinstance(r.get(key), int | float)]
        merged[key] = digits(statistics.fmean(values)) if values else None
    # A bin lies where it ends, so that the last point of a curve is the run's last step.
    return merged | {k: records[-1][k] for k in ("step", "tokens", "seconds") if k in records[-1]}


def smooth(values: Sequence[float | None], span: float) -> list[float | None]:
    """Exponential mean over about `span` values, over fewer at the steep start; nulls change nothing."""
    mean, smoothed = None, list[float | None]()
    for i, value in enumerate(values):
        if value is not None:
            mean = value if mean is None else mean + (value - mean) / max(1.0, min(span, i / 4))
        smoothed.append(mean)
    return smoothed


def digits(x: float | None, significant: int = 5) -> float | None:
    """Rounded for the page, which is half as long for it; counts stay exact."""
    if x is None or isinstance(x, int):
        return x
    return float(f"{x:.{significant}g}") if math.isfinite(x) else None
