"""A rank dies: the job says which, ends in time, and torchrun starts it again where it was."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
RECIPE = """
name = "fault"
stages = ["tokenizer", "pretrain"]
[model]
preset = "tiny"
hidden_size = 32
num_hidden_layers = 2
[data]
sources = ["{corpus}"]
vocab_size = 300
held_out = 1
[train]
steps = {steps}
context = 32
batch_tokens = 128
eval_every = 1000
checkpoint_every = 2
peak_flops = 1e11
device = "cpu"
[mesh]
patience = 8.0
"""


def recipe(folder: Path, steps: int) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir()
    for name in ("bisect", "cmd", "codeop", "colorsys", "keyword"):
        (corpus / f"{name}.py").write_text((Path(os.__file__).parent / f"{name}.py").read_text())
    path = folder / "fault.toml"
    path.write_text(RECIPE.format(corpus=corpus, steps=steps))
    return path


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def steps_done(out: Path) -> list[int]:
    path = out / "pretrain" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for(condition, limit: float, what: str) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {limit} s"
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_is_named(tmp_path: Path, how: signal.Signals) -> None:
    """No agent: two processes with torchrun's variables, as on two machines. The survivor ends within 30 s."""
    path, out = recipe(tmp_path, 100000), tmp_path / "run"
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
    program = [sys.executable, "-m", "perilune", "run", str(path), "--out", str(out)]
    ranks = [
        subprocess.Popen(
            program, env=environment(**shared, RANK=str(r), LOCAL_RANK=str(r)), cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for r in range(2)
    ]  # fmt: skip
    try:
        wait_for(lambda: len(steps_done(out)) >= 3 or ranks[0].poll() is not None, 120, "training starts")
        ranks[1].send_signal(how)
        began = time.monotonic()
        _, said = ranks[0].communicate(timeout=60)
        assert time.monotonic() - began < 30
    finally:
        end(*ranks)
    assert ranks[0].returncode not in (0, None)
    host = re.escape(socket.gethostname())
    assert re.search(rf"rank 0 stops: rank 1 on {host} showed no sign of life for 8 s", said), said[-2000:]


def test_torchrun_starts_it_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    path, out = recipe(tmp_path, 14), tmp_path / "run"
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    program += ["--local-addr", "127.0.0.1", "--master-port", port()]
    job = subprocess.Popen(
        [*program, "-m", "perilune", "run", str(path), "--out", str(out)],
        env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: len(steps_done(out)) >= 5 or job.poll() is not None, 150, "training starts")
        workers = {rank_of(pid): pid for pid in children(job.pid)}
        os.kill(workers["1"], signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{workers['0']}").exists(), 30, "the other rank ends")
        _, said = job.communicate(timeout=200)
    finally:
        end(job)
    assert job.returncode == 0, said[-6000:]
    assert re.search(r"exitcode: -9\) local_rank: 1", said), said[-3000:]
    assert steps_done(out) == list(range(14))  # no step twice, none missing
    assert (out / "pretrain" / "weights" / "config.json").is_file()


def end(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def rank_of(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v[5:].decode() for v in variables if v.startswith(b"RANK=")), "")
