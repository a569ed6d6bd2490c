"""One MoE layer among GPUs, balanced and standard: torchrun --nproc-per-node 2 bench/exchange.py --out FILE.json

Routing: expert popularity is lognormal, its sigma bisected until the fullest expert holds (1 + maxvio) times the mean;
every token draws K distinct experts. Three exchanges run the same layer on the same inputs:

    symmetric   balanced, Triton over NVLink, nothing read by the host
    nccl        balanced, all-to-all collectives
    standard    dropless all-to-all to the experts' homes, over NCCL

Reported per exchange and maxvio, in ms (the slowest rank; median of `--repeat` timed by CUDA events): plan (with the
exchange of counts), prefetch, dispatch, combine; forward; forward and backward; TFLOP/s a GPU of the expert products in
the latter; GiB at the peak, shared buffers included. What never asks the host is timed twice: as the host issues it,
and, in rows named "captured", as one CUDA graph, which is what the device alone needs. `--cpu` runs the two collective
ones on gloo with small numbers, to try the script. `--profile` adds each kernel's time.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.parallel.exchange import Exchange
from perilune.parallel.experts import Experts
from perilune.parallel.fabric import Collective

COLOURS = {"symmetric captured": "#0b3f26", "symmetric": "#1b7f4d", "nccl": "#3465a4", "standard": "#c0392b"}


def draw(popularity_E: Tensor, tokens: int, top_k: int, seed: int) -> Tensor:
    """K distinct experts a token, without replacement by popularity (Gumbel top-k): [tokens, K]."""
    g = torch.Generator().manual_seed(seed)
    noise = -torch.log(-torch.log(torch.rand(tokens, len(popularity_E), generator=g).clamp(1e-12, 1 - 1e-7)))
    return (popularity_E.log() + noise).topk(top_k).indices


def maxvio(experts_SK: Tensor, experts: int) -> float:
    counts = torch.bincount(experts_SK.flatten(), minlength=experts).double()
    return float(counts.max() / counts.mean() - 1)


def routing(want: float, ranks: int, tokens: int, top_k: int, experts: int) -> list[Tensor]:
    """Tokens of every rank whose joint maxvio is near `want`."""
    shape = torch.randn(experts, generator=torch.Generator().manual_seed(1234))
    low, high = 0.0, 8.0
    for _ in range(20):
        sigma = (low + high) / 2
        found = [draw((sigma * shape).exp(), tokens, top_k, 100 + r) for r in range(ranks)]
        if maxvio(torch.cat(found), experts) < want:
            low = sigma
        else:
            high = sigma
    return found


Run = Callable[[], Any]


def captured(what: Run) -> Run:
    """The same work as one CUDA graph; what it made is kept, so that its memory is not given away."""
    graph: Any = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a graph has memory of its own
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        graph.made = what()
    return graph.replay


def kernel_times(what: Callable[[], Any], rounds: int = 3) -> str:
    """Calls and microseconds of every kernel in one run, the longest first."""
    what()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            what()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    line = "{:>9.1f} us {:>5.1f} x {}".format
    return "\n".join(line(e.self_device_time_total / rounds, e.count / rounds, e.key[:110]) for e in found[:24])


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.rank, self.size = given, dist.get_rank(), dist.get_world_size()
        self.capture = False
        self.together: Run = lambda: None
        self.device = torch.device("cpu") if given.cpu else torch.device("cuda", torch.cuda.current_device())
        g = torch.Generator(self.device).manual_seed(7 + self.rank)
        new = lambda *shape: torch.randn(*shape, generator=g, device=self.device, dtype=torch.bfloat16)  # noqa: E731
        local, H, I = given.experts // self.size, given.width, given.hidden  # noqa: E741
        self.own = [(new(local, 2 * I, H) * H**-0.5).requires_grad_(), (new(local, H, I) * I**-0.5).requires_grad_()]
        self.x, self.dy = new(given.tokens, H).requires_grad_(), new(given.tokens, H)

    def exchange(self, name: str) -> Exchange:
        given = self.given
        if name == "symmetric":
            from perilune.parallel.symmetric import Symmetric

            return Exchange(Symmetric(), given.experts, given.top_k, tokens=given.tokens)
        if name == "nccl":
            return Exchange(Collective(), given.experts, given.top_k, tokens=given.tokens)
        return Exchange(Collective(), given.experts, given.top_k, balanced=False)

    def time(self, what: Run) -> float:
        """Median ms of the slowest rank; every run starts together, behind a barrier as in a layer.

        A captured run is in the queue before that barrier is passed: what the host does is not timed.
        """
        if self.given.cpu:
            what()
            return float("nan")
        for _ in range(self.given.warmup):
            what()
        self.together()
        what = captured(what) if self.capture else what
        found = []
        for _ in range(self.given.repeat):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            if self.capture:
                torch.cuda._sleep(1_000_000)
            self.together()
            start.record()
            what()
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor(start.elapsed_time(end), device=self.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found.append(float(slowest))
        return statistics.median(found)

    def parts(self, exchange: Exchange, ids: Tensor, weights: Tensor) -> dict[str, float]:
        """The transfers one by one."""
        fabric, x = exchange.fabric, self.x.detach()
        found = {"plan": self.time(lambda: exchange.route(ids))}
        traffic = exchange.route(ids)
        rows = fabric.push(x, weights, traffic)[0]

        def prefetch() -> None:
            exchange.loan(traffic, *self.own).slots()  # a new loan: nothing is held

        found["prefetch"] = self.time(prefetch) if exchange.slots else 0.0
        found["dispatch"] = self.time(lambda: fabric.push(x, weights, traffic))
        found["combine"] = self.time(lambda: fabric.pull(rows, None, traffic))
        return found

    def show(self, title: str, lines: str) -> None:
        """One rank after the other."""
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                print(f"{title}\n{lines}", flush=True)
            dist.barrier()

    def measure(self, exchange: Exchange, ids: Tensor) -> dict[str, float]:
        fabric = exchange.fabric
        self.together = partial(fabric._barrier, "reuse of a buffer") if hasattr(fabric, "_barrier") else lambda: None
        weights = torch.full(ids.shape, 1 / ids.shape[1], device=self.device).requires_grad_()
        found = self.parts(exchange, ids, weights.detach())

        def layer(backward: bool) -> Any:
            y = exchange(self.x, ids, weights, self.own, Experts())
            return torch.autograd.grad(y, (self.x, weights, *self.own), self.dy) if backward else y

        if not self.given.cpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found["forward"] = self.time(lambda: layer(False))
        found["both"] = self.time(lambda: layer(True))
        flop = 3 * 3 * 2 * ids.numel() * self.given.width * self.given.hidden  # 3 products, forward and twice backward
        found["TFLOP/s"] = flop / found["both"] / 1e9
        buffers = [*getattr(fabric, "_buffers", {}).values(), *getattr(fabric, "_pools", {}).values()]
        shared = sum(b.mine.numel() * b.mine.element_size() for b in buffers)
        peak = 0 if self.given.cpu else torch.cuda.max_memory_allocated()
        found["GiB"] = (peak + shared) / 2**30
        getattr(fabric, "check", lambda: None)()
        if self.given.profile and self.capture:
            self.together()
            self.show(f"rank {self.rank}, kernels of forward and backward", kernel_times(captured(lambda: layer(True))))
        return found


def svg(found: list[dict[str, Any]], path: Path) -> None:
    """Time of a layer, forward and backward, against maxvio; both axes from zero."""
    top = max(one["both"] for one in found) * 1.1
    right = max(one["maxvio"] for one in found) * 1.05
    place = lambda one: (60 + 500 * one["maxvio"] / right, 340 - 300 * one["both"] / top)  # noqa: E731
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="640" height="400" font-family="sans-serif">',
             '<path d="M60 40V340H580" fill="none" stroke="black"/>',
             f'<text x="60" y="28">ms, forward and backward (0 to {top:.0f})</text>',
             f'<text x="400" y="375">maxvio (0 to {right:.0f})</text>']  # fmt: skip
    for i, (name, colour) in enumerate(COLOURS.items()):
        line = sorted(place(one) for one in found if one["exchange"] == name)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{70 + 130 * i}" y="60" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 4096, "experts": 384, "top-k": 8, "width": 7168, "hidden": 2048, "warmup": 5}.items():
        arguments.add_argument(f"--{name}", type=int, default=value)
    arguments.add_argument("--repeat", type=int, default=20)
    arguments.add_argument("--maxvio", type=float, nargs="+", default=[0.2, 1, 5, 20])
    arguments.add_argument("--only", nargs="+", default=list(COLOURS)[1:])
    arguments.add_argument("--out", type=Path, help="JSON; the plot lies beside it as .svg")
    arguments.add_argument("--cpu", action="store_true")
    arguments.add_argument("--profile", action="store_true", help="kernels of the captured layer")
    given = arguments.parse_args()
    if not given.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if given.cpu else "nccl")
    bench, found = Bench(given), []
    routes = [routing(want, bench.size, given.tokens, given.top_k, given.experts) for want in given.maxvio]
    for name in given.only[given.cpu :]:
        exchange = bench.exchange(name)
        for ids, bench.capture in itertools.product(routes, [False, True] if name == "symmetric" else [False]):
            seen = maxvio(torch.cat(ids), given.experts)
            one: dict[str, Any] = {"exchange": name + " captured" * bench.capture, "maxvio": seen}
            one |= bench.measure(exchange, ids[bench.rank].to(bench.device))
            found.append(one)
            if bench.rank == 0:
                print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else v for k, v in one.items()), flush=True)
        del exchange
    if bench.rank == 0 and given.out:
        given.out.write_text(json.dumps({"given": vars(given) | {"out": str(given.out)}, "found": found}, indent=1))
        svg(found, given.out.with_suffix(".svg"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
