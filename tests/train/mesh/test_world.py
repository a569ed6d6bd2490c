"""Every mesh shape in one world of eight processes: losses, gradients, weights and loads are those of one process."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from train.mesh.world import CASES

pytestmark = pytest.mark.slow
TESTS = Path(__file__).resolve().parents[2]


@cache
def outcomes() -> dict[str, str]:
    """What became of each case: "ok", or under "world" what ended it."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
        program = [sys.executable, str(TESTS / "train" / "mesh" / "world.py"), folder]
        said = subprocess.run(program, env=env, capture_output=True, text=True)
        path = Path(folder) / "outcome.json"
        return json.loads(path.read_text()) if path.exists() else {"world": said.stderr[-3000:]}


@pytest.mark.parametrize("case", [*CASES, "resharding"])
def test_mesh(case: str) -> None:
    assert outcomes().get(case) == "ok", outcomes().get(case) or outcomes().get("world")
