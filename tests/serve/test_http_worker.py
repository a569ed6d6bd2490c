"""The engine's thread and the clients' comings and goings: nobody who left is worked for, nobody waits for ever."""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from serve.live import Live, Scripted, serving, soon, toy_model, toy_tokenizer

from perilune.model.weights import save
from perilune.serve.engine import Engine
from perilune.serve.request import Request, Sampling
from perilune.serve.worker import Stream, Unavailable, Worker

ENDLESS = {"prompt": "x", "max_tokens": 100_000}


def endless() -> Scripted:
    return Scripted(lambda _: [70] * 100_000, seconds=0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_hangs_up_frees_its_requests(stream: bool, choices: int) -> None:
    engine = endless()
    with serving(engine, context=200_000) as live:
        host, port = live.url.removeprefix("http://").split(":")
        body = json.dumps({**ENDLESS, "stream": stream, "n": choices}).encode()
        with socket.create_connection((host, int(port))) as talk:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            talk.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            assert soon(lambda: len(engine.seen) == choices)
        assert soon(lambda: not engine.busy)
        assert len(engine.cancelled) == choices and not live.worker.streams
        assert live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200


def test_clients_that_come_and_go_leave_a_real_engine_idle() -> None:
    engine = Engine(toy_model())

    async def visit(live: Live, patience: float) -> None:
        async with httpx.AsyncClient(timeout=patience) as talk:
            with contextlib.suppress(httpx.TimeoutException):
                body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
                await talk.post(live.url + "/v1/completions", json=body)

    async def crowd(live: Live) -> None:
        await asyncio.gather(*(visit(live, 0.02 + n / 50) for n in range(12)))

    with serving(engine) as live:
        asyncio.run(crowd(live))
        assert soon(lambda: not engine.busy)
        assert engine.stats().running == engine.stats().waiting == 0


def test_a_client_that_leaves_while_its_request_is_admitted() -> None:
    """The admission is under way in the engine's thread when its waiter goes: the cancellation comes after it."""
    engine, gate = endless(), threading.Event()
    submit = engine.submit

    def slow(request: Request) -> None:
        gate.wait(5)
        submit(request)

    engine.submit = slow  # type: ignore[method-assign]

    async def story() -> None:
        worker = Worker(engine)
        worker.start()

        async def ask() -> None:
            async with Stream(worker) as stream:
                await stream.add(Request("a", (1,), Sampling(max_tokens=9)))

        task = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.set()
        await worker.call(lambda: None)
        assert not engine.busy and engine.cancelled == ["a"]
        worker.draining = True
        with pytest.raises(Unavailable):
            await Stream(worker).add(Request("b", (1,)))
        await asyncio.to_thread(worker.stop)

    asyncio.run(story())


def test_the_log_names_the_request_and_not_what_it_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perilune.serve")
    with serving(Scripted(lambda _: [70])) as live:
        body = {"prompt": "secret moon", "max_tokens": 1, "prompt_cache_key": "agent-7"}
        live.http.post("/v1/completions", json=body, headers={"x-request-id": "mine-7"})
    (line,) = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert line.startswith("mine-7 POST /v1/completions 200 ") and "session='agent-7'" in line
    assert "moon" not in line


def test_metrics_tell_latencies_and_the_engine() -> None:
    with serving(Scripted(lambda _: [70] * 9)) as live:
        live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, "n": 2})
        live.http.post("/v1/completions", json={"prompt": "x", "temperature": 9})
        text = live.http.get("/metrics").text
    for line in (
        'perilune_requests_total{path="/v1/completions",status="200"} 1.0',
        'perilune_requests_total{path="/v1/completions",status="400"} 1.0',
        'perilune_finished_total{reason="length"} 2.0',
        "perilune_ttft_seconds_count 2.0",
        "perilune_tpot_seconds_count 2.0",
        "perilune_running 0.0",
        "perilune_match_tokens 0.0",
        'perilune_hit_tokens_total{tier="offload"} 0.0',
        'perilune_pool_pages{use="free"} 0.0',
    ):
        assert line in text.splitlines(), line


@pytest.mark.slow
def test_sigterm_lets_a_running_answer_finish(tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.mktemp("toy")
    save(toy_model(), where)
    toy_tokenizer().save(where)
    command = [sys.executable, "-m", "perilune", "serve", str(where), "--port", "0", "--name", "toy"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = server.stderr.readline().split()[-1]
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.terminate()
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait(20) == 0
