"""Everything that needs real processes: each world is spawned once and runs all its checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.world import TESTS, checks, outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", checks("exchange_world"))
@pytest.mark.parametrize("size", [2, 4])
def test_exchange(size: int, check: str) -> None:
    outcome(size, "exchange_world", check)


@pytest.mark.parametrize("check", checks("scan_world"))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_scan(size: int, check: str) -> None:
    outcome(size, "scan_world", check)


def test_the_how_to_runs(tmp_path: Path) -> None:
    """The program in docs/parallel.md, as it stands there, on two processes."""
    page = (TESTS.parent / "docs" / "parallel.md").read_text()
    program = tmp_path / "moe.py"
    program.write_text(page.split("```python\n")[1].split("```")[0])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("torch.Size([16, 64])") == 2
