"""The recall tasks ask what they say, and their layers differ in what they should."""

import argparse
import importlib
import math
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from perilune.ops.cross_entropy import IGNORE


@pytest.fixture
def recall(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend("bench")
    return importlib.import_module("recall")


def test_palindrome_scores_the_reversed_copy(recall: ModuleType) -> None:
    s = recall.SETTINGS["small"]
    tokens, scored = recall.palindrome(np.random.default_rng(0), 5, s)
    half = s.length // 2
    assert tokens.shape == (5, s.length + 1) and (tokens[:, half] == s.symbols).all()
    assert (tokens[:, half + 1 :] == tokens[:, :half][:, ::-1]).all() and scored.sum() == 5 * half
    assert scored[:, half + 1 :].all()


def test_mqar_asks_every_key_once_and_scores_the_value_bound_to_it(recall: ModuleType) -> None:
    tokens, scored = recall.mqar(np.random.default_rng(0), 5, recall.SETTINGS["small"])
    pairs = recall.SETTINGS["small"].length // 4
    for row, score in zip(tokens.tolist(), scored):
        bound = dict(zip(row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]))
        asked = dict(zip(row[2 * pairs + 1 :: 2], row[2 * pairs + 2 :: 2]))
        assert len(bound) == pairs and asked == bound
        assert np.flatnonzero(score).tolist() == list(range(2 * pairs + 2, len(row), 2))


def test_stack_pops_what_was_pushed_last_and_scores_pops_only(recall: ModuleType) -> None:
    s = recall.SETTINGS["small"]
    tokens, scored = recall.stack(np.random.default_rng(0), 20, s)
    pops = 0
    for row, score in zip(tokens.tolist(), scored):
        stacks: dict[int, list[int]] = defaultdict(list)
        for at in range(0, len(row), 3):
            move, which, value = row[at : at + 3]
            pop = move == s.symbols + s.stacks + 1
            assert pop or move == s.symbols + s.stacks
            if pop:
                assert stacks[which].pop() == value
                pops += 1
            else:
                stacks[which].append(value)
            assert score[at : at + 3].tolist() == [False, False, pop]
    assert pops > 20


def test_targets_are_the_next_scored_token(recall: ModuleType) -> None:
    s = recall.SETTINGS["small"]
    x, y = next(recall.batches("mqar", s, 3, torch.device("cpu")))
    x, y = x.view(s.batch, -1), y.view(s.batch, -1)
    assert x.shape == (s.batch, s.length)
    inside = y[:, :-1] != IGNORE
    assert inside.any() and (y[:, :-1][inside] == x[:, 1:][inside]).all()


def test_unlearned_layers_guess_and_a_resumed_table_reads_its_cells(recall: ModuleType) -> None:
    """A rate of zero leaves accuracy at chance; the peak of the better rate is what the table shows."""
    s = recall.Setting(32, 32, 16, 16, 4, 8, 2, 1, (0.0,))
    args = argparse.Namespace(device="cpu", bf16=False, bound=None, threads=1, limit=1e9)
    cell = recall.train("palindrome", "gdn", 0.0, 0, s, args)
    assert set(cell["accuracy"]) == {1, 2} and max(cell["accuracy"].values()) < 40
    fake = {"accuracy": {"1": 10.0, "2": 80.0}, "steps": 2}, {"accuracy": {"1": 90.0, "2": 70.0}, "steps": 2}
    s = recall.Setting(32, 32, 16, 16, 4, 8, 2, 1, (1e-3, 2e-3))
    rows = recall.table({"mqar/kda/0.001/0": fake[0], "mqar/kda/0.002/0": fake[1]}, ["mqar"], ["kda"], s, 1)
    assert "| mqar | kda | 0.002 | 90.0 | 90.0 | 70.0 | 100 / 100 / 100 |" in rows


def test_the_layers_differ_in_decay_and_delta_only(recall: ModuleType) -> None:
    s = recall.SETTINGS["small"]
    kda, gdn, mamba2 = (recall.config(layer, s, None) for layer in ("kda", "gdn", "mamba2"))
    assert gdn == kda.replace(kda_decay="head") and mamba2 == gdn.replace(kda_delta=False)


def test_cells_are_computed_once_and_only_for_one_setting(recall: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    assert recall.Cells(path, {"steps": 2}).get("a", lambda: [1.5]) == [1.5]
    assert recall.Cells(path, {"steps": 2}).get("a", lambda: pytest.fail("computed twice")) == [1.5]
    with pytest.raises(SystemExit, match=r"cells\.json holds cells of another setting"):
        recall.Cells(path, {"steps": 3})


def test_cells_in_processes_keep_what_ends_and_name_what_fails(recall: ModuleType, tmp_path: Path, capsys) -> None:
    """math.sqrt stands for a cell: of 9 it ends, of -1 it fails, and a kept cell is not computed again."""
    cells = recall.Cells(tmp_path / "cells.json", {})
    cells.get("kept/0", lambda: 5.0)
    cells.fill({"a/0": (9.0,), "b/0": (-1.0,), "kept/0": (-1.0,)}, math.sqrt, jobs=2, threads=1)
    assert recall.Cells(tmp_path / "cells.json", {}).done == {"kept/0": 5.0, "a/0": 3.0}
    assert "b/0 failed" in capsys.readouterr().out


def test_a_cell_stops_at_its_limit_with_what_it_has(recall: ModuleType) -> None:
    s = recall.Setting(8, 16, 16, 8, 4, 2, 1000, 1000, (0.0,))
    args = argparse.Namespace(device="cpu", bf16=False, bound=None, threads=1, limit=0.0)
    cell = recall.train("palindrome", "kda", 0.0, 0, s, args)
    assert set(cell["accuracy"]) == {20} and cell["steps"] == 20
    assert recall.at(cell, 10) == recall.at(cell, 900) == recall.peak(cell)
