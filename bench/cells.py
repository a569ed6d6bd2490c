"""Finished cells of an experiment in one JSON file, so that a run stopped anywhere goes on where it was."""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Cells:
    """A mapping from a cell's name to its result, on disk after each cell; `setting` is what all of them share.

    A file of another setting ends the program with a sentence, since its cells are no answers to this question.
    """

    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        kept = json.loads(path.read_text()) if path.exists() else {"setting": setting, "cells": {}}
        if kept["setting"] != setting:
            raise SystemExit(f"{path} holds cells of another setting, {kept['setting']}: name another file.")
        self.path, self.setting, self.done = path, setting, kept["cells"]

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The kept result of `name`, or a new one, kept at once."""
        if name not in self.done:
            self._keep(name, compute())
        return self.done[name]

    def fill(self, wanted: Mapping[str, tuple[Any, ...]], compute: Callable[..., Any], jobs: int, threads: int) -> None:
        """Computes the cells that are missing, `compute(*arguments)` each, in `jobs` fresh processes of `threads`
        threads; what a cell prints goes to NAME.log beside the file. A cell that fails is named and left out."""
        missing = {name: arguments for name, arguments in wanted.items() if name not in self.done}
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read once, when a process starts
        began, spawn = time.perf_counter(), multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs, spawn) as pool:
            logs = {name: self.path.with_name(name.replace("/", "-") + ".log") for name in missing}
            futures = {pool.submit(_logged, logs[name], compute, missing[name]): name for name in missing}
            for done in concurrent.futures.as_completed(futures):
                name = futures[done]
                if error := done.exception():
                    print(f"{name} failed, see {logs[name]}: {error}", flush=True)
                    continue
                self._keep(name, done.result())
                print(f"[{time.perf_counter() - began:4.0f} s] {name}", flush=True)

    def _keep(self, name: str, result: Any) -> None:
        self.done[name] = json.loads(json.dumps(result))  # as a resumed run reads it
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps({"setting": self.setting, "cells": self.done}, indent=1) + "\n")
        draft.replace(self.path)


def _logged(log: Path, compute: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    sys.path[:0] = [str(Path(__file__).parent)]
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return compute(*arguments)
