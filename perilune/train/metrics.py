"""One record a step: JSONL for machines, TensorBoard files, W&B if asked, and a progress line for a person.

    bits per byte = loss / ln 2 · tokens / bytes        MFU = 6 · active non-embedding parameters · tokens/s / peak

`metrics.jsonl` is cut back to the resumed step, so a curve continues without gaps or duplicates. Peak is the dense
matmul rate measured on this machine unless stated, and is written beside the MFU.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from perilune.train.balance import Load


@dataclass(frozen=True)
class StepMetrics:
    """What a training step tells. Loss in nats per token; a step counts from 0; memory in bytes (peak so far)."""

    step: int
    tokens: int  # consumed so far, this step included
    loss: float
    bpb: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    mfu: float
    peak_flops: float
    memory: int
    max_logit: float | None = None
    skipped: int = 0  # steps so far
    layers: tuple[int, ...] = ()  # the MoE layers that the next two are about
    max_violation: tuple[float, ...] = ()
    dead: tuple[float, ...] = ()
    val_bpb: float | None = None

    @property
    def imbalance(self) -> float:
        """MaxVio of the worst layer."""
        return max(self.max_violation, default=0.0)

    def scalars(self) -> dict[str, float]:
        """Every finite number under one name, layers apart."""
        flat: dict[str, float] = {}
        for name, value in asdict(self).items():
            if name in ("step", "layers"):
                continue
            if isinstance(value, tuple):
                flat |= {f"{name}/layer_{layer}": v for layer, v in zip(self.layers, value, strict=True)}
            elif value is not None:
                flat[name] = value
        return {name: value for name, value in flat.items() if math.isfinite(value)}


def layer_loads(loads: Mapping[int, Load]) -> dict[str, Any]:
    """The three per-layer fields of `StepMetrics` from a balancer's loads by layer."""
    return {
        "layers": tuple(loads),
        "max_violation": tuple(load.max_violation for load in loads.values()),
        "dead": tuple(load.dead for load in loads.values()),
    }


def bits_per_byte(loss: float, tokens: int, text_bytes: int) -> float:
    """From mean nats per token over `tokens` that stand for `text_bytes` bytes of text."""
    return loss / math.log(2) * tokens / text_bytes


def mfu(active_parameters: int, tokens_per_second: float, peak_flops: float) -> float:
    """Share of peak; `active_parameters` without embeddings. Attention's own products are not counted."""
    return 6 * active_parameters * tokens_per_second / peak_flops


def measure_peak(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Dense matmul FLOP/s: the best of a few square products (about 50 ms)."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: of the CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rss if sys.platform == "darwin" else 1024 * rss


# --- records ------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without a last line that a killed process left torn."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def cut_back(path: Path, step: int) -> None:
    """Removes the records of `step` and later, and a torn last line."""
    if not path.exists():
        return
    kept = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                break
            kept += len(line)
        file.truncate(kept)
        os.fsync(file.fileno())


class MetricsLog:
    """Appends `StepMetrics` to DIRECTORY/metrics.jsonl and DIRECTORY/tensorboard, from `step` on.

    `wandb`: a project name, or None. Asking for W&B without it installed is an error, not a silence.
    """

    def __init__(self, directory: Path, step: int = 0, wandb: str | None = None):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only trainers need it

        directory.mkdir(parents=True, exist_ok=True)
        self._wandb = _wandb(wandb, directory) if wandb else None  # first: it may refuse, before anything is cut
        path = directory / "metrics.jsonl"
        cut_back(path, step)
        self._file: TextIO = path.open("a")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step)

    def write(self, metrics: StepMetrics) -> None:
        # A skipped step's loss may be NaN, which JSON has no word for.
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(metrics).items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in metrics.scalars().items():
            self._board.add_scalar(name, value, metrics.step)
        if self._wandb is not None:
            self._wandb.log(metrics.scalars(), step=metrics.step)

    def sync(self) -> None:
        """Everything written so far to disk; call before a checkpoint that this curve must reach."""
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wandb(project: str, directory: Path) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError("metrics.wandb is set, but the package wandb is not installed.") from None
    return wandb.init(project=project, name=directory.name, dir=str(directory), resume="allow")


# --- the line a person watches ------------------------------------------------------------------------------------


class ProgressLine:
    """A bar with loss, bits per byte, tokens/s, expert imbalance and time left; plain lines where there is no terminal.

    `every`: seconds between plain lines. Use as a context; `say` prints a line above the bar.
    """

    def __init__(self, steps: int, start: int = 0, console: Console | None = None, every: float = 10.0):
        self.console = console or Console()
        self.steps, self.start, self.every = steps, start, every
        self._began = self._shown = time.monotonic()
        self._progress: Progress | None = None
        if self.console.is_terminal:
            texts = TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}")
            self._progress = Progress(texts[0], BarColumn(None), texts[1], console=self.console)
            self._task = self._progress.add_task("starting", total=steps, completed=start)

    def update(self, metrics: StepMetrics) -> None:
        """Shows a finished step."""
        now = time.monotonic()
        done = metrics.step + 1 - self.start
        left = (now - self._began) / max(1, done) * (self.steps - metrics.step - 1)
        line = describe(metrics, self.steps, left)
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step + 1, description=line)
        elif now - self._shown >= self.every or done == 1 or metrics.step + 1 == self.steps:
            self._shown = now
            self.say(line)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "ProgressLine":
        self._began = time.monotonic()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def describe(metrics: StepMetrics, steps: int, seconds_left: float) -> str:
    """step 120/600  loss 3.412  1.873 bpb  8,214 tok/s  imbalance 0.18  3:05 left"""
    minutes, seconds = divmod(round(seconds_left), 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    parts = [
        f"step {metrics.step + 1}/{steps}",
        f"loss {metrics.loss:.3f}",
        f"{metrics.bpb:.3f} bpb",
        f"{metrics.tokens_per_second:,.0f} tok/s",
        *([f"imbalance {metrics.imbalance:.2f}"] if metrics.layers else []),
        *([f"{metrics.skipped} skipped"] if metrics.skipped else []),
        f"{left} left",
    ]
    return "  ".join(parts)
