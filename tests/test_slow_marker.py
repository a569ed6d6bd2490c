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

def load(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("triton", "ray"):  # these come with the extras `gpu` and `ray`
            raise

part = load("perilune." + sys.argv[1])
for module in pkgutil.walk_packages(getattr(part, "__path__", []), "perilune." + sys.argv[1] + "."):
    load(module.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_imports_alone(part: str) -> None:
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", SCRIPT, part]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
