"""Which bytes of a checkpoint's files are which elements: every rank writes and reads the boxes it holds.

    step-…/weights/*.safetensors   the released layout, fp32      step-…/optimizer.safetensors   whole tensors by name

The layout of a file is known before its values are: rank 0 writes headers and sizes, then every rank writes rows and
columns it holds straight where they belong, and reads back whatever boxes it holds on another mesh. Nothing is
gathered, parameters are bit-equal on any mesh, and a single process continues a mesh's run or the other way round.
The directory must be one that all ranks see.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from perilune.config import ModelConfig
from perilune.model.shards import INDEX, SHARD_BYTES, WIDTHS, shard_files, write_json
from perilune.model.weights import ours, plain
from perilune.release import to_json
from perilune.tensors import tensors
from perilune.train.checkpoint import CheckpointError
from perilune.train.mesh.boxes import Box, as_matrix, matrix, whole

_DTYPES = {"F32": torch.float32, "I64": torch.int64}
_BYTES = {**WIDTHS, "I64": 8}


@dataclass(frozen=True)
class Place:
    """A tensor in a file: bytes from `offset`, `shape` of `dtype`; it is `box` of our parameter `name`'s matrix."""

    file: str
    tensor: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    box: Box

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True)
class Held:
    """Values [rows, columns] of a box of a parameter (or a state of it) that this rank holds, and nobody else."""

    name: str
    box: Box
    values: Tensor


# --- what lies where ----------------------------------------------------------------------------------------------


def weight_places(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], limit: int = SHARD_BYTES
) -> list[list[Place]]:
    """The released layout in fp32, file by file. shapes: of our parameters and buffers."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for row in tensors(config):
        if row.part in ("vision", "projector"):
            continue
        size = math.prod(row.shape) * _BYTES["F32"]
        for name in row.names():
            if files[-1] and filled + size > limit:
                files.append([])
                filled = 0
            files[-1].append((name, tuple(row.shape)))
            filled += size
    made = []
    for i, members in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        boxes = [(ours(plain(n), config), _released_box(plain(n), shapes[ours(plain(n), config)])) for n, _ in members]
        made.append(_lay_out(file, [(n, s, "F32", *b) for (n, s), b in zip(members, boxes)]))
    return made


def _released_box(name: str, shape: tuple[int, ...]) -> Box:
    """Which part of our parameter a released tensor is: all of it, or one matrix of a stack of experts."""
    rows, columns = matrix(shape)
    if ".experts." not in name:
        return Box(0, rows, 0, columns)
    expert, which = int(name.split(".experts.")[1].split(".")[0]), name.split(".")[-2]
    height = rows // shape[0]
    part = height if which == "w2" else height // 2
    top = expert * height + (part if which == "w3" else 0)
    return Box(top, top + part, 0, columns)


def state_places(states: Mapping[str, tuple[tuple[int, ...], str]]) -> list[Place]:
    """optimizer.safetensors. states: name -> (shape, dtype)."""
    return _lay_out("optimizer.safetensors", [(n, s, dtype, n, whole(s)) for n, (s, dtype) in sorted(states.items())])


def _lay_out(file: str, rows: list[tuple[str, tuple[int, ...], str, str, Box]]) -> list[Place]:
    """Places of a file's tensors, one after the other behind its header."""
    places, at = [], 0
    for tensor, shape, dtype, name, box in rows:
        places.append(Place(file, tensor, at, shape, dtype, name, box))
        at += places[-1].nbytes
    start = len(_header(places, 0))
    return [replace(p, offset=p.offset + start) for p in places]


def _header(places: list[Place], start: int) -> bytes:
    """Of a safetensors file whose data begin at byte `start`."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for p in places:
        span = [p.offset - start, p.offset - start + p.nbytes]
        rows[p.tensor] = {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": span}
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def create(directory: Path, places: list[Place]) -> None:
    """The file with its header and full size, zeros where values will be (and stay, where a tensor is padded)."""
    with (directory / places[0].file).open("wb") as file:
        file.write(_header(places, places[0].offset))
        file.truncate(places[-1].offset + places[-1].nbytes)


# --- writing and reading boxes ------------------------------------------------------------------------------------


def write_boxes(directory: Path, places: Iterable[Place], held: Iterable[Held]) -> None:
    """Put every value that this rank holds where it belongs, and sync the files it touched."""
    targets: dict[str, list[Place]] = {}
    for place in places:
        targets.setdefault(place.name, []).append(place)
    files: dict[str, int] = {}
    try:
        for mine in held:
            for place in targets[mine.name]:
                if (both := place.box & mine.box).size:
                    if place.file not in files:
                        files[place.file] = os.open(directory / place.file, os.O_WRONLY)
                    _write(files[place.file], place, both, both.of(mine.box, mine.values))
        for handle in files.values():
            os.fsync(handle)
    finally:
        for handle in files.values():
            os.close(handle)


def _write(handle: int, place: Place, box: Box, values: Tensor) -> None:
    """One run of bytes for whole rows, one a row for parts of rows."""
    data = values.to(_DTYPES[place.dtype]).contiguous()
    width, columns = _BYTES[place.dtype], place.box.shape[1]
    first = place.offset + ((box.top - place.box.top) * columns + box.left - place.box.left) * width
    runs = [data] if box.shape[1] == columns else list(data)
    for i, run in enumerate(runs):
        _pwrite(handle, run.numpy().tobytes(), first + i * columns * width)


def _pwrite(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done


def read_box(directory: Path, file: str, tensor: str, at: Box, box: Box) -> Tensor:
    """Part `box` of a parameter from a stored tensor that is its part `at`: [rows, columns]."""
    with safe_open(directory / file, framework="pt") as stored:
        part = stored.get_slice(tensor)
        shape = tuple(part.get_shape())
        top, bottom = box.top - at.top, box.bottom - at.top
        left, right = box.left - at.left, box.right - at.left
        if len(shape) == 2:
            return part[top:bottom, left:right]
        return as_matrix(stored.get_tensor(tensor))[top:bottom, left:right]  # vectors and convolutions are small


def read_weights(
    directory: Path, config: ModelConfig, held: Iterable[Held], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Fill every held box from a checkpoint's `weights/`, however it was cut into files."""
    files: dict[str, str] = {}
    for path in shard_files(directory):
        with safe_open(path, framework="pt") as stored:
            files |= dict.fromkeys(stored.keys(), path.name)
    targets: dict[str, list[tuple[str, Box]]] = {}
    for tensor in files:
        name = ours(plain(tensor), config)
        if name in shapes:
            targets.setdefault(name, []).append((tensor, _released_box(plain(tensor), shapes[name])))
    for mine in held:
        for tensor, at in targets.get(mine.name, ()):
            if (both := at & mine.box).size:
                both.of(mine.box, mine.values).copy_(read_box(directory, files[tensor], tensor, at, both))
        if mine.name not in targets:
            raise CheckpointError(f"{directory} lacks the tensor of {mine.name}.")


def read_states(path: Path, held: Iterable[Held]) -> None:
    """Fill every held box of optimiser state from optimizer.safetensors."""
    with safe_open(path, framework="pt") as stored:
        known = set(stored.keys())
    for mine in held:
        if mine.name not in known:
            raise CheckpointError(f"{path} lacks {mine.name}.")
        if mine.box.size:
            mine.values.copy_(read_box(path.parent, path.name, mine.name, Box(0, 0, 0, 0), mine.box))


def create_weights(directory: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The released layout without values: files, index and config.json."""
    directory.mkdir(parents=True)
    files = weight_places(config, shapes)
    for places in files:
        create(directory, places)
    total = sum(p.nbytes for places in files for p in places)
    names = {p.tensor: p.file for places in files for p in places}
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))})
    write_json(directory / "config.json", to_json(config))
