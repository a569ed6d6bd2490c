"""Two GPUs: the symmetric fabric against NCCL. One world of processes runs all checks."""

import pytest
import torch
from parallel.world import outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices that reach each other"),
]


@pytest.mark.parametrize(
    "check",
    [
        "check_planner_kernel",
        "check_symmetric_equals_nccl_bit_for_bit",
        "check_near_the_equation",
        "check_thousand_layers_in_a_row",
        "check_a_missing_rank_is_named",
    ],
)
def test_two_gpus(check: str) -> None:
    outcome(2, "gpu_world", check, "nccl")
