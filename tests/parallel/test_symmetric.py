"""The symmetric fabric: its kernels in Triton's interpreter, on threads that share memory; on GPUs, the same over
NVLink.
"""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from parallel.test_planner_triton import script

from perilune.parallel.fabric import FabricError
from perilune.parallel.symmetric import Symmetric


def test_near_the_equation() -> None:
    assert script("symmetric_cases.py", "check_near_the_equation", interpret=True) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["check_layer", "check_half_precision", "check_many_blocks", "check_two_layers", "check_barriers"]
)
def test_equals_the_collectives_bit_for_bit(check: str) -> None:
    assert script("symmetric_cases.py", check, interpret=True) == "ok"


@pytest.mark.slow
def test_compiles_for_hopper() -> None:
    assert script("compile_hopper.py", "symmetric", interpret=False).count("symmetric ") == 12


def test_a_late_rank_is_named() -> None:
    """What the device leaves behind when a barrier gives up becomes one sentence."""
    fabric = Symmetric.__new__(Symmetric)
    fabric.rank, fabric._status = 0, torch.tensor([2, 1, 17])
    with pytest.raises(FabricError, match=r"^rank 0: rank 1 did not reach combine \(barrier 17\)$"):
        fabric.check()
