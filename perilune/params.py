"""`perilune params`: the account of a model as a table."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from perilune.accounting import Account, account, flops_per_token
from perilune.config import PRESETS, ModelConfig, preset
from perilune.release import read_config

CONTEXTS = (0, 8192, 131072, 1048576)


def show(model: str, contexts: tuple[int, ...] = ()) -> None:
    """Print the account of a preset or of a checkpoint directory."""
    config = preset(model) if model in PRESETS or not Path(model).exists() else read_config(Path(model))[0]
    console, cost = Console(), account(config)
    console.print(_parts(model, cost))
    console.print(_costs(config, cost, contexts or tuple(c for c in CONTEXTS if c <= config.max_position_embeddings)))


def _parts(model: str, cost: Account) -> Table:
    table = Table("part", ("parameters"), "share", title=f"{model}: parameters")
    table.columns[1].justify = table.columns[2].justify = "right"
    for part, count in cost.parts.items():
        table.add_row(part, f"{count:,}", f"{count / cost.total:.2%}")
    table.add_section()
    table.add_row("total", f"{cost.total:,}", "")
    table.add_row("active per token (text, head, no embedding)", f"{cost.active:,}", f"{cost.active / cost.total:.2%}")
    return table


def _costs(config: ModelConfig, cost: Account, contexts: tuple[int, ...]) -> Table:
    table = Table("cost", "value", title="bytes and FLOPs", show_header=False)
    table.columns[1].justify = "right"
    table.add_row("checkpoint bytes", f"{cost.checkpoint_bytes:,}")
    table.add_row("decode state per sequence: KDA, fp32", _bytes(cost.kda_state_bytes))
    table.add_row("decode state per sequence: conv tails, bf16", _bytes(cost.conv_state_bytes))
    table.add_row("MLA latents per token, bf16", f"{cost.mla_bytes_per_token:,} B")
    for context in contexts:
        flops = flops_per_token(config, context)
        table.add_row(f"forward FLOPs per token at context {context:,}", f"{flops:.4g}")
    return table


def _bytes(count: int) -> str:
    return f"{count:,} B ({count / 2**20:.2f} MiB)"
