"""The routes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from perilune import __version__
from perilune.chat import ChatError, read_request, render
from perilune.serve.http.answer import answer
from perilune.serve.http.errors import UNPARSED, ApiError, Reply, bad, of_validation
from perilune.serve.http.gate import Gate
from perilune.serve.http.schema import (
    ANSWER,
    HEALTH,
    LIVE,
    METRICS,
    MODELS,
    TOKENS,
    ChatBody,
    CompletionBody,
    TokenizeBody,
)
from perilune.serve.http.service import Job, Service, chat_job, completion_job, unavailable

T = TypeVar("T", ChatBody, CompletionBody)
_PAGE = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


def create_app(service: Service) -> FastAPI:
    """The application. Its lifespan starts and stops the worker's thread."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.stop()

    app = FastAPI(title="Perilune", version=__version__, lifespan=lifespan, default_response_class=Reply)
    _routes(app, service)
    _page(app)
    _errors(app)
    app.add_middleware(Gate, options=service.options, requests=service.metrics.requests)
    return app


def _routes(app: FastAPI, service: Service) -> None:
    options, worker, metrics = service.options, service.worker, service.metrics

    async def run(make: Callable[[Service, T], Job], body: T, http: Request) -> Response:
        if body.model not in (None, options.name):
            raise ApiError(404, f"There is no model {body.model!r} here.", param="model", code="model_not_found")
        if len(worker.streams) >= options.max_requests:
            raise unavailable(service, "Too many requests are in flight; try again.", 429, "rate_limit_exceeded")
        job = await run_in_threadpool(make, service, body)  # long prompts take a while
        job.placed_by(http.headers)
        return await answer(service, job, http)

    @app.post("/v1/chat/completions", responses=ANSWER, response_model=None)
    async def chat(body: ChatBody, http: Request) -> Response:
        return await run(chat_job, body, http)

    @app.post("/v1/completions", responses=ANSWER, response_model=None)
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await run(completion_job, body, http)

    @app.get("/v1/models", responses=MODELS, response_model=None)
    async def models() -> Response:
        model = {"id": options.name, "object": "model", "created": 0, "owned_by": "perilune"}
        return Reply({"object": "list", "data": [{**model, "context_length": service.context}]})

    @app.post("/tokenize", responses=TOKENS, response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        ids = await run_in_threadpool(_ids, service, body)
        return Reply({"count": len(ids), "max_model_len": service.context, "tokens": ids})

    @app.get("/health", responses=HEALTH, response_model=None)
    async def health() -> Response:
        state = "failed" if worker.failed else "draining" if worker.draining else "ok"
        return Reply({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", responses=METRICS, response_class=Response)
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/live", responses=LIVE, response_model=None)
    async def live() -> Response:
        return Reply(
            {
                **asdict(worker.stats),
                "model": options.name,
                "context": service.context,
                "key_needed": bool(options.api_keys),
            }
        )


def _ids(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad("prompt", "give either prompt or messages")
    if body.prompt is not None:
        return service.tokenizer.encode(body.prompt, allow_special=bool(body.add_special_tokens))
    return render(read_request(body.model_dump(exclude_unset=True))).ids(service.tokenizer)


def _page(app: FastAPI) -> None:
    for name, kind in _PAGE.items():
        text = (files("perilune.serve") / "web" / name).read_text()
        path = "/" if name == "index.html" else f"/{name}"
        app.add_api_route(path, lambda text=text, kind=kind: Response(text, media_type=kind), include_in_schema=False)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def own(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(ChatError)
    async def of_chat(_: Request, error: ChatError) -> Response:
        return ApiError(400, f"{error}.", param=error.param).response()

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def of_routing(http: Request, error: HTTPException) -> Response:
        words = {
            400: UNPARSED,
            404: f"There is nothing at {http.url.path}.",
            405: f"{http.url.path} does not take {http.method}.",
        }
        sentence = words.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, sentence, headers=error.headers).response()  # a 405 says what it allows

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, __: Exception) -> Response:
        return ApiError(500, "The server failed on this request; its log says why.").response()
