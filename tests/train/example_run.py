"""A run that nobody trained, in the files training writes: noisy curves, settling experts, drifting decays."""

import json
import math
import random
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, HEADS, CHANNELS, KDA_LAYERS = (1, 2, 3, 4), 16, 4, 32, (0, 1, 2)


TEXTS = [
    "0t\x07 e ,=(e\n\n  ,,",
    'self(self, self):\n        """Return the self."""\n',
    "open(self, name):\n    if not name:\n        raise ValueError('no name')\n    return self.read(name)\n",
]


def write(
    directory: Path, *, steps: int = 600, seed: int = 0, every: int = 20, offset: float = 0.0, **recipe: Any
) -> Path:
    """Writes metrics.jsonl, inspect.jsonl and run.json below `directory` and returns it."""
    rng = random.Random(seed)
    directory.mkdir(parents=True)
    _lines(directory / "metrics.jsonl", [_metrics(s, steps, rng, offset) for s in range(steps)])
    moments = [*range(0, steps, every), steps - 1]
    _lines(directory / "inspect.jsonl", [_inspection(s, s / steps, rng) for s in moments])
    about = {
        "recipe": {
            "model": {"preset": "tiny", "changes": {"attn_res_full": False}},
            "data": {"sources": [], "sequence": 256, "held_out": 0.02},
            "train": {"steps": steps, "tokens_per_step": 4096, "seed": seed, "optimizer": "per_head", **recipe},
            "schedule": {"peak": 0.01, "warmup_share": 0.01, "floor_share": 0.1, "kind": "cosine"},
        },
        "config": {"hidden_size": 128, "num_hidden_layers": 5, "mla_layers": [3, 4], "q_lora_rank": 64, "vision": None},
        "parameters": {"total": 2_412_544, "active": 1_208_320},
        "machine": "2 cores of an Intel Xeon 8481C, torch 2.13",
        "started": "2026-11-30 01:12 UTC",
    }
    (directory / "run.json").write_text(json.dumps(about))
    return directory


def _lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def _metrics(step: int, steps: int, rng: random.Random, offset: float) -> dict[str, Any]:
    loss = offset + 2.05 + 5.6 * math.exp(-step / 18) + 1.9 * (1 + step / 25) ** -0.55 + rng.gauss(0, 0.06)
    rate = 0.01 * min(1.0, (step + 1) / 6) * (0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
    violation = [0.09 + 1.6 * math.exp(-step / (6 + 2 * j)) + abs(rng.gauss(0, 0.03)) for j in LAYERS]
    return {
        "step": step,
        "tokens": 4096 * (step + 1),
        "loss": loss,
        "bpb": loss / math.log(2) / 2.92,
        "grad_norm": 0.35 + 3 * math.exp(-step / 20) + rng.lognormvariate(-2.2, 0.6),
        "lr": rate,
        "tokens_per_second": 8400 + rng.gauss(0, 160) - (2600 if step % 97 == 96 else 0),
        "mfu": 0.31,
        "peak_flops": 2.1e11,
        "memory": 1_610_612_736,
        "max_logit": 4 + 22 * (1 - math.exp(-step / 150)) + rng.gauss(0, 0.8),
        "skipped": 0,
        "layers": list(LAYERS),
        "max_violation": violation,
        "dead": [0.0625 * (rng.random() < math.exp(-step / 8)) for _ in LAYERS],
        "val_bpb": (loss + 0.03) / math.log(2) / 2.92 if step % 50 == 49 or step == steps - 1 else None,
    }


def _inspection(step: int, done: float, rng: random.Random) -> dict[str, Any]:
    def loads(layer: int) -> list[float]:
        spread = 0.06 + 1.3 * math.exp(-18 * done)
        raw = [math.exp(spread * math.sin(3.1 * e + layer) + rng.gauss(0, 0.05)) for e in range(EXPERTS)]
        raw[5] *= 0.0 if done < 0.03 and layer == 2 else 1.0
        return [x / sum(raw) for x in raw]

    def decay(layer: int) -> list[list[float]]:
        centre = [math.log(6) + 0.5 * layer + done * (1.1 * h - 0.8 + 0.6 * layer) for h in range(HEADS)]
        return [[-math.log(2) / math.exp(c + math.sin(2.4 * i)) for i in range(CHANNELS)] for c in centre]

    text = TEXTS[min(2, int(3.6 * done))]
    return {
        "step": step,
        "loads": {str(j): loads(j) for j in LAYERS},
        "decay": {str(j): decay(j) for j in KDA_LAYERS},
        "attn_res": [_weights(sources, read, done) for read, sources in enumerate([2, 2, 2, 2, 3, 3, 3, 3, 4, 4])],
        "samples": [{"prompt": "def ", "text": text}, {"prompt": "# ", "text": text}],
    }


def _weights(sources: int, read: int, done: float) -> list[float]:
    raw = [math.exp(done * (1.4 * math.cos(1.7 * read + 2.3 * s) + 0.9 * (s == sources - 1))) for s in range(sources)]
    return [x / sum(raw) for x in raw]
