"""Checkpoints from file to file, tensor by tensor: `import` takes a release in, `export` writes one.

Both check every name and shape against the config before a byte is written, keep names, foreign config keys and vision
tensors as they are, and hold one shard in memory. What needs no conversion is copied bit for bit.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from torch import Tensor

from perilune.config import ConfigError
from perilune.model.shards import SHARD_BYTES, WIDTHS, Entry, Stored, read_shards, write_shards
from perilune.model.weights import DTYPES, check, is_vision, missing_tensors, plain, table
from perilune.ops.mx import pack_mxfp4, unpack_mxfp4
from perilune.release import read_config, to_json
from perilune.tensors import Tensor as Row

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
_EXPERT_MATRIX = re.compile(r"\.experts\.\d+\.w[123]\.(weight|weight_packed|weight_scale)$")


def import_checkpoint(source: Path, target: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Copy a released checkpoint directory to `target`, checked; returns its tensor bytes.

    Raises ConfigError or WeightsError in one sentence, naming the file or tensor, with nothing written.
    """
    return convert(source, target, dtype=None, experts=None, shard_bytes=shard_bytes)


def convert(
    source: Path,
    target: Path,
    *,
    dtype: Literal["BF16", "F32"] | None = "BF16",
    experts: Literal["bfloat16", "mxfp4"] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Copy a checkpoint directory, converting on the way; returns the tensor bytes written.

    dtype: storage of what the release keeps in BF16; None leaves each tensor as stored.
    experts: packs or unpacks the routed experts; None leaves them.
    """
    source, target = Path(source), Path(target)
    if target.resolve() == source.resolve():
        raise ConfigError(f"{target} is the source itself; name another directory.")
    config, raw = read_config(source)
    rows, seen = table(config), set[str]()
    stored = {s.name: s for s in read_shards(source) if check(s, rows, seen)}
    missing_tensors(rows, seen, source)
    wanted = config if experts is None else config.replace(expert_format=experts)
    entries = [e for s in stored.values() for e in _entries(s, rows[plain(s.name)], dtype, experts, stored)]
    total = write_shards(target, entries, to_json(wanted, raw), shard_bytes)
    copy_tokenizer(source, target)
    return total


def _entries(
    stored: Stored, row: Row, dtype: str | None, experts: str | None, others: dict[str, Stored]
) -> list[Entry]:
    matrix = _EXPERT_MATRIX.search(stored.name)
    if matrix and experts == "mxfp4" and matrix[1] == "weight":
        return _packed(stored, row)
    if matrix and experts == "bfloat16" and matrix[1] != "weight":
        return _unpacked(stored, row, others) if matrix[1] == "weight_packed" else []
    if dtype is None or row.dtype != "BF16" or is_vision(row) or stored.dtype == dtype:
        return [Entry(stored.name, stored.nbytes, stored.read)]
    nbytes = stored.nbytes // WIDTHS[stored.dtype] * WIDTHS[dtype]
    return [Entry(stored.name, nbytes, lambda: stored.read().to(DTYPES[dtype]))]


def _packed(stored: Stored, row: Row) -> list[Entry]:
    values = row.shape[0] * row.shape[1]

    def half(which: int) -> Callable[[], Tensor]:
        return lambda: pack_mxfp4(stored.read())[which]

    return [
        Entry(stored.name + "_packed", values // 2, half(0)),
        Entry(stored.name + "_scale", values // 32, half(1)),
    ]


def _unpacked(stored: Stored, row: Row, others: dict[str, Stored]) -> list[Entry]:
    scale = others[stored.name.removesuffix("_packed") + "_scale"]
    name, nbytes = stored.name.removesuffix("_packed"), row.size * WIDTHS["BF16"]
    return [Entry(name, nbytes, lambda: unpack_mxfp4(stored.read(), scale.read(), DTYPES["BF16"]))]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Tokenizer files beside the weights travel with them."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
