"""Where the golden vectors lie: `PERILUNE_GOLDEN`, or `shared/golden/open` beside the checkout."""

import os
from pathlib import Path

import pytest


def _beside_checkout() -> Path:
    """The folder that holds the checkout (the main one, where this is a linked worktree)."""
    here = Path(__file__).resolve().parents[1]
    link = here / ".git"
    if link.is_file():  # "gitdir: MAIN/.git/worktrees/NAME"
        here = Path(link.read_text().split(":", 1)[1].strip()).parents[2]
    return here.parent


ROOT = Path(os.environ.get("PERILUNE_GOLDEN", _beside_checkout() / "shared" / "golden" / "open"))


def golden(family: str) -> Path:
    """The directory of one vector family; skips the test, saying why, where it is absent."""
    path = ROOT / family
    if not path.is_dir():
        pytest.skip(f"golden vectors not found at {path} (set PERILUNE_GOLDEN)")
    return path
