"""Slow tests live beside the others under the marker `slow`; this one imports each part of the house in an interpreter
of its own, so that none leans on what another has imported."""

import pkgutil
import subprocess
import sys

import pytest

import perilune

PARTS = sorted(m.name for m in pkgutil.iter_modules(perilune.__path__) if m.name != "__main__")
SCRIPT = """
import importlib, pkgutil, sys
part = importlib.import_module("perilune." + sys.argv[1])
for module in pkgutil.walk_packages(getattr(part, "__path__", []), part.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # the kernels come with the extra `gpu`
            raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_imports_alone(part: str) -> None:
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", SCRIPT, part]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
