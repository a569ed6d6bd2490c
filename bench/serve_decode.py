"""What the engine is worth: decoding on a GPU against the bytes it must read; on a CPU against plain loops.

    python bench/serve_decode.py [PRESET] [--threads N]
    python bench/serve_decode.py [PRESET] --device cuda [--batch 1 8 64] [--context 1024] [--profile]

GPU: random weights in bf16, made on the card; greedy decoding of requests that have `context` tokens behind them. A
step's floor is the time its bytes take at 4.8 TB/s: every weight but the embedding once, of the routed experts as many
as uniform routing touches, KDA states read and written, latents read. `step_ms` is a replay of the recorded step,
`engine_ms` a whole step of the engine with the host's part.
CPU, decode: tokens per second of the engine at batch 8 against two plain loops over K3.forward, one request after
another (what there is without an engine) and the eight in step on a Dense cache. Prefix: TTFT of a prompt of which most
was seen before, against the same prompt unseen; the cut should be at least 0.9 of the share of tokens reused.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from perilune.config import ModelConfig, preset
from perilune.model.cache import Dense
from perilune.model.net import K3
from perilune.model.weights import is_fp32
from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions, Request, Sampling

BATCH, PROMPT, TOKENS = 8, 96, 64
BANDWIDTH = 4.8e12  # bytes a second of an H200's memory, as its maker says


def build(config: ModelConfig) -> K3:
    torch.manual_seed(0)
    model = K3(config)
    model.reset_parameters()
    return model.eval()


def prompt(n: int, seed: int, config: ModelConfig) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, config.vocab_size, (n,), generator=generator).tolist())


@torch.inference_mode()
def plain(model: K3, prompts: list[tuple[int, ...]]) -> float:
    """Seconds to decode TOKENS more of each prompt in step, prefill not counted."""
    cache = Dense(model.config, len(prompts), dtype=model.embed_tokens.weight.dtype)
    feed = torch.tensor([t for p in prompts for t in p])
    feed = model(feed, cache.layout([PROMPT] * len(prompts)), cache, logits="last").logits.argmax(-1)
    started = time.perf_counter()
    for _ in range(TOKENS):
        feed = model(feed, cache.layout([1] * len(prompts)), cache, logits="last").logits.argmax(-1)
        feed.tolist()
    return time.perf_counter() - started


def engine(model: K3, prompts: list[tuple[int, ...]], options: EngineOptions) -> float:
    """The same through the engine."""
    served = Engine(model, options)
    for i, ids in enumerate(prompts):
        served.submit(Request(str(i), ids, Sampling(temperature=0, max_tokens=TOKENS + 1, ignore_eos=True)))
    while served.stats().completion_tokens < len(prompts):
        served.step()
    started = time.perf_counter()
    while served.busy:
        served.step()
    return time.perf_counter() - started


def first_token(served: Engine, ids: tuple[int, ...]) -> tuple[float, int]:
    """(TTFT in seconds, cached tokens)."""
    started = time.perf_counter()
    served.submit(Request("x", ids, Sampling(temperature=0, max_tokens=1, ignore_eos=True)))
    while True:
        for delta in served.step():
            return time.perf_counter() - started, delta.usage.cached_tokens


def decode(model: K3, rounds: int) -> dict[str, float]:
    prompts = [prompt(PROMPT, i, model.config) for i in range(BATCH)]
    seconds: dict[str, list[float]] = {"one after another": [], "in step, Dense": [], "engine": []}
    for _ in range(rounds):
        seconds["one after another"].append(sum(plain(model, [p]) for p in prompts[:2]) * BATCH / 2)
        seconds["in step, Dense"].append(plain(model, prompts))
        seconds["engine"].append(engine(model, prompts, EngineOptions(max_batch=BATCH)))
    return {name: BATCH * TOKENS / statistics.median(s) for name, s in seconds.items()}


def prefix(model: K3, shared: int, own: int, rounds: int) -> dict[str, float]:
    """Medians over prompts of `shared` tokens in common and `own` of their own."""
    cold, hit, cached = [], [], 0
    for r in range(rounds):
        served = Engine(model, EngineOptions(pool_tokens=4 * (shared + own), max_batch=2))
        start = prompt(shared, 100 + r, model.config)
        for i in range(3):  # the first is cold, the second shows where the branch is, the third finds it
            seconds, cached = first_token(served, start + prompt(own, 10 * r + i, model.config))
            (cold if i == 0 else hit).append(seconds)
            if i == 1:
                hit.pop()
    share = cached / (shared + own)
    cut = 1 - statistics.median(hit) / statistics.median(cold)
    return {"cold_ms": statistics.median(cold) * 1e3, "hit_ms": statistics.median(hit) * 1e3,
            "share_reused": share, "cut": cut, "cut_over_share": cut / share}  # fmt: skip


# --- on a GPU -------------------------------------------------------------------------------------------------------


def build_on_card(config: ModelConfig) -> K3:
    """In bf16 from the start: 48B parameters are never anywhere in fp32."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = K3(config.replace(num_nextn_predict_layers=0))
    torch.set_default_dtype(torch.float32)
    model.to_empty(device="cuda")
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if is_fp32(name):
            p.data = p.data.float()
    model.reset_parameters()
    return model.eval().requires_grad_(False)


def step_bytes(model: K3, batch: int, context: int) -> float:
    """Bytes that a step of `batch` requests with `context` tokens each cannot avoid."""
    c, total = model.config, 0.0
    share = 1 - (1 - c.num_experts_per_token / max(c.num_experts, 1)) ** batch
    for name, p in model.named_parameters():
        routed = ".experts.w" in name
        total += 0 if name.startswith("embed_tokens") else p.nbytes * (share if routed else 1)
    state = c.kda_num_heads * c.kda_head_dim**2 * 4 + 3 * c.kda_width * (c.short_conv_kernel_size - 1) * 2
    latents = len(c.mla_layers) * context * c.latent_width * 2
    return total + batch * (2 * len(c.kda_layers) * state + latents)


def kernels(replay: Callable[[], None]) -> dict[str, object]:
    """How many kernels a step runs, and where its time goes, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    largest = {f"{e.key[:70]} x{e.count}": round(e.self_device_time_total, 1) for e in events[:24]}
    return {"kernels": sum(e.count for e in events), "busy_us": round(sum(e.self_device_time_total for e in events)),
            "largest_us": largest}  # fmt: skip


def on_card(model: K3, batch: int, context: int, steps: int, profiled: bool) -> dict[str, object]:
    options = EngineOptions(
        max_batch=batch, pool_tokens=batch * (context + 4 * steps), context=context + 4 * steps, token_budget=8192,
        prefix_cache=False,
    )  # fmt: skip
    served = Engine(model, options)
    for i in range(batch):
        rules = Sampling(temperature=0, max_tokens=4 * steps - 1, ignore_eos=True)
        served.submit(Request(str(i), prompt(context, i, model.config), rules))
    while served.stats().completion_tokens < batch or served.stats().last_batch < batch:
        served.step()
    served.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        served.step()
    whole = (time.perf_counter() - started) / steps
    assert served.graphs is not None
    (recorded,) = (r for (size, _), r in served.graphs._made.items() if size == batch)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        recorded._replay()
    end.record()
    torch.cuda.synchronize()
    step = begin.elapsed_time(end) / steps / 1e3
    floor = step_bytes(model, batch, context) / BANDWIDTH
    found = {
        "batch": batch, "context": context, "floor_ms": floor * 1e3, "step_ms": step * 1e3, "engine_ms": whole * 1e3,
        "tokens_per_s": batch / whole, "share_of_floor": floor / whole, "share_of_floor_step": floor / step,
        "GB_a_step": floor * BANDWIDTH / 1e9,
    }  # fmt: skip
    return found | (kernels(recorded._replay) if profiled else {})


def gpu(name: str, batches: list[int], context: int, profiled: bool) -> None:
    started = time.perf_counter()
    model = build_on_card(preset(name))
    torch.cuda.synchronize()
    size = sum(p.nbytes for p in model.parameters())
    print(json.dumps({"preset": name, "GB": size / 1e9, "build_s": time.perf_counter() - started}), flush=True)
    for batch in batches:
        started = time.perf_counter()
        found = on_card(model, batch, context, 32, profiled)
        print(json.dumps(found | {"seconds": time.perf_counter() - started}, indent=1), flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="tiny")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.device == "cuda":
        gpu(args.preset, args.batch, args.context, args.profile)
        return
    torch.set_num_threads(args.threads)
    model = build(preset(args.preset))
    speeds = decode(model, args.rounds)
    longer = build(preset(args.preset).replace(max_position_embeddings=8192))
    result = {
        "preset": args.preset, "threads": args.threads,
        "decode_tokens_per_s": speeds,
        "engine_over_one_after_another": speeds["engine"] / speeds["one after another"],
        "engine_over_in_step": speeds["engine"] / speeds["in step, Dense"],
        "prefix 1536+64": prefix(model, 1536, 64, args.rounds),
        "prefix 6144+256": prefix(longer, 6144, 256, args.rounds),
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
