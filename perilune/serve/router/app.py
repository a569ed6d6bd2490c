"""The router's routes, and its process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from perilune.serve.http.answer import until_gone
from perilune.serve.http.errors import ApiError, Reply
from perilune.serve.http.gate import Gate
from perilune.serve.http.options import ServeOptions
from perilune.serve.http.process import run
from perilune.serve.router.admission import Budget, Cost
from perilune.serve.router.proxy import Errand, Router
from perilune.serve.router.worker import Upstream, watch


def create_router(
    workers: Sequence[str],
    *,
    budget: float = 1_000_000,
    cost: Cost | None = None,
    wait: float = 10.0,
    look: float = 1.0,
    options: ServeOptions | None = None,
) -> Starlette:
    """The router's application. budget: cost in flight on one worker, see `admission`; look: seconds between health
    checks. Raises ValueError for workers that are not distinct http addresses."""
    urls = [url.rstrip("/") for url in workers]
    if not urls or len(set(urls)) < len(urls) or not all(url.startswith(("http://", "https://")) for url in urls):
        raise ValueError("--workers must be distinct http:// addresses, at least one.")
    timeout, limits = httpx.Timeout(None, connect=2.0), httpx.Limits(max_connections=None, max_keepalive_connections=64)
    upstreams = [
        Upstream(url, httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits), Budget(budget)) for url in urls
    ]
    router = Router(upstreams, cost or Cost(), wait)
    registry = CollectorRegistry()
    requests = Counter("perilune_route_requests", "Requests by path and status", ["path", "status"], registry=registry)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.gather(*(worker.look() for worker in upstreams))
        watcher = asyncio.create_task(watch(upstreams, look))
        yield
        watcher.cancel()
        for worker in upstreams:
            await worker.client.aclose()

    async def forward(http: Request) -> Response:
        errand = Errand.of(http.url.path, await http.body(), http.headers, router.policy.cost)
        errand.headers.setdefault("x-request-id", http.state.request_id)
        return await until_gone(http, router.send(errand))

    async def models(_: Request) -> Response:
        for worker in upstreams:
            if worker.usable:
                answer = await worker.client.get("/v1/models")
                return Response(answer.content, answer.status_code, media_type="application/json")
        raise ApiError(503, "No worker is up.", code="unavailable")

    async def health(_: Request) -> Response:
        up = sum(worker.usable for worker in upstreams)
        return Reply({"status": "ok" if up else "down", "workers": len(upstreams), "up": up}, 200 if up else 503)

    async def state(_: Request) -> Response:
        return Reply({"failovers": router.failovers, "workers": [worker.describe() for worker in upstreams]})

    async def drain(http: Request) -> Response:
        worker = router.workers.get(http.query_params.get("worker", "").rstrip("/"))
        if worker is None:
            raise ApiError(404, "There is no such worker.", param="worker")
        worker.draining = http.method == "POST"
        return Reply(worker.describe())

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def refusal(_: Request, error: Exception) -> Response:
        return error.response() if isinstance(error, ApiError) else Response(status_code=500)

    paths = ("/v1/chat/completions", "/v1/completions", "/tokenize")
    routes = [Route(path, forward, methods=["POST"]) for path in paths]
    routes += [Route("/v1/models", models), Route("/health", health), Route("/metrics", metrics)]
    routes += [Route("/v1/workers", state), Route("/v1/drain", drain, methods=["POST", "DELETE"])]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={ApiError: refusal})
    app.add_middleware(Gate, options=options or ServeOptions(), requests=requests)
    app.state.router = router
    return app


def route(workers: Sequence[str], host: str, port: int, *, drain_seconds: float = 60.0, **settings: Any) -> None:
    """Route until a signal; settings are `create_router`'s."""
    run(create_router(workers, **settings), host, port, drain_seconds)
