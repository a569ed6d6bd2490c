"""GPUs: every two-rank mesh trains a small K3 in bf16 to the losses of plain data parallelism, and a mesh of one GPU to
those of the trainer without a mesh.
"""

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
ALONE: dict[str, dict[str, Any]] = {  # "exchange": the layers' experts behind an exchange of one rank
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "recompute-offload": {"activations": dict.fromkeys(("kda", "mla", "mlp", "moe"), "recompute+offload")},
    "fp8": {"zero": 3, "activations": {"kda": "offload", "mla": "fp8+offload", "mlp": "recompute+fp8", "moe": "fp8"}},
    "collective": {"exchange": "collective"},
    "symmetric": {"exchange": "symmetric", "zero": 3},
}
pytestmark = pytest.mark.gpu


@cache
def losses(size: int) -> dict[str, list[float]]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), __file__]
    said = subprocess.run(program, env=env, capture_output=True, text=True, timeout=400)
    found = [json.loads(line) for line in said.stdout.splitlines() if line.startswith('{"')]
    assert len(found) == len(shapes(size)), said.stderr[-3000:]
    return {one["shape"]: one["losses"] for one in found}


def shapes(size: int) -> dict[str, dict[str, Any]]:
    return SHAPES if size == 2 else {"without a mesh": {}, **ALONE}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices that reach each other")
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "dp"])
def test_shape(shape: str) -> None:
    for got, want in zip(losses(2)[shape], losses(2)["dp"], strict=True):
        assert abs(got - want) < 5e-3 * want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", ALONE)
def test_one_gpu(shape: str) -> None:
    for got, want in zip(losses(1)[shape], losses(1)["without a mesh"], strict=True):
        assert abs(got - want) < 5e-3 * want


def main() -> None:
    import torch.distributed as dist
    from train.mesh.world import data, force

    from perilune.config import preset, three_to_one
    from perilune.train.loop import Trainer
    from perilune.train.mesh.config import MeshConfig
    from perilune.train.mesh.routed import make_exchange, spread_experts
    from perilune.train.mesh.trainer import MeshTrainer, local_device
    from perilune.train.options import TrainConfig

    model = preset("mini").replace(num_hidden_layers=5, mla_layers=three_to_one(5), num_experts=32, vocab_size=4096)
    options = TrainConfig(
        steps=3, context=1024, batch_tokens=16384, micro_tokens=8192, lr=0.005, logit_every=1, peak_flops=1e15
    )
    local_device("auto")
    dist.init_process_group("cpu:gloo,cuda:nccl")

    def made(shape: dict[str, Any]) -> Trainer:
        if not shape and dist.get_world_size() == 1:
            trainer = Trainer(model, options, data(), Path(), {})
            force(trainer)
            return trainer
        exchange = shape.pop("exchange", None)
        mesh = MeshConfig(forced_routing=True, fabric=exchange or shape.pop("fabric", "collective"), **shape)
        on_mesh = MeshTrainer(model, options, data(), Path(), {}, mesh)
        if exchange:
            tokens = options.rows * options.context
            carried = make_exchange(on_mesh.mesh, model.num_experts, model.num_experts_per_token, tokens)
            for layer in on_mesh.part.layers:
                if hasattr(layer, "block_sparse_moe"):
                    spread_experts(layer.block_sparse_moe.experts, carried)
        return on_mesh

    wanted = {name: one for name, one in shapes(dist.get_world_size()).items() if name in (sys.argv[1:] or [name])}
    for name, shape in wanted.items():
        trainer = made(dict(shape))
        seen = [trainer.train_step() for _ in range(options.steps)]
        if dist.get_rank() == 0:
            found = {"shape": name, "losses": [s.loss for s in seen], "tokens/s": seen[-1].tokens_per_second}
            print(json.dumps(found), flush=True)
        del trainer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
