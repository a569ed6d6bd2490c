"""Where the elements of every parameter lie: pure functions of names, shapes and mesh sizes.

A parameter is looked at as a matrix: [n] as n x 1, [C, 1, W] as C x W, experts [E, 2I, L] as E·2I x L. TP and EP
cut it into equal parts, FSDP cuts each part's first axis into chunks of ⌈n/ranks⌉. Each rank of a stage then holds one
box, and a stage's boxes tile the matrix: ownership, checkpoints and resharding are intersections of boxes.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal["whole", "split", "experts"]

# Rows of heads, hidden units and words; columns where a product sums over them.
_ROWS = re.compile(
    r"self_attn\.((q|k|v|g|q_b|kv_b|f_b|b|g_b)_proj\.weight|[qkv]_conv1d\.weight|A_log|dt_bias)$"
    r"|(mlp|shared_experts)\.(gate|up)_proj\.weight$|^lm_head\.weight$"
)
_COLUMNS = re.compile(r"self_attn\.o_proj\.weight$|(mlp|shared_experts)\.down_proj\.weight$")
_EXPERTS = re.compile(r"\.experts\.(w13|w2)$")


@dataclass(frozen=True)
class Box:
    """Rows [top, bottom) and columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return max(self.bottom - self.top, 0), max(self.right - self.left, 0)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __and__(self, other: "Box") -> "Box":
        """What both hold; its size is 0 where that is nothing."""
        return Box(
            max(self.top, other.top), min(self.bottom, other.bottom),
            max(self.left, other.left), min(self.right, other.right),
        )  # fmt: skip

    def of(self, outer: "Box", values: Tensor) -> Tensor:
        """The view of this box in `values`, the matrix that `outer` holds."""
        return values[self.top - outer.top : self.bottom - outer.top, self.left - outer.left : self.right - outer.left]


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns under which a parameter of this shape is looked at."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


def as_matrix(x: Tensor) -> Tensor:
    return x.reshape(matrix(x.shape))


def whole(shape: Sequence[int]) -> Box:
    rows, columns = matrix(shape)
    return Box(0, rows, 0, columns)


@dataclass(frozen=True)
class Sizes:
    """What decides where parameters lie: tp, ep and the ranks of a stage."""

    tp: int
    ep: int
    stage: int

    def kind(self, name: str) -> Kind:
        if _EXPERTS.search(name):
            return "experts"
        return "split" if self.tp > 1 and (_ROWS.search(name) or _COLUMNS.search(name)) else "whole"

    def cut(self, name: str, rank: int) -> tuple[int, int, int]:
        """(axis, part, parts) that TP or EP gives a rank of the stage, before FSDP."""
        kind = self.kind(name)
        if kind == "whole":
            return 0, 0, 1
        if kind == "experts":
            return 0, rank % self.ep, self.ep
        return (1 if _COLUMNS.search(name) else 0), rank % self.tp, self.tp

    def boxes(self, name: str, shape: Sequence[int]) -> list[Box]:
        """What each rank of the stage holds of a parameter of this (whole) shape."""
        return [self._box(name, tuple(shape), rank) for rank in range(self.stage)]

    def _box(self, name: str, shape: tuple[int, ...], rank: int) -> Box:
        axis, part, parts = self.cut(name, rank)
        rows, columns = matrix(shape)
        height = rows // shape[0] if shape else 1  # rows of the matrix in one step of the first axis
        first, count = (part * shape[0] // parts, shape[0] // parts) if axis == 0 and shape else (0, (shape or (1,))[0])
        left, width = (part * columns // parts, columns // parts) if axis == 1 else (0, columns)
        repeats = self.stage // parts
        chunk = -(-count // repeats)
        top = min(rank // parts * chunk, count)
        bottom = min(top + chunk, count)
        return Box((first + top) * height, (first + bottom) * height, left, left + width)


def take(x: Tensor, axis: int, part: int, parts: int) -> Tensor:
    """A copy of one of `parts` equal parts along an axis."""
    return x.detach().chunk(parts, axis)[part].clone()
