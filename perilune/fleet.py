"""A fleet on Ray Serve: many `perilune serve` engines behind one door, placed by our policy, kept alive by Ray.

    pip install 'perilune[ray]'
    serve run perilune.fleet:app where=runs/demo replicas=2

client -> Door (the router's API) -> handle, SessionRouter -> Replica (an engine and its HTTP application, in process)

Ray starts the replicas, asks for their health, restarts them and says which there are. `serve run` also takes it to a
cluster, `serve build` writes the YAML to keep. Under Ray a request fails over before its first token, as without.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, generate_latest
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Scope

from perilune.serve.engine import Engine
from perilune.serve.http import ServeOptions, Service, create_app
from perilune.serve.http.answer import until_gone
from perilune.serve.http.errors import ApiError, Reply
from perilune.serve.http.gate import Gate
from perilune.serve.request import EngineOptions
from perilune.serve.router.admission import CLASSES, Cost, Refused
from perilune.serve.router.proxy import Errand, until_spoken
from perilune.serve.router.replicas import SessionRouter
from perilune.serve.worker import Worker
from perilune.talk import open_model

log = logging.getLogger("perilune.fleet")
_LATER = {"retry-after": "5"}


@dataclass(frozen=True)
class Head:
    """The beginning of a replica's answer."""

    status: int
    headers: dict[str, str]


class Replica:
    """One engine. It is called with an Errand and yields a Head, then the body in pieces."""

    def __init__(self, where: str, engine: EngineOptions, manners: ServeOptions) -> None:
        model, tokenizer = open_model(Path(where), torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        served = Engine(model, engine)
        self._worker = Worker(served)
        service = Service(self._worker, tokenizer, served.context, model.config.vocab_size, manners)
        self._app = create_app(service)
        self._life = contextlib.AsyncExitStack()
        self._started: asyncio.Task[None] | None = None

    async def __call__(self, errand: Errand) -> AsyncIterator[Head | bytes]:
        await self._ready()
        pieces: asyncio.Queue[Message | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": errand.body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        call = asyncio.ensure_future(self._app(_scope(errand), receive, pieces.put))
        call.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (message := await pieces.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = {k.decode(): v.decode() for k, v in message["headers"]}
                    yield Head(message["status"], headers | {"x-served-by": serve.get_replica_context().replica_tag})
                elif message.get("body"):
                    yield message["body"]
        finally:  # whoever asked is gone, or all is said
            gone.set()
            await call

    async def _ready(self) -> None:
        """The application's lifespan, entered once, on the loop that requests run on."""
        if self._started is None:
            self._started = asyncio.ensure_future(
                self._life.enter_async_context(self._app.router.lifespan_context(self._app))  # type: ignore[arg-type]
            )
        await self._started

    def check_health(self) -> None:
        """Ray replaces a replica whose engine has failed."""
        if self._worker.failed:
            raise RuntimeError(self._worker.failed)


def _scope(errand: Errand) -> Scope:
    headers = [(k.lower().encode(), v.encode("latin-1", "replace")) for k, v in errand.headers.items()]
    headers.append((b"content-length", str(len(errand.body)).encode()))
    return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": errand.path, "raw_path": errand.path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": None, "server": None}  # fmt: skip


# --- the door -------------------------------------------------------------------------------------------------------


class Front:
    """What `perilune route` answers, from a handle's replicas instead of servers' addresses."""

    def __init__(self) -> None:
        self.cost = Cost()

    @cached_property
    def handle(self) -> DeploymentHandle[Any]:
        """Asked for where requests come in: Ray copies an application to its process, and what it holds."""
        return serve.get_deployment_handle("Replica").options(stream=True)

    async def forward(self, http: Request) -> Response:
        errand = Errand.of(http.url.path, await http.body(), http.headers, self.cost)
        errand.headers.setdefault("x-request-id", http.state.request_id)
        return await until_gone(http, self._send(errand))

    async def _send(self, errand: Errand) -> Response:
        """From the session's replica; once more where that died before the client saw anything."""
        for attempt in range(2):
            try:
                return await self._ask(errand)
            except Refused as error:
                later = {"retry-after": str(error.retry_after)}
                raise ApiError(429, str(error), code="rate_limit_exceeded", headers=later) from None
            except (RayError, RayServeException) as error:
                log.warning("attempt %d: %s", attempt + 1, type(error).__name__)
        raise ApiError(502, "The session's replicas failed before the first token.", code="unavailable", headers=_LATER)

    async def _ask(self, errand: Errand) -> Response:
        answer = self.handle.remote(errand)
        pieces = aiter(answer)
        try:
            head = await anext(pieces)
            if not head.headers.get("content-type", "").startswith("text/event-stream"):
                return Response(b"".join([piece async for piece in pieces]), head.status, _kept(head.headers))
            opening = await until_spoken(pieces)
        except BaseException:
            answer.cancel()
            raise
        return StreamingResponse(_rest(answer, opening, pieces), head.status, _kept(head.headers))


async def _rest(answer: Any, opening: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream passed on; once it has begun, a failure is told in it."""
    try:
        yield opening
        async for piece in pieces:
            yield piece
    except (RayError, RayServeException):
        error = ApiError(502, "The replica failed in the middle of this answer.", code="unavailable")
        yield b"data: " + Reply(error.body).body + b"\n\n"
    finally:
        answer.cancel()


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {k: headers[k] for k in ("content-type", "cache-control", "retry-after", "x-served-by") if k in headers}


def door(manners: ServeOptions) -> FastAPI:
    """The application at the door."""
    front, registry = Front(), CollectorRegistry()
    requests = Counter("perilune_fleet_requests", "Requests by path and status", ["path", "status"], registry=registry)

    async def models(_: Request) -> Response:
        return Reply({"object": "list", "data": [{"id": manners.name, "object": "model", "owned_by": "perilune"}]})

    async def health(_: Request) -> Response:
        return Reply({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def refusal(_: Request, error: Exception) -> Response:
        return error.response() if isinstance(error, ApiError) else Response(status_code=500)

    paths = ("/v1/chat/completions", "/v1/completions", "/tokenize")
    routes: list[BaseRoute] = [Route(path, front.forward, methods=["POST"]) for path in paths]
    routes += [Route("/v1/models", models), Route("/health", health), Route("/metrics", metrics)]
    asgi = FastAPI(routes=routes, exception_handlers={ApiError: refusal})
    asgi.add_middleware(Gate, options=manners, requests=requests)
    return asgi


def app(args: dict[str, str]) -> serve.Application:
    """Ray Serve's application builder.

    args: where (a run, stage or checkpoint); replicas (2); budget (1e6) and wait (10), as `perilune route`'s;
        parallel (256), requests a replica takes at once; cpus (1) and gpus (0) a replica; name; any number of
        `EngineOptions`. Raises ValueError naming an unknown one.
    """
    settings, known = dict(args), {f.name for f in fields(EngineOptions)}
    where = str(Path(settings.pop("where")).resolve())

    def take(name: str, default: float) -> float:
        return float(settings.pop(name, default))

    replicas, parallel, name = int(take("replicas", 2)), int(take("parallel", 256)), settings.pop("name", None)
    policy, needs = {"budget": take("budget", 1e6), "wait": take("wait", 10)}, (take("cpus", 1), take("gpus", 0))
    if wrong := sorted(set(settings) - known):
        raise ValueError(f"{wrong[0]} is no setting of a fleet or an engine.")
    sizes = {key: int(value) for key, value in settings.items()}
    classes = tuple(one.name for one in CLASSES)
    engine = EngineOptions(**{"priorities": (classes[0], "interactive", *classes[1:]), **sizes})  # type: ignore[arg-type]
    manners = ServeOptions(name=name or Path(where).name)
    worker = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=parallel,
        ray_actor_options={"num_cpus": needs[0], "num_gpus": needs[1]},
        request_router_config=RequestRouterConfig(
            request_router_class=f"{SessionRouter.__module__}.{SessionRouter.__name__}", request_router_kwargs=policy
        ),
    )

    @serve.deployment(name="Door", max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0.1})
    @serve.ingress(door(manners))
    class Door:
        def __init__(self, replicas: DeploymentHandle[Any]) -> None:
            """replicas: named here, so that Ray deploys them with the door."""

    bound: serve.Application = Door.bind(worker.bind(where, engine, manners))  # type: ignore[attr-defined]
    return bound
