"""Finished cells of an experiment in one JSON file, so that a run stopped anywhere goes on where it was."""

import json
from collections.abc import Callable
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
            self.done[name] = compute()
            draft = self.path.with_suffix(".part")
            draft.write_text(json.dumps({"setting": self.setting, "cells": self.done}, indent=1) + "\n")
            draft.replace(self.path)
        return self.done[name]
