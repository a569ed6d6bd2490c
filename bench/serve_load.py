"""A server under load from clients that share prefixes: time to first token, time per token, throughput.

    python bench/serve_load.py [--url http://127.0.0.1:8000] [--concurrency 1 8 32] [--requests 32]
                               [--shared 512] [--groups 4] [--own 64] [--output 64] [--key KEY]

Prompts are random ids: one of `groups` prefixes of `shared` tokens, then `own` tokens nobody else has. Every row is a
closed loop: `concurrency` clients, each sending its next request when the last is answered. Without --url a server of
the `tiny` preset with random weights and a context of 4,096 is started for the run, in a process of its own.
"""

import argparse
import asyncio
import json
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx


class Load:
    """The requests of one run. first: seconds to the first token, each: seconds a token after it, cached: tokens."""

    def __init__(self, args: argparse.Namespace, talk: httpx.AsyncClient) -> None:
        self.args, self.talk = args, talk
        self.random = random.Random(args.seed)
        self.prefixes = [self._ids(args.shared) for _ in range(args.groups)]
        self.first: list[float] = []
        self.each: list[float] = []
        self.tokens = self.cached = self.prompt = self.errors = 0

    def _ids(self, n: int) -> list[int]:
        return [self.random.randrange(1, self.args.ids) for _ in range(n)]

    async def run(self, concurrency: int) -> float:
        """Seconds it took."""
        todo = [[*self.random.choice(self.prefixes), *self._ids(self.args.own)] for _ in range(self.args.requests)]
        begun = time.perf_counter()
        await asyncio.gather(*(self._client(todo) for _ in range(concurrency)))
        return time.perf_counter() - begun

    async def _client(self, todo: list[list[int]]) -> None:
        while todo:
            await self._ask(todo.pop())

    async def _ask(self, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": self.args.output, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        begun, first, usage = time.perf_counter(), 0.0, None
        async with self.talk.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter()
                usage = json.loads(line[6:]).get("usage") or usage
        if usage is None:
            self.errors += 1
            return
        self.first.append(first - begun)
        self.each.append((time.perf_counter() - first) / max(1, usage["completion_tokens"] - 1))
        self.tokens += usage["completion_tokens"]
        self.prompt += usage["prompt_tokens"]
        self.cached += usage["cached_tokens"]


def row(concurrency: int, load: Load, seconds: float) -> str:
    def spread(values: list[float]) -> str:
        worst = statistics.quantiles(values, n=100)[98] if len(values) > 1 else values[0]
        return f"{statistics.median(values) * 1e3:9.1f} {worst * 1e3:9.1f}"

    return (
        f"{concurrency:11} {spread(load.first)} {spread(load.each)} {load.tokens / seconds:10.1f} "
        f"{(load.tokens + load.prompt) / seconds:11.1f} {100 * load.cached / load.prompt:7.1f} {load.errors:6}"
    )


async def measure(args: argparse.Namespace, url: str) -> None:
    headers = {"authorization": f"Bearer {args.key}"} if args.key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as talk:
        print(
            f"{url}, {args.requests} requests a row, {args.groups} prefixes of {args.shared} + {args.own} own tokens, "
        )
        print(f"{args.output} tokens of output; client on {platform.machine()}, Python {platform.python_version()}")
        print("concurrency  TTFT p50   p99 (ms)  TPOT p50   p99 (ms)   out tok/s   all tok/s  hit %  errors")
        await Load(argparse.Namespace(**{**vars(args), "requests": 2, "seed": args.seed - 1}), talk).run(1)  # warm
        for n, concurrency in enumerate(args.concurrency):
            load = Load(argparse.Namespace(**{**vars(args), "seed": args.seed + n}), talk)  # prefixes new to the server
            print(row(concurrency, load, await load.run(concurrency)), flush=True)


def own_server(folder: str, context: int = 4096, *more: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server of random weights; its process and address."""
    import torch

    from perilune.config import preset
    from perilune.model.net import K3
    from perilune.model.weights import save
    from perilune.tokenizer import Tokenizer

    torch.manual_seed(0)
    model = K3(preset("tiny").replace(max_position_embeddings=context))
    model.reset_parameters()
    save(model, Path(folder))
    Tokenizer.train([Path(__file__).read_text()], 2048).save(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "perilune", "serve", folder, "--port", str(port), "--block-tokens", "64"]
    process, url = subprocess.Popen([*command, *more]), f"http://127.0.0.1:{port}"
    wait_for(url)
    return process, url


def wait_for(url: str) -> None:
    """Until somebody answers there."""
    for _ in range(600):
        try:
            httpx.get(f"{url}/health")
        except httpx.ConnectError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"nobody answers at {url}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--key")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=512)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--own", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--ids", type=int, default=256, help="prompts draw from ids below this")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.url:
        return asyncio.run(measure(args, args.url))
    with tempfile.TemporaryDirectory() as folder:
        process, url = own_server(folder)
        try:
            asyncio.run(measure(args, url))
        finally:
            process.terminate()
            process.wait()
    return None


if __name__ == "__main__":
    main()
