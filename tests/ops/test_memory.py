"""The heap keeps what is freed: a second large allocation costs no page faults."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from perilune.ops.memory import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = torch.zeros(4_000_000); del x
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_no_faults_the_second_time() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400  # 16 MB are 3,900 pages
