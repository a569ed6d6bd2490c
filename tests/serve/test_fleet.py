"""Our policy as Ray Serve's request router: alone on Ray's own classes, and over two real replicas, one of which dies.

Needs the extra `ray`, which `all` does not bring: two engines, a controller and a proxy take a minute to start.
"""

import asyncio
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

# Read when Ray starts: no report home; workers as urgent as the rest of a loaded machine, which may start slowly.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "240"}
warnings.simplefilter("ignore")  # Ray's own are not ours to mend; pytest sets its filters anew for every test
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'perilune[ray]'")
from ray import serve  # noqa: E402
from ray.serve._private.common import RequestMetadata  # noqa: E402
from ray.serve.request_router import PendingRequest  # noqa: E402
from serve.live import client, soon, toy_model, toy_tokenizer  # noqa: E402

from perilune.fleet import app  # noqa: E402
from perilune.model.weights import save  # noqa: E402
from perilune.serve.router import Cost, Refused, placed  # noqa: E402
from perilune.serve.router.admission import Budget  # noqa: E402
from perilune.serve.router.proxy import Errand  # noqa: E402
from perilune.serve.router.replicas import Seat, SessionRouter  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def errand(session: str, tokens: int = 100) -> Errand:
    text = b'{"prompt": [' + b",".join([b"1"] * tokens) + b'], "max_tokens": 8, "user": "%s"}' % session.encode()
    return Errand.of("/v1/completions", text, {}, Cost())


def pending(asked: Errand, id: str = "r") -> PendingRequest:
    return PendingRequest(args=[asked], kwargs={}, metadata=RequestMetadata(request_id=id, internal_request_id=id))


def router(names: str, budget: float, wait: float = 10.0) -> tuple[SessionRouter, list[Any]]:
    """The router as Ray sets it up, with replicas of these names."""
    made = SessionRouter.__new__(SessionRouter)
    made.initialize_state(budget=budget, wait=wait)
    made.seats = {name: Seat(Budget(budget)) for name in names}
    return made, [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def test_primary_then_secondary_and_no_other() -> None:
    async def story() -> None:
        made, replicas = router("abcd", 1e6)
        for session in "stuvwxyz":
            ranks = await made.choose_replicas(replicas, pending(errand(session)))
            assert [rank[0].replica_id.unique_id for rank in ranks] == placed(session, "abcd")

    asyncio.run(story())


def test_a_full_budget_sends_to_the_secondary_then_waits_then_refuses() -> None:
    async def story() -> None:
        made, replicas = router("ab", 1000.0, wait=0.05)
        first, second = placed("s", "ab")
        by_name = {r.replica_id.unique_id: r.replica_id for r in replicas}
        for name in (first, second):
            asked = pending(errand("s", 300), name)  # 308 of the short class' 350
            assert (await made.choose_replicas(replicas, asked))[0][0].replica_id.unique_id == name
            made.on_request_routed(asked, by_name[name], None)  # type: ignore[arg-type]
            made.seats[name].sessions["s"] = 0.0  # as if it had been evicted: the next one costs as much
        late = pending(errand("s", 300), "late")
        assert await made.choose_replicas(replicas, late) == [] and not late.future.done()
        other = pending(errand("t" * 8, 9000), "long")  # a class of its own: not held up by short ones
        assert await made.choose_replicas(replicas, other)
        await asyncio.sleep(0.1)
        assert await made.choose_replicas(replicas, late) == []
        assert isinstance(late.future.exception(), Refused)
        made.on_request_completed(by_name[first], first)
        again = pending(errand("s", 300), "again")
        (rank,) = await made.choose_replicas(replicas, again)
        assert rank[0].replica_id.unique_id == first
        assert again.args[0].headers["x-request-class"] == "short"
        made.on_request_routed(again, by_name[first], None)  # type: ignore[arg-type]
        assert made.seats[first].sessions["s"] == 300  # the next turn there is priced as cached

    asyncio.run(story())


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    where = tmp_path_factory.mktemp("toy")
    save(toy_model(), where)
    toy_tokenizer().save(where)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    sizes = {"max_batch": "4", "pool_tokens": "8192", "block_tokens": "32"}
    serve.run(app({"where": str(where), "replicas": "2", "cpus": "0.1", **sizes}), name="fleet")
    with client(f"http://127.0.0.1:{port}") as http:
        yield http
    serve.shutdown()
    ray.shutdown()


def ask(http: httpx.Client, session: str, **more: Any) -> httpx.Response:
    body = {"prompt": "the moon is near " * 20, "max_tokens": 4, "user": session, "ignore_eos": True}
    return http.post("/v1/completions", json=body | more)


def test_a_session_stays_until_its_replica_dies(fleet: httpx.Client) -> None:
    homes = {f"s{n}": ask(fleet, f"s{n}").headers["x-served-by"] for n in range(8)}
    assert len(set(homes.values())) == 2
    for session, home in homes.items():
        again = ask(fleet, session)
        assert again.headers["x-served-by"] == home and again.json()["usage"]["cached_tokens"] > 0
    lost = homes["s0"]
    ray.kill(ray.get_actor(f"SERVE_REPLICA::fleet#Replica#{lost}", namespace="serve"))
    moved = ask(fleet, "s0")
    assert moved.status_code == 200 and moved.headers["x-served-by"] != lost
    assert soon(lambda: running() == 2, 120)  # Ray has put another in its place


def running() -> int:
    replicas = serve.status().applications["fleet"].deployments["Replica"].replica_states
    return int(replicas.get("RUNNING", 0))


def test_streams_and_refusals_pass_through(fleet: httpx.Client) -> None:
    with fleet.stream("POST", "/v1/completions", json={"prompt": "moon", "max_tokens": 3, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    refused = fleet.post("/v1/completions", json={"prompt": 5})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
    assert fleet.post("/v1/completions", content=b"{").status_code == 400


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ValueError, match="bogus"):
        app({"where": ".", "bogus": "1"})
