"""Looks at a model in training: held-out bits per byte, and what a report draws of its inside."""

from typing import Any

import torch

from perilune.data import Prepared, Shard, bits_per_byte, held_out_batches
from perilune.model.generate import Sampling, generate
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.model.taps import Taps
from perilune.train.loss import batch_loss
from perilune.train.options import TrainConfig


@torch.no_grad()
def evaluate(model: K3, shard: Shard, options: TrainConfig, tokens: int, dtype: torch.dtype) -> float:
    """Held-out bits per byte over the first `tokens` tokens of the split, in rows of the training context."""
    nats, text_bytes, read = 0.0, 0, 0
    for batch in held_out_batches(shard, options.context, options.rows):
        with torch.autocast(model.embed_tokens.weight.device.type, dtype, enabled=dtype != torch.float32):
            nats += float(batch_loss(model, batch, dtype, mtp=False).next_token)
        text_bytes += batch.n_bytes
        read += len(batch.tokens)
        if read >= tokens:
            break
    return bits_per_byte(nats, text_bytes) if text_bytes else float("nan")


@torch.no_grad()
def inspect(model: K3, data: Prepared, options: TrainConfig) -> dict[str, Any]:
    """One look: loads {layer: share per expert}, decay {layer: [head][channel] mean log}, attn_res [read][source],
    samples [{prompt, text}]."""
    source = data.held_out if data.held_out.n_tokens else data.train
    batch = next(iter(held_out_batches(source, options.context, options.rows)))
    device = model.embed_tokens.weight.device
    taps = Taps.of({"decay", "attn_res", "routes"})
    model(batch.tokens.to(device), Layout.packed(batch.lengths, device), logits="none", taps=taps)
    loads = {layer: _shares(index, model.config.num_experts) for layer, (index, _) in taps.routes.items()}
    return {
        "loads": loads,
        "decay": {layer: _rounded(g) for layer, g in taps.decays.items()},
        "attn_res": [_rounded(p) for p in taps.attn_res],
        "samples": samples(model, data, options),
    }


def samples(model: K3, data: Prepared, options: TrainConfig) -> list[dict[str, str]]:
    """Continuations of the recipe's prompts, from a fixed seed."""
    tokenizer = data.tokenizer()
    rule = Sampling(temperature=0.8, top_p=0.95, seed=0, max_tokens=options.sample_tokens, stop=(tokenizer.eos,))
    made = []
    for prompt in options.sample_prompts:
        ids = tokenizer.encode(prompt) or [tokenizer.eos]  # an empty prompt asks for a document from its start
        text = tokenizer.decode(list(generate(model, ids, rule)), skip_special=True)
        made.append({"prompt": prompt, "text": text})
    return made


def _shares(index: torch.Tensor, experts: int) -> list[float]:
    counts = torch.bincount(index.flatten(), minlength=experts).double()
    return _rounded(counts / counts.sum())


def _rounded(x: torch.Tensor) -> Any:
    return torch.round(x.double() * 1e6).div(1e6).tolist()
