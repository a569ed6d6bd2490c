"""Two GPUs: every two-rank mesh trains a small K3 in bf16 to the losses of plain data parallelism."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SHAPES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "ep": {"dp": 2, "ep": 2},
    "ep-symmetric": {"dp": 2, "ep": 2, "fabric": "symmetric"},
    "tp": {"tp": 2, "ep": 2},
    "cp": {"cp": 2, "ep": 2},
    "pp": {"pp": 2},
    "zero3-policies": {"dp": 2, "ep": 2, "zero": 3, "activations": {"kda": "recompute", "mla": "fp8+offload"}},
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices that reach each other"),
]


@cache
def losses() -> dict[str, list[float]]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    said = subprocess.run(program, env=env, capture_output=True, text=True, timeout=400)
    found = [json.loads(line) for line in said.stdout.splitlines() if line.startswith('{"')]
    assert len(found) == len(SHAPES), said.stderr[-3000:]
    return {one["shape"]: one["losses"] for one in found}


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "dp"])
def test_shape(shape: str) -> None:
    for got, want in zip(losses()[shape], losses()["dp"], strict=True):
        assert abs(got - want) < 5e-3 * want


def main() -> None:
    import torch.distributed as dist
    from train.mesh.world import data

    from perilune.config import preset, three_to_one
    from perilune.train.mesh.config import MeshConfig
    from perilune.train.mesh.trainer import MeshTrainer, local_device
    from perilune.train.options import TrainConfig

    model = preset("mini").replace(num_hidden_layers=5, mla_layers=three_to_one(5), num_experts=32, vocab_size=4096)
    options = TrainConfig(
        steps=3, context=1024, batch_tokens=16384, micro_tokens=8192, lr=0.005, logit_every=1, peak_flops=1e15
    )
    local_device("auto")
    dist.init_process_group("cpu:gloo,cuda:nccl")
    for name, shape in SHAPES.items():
        trainer = MeshTrainer(model, options, data(), Path(), {}, MeshConfig(forced_routing=True, **shape))
        seen = [trainer.train_step().loss for _ in range(options.steps)]
        if dist.get_rank() == 0:
            print(json.dumps({"shape": name, "losses": seen}), flush=True)
        del trainer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
