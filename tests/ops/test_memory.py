"""The heap keeps what is freed: a step's tensors cost page faults once, not every step."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from perilune.ops.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    kept, x = [], torch.ones(500_000)
    for _ in range(20):
        x = (x * 2 + 1).sigmoid_()
        kept.append(x)
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_steps_stop_faulting() -> None:
    faults = [
        int(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("plain", "keep")
    ]
    if faults[0] < 20_000:  # ten steps of forty megabytes
        pytest.skip(f"this machine's allocator keeps freed memory anyway ({faults[0]} faults)")
    assert faults[1] < faults[0] / 5
