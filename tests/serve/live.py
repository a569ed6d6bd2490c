"""Shared by the server's tests: a toy tokenizer and model, an engine that follows a script, a live server."""

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import torch
import uvicorn

from perilune.chat.segments import close_tag, encode, open_tag
from perilune.config import PRESETS
from perilune.model.net import K3
from perilune.serve.http import ServeOptions, Service, create_app
from perilune.serve.request import Delta, Full, Request, Stats, TokenLogprob, Usage
from perilune.serve.worker import Runs, Worker
from perilune.tokenizer import Tokenizer

WORDS = ["the moon is near and the sea is far, ", "你好，世界。", '{"city": "Paris"} ', "naïve café — 🌙🌊 "] * 50


@functools.cache
def toy_tokenizer() -> Tokenizer:
    return Tokenizer.train(WORDS, 400)


@functools.cache
def toy_model(context: int = 4096) -> K3:
    """`tiny` cut down, with random weights: it says nothing, but it says it deterministically."""
    torch.manual_seed(0)
    config = PRESETS["tiny"].replace(vocab_size=toy_tokenizer().vocab_size, max_position_embeddings=context)
    config = config.replace(num_hidden_layers=2, mla_layers=(1,))
    return K3(config.replace(eos_token_id=toy_tokenizer().end_of_msg)).eval()


def written(reasoning: str | None, content: str | None, *calls: dict[str, Any]) -> list[int]:
    """The ids of an assistant turn, as the model writes it after `<|open|>think<|sep|>` (or response: no reasoning)."""
    tokenizer = toy_tokenizer()
    ids: list[int] = []
    if reasoning is not None:
        ids += [*tokenizer.encode(reasoning), *encode(close_tag("think"), tokenizer)]
    if content is not None:
        begin = encode(open_tag("response"), tokenizer) if reasoning is not None else []
        ids += [*begin, *tokenizer.encode(content), *encode(close_tag("response"), tokenizer)]
    if calls:
        ids += encode(open_tag("tools"), tokenizer)
        for n, call in enumerate(calls, 1):
            ids += encode(open_tag("call", tool=call["name"], index=n), tokenizer)
            for key, value in call["arguments"].items():
                ids += encode(open_tag("argument", key=key, type="string"), tokenizer)
                ids += [*tokenizer.encode(value), *encode(close_tag("argument"), tokenizer)]
            ids += encode(close_tag("call"), tokenizer)
        ids += encode(close_tag("tools"), tokenizer)
    return [*ids, *encode(close_tag("message"), tokenizer), tokenizer.end_of_msg]


@dataclass
class Scripted:
    """An engine whose answers are written beforehand, one token a request and step. See `Runs`."""

    script: Callable[[Request], Sequence[int]]
    seconds: float = 0.0  # a step takes
    slots: int = 1000  # before Full
    cached: int = 0
    fails_at: int = -1  # step that raises
    seen: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    _running: dict[str, tuple[Request, list[int]]] = field(default_factory=dict)
    _steps: int = 0

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> None:
        if len(self._running) >= self.slots:
            raise Full(f"{len(self._running)} requests are waiting; try again later.")
        self.seen.append(request)
        self._running[request.id] = (request, [])

    def cancel(self, id: str) -> None:
        if self._running.pop(id, None):
            self.cancelled.append(id)

    def step(self) -> list[Delta]:
        time.sleep(self.seconds)
        self._steps += 1
        if self._steps == self.fails_at:
            raise RuntimeError("a wire came loose")
        return [self._one(*item) for item in list(self._running.values())]

    def _one(self, request: Request, said: list[int]) -> Delta:
        wanted, rules = self.script(request), request.sampling
        said += wanted[len(said) : len(said) + 1]
        last = said[-1:]
        finish: Any = "stop" if last and last[0] in rules.stop_ids else None
        if finish is None and len(said) >= min(rules.max_tokens, len(wanted)):
            finish = "length"
        if finish:
            del self._running[request.id]
        top = (
            ()
            if rules.logprobs is None
            else (TokenLogprob(last[0], -0.5, 1, ((last[0], -0.5), (0, -3.0))[: rules.logprobs]),)
        )
        usage = Usage(len(request.prompt), self.cached, len(said))
        return Delta(request.id, tuple(last), top, finish, usage=usage)

    def stats(self) -> Stats:
        return Stats(running=len(self._running), steps=self._steps)


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """An ASGI application on loopback, in a thread; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def serving(engine: Runs, context: int = 4096, tokenizer: Tokenizer | None = None, **options: Any) -> Iterator["Live"]:
    """A server around `engine`."""
    worker = Worker(engine)
    tokenizer = tokenizer or toy_tokenizer()
    service = Service(worker, tokenizer, context, tokenizer.vocab_size, ServeOptions(name="toy", **options))
    with running(create_app(service)) as url, client(url) as http:
        yield Live(url, worker, service, http)


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, verify=False)  # no certificates to read: a second saved


@dataclass
class Live:
    url: str
    worker: Worker
    service: Service
    http: httpx.Client

    @functools.cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, http_client=self.http)


def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition` comes true within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False
