"""Records that continue after a kill, numbers by their definitions, and a line for terminals and for files."""

import io
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from perilune.train.balance import Load
from perilune.train.metrics import (
    MetricsLog,
    ProgressLine,
    StepMetrics,
    bits_per_byte,
    describe,
    layer_loads,
    measure_peak,
    mfu,
    peak_memory,
    read_metrics,
)

LOADS = {1: Load(0.25, 0.0), 4: Load(0.5, 0.125)}


def metrics(step: int, loss: float = 3.0, **changes) -> StepMetrics:  # type: ignore[no-untyped-def]
    values = {"bpb": 1.5, "grad_norm": 0.7, "lr": 0.01, "tokens_per_second": 8214.4, "mfu": 0.12, "peak_flops": 1e11}
    values |= {"memory": 2**30, "max_logit": 17.0, **layer_loads(LOADS), **changes}
    return StepMetrics(step=step, tokens=4096 * (step + 1), loss=loss, **values)


def test_the_curve_after_a_kill_and_a_resume_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Killed at step 7 with a torn line, resumed from the checkpoint of step 5."""
    with MetricsLog(tmp_path / "a") as log:
        for step in range(10):
            log.write(metrics(step, loss=10.0 - step))
    with MetricsLog(tmp_path / "b") as log:
        for step in range(7):
            log.write(metrics(step, loss=10.0 - step))
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 2.')
    assert len(read_metrics(tmp_path / "b" / "metrics.jsonl")) == 7
    with MetricsLog(tmp_path / "b", step=5) as log:
        for step in range(5, 10):
            log.write(metrics(step, loss=10.0 - step))
    paths = [tmp_path / run / "metrics.jsonl" for run in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [r["step"] for r in read_metrics(paths[1])] == list(range(10))


def test_every_record_is_on_disk_when_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(metrics(0))
        record = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert record["layers"] == [1, 4] and record["max_violation"] == [0.25, 0.5] and record["dead"] == [0.0, 0.125]
    assert record["max_logit"] == 17.0 and record["tokens"] == 4096 and record["peak_flops"] == 1e11


def test_a_skipped_steps_nan_becomes_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(metrics(0, loss=math.nan, grad_norm=math.inf, skipped=1))
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert record["loss"] is None and record["grad_norm"] is None and record["skipped"] == 1


def test_tensorboard_has_the_scalars_once_each_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 4), (2, 5)):
        with MetricsLog(tmp_path, step=first) as log:
            for step in range(first, last):
                log.write(metrics(step, loss=float(step)))
        time.sleep(1.1)  # event files are read in the order of their names, which count seconds
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {"loss", "bpb", "mfu", "max_violation/layer_4", "dead/layer_1"} <= set(board.Tags()["scalars"])
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(i, float(i)) for i in range(5)]


def test_asking_for_an_absent_wandb_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb is not installed"):
        MetricsLog(tmp_path, wandb="moon")


def test_numbers_by_definition() -> None:
    assert bits_per_byte(math.log(2) * 8, tokens=100, text_bytes=400) == pytest.approx(2.0)
    assert mfu(40_000_000, 300_000, 790e12) == pytest.approx(0.0911, abs=1e-4)
    assert metrics(0).imbalance == 0.5 and metrics(0, **layer_loads({})).imbalance == 0.0
    assert "max_violation/layer_4" in metrics(0).scalars() and "val_bpb" not in metrics(0).scalars()


def test_peak_and_memory_are_of_this_machine() -> None:
    assert 1e8 < measure_peak(torch.device("cpu")) < 1e14
    held = torch.ones(4_000_000)
    assert held.numel() * 4 < peak_memory(torch.device("cpu")) < 2**40


def test_the_line_says_it_all() -> None:
    assert describe(metrics(119, loss=3.4123), 600, 185) == (
        "step 120/600  loss 3.412  1.500 bpb  8,214 tok/s  imbalance 0.50  3:05 left"
    )
    assert describe(metrics(0, skipped=2, **layer_loads({})), 9, 3661.2).endswith("tok/s  2 skipped  1:01:01 left")


def test_a_file_gets_few_plain_lines_and_a_terminal_gets_a_bar() -> None:
    plain, fancy = io.StringIO(), io.StringIO()
    for stream, console in ((plain, Console(file=plain)), (fancy, Console(file=fancy, force_terminal=True, width=120))):
        with ProgressLine(50, console=console, every=1000.0) as line:
            for step in range(50):
                line.update(metrics(step))
            line.say("[skipped] one")
        assert "[skipped] one" in stream.getvalue()
    lines = plain.getvalue().splitlines()
    assert [text.split("  ")[0] for text in lines] == ["step 1/50", "step 50/50", "[skipped] one"]
    assert "\x1b[" not in plain.getvalue() and "━" in fancy.getvalue() and "100%" in fancy.getvalue()
