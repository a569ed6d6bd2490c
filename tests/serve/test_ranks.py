"""A parallel engine, in two and four processes over gloo; each world is spawned once and runs all its checks."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from parallel.world import checks, outcome
from serve.live import client, serving, toy_model, toy_tokenizer

from perilune.model.weights import save
from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", checks("serve_world"))
def test_two_ranks(check: str) -> None:
    outcome(2, "serve_world", check)


@pytest.mark.parametrize("check", checks("latents_world"))
@pytest.mark.parametrize("size", [2, 4])
def test_latents_shared_out(size: int, check: str) -> None:
    outcome(size, "latents_world", check)


def test_two_processes_serve_one_model(tmp_path: Path) -> None:
    """`perilune serve` under torchrun, latents shared out: clients see one server, which drains as one does."""
    save(toy_model(), tmp_path)
    toy_tokenizer().save(tmp_path)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(_free_port())]
    serve = ["-m", "perilune", "serve", str(tmp_path), "--port", "0", "--name", "toy", "--block-tokens", "32"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    prompt = toy_tokenizer().encode("the moon is near and the sea is far, " * 8)
    ask = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with serving(Engine(toy_model(), EngineOptions(block_tokens=32))) as one:
        want = one.http.post("/v1/completions", json=ask).json()["choices"][0]["token_ids"]
    with subprocess.Popen([*start, *serve, "--shard-latents"], env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = next(line.split()[-1] for line in server.stderr if "serving at" in line)
        with client(address) as http:
            for hits in (False, True):
                answer = http.post("/v1/completions", json=ask).json()
                assert answer["choices"][0]["token_ids"] == want
                assert (answer["usage"]["cached_tokens"] > 0) == hits
            held = {"messages": [{"role": "user", "content": "a city"}], "response_format": CITY, "max_tokens": 80}
            said = http.post("/v1/chat/completions", json=held).json()["choices"][0]["message"]["content"]
            assert isinstance(json.loads(said)["city"], str)
        os.kill(_leader(server.pid), signal.SIGTERM)  # of a signal to itself torchrun makes an error
        assert server.wait(60) == 0


CITY = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _leader(torchrun: int) -> int:
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if b"RANK=0" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError("torchrun has no rank 0")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
