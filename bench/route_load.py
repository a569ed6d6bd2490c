"""Short requests during a burst of long ones, straight to a server and through the router.

    python bench/route_load.py [--long 5] [--long-tokens 12000] [--short 24] [--short-tokens 8]

One server of the `tiny` preset with random weights, 512 new tokens a step, and a router, each in a process of its own.
First `long` prompts are sent at once, then a short one every 100 ms; what is measured is the time to a short one's last
token (8 of them).
"""

import argparse
import asyncio
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import httpx
from serve_load import own_server, wait_for

from perilune.serve.router import Cost


async def ask(talk: httpx.AsyncClient, tokens: int, output: int) -> tuple[int, float]:
    begun = time.perf_counter()
    prompt = [random.randrange(1, 256) for _ in range(tokens)]
    body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True}
    answer = await talk.post("/v1/completions", json=body)
    return answer.status_code, time.perf_counter() - begun


async def measure(url: str, args: argparse.Namespace) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as talk:
        burst = [asyncio.create_task(ask(talk, args.long_tokens, 1)) for _ in range(args.long)]
        shorts = []
        for _ in range(args.short):
            await asyncio.sleep(0.1)
            shorts.append(asyncio.create_task(ask(talk, args.short_tokens, 8)))
        short, long = await asyncio.gather(*shorts), await asyncio.gather(*burst)
    served = [seconds for status, seconds in short if status == 200]
    done = [seconds for status, seconds in long if status == 200]
    words = (
        f"{len(served)} of {args.short} short, median {statistics.median(served):.2f} s, worst {max(served):.2f} s; "
    )
    return words + f"{len(done)} of {args.long} long, the last after {max(done):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=5)
    parser.add_argument("--long-tokens", type=int, default=12_000)
    parser.add_argument("--short", type=int, default=24)
    parser.add_argument("--short-tokens", type=int, default=8)
    args = parser.parse_args()
    cost = Cost()
    extremes = cost.of(args.short_tokens, 0, 8), cost.of(args.long_tokens, 0, 1)
    print(f"cost of a short request {extremes[0]:.0f}, of a long one {extremes[1]:.0f}")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        server, url = own_server(folder, 16384, "--token-budget", "512")
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "perilune", "route", "--workers", url, "--port", str(port), "--wait", "120"]
        router = subprocess.Popen([*command, "--budget", str(4 * extremes[1])])
        try:
            wait_for(f"http://127.0.0.1:{port}")
            print("server:", asyncio.run(measure(url, args)), flush=True)
            print("router:", asyncio.run(measure(f"http://127.0.0.1:{port}", args)), flush=True)
        finally:
            for process in (router, server):
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
