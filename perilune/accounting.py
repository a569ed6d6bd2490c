"""What a model costs, computed from its config (docs/architecture.md, "What it costs"): counts, bytes, FLOPs."""

from collections import Counter
from dataclasses import dataclass

from perilune.config import ModelConfig
from perilune.tensors import Tensor, is_kimi_linear, padded_heads, tensors


@dataclass(frozen=True)
class Account:
    """Counts of parameters unless the name says bytes. `active` is per token, text only, with the head, without the
    embedding; `matmul` is `active` less what is never multiplied by a matrix (norms, convs, biases)."""

    parts: dict[str, int]
    total: int
    padding: int
    active: int
    checkpoint_bytes: int
    kda_state_bytes: int
    conv_state_bytes: int
    mla_bytes_per_token: int


def account(config: ModelConfig, state_bytes: int = 4, cache_bytes: int = 2) -> Account:
    """Count everything. `state_bytes`: bytes a value of KDA state (fp32), `cache_bytes`: of conv tails and latents."""
    rows = list(tensors(config))
    parts: Counter[str] = Counter()
    for row in rows:
        parts[row.part] += row.parameters
    padding = 0 if is_kimi_linear(config) else padded_heads(config.kda_num_heads) - config.kda_num_heads
    padding *= len(config.kda_layers)
    parts["kda"] -= padding
    parts["A_log padding"] = padding
    kda, mla = len(config.kda_layers), len(config.mla_layers)
    return Account(
        parts={part: count for part, count in parts.items() if count},
        total=sum(row.parameters for row in rows),
        padding=padding,
        active=sum(_active(config, row) for row in rows) - padding,
        checkpoint_bytes=sum(row.bytes for row in rows),
        kda_state_bytes=kda * config.kda_num_heads * config.kda_head_dim**2 * state_bytes,
        conv_state_bytes=kda * 3 * config.kda_width * (config.short_conv_kernel_size - 1) * cache_bytes,
        mla_bytes_per_token=mla * config.latent_width * cache_bytes,
    )


def _active(config: ModelConfig, row: Tensor) -> int:
    if row.part in ("embedding", "vision", "projector", "mtp"):
        # A tied head reads the embedding matrix, so it counts once.
        return row.parameters if row.part == "embedding" and config.tie_word_embeddings else 0
    if row.part == "experts":
        return row.size * config.num_experts_per_token
    return row.parameters


def non_embedding_active(config: ModelConfig) -> int:
    """Active parameters less embedding and head: the N of MFU's 6N."""
    head = config.vocab_size * config.hidden_size
    return account(config).active - head


def flops_per_token(config: ModelConfig, context: int) -> int:
    """Forward FLOPs of one token that attends to `context` tokens: 2 per active weight, the KDA state's three passes
    (decay and read, write, output: 6KV a head) and MLA's scores and values (2(d_qk + d_v) a head and key)."""
    weights = 2 * account(config).active
    kda = len(config.kda_layers) * config.kda_num_heads * 6 * config.kda_head_dim**2
    per_key = 2 * (config.qk_head_dim + config.v_head_dim)
    mla = len(config.mla_layers) * config.num_attention_heads * per_key * context
    return weights + kda + mla
