"""Finished cells of an experiment in one JSON file, so that a run stopped anywhere goes on where it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Cells:
    """A mapping from a cell's name to its result, on disk after each cell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The kept result of `name`, or a new one, kept at once."""
        if name not in self.done:
            self.done[name] = compute()
            draft = self.path.with_suffix(".part")
            draft.write_text(json.dumps(self.done, indent=1) + "\n")
            draft.replace(self.path)
        return self.done[name]
