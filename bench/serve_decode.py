"""What the engine is worth on a CPU: decoding eight requests, and the first token after a shared prefix.

    python bench/serve_decode.py [PRESET] [--threads N]

Decode: tokens per second of the engine at batch 8 against two plain loops over K3.forward, one request after another
(what there is without an engine) and the eight in step on a Dense cache. Prefix: TTFT of a prompt of which most was
seen before, against the same prompt unseen; the cut should be at least 0.9 of the share of tokens reused.
"""

import argparse
import json
import statistics
import time

import torch

from perilune.config import ModelConfig, preset
from perilune.model.cache import Dense
from perilune.model.net import K3
from perilune.serve.engine import Engine
from perilune.serve.request import EngineOptions, Request, Sampling

BATCH, PROMPT, TOKENS = 8, 96, 64


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="tiny")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
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
