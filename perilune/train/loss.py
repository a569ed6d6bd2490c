"""The training loss of one packed batch: next token, and the token after it through the MTP layer.

L = nll(head(hidden_t), x_{t+1}) + w · nll(head(mtp_t), x_{t+2}),   sums over targets, divided by the step's count
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.data.batches import NO_TARGET, Batch
from perilune.model.layout import Layout
from perilune.model.net import K3, MTP
from perilune.model.taps import Taps
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.router import Routing


@dataclass(frozen=True)
class Loss:
    """Summed nats: of the next token, and of the MTP layer over its own targets (zero without one)."""

    next_token: Tensor
    mtp: Tensor
    routes: dict[int, Routing]


def batch_loss(model: K3, batch: Batch, dtype: torch.dtype, taps: Taps | None = None, *, mtp: bool = True) -> Loss:
    """Forward of one micro-batch on the model's device. `dtype`: of the head's product; `mtp`: with that layer."""
    device = model.embed_tokens.weight.device
    tokens, targets = batch.tokens.to(device), batch.targets.to(device)
    layout = Layout.packed(batch.lengths, device)
    out = model(tokens, layout, logits="none", taps=taps)
    loss = linear_cross_entropy(out.hidden.to(dtype), model.lm_head.weight, targets)
    routes = dict(out.routes)
    second = torch.zeros((), device=device)
    real = _with_second_target(batch).to(device) if mtp and model.mtp else None
    for i, layer in enumerate(model.mtp if mtp else ()):
        assert isinstance(layer, MTP)
        after = second_targets(targets, layout)
        embedded = model.embed_tokens(targets.clamp(min=0))  # the next token, where there is one
        hidden, _, route = layer.predict(embedded, out.features, layout, taps=taps)
        second = second + linear_cross_entropy(hidden.to(dtype), model.lm_head.weight, after)
        if route is not None:
            # A position without a second target reads a made-up next token: its choice must not move the balance.
            routes[model.config.num_hidden_layers + i] = Routing(*(part[real] for part in route))
    return Loss(loss, second, routes)


def second_target_count(batch: Batch) -> int:
    """The MTP layer's targets in a batch, on the host."""
    return len(_with_second_target(batch))


def _with_second_target(batch: Batch) -> Tensor:
    """Positions of the MTP layer's targets, found on the host: no sync with a device."""
    return torch.nonzero(second_targets(batch.targets, Layout.packed(batch.lengths)) != NO_TARGET).flatten()


def second_targets(targets: Tensor, layout: Layout) -> Tensor:
    """targets [T] one step later within each sequence: x_{t+2}, none at a sequence's last position."""
    after = torch.cat([targets[1:], targets.new_full((1,), NO_TARGET)])
    after = after.masked_fill(targets == NO_TARGET, NO_TARGET)
    return after.index_fill(0, layout.last[torch.diff(layout.cu_seqlens) > 0], NO_TARGET)
