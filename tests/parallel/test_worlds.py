"""Everything that needs real processes: each world is spawned once and runs all its checks."""

import os
import socket
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # what torchrun would set
    ranks = [
        subprocess.Popen([sys.executable, str(program)], env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert all("torch.Size([16, 64])" in words for words in said)
