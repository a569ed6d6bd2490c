"""The planner kernel against the reference, bit for bit, in Triton's interpreter; and that it compiles for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
TESTS = Path(__file__).resolve().parents[1]


def script(name: str, *arguments: str, interpret: bool) -> str:
    """Run a script of this directory in its own interpreter; its output, or the end of its error as a failure."""
    env = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    env["TRITON_INTERPRET"] = "1" if interpret else "0"
    done = subprocess.run(
        [sys.executable, str(TESTS / "parallel" / name), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_equal_bit_for_bit_to_the_reference() -> None:
    assert script("planner_kernel_cases.py", "0", "5", interpret=True) == "equal 5"


@pytest.mark.slow
def test_equal_bit_for_bit_on_many() -> None:
    assert script("planner_kernel_cases.py", "100", "400", interpret=True) == "equal 300"


@pytest.mark.slow
def test_compiles_for_hopper() -> None:
    assert script("compile_hopper.py", "planner", interpret=False).startswith("planner ")
