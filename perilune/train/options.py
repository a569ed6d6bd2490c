"""What the user says about training: one frozen dataclass that the recipe nests as `[train]`."""

import math
from dataclasses import dataclass
from typing import Literal

from perilune.train.activations import activation_policy

_AT_LEAST_ONE = (
    *("steps", "context", "batch_tokens", "logit_every", "eval_every", "inspect_every", "checkpoint_every", "keep"),
    *("eval_tokens", "balance_bins"),
)
_NOT_NEGATIVE = (
    *("micro_tokens", "lr", "adamw_lr_scale", "weight_decay", "grad_clip", "qk_clip", "mtp_weight", "balance_gamma"),
    *("peak_flops", "sample_tokens"),
)


@dataclass(frozen=True)
class TrainConfig:
    """One pretraining run. Token counts are per optimiser step unless they say otherwise."""

    steps: int = 500
    context: int = 256
    """Tokens of a packed row."""
    batch_tokens: int = 4096
    micro_tokens: int = 0
    """Tokens of one forward and backward; 0 takes the whole batch at once."""
    seed: int = 0

    lr: float = 0.02
    """Peak rate of Muon; AdamW's is `lr * adamw_lr_scale`."""
    adamw_lr_scale: float = 0.6
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_share: float = 0.01
    floor_share: float = 0.1
    optimizer: Literal["per_head", "whole", "adamw"] = "per_head"
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    qk_clip: float = 100.0
    """Largest MLA logit a head may show before its q and k are scaled down; 0 turns QK-Clip off."""
    logit_every: int = 1
    """Steps between looks at the MLA logits; QK-Clip acts on those steps. A look is a second product of scores: about
    1% of a tiny step on a CPU, more on a GPU, where the recipes look every tenth step."""
    mtp_weight: float = 0.3
    """Weight of the multi-token-prediction loss, where the model has that layer."""

    balance: Literal["quantile", "exact", "sign", "none"] = "quantile"
    balance_bins: int = 1000
    balance_gamma: float = 1e-3
    balance_ema: float = 0.0

    device: str = "auto"
    """"auto" takes a CUDA device if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """"auto": bf16 autocast on CUDA, fp32 elsewhere (bf16 matmuls are slower than fp32 on most CPUs)."""
    activations: str = "keep"
    """"keep", "recompute", or "recompute:N", which keeps every N-th layer's."""
    peak_flops: float = 0.0
    """Dense matmul rate that MFU is a share of; 0 measures this machine."""

    eval_every: int = 100
    eval_tokens: int = 65536
    """Held-out tokens of an evaluation on the way; the last one reads all of them."""
    inspect_every: int = 50
    """Steps between samples and looks at expert loads, decays and depth weights."""
    sample_prompts: tuple[str, ...] = ("def ", "import ", "class ", "# ")
    sample_tokens: int = 48
    checkpoint_every: int = 100
    keep: int = 2
    wandb: str | None = None

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be at least 1, not {getattr(self, name)}.")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} must be at least 0 and finite, not {getattr(self, name)}.")
        if not 0 <= self.balance_ema < 1:
            raise ValueError(f"train.balance_ema must lie in [0, 1), not {self.balance_ema}.")
        for name in ("warmup_share", "floor_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"train.{name} must lie in [0, 1], not {getattr(self, name)}.")
        activation_policy(self.activations, 1)  # its word is checked before the data is prepared
        micro = self.micro_tokens or self.batch_tokens
        if micro % self.context or self.batch_tokens % micro:
            raise ValueError(
                f"train.batch_tokens {self.batch_tokens} must be whole micro-batches of {micro} tokens, "
                f"and those whole rows of train.context {self.context}."
            )

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return (self.micro_tokens or self.batch_tokens) // self.context

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return self.batch_tokens // (self.rows * self.context)
