"""Text in, packed token batches out: sources -> clean -> shards -> batches; `prepare` runs the first three."""

from perilune.data.batches import Batch, Batches, bits_per_byte, held_out_batches
from perilune.data.options import DataConfig, DataError
from perilune.data.prepare import prepare
from perilune.data.shards import Prepared, Shard, open_shards

__all__ = [
    "Batch",
    "Batches",
    "DataConfig",
    "DataError",
    "Prepared",
    "Shard",
    "bits_per_byte",
    "held_out_batches",
    "open_shards",
    "prepare",
]
