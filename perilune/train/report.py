"""The page of a run: one HTML file without a network, drawn from what training left in the run's directory.

Whatever is absent becomes a sentence on the page. `page/` holds its template, style and charts; what they draw comes
from `record.payload`.
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from perilune import __version__
from perilune.train.record import Run, payload, thin

SAMPLES = 8  # moments of a prompt
_PAGE = Path(__file__).parent / "page"


def report(run_dir: Path, earlier: Sequence[Path] = ()) -> Path:
    """Writes RUN_DIR/report.html, with the curves of `earlier` runs behind this run's, and returns its path.

    Raises ReportError if one of the directories has no metrics.
    """
    run_dir = Path(run_dir)
    run, others = Run.read(run_dir), [Run.read(Path(path)) for path in earlier]
    path = run_dir / "report.html"
    draft = path.with_name(".report.html.part")
    draft.write_text(page(run, others), encoding="utf-8")
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
    return path


# --- the page -----------------------------------------------------------------------------------------------------


def page(run: Run, earlier: Sequence[Run] = ()) -> str:
    """The whole HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"count": count, "toml": toml}
    return environment.get_template("report.html").render(
        run=run,
        about=run.about,
        figures=figures(run),
        runs=[summary(r, run) for r in (run, *earlier)],
        data=payload(run, earlier),
        prompts=samples(run),
        style=_asset("report.css"),
        script=_asset("charts.js"),
        version=__version__,
    )


def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def figures(run: Run) -> list[tuple[str, str, str]]:
    """The header's (label, value, note)."""
    parameters, rate = run.about.get("parameters", {}), run.last("mfu")
    loss, held_out, bpb = run.last("loss"), run.last("val_bpb"), run.last("bpb")
    found: list[tuple[str, str, str]] = []
    if "total" in parameters:
        found.append(("parameters", count(parameters["total"]), f"{count(parameters['active'])} active per token"))
    found.append(("tokens", count(run.last("tokens")), f"{len(run.metrics):,} steps"))
    if loss is not None:
        found.append(("training loss", f"{_recent(run, 'loss'):.3f}", "nats per token, last 2%"))
    if held_out is not None:
        found.append(("held-out", f"{held_out:.3f}", "bits per byte"))
    elif bpb is not None:
        found.append(("training text", f"{_recent(run, 'bpb'):.3f}", "bits per byte, last 2%"))
    if run.rate:
        mfu = "" if rate is None else f"MFU {rate:.1%} of {flops(run.last('peak_flops') or 0)}"
        found.append(("tokens per second", f"{run.rate:,.0f}", mfu or "median"))
        found.append(("time in steps", clock(run.seconds[-1]), f"peak memory {size(run.last('memory') or 0)}"))
    if run.last("skipped"):
        found.append(("skipped steps", str(run.last("skipped")), "gradient not finite"))
    return found


def _recent(run: Run, key: str) -> float:
    values = [r[key] for r in run.metrics if r.get(key) is not None]
    return statistics.fmean(values[-max(1, len(values) // 50) :])


def summary(run: Run, beside: Run) -> dict[str, Any]:
    """A row of the table of runs: last figures, and the recipe keys in which it differs from `beside`."""
    mine, theirs = _flat(run.about.get("recipe", {})), _flat(beside.about.get("recipe", {}))
    differs = {k: mine.get(k, "absent") for k in sorted(mine.keys() | theirs.keys()) if mine.get(k) != theirs.get(k)}
    return {
        "name": run.name,
        "loss": _recent(run, "loss") if run.last("loss") is not None else None,
        "val_bpb": run.last("val_bpb"),
        "tokens": run.last("tokens"),
        "rate": run.rate,
        "differs": differs,
    }


def samples(run: Run) -> list[dict[str, Any]]:
    """Each prompt with its continuations at up to SAMPLES moments, from first to last."""
    bpb = {r["step"]: r.get("bpb") for r in run.metrics}
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for inspection in run.inspections:
        for sample in inspection.get("samples") or []:
            moment = {"step": inspection["step"], "bpb": bpb.get(inspection["step"]), "text": sample["text"]}
            by_prompt.setdefault(sample["prompt"], []).append(moment)
    return [{"prompt": p, "moments": thin(moments, SAMPLES)} for p, moments in by_prompt.items()]


# --- numbers and tables as text -------------------------------------------------------------------------------------


def count(n: float) -> str:
    """2,779,931,837,184 -> 2.78T; below a thousand as it is."""
    for unit, value in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(n) >= 0.9995 * value:  # what rounds to one of the unit is one
            return f"{n / value:.3g}{unit}"
    return f"{n:g}"


def flops(rate: float) -> str:
    """2.1e11 -> 210 GFLOP/s."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def size(n: float) -> str:
    """Bytes with a binary unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 2**power:
            return f"{n / 2**power:.3g} {unit}"
    return f"{n:g} B"


def clock(seconds: float) -> str:
    """75 -> 1 min 15 s; hours from 3600 on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """A table as TOML, scalars before sections; TOML has no null, so absent values are left out."""
    scalars = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in scalars.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{key}]", toml(value, f"{prefix}{key}.")]
    return "\n".join(lines).strip("\n")
