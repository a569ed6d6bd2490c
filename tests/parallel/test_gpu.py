"""The symmetric fabric against collectives on GPUs. One world of processes runs all checks: two GPUs, or where there is
one, two processes that share it, or one process.
"""

import pytest
import torch
from parallel.world import SHARED_GPU, outcome

pytestmark = pytest.mark.gpu
CHECKS = [
    "check_planner_kernel",
    "check_borrowed_products",
    "check_symmetric_equals_collectives_bit_for_bit",
    "check_near_the_equation",
    "check_many_layers_in_a_row",
    "check_a_missing_rank_is_named",
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices that reach each other")
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str) -> None:
    outcome(2, "gpu_world", check, "nccl")


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one CUDA device")
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_on_one_gpu(check: str) -> None:
    outcome(2, "gpu_world", check, SHARED_GPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", CHECKS[:-1])
def test_one_process(check: str) -> None:
    outcome(1, "gpu_world", check, "nccl")
