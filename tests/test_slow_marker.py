"""Slow tests live beside the others under the marker `slow`; this one imports every module of a fresh interpreter."""

import pkgutil
import subprocess
import sys

import pytest

import perilune


@pytest.mark.slow
def test_every_module_imports_alone() -> None:
    names = [m.name for m in pkgutil.walk_packages(perilune.__path__, "perilune.") if not m.name.endswith("__main__")]
    assert "perilune.cli" in names
    for name in names:
        done = subprocess.run(
            [sys.executable, "-W", "error::SyntaxWarning", "-c", f"import {name}"], capture_output=True
        )
        assert done.returncode == 0, f"{name}: {done.stderr.decode()[-500:]}"
