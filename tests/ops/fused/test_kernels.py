"""The fused siblings without a GPU: in Triton's interpreter against fp64, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from ops.fused.compile_kernels import ALL as NAMES

HERE = Path(__file__).resolve().parent


def script(name: str, *arguments: str, interpret: bool) -> str:
    env = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parents[2]}", "OMP_NUM_THREADS": "1"}
    env["TRITON_INTERPRET"] = "1" if interpret else "0"
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments], env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout.strip()


def test_against_fp64_in_the_interpreter() -> None:
    lines = script("cases.py", *NAMES, interpret=True).splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert max(float(line.split()[1]) for line in lines) < 1e-5, lines


def test_attention_never_rounds_its_output() -> None:
    assert float(script("cases.py", "kept", interpret=True).split()[1]) < 1e-6


@pytest.mark.slow
def test_a_model_trains_alike_in_the_interpreter() -> None:
    assert float(script("cases.py", "model", interpret=True).split()[1]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_hopper(name: str) -> None:
    print(script("compile_kernels.py", name, interpret=False))
