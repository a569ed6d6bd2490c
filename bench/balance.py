"""Simulated expert parallelism over real routing: python bench/balance.py TRACE.npz [--tokens 32768]

TRACE.npz comes from bench/routing_trace.py. For every number of ranks R the recorded tokens are cut into steps, a
step's tokens into R equal shares, and three placements of the 896 experts are compared:

    home      every expert where it lives
    history   as many replicas as the plan has slots for, placed by the last step's loads (greedy: replicate the
              heaviest load per replica, pack the heaviest first), the rows of an expert split evenly over its replicas
    plan      perilune.parallel.plan, exact and with a tolerance of 1% of a rank's share

Printed: makespan (rows of the fullest rank over the mean), copies of experts (all; most received and most sent by one
rank), GB a step the busiest sender pushes at K3's expert size (66.1 MB bf16, 17.5 MB MXFP4), and rows that leave their
rank with one payload per token and host. Everything is exact counting on the CPU; no time is modelled.
"""

import argparse
import heapq
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perilune.parallel import Plan, plan, route, segments
from perilune.parallel.routes import count_rows

EXPERTS, BF16, MXFP4 = 896, 66.1e-3, 17.5e-3  # GB an expert: 3 matrices of 3584 x 3072


def history_makespan(before_E: Tensor, now_E: Tensor, ranks: int, slots: int) -> float:
    """Load of the fullest rank over the mean, when placement follows `before_E` and tokens are `now_E`."""
    replicas = np.ones(EXPERTS, dtype=np.int64)
    heap = [(-float(load), e) for e, load in enumerate(before_E.tolist())]
    heapq.heapify(heap)
    for _ in range(ranks * slots):
        _, e = heapq.heappop(heap)
        replicas[e] += 1
        heapq.heappush(heap, (-float(before_E[e]) / replicas[e], e))
    copies = sorted(
        ((float(before_E[e]) / replicas[e], e) for e in range(EXPERTS) for _ in range(replicas[e])), reverse=True
    )
    room, expected, load = np.full(ranks, EXPERTS // ranks + slots), np.zeros(ranks), np.zeros(ranks)
    for share, e in copies:
        r = int(np.where(room > 0, expected, np.inf).argmin())
        room[r] -= 1
        expected[r] += share
        load[r] += float(now_E[e]) / replicas[e]
    return float(load.max() / load.mean())


def remote_payloads(made: Plan, experts_RSK: Tensor) -> float:
    """Payloads that leave their rank, over all payloads if each entry travelled alone and none stayed (of 8 ranks)."""
    layout, sent, ranks = segments(made), 0, range(0, made.ranks, made.ranks // 8)
    for rank in ranks:
        at = route(made, layout, experts_RSK[rank], rank)
        sent += int((at.primary & (at.host != rank)).sum())
    return sent / (experts_RSK[0].numel() * len(ranks))


def step(experts_RSK: Tensor, before_E: Tensor | None) -> dict[str, float]:
    ranks = experts_RSK.shape[0]
    counts = torch.stack([count_rows(e, EXPERTS) for e in experts_RSK])
    home, exact = plan(counts, num_slots=0), plan(counts)
    slack = plan(counts, tolerance=int(counts.sum()) // ranks // 100)
    now_E, mean = counts.sum(0), float(counts.sum()) / ranks
    received = (exact.replicas >= 0).sum(1)
    sent = torch.bincount(exact.replicas[exact.replicas >= 0] // exact.local, minlength=ranks)
    return {
        "maxvio": float(now_E.max() / now_E.double().mean() - 1),
        "home": float(home.rows.max()) / mean,
        "history": history_makespan(before_E, now_E, ranks, 1) if before_E is not None else float("nan"),
        "plan": float(exact.rows.max()) / mean,
        "copies": float(received.sum()),
        "received": float(received.max()),
        "sent": float(sent.max()),
        "copies 1%": float((slack.replicas >= 0).sum()),
        "sent 1%": float(torch.bincount(slack.replicas[slack.replicas >= 0] // slack.local, minlength=ranks).max()),
        "rows home": remote_payloads(home, experts_RSK),
        "rows plan": remote_payloads(exact, experts_RSK),
    }


def simulate(trace_TK: Tensor, ranks: int, tokens: int) -> dict[str, float]:
    """Means over the steps of one layer."""
    found, before = [], None
    for part in trace_TK.split(tokens):
        if len(part) == tokens:
            experts_RSK = part.view(ranks, tokens // ranks, -1)
            found.append(step(experts_RSK, before))
            before = count_rows(part, EXPERTS)
    return {name: float(np.nanmean([one[name] for one in found])) for name in found[0]}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("trace", type=Path)
    arguments.add_argument("--tokens", type=int, default=32768, help="of a step, over all ranks")
    given = arguments.parse_args()
    head = ["biases", "layer", "R", "maxvio", "makespan home", "history", "plan", "copies", "received", "sent"]
    print("| " + " | ".join([*head, "GB sent bf16", "MXFP4", "copies at 1%", "rows sent, home", "plan"]) + " |")
    print("|" + "---|" * 15)
    for mode, layers in np.load(given.trace).items():
        for layer, trace in enumerate(layers):
            for ranks in (8, 16, 32, 64, 128):
                one = simulate(torch.from_numpy(trace.astype(np.int64)), ranks, given.tokens)
                cells = [f"{one[n]:.2f}" for n in ("maxvio", "home", "history", "plan")]
                cells += [f"{one[n]:.1f}" for n in ("copies", "received", "sent")]
                cells += [f"{one['sent'] * size:.2f}" for size in (BF16, MXFP4)]
                cells += [f"{one['copies 1%']:.1f}", f"{one['rows home']:.3f}", f"{one['rows plan']:.3f}"]
                print(f"| {mode} | {layer} | {ranks} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
