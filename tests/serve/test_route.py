"""The router: where sessions live, what a class may hold, and what a client sees when workers fail."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.live import Live, Scripted, client, running, serving, soon, toy_tokenizer, written

from perilune.serve.request import Request
from perilune.serve.router import Budget, Cost, Refused, create_router, placed
from perilune.serve.router.admission import CLASSES, class_of
from perilune.serve.router.placement import session_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# ------------------------------------------------------------------ placement


@given(st.text(), st.integers(2, 8))
def test_a_new_worker_takes_sessions_and_moves_no_other(session: str, n: int) -> None:
    workers = [f"http://w{i}" for i in range(n)]
    before, after = placed(session, workers), placed(session, [*workers, "http://new"])
    assert len(set(before)) == 2 and placed(session, workers[::-1]) == before
    assert [worker for worker in after if worker != "http://new"] == before[: len(after) - after.count("http://new")]


def test_sessions_spread_evenly() -> None:
    workers = [f"http://w{i}" for i in range(4)]
    primaries = [placed(str(n), workers)[0] for n in range(4000)]
    assert all(850 < primaries.count(worker) < 1150 for worker in workers)


def test_a_conversation_without_a_key_is_known_by_its_beginning() -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    later = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert session_of({"messages": first}, {}) == session_of({"messages": later}, {})
    assert session_of({"messages": first}, {}) != session_of({"messages": first, "tools": [1]}, {})
    assert session_of({"messages": first, "prompt_cache_key": "k", "user": "u"}, {"x-session-id": "h"}) == "k"
    assert session_of({"messages": first, "user": "u"}, {"x-session-id": "h"}) == "h"


# ------------------------------------------------------------------ admission


def test_the_cost_of_the_report_s_extremes() -> None:
    """400 K cached and 4 K new, a cold million, a short question: three orders of magnitude."""
    cost = Cost()
    agent, cold, short = cost.of(404_000, 400_000, 500), cost.of(1_000_000), cost.of(500, 0, 300)
    assert agent == pytest.approx(4_000 + (404_000**2 - 400_000**2) / 282_000 + 16_000 + 500)
    assert cold / short > 1000 and cold / agent > 100
    assert [class_of(c, False).name for c in (short, agent, cold)] == ["short", "medium", "long"]
    assert class_of(short, True).name == "batch"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([c.name for c in CLASSES]), st.floats(1, 2000), st.booleans()), max_size=30))
def test_no_class_holds_more_than_its_share_and_all_is_given_back(asked: list[tuple[str, float, bool]]) -> None:
    async def story() -> None:
        budget = Budget(1000)

        async def one(name: str, cost: float, leaves: bool) -> None:
            with contextlib.suppress(Refused, asyncio.CancelledError):
                charge = await budget.take(name, cost, 0.0005 if leaves else 5)
                assert all(account.held <= account.limit * 1.001 for account in budget.accounts.values())
                await asyncio.sleep(0)
                budget.give_back(name, charge)

        await asyncio.gather(*(one(*item) for item in asked))
        assert all(
            account.held == pytest.approx(0, abs=1e-6) and not account.queue for account in budget.accounts.values()
        )

    asyncio.run(story())


def test_within_a_class_first_come_is_first_served() -> None:
    async def story() -> list[int]:
        budget, order = Budget(1000), list[int]()
        first = await budget.take("short", 350, 1)

        async def wait(n: int, cost: float) -> None:
            charge = await budget.take("short", cost, 1)
            order.append(n)
            budget.give_back("short", charge)

        tasks = [asyncio.create_task(wait(n, cost)) for n, cost in enumerate((300, 10, 10))]
        await asyncio.sleep(0)
        budget.give_back("short", first)
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(story()) == [0, 1, 2]  # the small ones do not slip past the large one


# ------------------------------------------------------------------ the router over live workers


@contextlib.contextmanager
def routed(*workers: str, **settings: Any) -> Iterator[httpx.Client]:
    with running(create_router(workers, look=0.05, **settings)) as url, client(url) as http:
        yield http


@contextlib.contextmanager
def fleet(n: int, **engine: Any) -> Iterator[list[tuple[Live, Scripted]]]:
    with contextlib.ExitStack() as stack:
        engines = [Scripted(lambda _: written("hm", "yes"), **engine) for _ in range(n)]
        yield [(stack.enter_context(serving(one, context=300_000)), one) for one in engines]


def ask(session: str = "s", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "prompt_cache_key": session, **more}


def test_sessions_stay_and_spread() -> None:
    with fleet(3) as workers, routed(*(live.url for live, _ in workers)) as http:
        for n in range(16):
            for stream in (False, True):
                response = http.post(CHAT, json=ask(str(n % 8), stream=stream))
                assert (response.status_code == 200 and "yes" in response.text.replace('"},', "")) or stream
        served = [len(engine.seen) for _, engine in workers]
        assert sum(served) == 32 and all(count % 4 == 0 for count in served) and sum(map(bool, served)) > 1
        assert http.get("/v1/models").json()["data"][0]["id"] == "toy"
        assert {worker["state"] for worker in http.get("/v1/workers").json()["workers"]} == {"ok"}


def test_failover_is_to_the_secondary_only() -> None:
    with fleet(3) as workers, routed(*(live.url for live, _ in workers)) as http:
        by_url = {live.url: (live, engine) for live, engine in workers}
        primary, secondary, third = placed("s", list(by_url), 3)
        assert http.post(CHAT, json=ask()).status_code == 200
        by_url[primary][0].worker.draining = True  # its /health is 503 from here on
        assert soon(lambda: http.get("/health").json()["up"] == 2)
        assert http.post(CHAT, json=ask()).status_code == 200
        by_url[secondary][0].worker.draining = True
        assert soon(lambda: http.get("/health").json()["up"] == 1)
        refused = http.post(CHAT, json=ask())
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert [len(by_url[url][1].seen) for url in (primary, secondary, third)] == [1, 1, 0]
        by_url[primary][0].worker.draining = False
        assert soon(lambda: http.post(CHAT, json=ask()).status_code == 200)
        assert len(by_url[primary][1].seen) == 2  # and back home


def test_an_operator_drains_a_worker() -> None:
    with fleet(2) as workers, routed(*(live.url for live, _ in workers)) as http:
        home = placed("s", [live.url for live, _ in workers])[0]
        assert http.post("/v1/drain", params={"worker": home}).json()["state"] == "draining"
        time.sleep(0.15)  # health checks do not undo it
        assert http.post(CHAT, json=ask()).status_code == 200
        assert [len(engine.seen) for live, engine in workers if live.url == home] == [0]
        assert http.request("DELETE", "/v1/drain", params={"worker": home}).json()["state"] == "ok"
        assert http.post("/v1/drain", params={"worker": "http://x"}).status_code == 404


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(delta: dict[str, Any]) -> bytes:
    body = b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


@contextlib.contextmanager
def breaking(says: bytes) -> Iterator[str]:
    """A worker that is healthy, says `says` to every request and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(talk: socket.socket) -> None:
        with talk:
            head = talk.recv(65536)
            healthy = head.startswith(b"GET /health")
            talk.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" if healthy else says)

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                answer(listener.accept()[0])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def at_home(url: str, workers: list[str]) -> str:
    """A session whose primary is `url`."""
    return next(str(n) for n in range(1000) if placed(str(n), workers)[0] == url)


@pytest.mark.parametrize("says", [b"", HEAD, HEAD + event({"role": "assistant", "content": ""})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_breaks_before_the_first_token_is_replaced(says: bytes, stream: bool) -> None:
    with breaking(says) as broken, fleet(1) as ((live, engine),), routed(broken, live.url, wait=5) as http:
        response = http.post(CHAT, json=ask(at_home(broken, [broken, live.url]), stream=stream))
        assert (response.status_code == 200 and "yes" in response.text.replace('"', "")) or stream
        assert len(engine.seen) == 1
        if stream:
            assert response.text.count('"role":"assistant"') == 1 and response.text.endswith("data: [DONE]\n\n")


def test_a_worker_that_breaks_later_is_not() -> None:
    says = HEAD + event({"role": "assistant", "content": ""}) + event({"content": "so"})
    with breaking(says) as broken, fleet(1) as ((live, engine),), routed(broken, live.url) as http:
        text = http.post(CHAT, json=ask(at_home(broken, [broken, live.url]), stream=True)).text
        assert '"content": "so"' in text and "failed in the middle" in text and "[DONE]" not in text
        assert engine.seen == []


def test_a_client_that_leaves_frees_worker_and_budget() -> None:
    with fleet(1, seconds=0.01) as ((live, engine),), routed(live.url) as http:
        engine.script = lambda _: [70] * 10_000
        with http.stream("POST", TEXT, json={"prompt": "x", "max_tokens": 9000, "stream": True}) as answer:
            next(answer.iter_lines())
            assert engine.busy
        assert soon(lambda: not engine.busy)
        (worker,) = http.get("/v1/workers").json()["workers"]
        assert worker["requests"] == 0 and set(worker["held"].values()) == {0}


def test_refusals_of_the_router() -> None:
    with fleet(1) as ((live, _),), routed(live.url) as http:
        assert http.post(CHAT, content=b"[1]").status_code == 400
        assert http.post(CHAT, json=ask(temperature=9)).json()["error"]["param"] == "temperature"  # the worker's own
        json_ = {"content-type": "application/json"}
        huge = http.post(CHAT, content=json.dumps(ask(max_tokens=10**400)), headers=json_)  # no float holds it
        assert huge.status_code == 400 and huge.json()["error"]["param"] == "max_tokens"
        assert http.post(CHAT, json=ask(), headers={"x-session-id": "é".encode()}).status_code == 200
        assert http.get("/v1/nothing").status_code == 404
    with pytest.raises(ValueError, match="distinct"):
        create_router(["http://a", "http://a/"])


class Slow(Scripted):
    """An engine whose prompts take time: `speed` tokens a second, one prompt after the other, urgent ones first."""

    def __init__(self, speed: float) -> None:
        super().__init__(lambda _: toy_tokenizer().encode("x"))
        self.speed = speed
        self._todo: dict[str, float] = {}

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._todo[request.id] = len(request.prompt)

    def step(self) -> list[Any]:
        live = [item for id, item in self._running.items() if id in self._todo]
        if not live:
            return []
        request, said = live[0]
        time.sleep(min(self._todo[request.id], 500) / self.speed)
        self._todo[request.id] -= 500
        if self._todo[request.id] > 0:
            return []
        del self._todo[request.id]
        return [self._one(request, said)]


def test_a_burst_of_long_prompts_does_not_starve_short_ones() -> None:
    """Costs from 100 to 100,000: twenty long prompts at once, then twenty short ones, on one worker."""
    engine = Slow(100_000)
    with serving(engine, context=300_000) as live, routed(live.url, budget=400_000, wait=0.5) as http:

        async def one(talk: httpx.AsyncClient, length: int) -> int:
            body = {"prompt": [70] * length, "max_tokens": 1, "prompt_cache_key": str(length)}
            response = await talk.post(f"{http.base_url}{TEXT}", json=body)
            assert response.status_code == 200 or int(response.headers["retry-after"]) >= 1
            return response.status_code

        async def story() -> tuple[list[int], list[int]]:
            async with httpx.AsyncClient(timeout=60, verify=False) as talk:
                burst = [asyncio.create_task(one(talk, 100_000)) for _ in range(20)]
                await asyncio.to_thread(soon, lambda: engine.busy)
                short = await asyncio.gather(*(one(talk, 100) for _ in range(20)))
                return short, await asyncio.gather(*burst)

        short, long = asyncio.run(story())
    assert short == [200] * 20
    assert sorted(set(long)) == [200, 429]  # the burst waits for its own budget, and most of it is told when to return
    reached = [len(request.prompt) for request in engine.seen]
    last_short = len(reached) - 1 - reached[::-1].index(100)
    assert reached[:last_short].count(100_000) <= 5
    assert {request.priority for request in engine.seen} == {"short", "long"}
