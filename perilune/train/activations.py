"""Which blocks keep their activations for the backward pass and which compute them again.

Declared outside the model: a policy is one word a block, and applying it replaces each block's forward on the
instance, so parameter names, buffers and the model's own code stay as they are.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Choice = Literal["keep", "recompute"]


def activation_policy(spec: str, blocks: int) -> tuple[Choice, ...]:
    """The choice for each of `blocks`: spec "keep", "recompute", or "recompute:N", which keeps every N-th block."""
    word, _, every = spec.partition(":")
    if word not in ("keep", "recompute") or (every and (word == "keep" or not every.isdigit() or int(every) < 2)):
        raise ValueError(
            f'activations must be "keep", "recompute" or "recompute:N" with N of at least 2, not {spec!r}.'
        )
    period = 1 if word == "keep" else int(every) if every else blocks + 1
    return tuple("keep" if (i + 1) % period == 0 else "recompute" for i in range(blocks))


def apply_policy(blocks: Iterable[nn.Module], policy: Sequence[Choice]) -> None:
    """Makes each block follow its choice from now on; applying another policy replaces the former.

    A recomputed block runs its forward twice when gradients are on, so it must return what it measures instead of
    adding it up in place. Nothing in the model draws random numbers, so none are saved.
    """
    for block, choice in zip(blocks, policy, strict=True):
        block.__dict__.pop("forward", None)
        if choice == "recompute":
            block.forward = partial(_recompute, type(block).forward, block)  # type: ignore[method-assign]


def _recompute(forward, block: nn.Module, *args, **kwargs):  # type: ignore[no-untyped-def]
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
