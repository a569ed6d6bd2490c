"""Several processes joined by gloo, spawned once for many checks.

`world.py SIZE MODULE OUT` starts SIZE processes of itself; each runs every `check_*` of MODULE in order with its
Collective fabric and rank 0 writes {check: "ok" or the error} to OUT. Everything is bounded: a rank that fails or hangs
ends the world.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 420.0  # seconds for a whole world
SHARED_GPU = "gloo-shared-gpu"  # all processes on one GPU, which they use in turn; collectives over gloo


@cache
def results(size: int, module: str, backend: str = "gloo") -> dict[str, str]:
    """Outcome of every check of `parallel.MODULE` in a world of `size` processes (run once a session)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        env = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
        env |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
        env |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if backend == SHARED_GPU else {}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(size), module, folder, backend],
                env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            logs = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            return {"world": f"{size} processes took more than {LIMIT:.0f} s"}
        finally:
            for rank in ranks:
                rank.kill()
        if not out.is_file():
            return {"world": "\n".join(f"rank {r}: {log[-1500:]}" for r, log in enumerate(logs))}
        return json.loads(out.read_text())


def checks(module: str) -> list[str]:
    return [name for name in vars(importlib.import_module(f"parallel.{module}")) if name.startswith("check_")]


def outcome(size: int, module: str, check: str, backend: str = "gloo") -> None:
    """Raise unless the check passed on every rank."""
    found = results(size, module, backend)
    assert found.get(check) == "ok", found.get(check) or found.get("world")


def main(rank: int, size: int, module: str, folder: Path, backend: str) -> None:
    import torch
    import torch.distributed as dist

    from perilune.parallel.fabric import Collective

    if backend in ("nccl", SHARED_GPU):
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend.split("-")[0],
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    fabric = Collective(debug=backend == "gloo")
    found = {}
    for name in checks(module):
        try:
            getattr(importlib.import_module(f"parallel.{module}"), name)(fabric)
            mine = "ok"
        except Exception:
            mine = f"rank {rank}: {traceback.format_exc(limit=-3)}"
        said: list = [None] * size
        dist.all_gather_object(said, mine)
        found[name] = next((s for s in said if s != "ok"), "ok")
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
