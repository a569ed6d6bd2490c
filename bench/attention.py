"""Training attention with an fp32 output against SDPA, which rounds it: times and errors at MLA's 192/128 heads.

    python bench/attention.py                 # 2 documents of 8192, 16 heads, bf16
    python bench/attention.py --lengths 5000 3000 8192 192

Each row: forward and forward with backward in ms (median), the model FLOPs a second of both together, the largest
and mean error of o against fp64 on the same bf16 inputs, in units of the mean |o|.
"""

import argparse
import statistics
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.ops.attention import attention, attention_reference
from perilune.train.machine import describe

LENGTHS, HEADS, DK, DV = (8192, 8192), 16, 192, 128


def inputs(lengths: list[int], heads: int, device: torch.device) -> list[Tensor]:
    """q, k [T,H,192] and v [T,H,128] in bf16; v's columns are a slice, as the model's are."""
    made = torch.Generator(device).manual_seed(0)
    q, k, kv = (
        torch.randn(sum(lengths), heads, n, generator=made, device=device).bfloat16() for n in (DK, DK, DV + 128)
    )
    return [x.detach().requires_grad_() for x in (q, k, kv[..., 128:])]


def rounded(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """SDPA as it comes, a call a document where lengths differ."""
    count = 1 if len(set(lengths)) == 1 else len(lengths)
    sizes = [len(q)] if count == 1 else lengths
    rows = len(lengths) if count == 1 else 1
    outs = []
    for part in zip(*(x.split(sizes) for x in (q, k, v))):
        a, b, c = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in part)
        outs.append(F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)


def milliseconds(run, repeats: int = 10) -> float:
    times = []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def time(op, leaves: list[Tensor], flops: float) -> str:
    do = torch.randn(op(*leaves).shape, device=leaves[0].device)

    def both() -> None:
        o = op(*leaves)
        torch.autograd.grad(o, leaves, do.to(o.dtype))

    forward, total = milliseconds(lambda: op(*leaves)), milliseconds(both)
    return f"forward {forward:6.2f} ms   both {total:6.2f} ms   {3.5 * flops / total / 1e9:4.0f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--heads", type=int, default=HEADS)
    args = parser.parse_args()
    device, scale = torch.device("cuda"), DK**-0.5
    flops = sum(n * n for n in args.lengths) * args.heads * (DK + DV)
    ops = {"fp32 output": attention, "SDPA, rounded": rounded, "SDPA of fp32": partial(attention, impl="eager")}
    print(f"{describe(device)}; documents {args.lengths}, {args.heads} heads, {DK}/{DV}")
    short = [1024, 700, 324]
    few = inputs(short, 2, device)
    exact = attention_reference(*(x.detach().double() for x in few), short, scale)
    for name, op in ops.items():
        error = (op(*few, short, scale).detach().double() - exact).abs() / exact.abs().mean()
        times = time(partial(op, lengths=args.lengths, scale=scale), inputs(args.lengths, args.heads, device), flops)
        print(f"{name:14} {times}   error {error.max():.1e}, mean {error.mean():.1e}", flush=True)


if __name__ == "__main__":
    main()
