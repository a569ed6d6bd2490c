"""Hours in small: clients of every kind against one server process, many of which leave or are killed in mid-answer.

Afterwards nothing is left of them: no request, no page, no growth; and the server answers as before.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.live import client, soon, toy_model, toy_tokenizer

from perilune.model.weights import save

# A client that reads nothing and waits to be killed: a bare socket, so that it starts at once.
VICTIM = """
import socket, sys, time
talk = socket.create_connection((sys.argv[1], int(sys.argv[2])))
talk.sendall(sys.stdin.buffer.read())
talk.recv(1)
print("begun", flush=True)
time.sleep(3600)
"""
WORDS = "the moon is near and the sea is far, "


@contextlib.contextmanager
def process(where: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    save(toy_model(), where)
    toy_tokenizer().save(where)
    command = [sys.executable, "-m", "perilune", "serve", str(where), "--port", "0", "--name", "toy"]
    sizes = ["--max-batch", "8", "--max-waiting", "24", "--pool-tokens", "8192", "--block-tokens", "32"]
    with subprocess.Popen([*command, *sizes], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        with client(server.stderr.readline().split()[-1]) as http:
            yield server, http
        server.terminate()
        assert server.wait(60) == 0


def body(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Some request: short or long, chat or text, streamed or not, one choice or three, shared or own prefix."""
    words = WORDS * dice.choice([1, 4, 30])
    ask: dict[str, Any] = {"max_tokens": dice.choice([1, 8, 40]), "n": dice.choice([1, 1, 3])}
    ask["stream"] = dice.random() < 0.5
    if dice.random() < 0.5:
        return "/v1/completions", {**ask, "prompt": words + str(dice.random()), "ignore_eos": True}
    messages = [{"role": "system", "content": words}, {"role": "user", "content": str(dice.random())}]
    return "/v1/chat/completions", {**ask, "messages": messages, "thinking": dice.random() < 0.5}


async def guest(url: str, end: float, dice: random.Random, tally: dict[str, int]) -> None:
    """One client after another, a third of which hang up early."""
    while time.monotonic() < end:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as talk:
            path, ask = body(dice)
            patience = dice.uniform(0.01, 0.5) if dice.random() < 0.33 else 120
            try:
                async with asyncio.timeout(patience):
                    response = await talk.post(path, json=ask)
                tally[str(response.status_code)] = tally.get(str(response.status_code), 0) + 1
            except TimeoutError:
                tally["left"] = tally.get("left", 0) + 1


async def killer(url: str, end: float, dice: random.Random, tally: dict[str, int]) -> None:
    """Clients killed with SIGKILL in the middle of a stream."""
    host, port = url.removeprefix("http://").split(":")
    while time.monotonic() < end:
        text = json.dumps({"prompt": WORDS, "max_tokens": 2000, "stream": True, "ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        victim = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", VICTIM, host, port, **pipes)
        assert victim.stdin is not None and victim.stdout is not None
        victim.stdin.write(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
        victim.stdin.close()
        await victim.stdout.readline()
        await asyncio.sleep(dice.uniform(0, 0.3))
        victim.send_signal(signal.SIGKILL)
        await victim.wait()
        tally["killed"] = tally.get("killed", 0) + 1


def resident(pid: int) -> float:
    """MB of memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def soak(where: Path, seconds: float) -> None:
    async def load(url: str) -> dict[str, int]:
        tally: dict[str, int] = {}
        end = time.monotonic() + seconds
        guests = [guest(url, end, random.Random(n), tally) for n in range(16)]
        await asyncio.gather(*guests, killer(url, end, random.Random(99), tally))
        return tally

    with process(where) as (server, http):
        url = str(http.base_url).rstrip("/")
        greedy = {"prompt": WORDS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        before = http.post("/v1/completions", json=greedy).json()["choices"]
        asyncio.run(load(url))  # the first half fills caches and allocators
        start = resident(server.pid)
        tally = asyncio.run(load(url))
        assert soon(lambda: _idle(http.get("/live").json()), 30), http.get("/live").json()
        assert http.post("/v1/completions", json=greedy).json()["choices"] == before
        print(tally, f"memory {start:.0f} -> {resident(server.pid):.0f} MB", http.get("/live").json())
        assert tally["killed"] > 0 and tally["left"] > 0 and tally["200"] > 0
        assert set(tally) <= {"200", "429", "left", "killed"}
        assert resident(server.pid) < start + 60


def _idle(live: dict[str, Any]) -> bool:
    return live["running"] == live["waiting"] == live["pages_running"] == 0


@pytest.mark.slow
def test_twenty_seconds(tmp_path: Path) -> None:
    soak(tmp_path, 10)


@pytest.mark.soak
def test_ten_minutes(tmp_path: Path) -> None:
    soak(tmp_path, 300)
