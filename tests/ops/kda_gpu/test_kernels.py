"""The fused KDA kernels without a GPU: in Triton's interpreter against fp64, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
HERE = Path(__file__).resolve().parent


def script(name: str, *arguments: str, interpret: bool) -> str:
    """Run a script beside this file in its own interpreter; its output, or the end of its error as a failure."""
    env = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parents[2]}", "OMP_NUM_THREADS": "1"}
    env["TRITON_INTERPRET"] = "1" if interpret else "0"
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments], env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["packed", "steps"])
def test_against_fp64_in_the_interpreter(name: str) -> None:
    assert float(script("interpreted.py", name, interpret=True).split()[1]) < 2e-5


@pytest.mark.parametrize("name", ["packed", "tokens"])
def test_gluon_kernels_against_fp64(name: str) -> None:
    assert float(script("emulated.py", name, interpret=True).split()[1]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bounded", "wide", "steps"])
def test_more_gluon_kernels_against_fp64(name: str) -> None:
    assert float(script("emulated.py", name, interpret=True).split()[1]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bounded", "softplus", "segments", "panels", "batch", "by_head", "operator"])
def test_more_against_fp64_in_the_interpreter(name: str) -> None:
    # dA_log of fast gates is a sum of large terms that cancel: 5e-5 in fp32.
    assert float(script("interpreted.py", name, interpret=True).split()[1]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepare", "chain", "backward", "decode"])
def test_compiles_for_hopper(name: str) -> None:
    print(script("compile_kernels.py", name, interpret=False))
