"""Released names and layout <-> the model's parameters, tensor by tensor.

    language_model.model.layers.3.block_sparse_moe.experts.7.w1.weight  ->  layers.3.block_sparse_moe.experts.w1 [7]

`load` accepts the prefix or none, BF16 or F32 storage, MXFP4 packed experts and any zero padding of A_log, and insists
that every parameter is given exactly once. `save` writes the same layout from the tensor table.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.config import ModelConfig
from perilune.model.net import K3
from perilune.model.shards import SHARD_BYTES, WIDTHS, Entry, Stored, WeightsError, read_shards, write_shards
from perilune.ops.mx import pack_mxfp4, unpack_mxfp4
from perilune.release import read_config, to_json
from perilune.tensors import Tensor as Row
from perilune.tensors import tensors

_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])\.(weight|weight_packed|weight_scale)$")
_FLOATS = ("BF16", "F32", "F16", "F64")
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


def plain(name: str) -> str:
    """A released name without its optional prefix: the table's key."""
    return name.removeprefix("language_model.")


def table(config: ModelConfig) -> dict[str, Row]:
    """Plain name -> row, experts expanded."""
    return {plain(name): row for row in tensors(config) for name in row.names()}


def is_vision(row: Row) -> bool:
    return row.part in ("vision", "projector")


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    packed: bool = False,
) -> K3:
    """The model of a checkpoint directory, ready to run. `dtype` None keeps each parameter as stored.

    packed: routed experts that are stored in MXFP4 stay so in memory; such a model runs, but is not trained or saved.
    """
    config, _ = read_config(Path(directory))
    with torch.device("meta"):
        model = K3(config)
    if packed and config.expert_format == "mxfp4":
        model.pack_experts()
    model.to_empty(device=device)
    if config.tie_word_embeddings:  # to_empty makes one parameter two, and no file fills the second
        model.lm_head.weight = model.embed_tokens.weight
    load(model, directory)
    if dtype is not None:
        cast(model, dtype)
    return model


def cast(model: K3, dtype: torch.dtype) -> None:
    """Parameters to `dtype`, except the fp32 set, which is never narrowed."""
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if p.is_floating_point() and not (is_fp32(name) and dtype.itemsize < 4):
            p.data = p.data.to(dtype)


def is_fp32(name: str) -> bool:
    """The set that stays fp32 everywhere: short convs, A_log, dt_bias, o_norm, the router's bias."""
    return name.endswith(("_conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias"))


def load(model: K3, directory: Path) -> None:
    """Fill `model` from a checkpoint directory, one tensor in memory at a time.

    Raises WeightsError naming the first tensor that is missing, unknown, repeated or misshapen; the model is then
    partly overwritten and must not be used.
    """
    rows = table(model.config)
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    waiting: dict[str, Stored | Tensor] = {}
    seen: set[str] = set()
    for stored in read_shards(Path(directory)):
        name = plain(stored.name)
        row = check(stored, rows, seen)
        if is_vision(row):
            continue
        _fill(targets, model.config, name, stored, waiting)
    missing_tensors(rows, seen, directory)


def check(stored: Stored, rows: dict[str, Row], seen: set[str]) -> Row:
    """The row a stored tensor belongs to, or WeightsError: unknown, repeated, misshapen or of a wrong dtype."""
    name = plain(stored.name)
    row = rows.get(name)
    if row is None:
        raise WeightsError(f"Tensor {stored.name} is not part of this config.")
    if name in seen:
        raise WeightsError(f"Tensor {stored.name} appears twice.")
    if not _fits(name, stored.shape, row.shape):
        raise WeightsError(f"Tensor {stored.name} is {list(stored.shape)}, but the config asks for {list(row.shape)}.")
    if (stored.dtype == "U8") != (row.dtype == "U8") or stored.dtype not in ("U8", *_FLOATS):
        raise WeightsError(f"Tensor {stored.name} is stored as {stored.dtype}, but the config asks for {row.dtype}.")
    seen.add(name)
    return row


def _fits(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if name.endswith("A_log"):  # [H] padded to any length, or [1, 1, H, 1]; the row's own size bounds the heads
        return max(shape, default=0) >= 1 and sum(n != 1 for n in shape) <= 1
    return shape == wanted


def missing_tensors(rows: dict[str, Row], seen: set[str], directory: Path | str) -> None:
    """WeightsError naming the first tensor nobody gave. A text-only checkpoint may omit all of vision."""
    absent = [name for name in rows if name not in seen]
    vision = [name for name in rows if is_vision(rows[name])]
    if not any(name in seen for name in vision):
        absent = [name for name in absent if name not in set(vision)]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise WeightsError(f"{directory} lacks the tensor {absent[0]}{more}.")


def ours(name: str, config: ModelConfig) -> str:
    """Plain released name -> the model's parameter name (experts: of the whole stack)."""
    name = name.removeprefix("model.")
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= config.num_hidden_layers:
        name = f"mtp.{int(layer[1]) - config.num_hidden_layers}." + name[layer.end() :]
    return _EXPERT.sub(lambda m: "experts.w2" if m[2] == "w2" else "experts.w13", name)


def _part(stack: Tensor, name: str) -> Tensor:
    """The view of an expert stack that holds one released matrix: w1 and w3 share w13, gate rows first."""
    match = _EXPERT.search(name)
    assert match is not None
    matrix = stack[int(match[1])]
    if match[2] == "w2":
        return matrix
    return matrix[: len(matrix) // 2] if match[2] == "w1" else matrix[len(matrix) // 2 :]


def _fill(targets: dict[str, Any], config: ModelConfig, name: str, stored: Stored, waiting: dict[str, Any]) -> None:
    expert = _EXPERT.search(name)
    if expert is not None and f"{ours(name, config)}_codes" in targets:
        kind = "codes" if expert[3] == "weight_packed" else "scales"
        _part(targets[f"{ours(name, config)}_{kind}"], name).copy_(stored.read())
        return
    target = targets[ours(name, config)].data
    if expert is None:
        value = stored.read()
        target.copy_(_heads(value, target, stored.name) if name.endswith("A_log") else value.view(target.shape))
        return
    value = stored.read()
    if expert[3] != "weight":
        base, kind = name.rsplit(".", 1)
        other = waiting.pop(base, None)
        if other is None:
            waiting[base] = value
            return
        packed, scale = (value, other) if kind == "weight_packed" else (other, value)
        value = unpack_mxfp4(packed, scale, dtype=target.dtype)
    _part(target, name).copy_(value)


def _heads(value: Tensor, target: Tensor, name: str) -> Tensor:
    value = value.flatten()
    if len(value) < len(target):
        raise WeightsError(f"Tensor {name} holds {len(value)} heads, but the config asks for {len(target)}.")
    if value[len(target) :].any():
        raise WeightsError(f"Tensor {name} has non-zero values past its {len(target)} heads.")
    return value[: len(target)]


# --- out ------------------------------------------------------------------------------------------------------------


def save(model: K3, directory: Path, **options: Any) -> int:
    """Write the model in the released layout; returns its tensor bytes. Options as for `save_tensors`."""
    return save_tensors(model.config, named_tensors(model), directory, **options)


def named_tensors(model: K3) -> dict[str, Tensor]:
    """Every parameter and buffer by our name, detached views."""
    return {name: p.detach() for name, p in (*model.named_parameters(), *model.named_buffers())}


def save_tensors(
    config: ModelConfig,
    values: Mapping[str, Tensor],
    directory: Path,
    *,
    dtype: str = "BF16",
    base: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write named values in the released layout.

    dtype: storage of what the release keeps in BF16: "BF16", or "F32" for a checkpoint that training resumes from.
    base: a config.json to overlay, so that foreign keys survive. Experts are packed if config.expert_format says so.
    """
    return write_shards(directory, _entries(config, values, dtype), to_json(config, base), shard_bytes)


def _entries(config: ModelConfig, values: Mapping[str, Tensor], dtype: str) -> Iterator[Entry]:
    for row in tensors(config):
        if is_vision(row):
            continue
        storage = dtype if row.dtype == "BF16" else row.dtype
        for name in row.names():
            value = values[ours(plain(name), config)]
            yield Entry(name, math.prod(row.shape) * WIDTHS[storage], _maker(row, name, value, storage))


def _maker(row: Row, name: str, value: Tensor, storage: str) -> Callable[[], Tensor]:
    expert = _EXPERT.search(name)

    def make() -> Tensor:
        x = _part(value, name) if expert else value
        if expert and expert[3] != "weight":
            packed, scale = pack_mxfp4(x)
            return packed if expert[3] == "weight_packed" else scale
        if name.endswith("A_log"):
            x = _padded(x, row.shape)
        return x.to("cpu", DTYPES[storage]).reshape(row.shape)

    return make


def _padded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    out = x.new_zeros(shape)
    out.view(-1)[: len(x)] = x
    return out
