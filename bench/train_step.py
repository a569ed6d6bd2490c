"""Tokens/s and MFU of whole training steps (forward, backward, optimiser) on random tokens.

    python bench/train_step.py mini --context 2048 --tokens 65536
    python bench/train_step.py tiny --context 256 --tokens 4096 --device cpu

MFU = 6 · active non-embedding parameters · tokens/s over the dense matmul rate measured on the same machine first.
Prints one line a configuration (medians over the timed steps) and, with --json, appends it to a file.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from perilune.accounting import non_embedding_active
from perilune.config import preset
from perilune.data import Batch
from perilune.model.linear import weights_cast_once
from perilune.model.net import K3
from perilune.ops.memory import keep_freed_memory
from perilune.ops.quantile import expert_counts, margin_histogram
from perilune.train.activations import activation_policy, apply_policy
from perilune.train.balance import QuantileBalancer, RouterTap
from perilune.train.loss import batch_loss
from perilune.train.machine import describe, pick_device, pick_precision
from perilune.train.metrics import measure_peak, mfu, peak_memory
from perilune.train.optim import Optimizer, plan


def batch(vocab: int, context: int, tokens: int, seed: int) -> Batch:
    ids = torch.randint(0, vocab, (tokens + 1,), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:-1], ids[1:].clone(), (context,) * (tokens // context), tokens, 0, tokens // context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=65536, help="per micro-batch")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--activations", default="keep")
    parser.add_argument("--mtp", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = pick_device(args.device)
    dtype = pick_precision("auto", device)
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(0)
    config = preset(args.preset).replace(num_nextn_predict_layers=args.mtp)
    with torch.device(device):
        model = K3(config)
    model.reset_parameters()
    apply_policy(model.layers, activation_policy(args.activations, config.num_hidden_layers))
    optimizer = Optimizer(plan(model.named_parameters(), config))
    batches = [batch(config.vocab_size, args.context, args.tokens, seed) for seed in range(args.micro)]
    peak = measure_peak(device, dtype)
    gates = {layer.layer: layer.block_sparse_moe.gate for layer in (*model.layers, *model.mtp) if layer.layer}
    biases = {i: gate.e_score_correction_bias for i, gate in gates.items()}
    balancer = QuantileBalancer(biases, config.num_experts_per_token)

    def look(route, bias) -> RouterTap:
        counts = expert_counts(route.idx, config.num_experts)
        return RouterTap(counts, margin_histogram(route.scores, route.threshold, bias))

    def step() -> None:
        with weights_cast_once():
            for b in batches:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss = batch_loss(model, b, dtype)
                    total = loss.next_token + 0.3 * loss.mtp
                (total / (args.tokens * args.micro)).backward()
                balancer.observe({i: look(route, biases[i]) for i, route in loss.routes.items()})
        optimizer.step(1e-4)
        optimizer.zero_grad()
        balancer.update()

    def sync() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for i in range(args.steps + 2):
        sync()
        began = time.perf_counter()
        step()
        sync()
        if i >= 2:
            times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    rate = args.tokens * args.micro / seconds
    result = {
        "preset": args.preset,
        "context": args.context,
        "tokens_per_step": args.tokens * args.micro,
        "activations": args.activations,
        "mtp": args.mtp,
        "tokens_per_second": round(rate),
        "mfu": round(mfu(non_embedding_active(config), rate, peak), 4),
        "peak_tflops": round(peak / 1e12, 3),
        "memory_gb": round(peak_memory(device) / 1e9, 2),
        "step_ms": round(1e3 * seconds, 1),
        "spread_ms": [round(1e3 * min(times), 1), round(1e3 * max(times), 1)],
        "machine": describe(device),
    }
    print(json.dumps(result))
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if args.profile:
        _profile(step, device)


def _profile(step, device) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as prof:
        step()
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(prof.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
