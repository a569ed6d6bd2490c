"""State is a value, storage is a protocol.

A `Cache` holds what a sequence needs from its past: per KDA layer the fp32 state [H, K, V] and the conv tail
[3·H·K, W−1] (last pre-conv projections of q, k, v, oldest first), per MLA layer the latents [L, R] = [RMSNorm(c) | r].
`Dense` keeps them functionally (gradients flow through); the server's paged pool is the same protocol in place.
A `State` is one sequence's share of a cache as a plain value: fork, split, save, move, measure in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from perilune.config import ModelConfig
from perilune.model.layout import Layout
from perilune.ops.kda.decode import Drafts
from perilune.ops.mla import mla_decode


@dataclass(frozen=True)
class Place:
    """Where a decoding window updates a KDA layer in place: the storage arguments of `ops.kda.decode`."""

    state: Tensor
    tail: Tensor
    slots: Tensor
    drafts: Drafts | None = None
    accepted: Tensor | None = None
    rows: Tensor | None = None


@dataclass(frozen=True)
class Book:
    """Where a decoding window's latents and those before it lie: the storage arguments of `ops.mla.mla_decode`."""

    latents: Tensor
    table: Tensor
    lengths: Tensor

    def attend(self, q: Tensor, values: int, scale: float) -> Tensor:
        """q [N, W, heads, R] -> [N, W, heads, values]: attention to what lies there."""
        return mla_decode(q, self.latents, self.table, self.lengths, values=values, scale=scale)


class Cache(Protocol):
    """What K3.forward asks of any storage. N is layout.sequences; shapes as in the module's head."""

    def read_kda(self, layer: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """(state [N, H, K, V] fp32, conv tail [N, C, W−1]) of the layout's slots."""
        ...

    def write_kda(
        self, layer: int, layout: Layout, state: Tensor, tail: Tensor, exports: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """exports: (states [E, H, K, V], tails [E, C, W−1]) after the layout's export_at."""
        ...

    def place_kda(self, layer: int, layout: Layout) -> Place | None:
        """For a decoding window, all sequences as long, that updates the storage itself; None: read and write."""
        ...

    def extend_mla(self, layer: int, layout: Layout, latents: Tensor) -> Tensor | Book | None:
        """Append latents [T, R]; returns each sequence's whole context [N, L, R], L the longest, padding undefined
        but finite. May be None for a fresh layout, whose context is the latents; a Book for a decoding window, all
        sequences as long, that reads the storage itself."""
        ...

    def advance(self, layout: Layout) -> None:
        """Called once after every layer has written: the layout's tokens are now past."""
        ...


@dataclass(frozen=True)
class State:
    """One sequence's past. kda[layer] [H, K, V], conv[layer] [C, W−1], mla[layer] [length, R]."""

    length: int
    kda: dict[int, Tensor]
    conv: dict[int, Tensor]
    mla: dict[int, Tensor]

    def _map(self, f: Any) -> "State":
        parts = ({layer: f(x) for layer, x in part.items()} for part in (self.kda, self.conv, self.mla))
        return State(self.length, *parts)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for part in (self.kda, self.conv, self.mla) for x in part.values())

    def clone(self) -> "State":
        """A fork: shares nothing with the original."""
        return self._map(torch.clone)

    def to(self, device: torch.device | str) -> "State":
        return self._map(lambda x: x.to(device))

    def split(self, ways: int) -> "list[State]":
        """Equal shares by KDA head for engines `ways` wide; latents belong to every head and are repeated."""
        heads = {x.shape[0] for x in self.kda.values()}
        if any(h % ways for h in heads):
            raise ValueError(f"A state of {heads.pop()} heads does not split {ways} ways.")
        return [self._share(ways, rank) for rank in range(ways)]

    def _share(self, ways: int, rank: int) -> "State":
        kda = {layer: x.chunk(ways)[rank] for layer, x in self.kda.items()}
        # Channels of a tail are [q heads | k heads | v heads]: split each third.
        conv = {layer: x.unflatten(0, (3, -1)).chunk(ways, 1)[rank].flatten(0, 1) for layer, x in self.conv.items()}
        return State(self.length, kda, conv, self.mla)

    @classmethod
    def join(cls, shares: "Sequence[State]") -> "State":
        """The inverse of split."""
        first = shares[0]
        kda = {layer: torch.cat([s.kda[layer] for s in shares]) for layer in first.kda}
        conv = {
            layer: torch.cat([s.conv[layer].unflatten(0, (3, -1)) for s in shares], 1).flatten(0, 1)
            for layer in first.conv
        }
        return cls(first.length, kda, conv, first.mla)

    def save(self, path: Path) -> None:
        """One safetensors file, written beside and renamed into place."""
        named = {
            f"{kind}.{layer}": x.contiguous()
            for kind, part in (("kda", self.kda), ("conv", self.conv), ("mla", self.mla))
            for layer, x in part.items()
        }
        partial = path.with_name(path.name + ".partial")
        save_file(named, partial, metadata={"length": str(self.length)})
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        named = load_file(path)
        parts: dict[str, dict[int, Tensor]] = {"kda": {}, "conv": {}, "mla": {}}
        for name, x in named.items():
            kind, layer = name.split(".")
            parts[kind][int(layer)] = x
        with safe_open(path, "pt") as file:
            length = int(file.metadata()["length"])
        return cls(length, **parts)


class Dense:
    """`slots` rows of plain tensors, grown by concatenation: functional, differentiable, any device.

    kda[layer] [S, H, K, V] fp32, conv[layer] [S, C, W−1], mla[layer] [S, L, R] with L the longest row so far.
    """

    def __init__(
        self, config: ModelConfig, slots: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.lengths = [0] * slots
        heads, dim = config.kda_num_heads, config.kda_head_dim
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        state = torch.zeros(slots, heads, dim, dim, dtype=wide, device=device)
        tail = torch.zeros(slots, 3 * config.kda_width, config.short_conv_kernel_size - 1, dtype=dtype, device=device)
        latents = torch.zeros(slots, 0, config.latent_width, dtype=dtype, device=device)
        self.kda = dict.fromkeys(config.kda_layers, state)
        self.conv = dict.fromkeys(config.kda_layers, tail)
        # An MTP layer is one more MLA layer after the last.
        mla = (*config.mla_layers, *range(config.num_hidden_layers, _depth(config)))
        self.mla = dict.fromkeys(mla, latents)

    def read_kda(self, layer: int, layout: Layout) -> tuple[Tensor, Tensor]:
        return self.kda[layer][layout.slots], self.conv[layer][layout.slots]

    def write_kda(
        self, layer: int, layout: Layout, state: Tensor, tail: Tensor, exports: tuple[Tensor, Tensor] | None = None
    ) -> None:
        assert layout.slots is not None and exports is None
        self.kda[layer] = self.kda[layer].index_copy(0, layout.slots, state)
        self.conv[layer] = self.conv[layer].index_copy(0, layout.slots, tail.to(self.conv[layer].dtype))

    def place_kda(self, layer: int, layout: Layout) -> None:
        """Functional storage has no place."""

    def extend_mla(self, layer: int, layout: Layout, latents: Tensor) -> Tensor:
        assert layout.slots is not None
        stored = self.mla[layer]
        longest = max((p + n for p, n in zip(layout.past, layout.lengths)), default=0)
        if longest > stored.shape[1]:
            stored = torch.nn.functional.pad(stored, (0, 0, 0, longest - stored.shape[1]))
        at = (layout.slots[layout.sequence_of], layout.position_of)
        self.mla[layer] = stored.index_put(at, latents.to(stored.dtype))
        return self.mla[layer][layout.slots, :longest]

    def advance(self, layout: Layout) -> None:
        assert layout.slots is not None
        for slot, past, new in zip(layout.slots.tolist(), layout.past, layout.lengths):
            self.lengths[slot] = past + new

    def layout(self, lengths: Sequence[int], slots: Sequence[int] | None = None) -> Layout:
        """The layout that appends lengths[i] tokens to row slots[i] (all rows in order by default)."""
        rows = range(len(self.lengths)) if slots is None else slots
        device = next(iter((self.kda or self.mla).values())).device
        return Layout.cached(lengths, list(rows), [self.lengths[s] for s in rows], device)

    def reset(self, slot: int) -> None:
        """Forget one row, so that another sequence can have it."""
        self.lengths[slot] = 0
        for part in (self.kda, self.conv):
            for layer, x in part.items():
                part[layer] = _set_row(x, slot, torch.zeros_like(x[slot]))

    def export(self, slot: int) -> State:
        """One row as a value. It shares no storage that later writes could change: writes are functional."""
        length = self.lengths[slot]
        kda = {layer: x[slot] for layer, x in self.kda.items()}
        conv = {layer: x[slot] for layer, x in self.conv.items()}
        mla = {layer: x[slot, :length] for layer, x in self.mla.items()}
        return State(length, kda, conv, mla)

    def load(self, slot: int, state: State) -> None:
        """Replace one row by a value. Raises ValueError naming the first layer that does not fit."""
        for name, ours, theirs in (("kda", self.kda, state.kda), ("conv", self.conv, state.conv)):
            for layer in ours:
                _check_fit(name, layer, ours[layer][slot], theirs.get(layer))
        self.lengths[slot] = state.length
        for part, values in ((self.kda, state.kda), (self.conv, state.conv)):
            for layer, x in part.items():
                part[layer] = _set_row(x, slot, values[layer])
        for layer, x in self.mla.items():
            latents = state.mla.get(layer)
            if latents is None or latents.shape[-1] != x.shape[-1]:
                raise ValueError(f"State holds no latents of width {x.shape[-1]} for MLA layer {layer}.")
            grown = torch.nn.functional.pad(x, (0, 0, 0, max(0, state.length - x.shape[1])))
            row = torch.nn.functional.pad(latents, (0, 0, 0, grown.shape[1] - state.length))
            self.mla[layer] = _set_row(grown, slot, row)


def _set_row(x: Tensor, slot: int, row: Tensor) -> Tensor:
    index = torch.tensor([slot], device=x.device)
    return x.index_copy(0, index, row.to(x).unsqueeze(0))


def _check_fit(name: str, layer: int, ours: Tensor, theirs: Tensor | None) -> None:
    if theirs is None:
        raise ValueError(f"State holds no {name} value for layer {layer}; it comes from another config.")
    if theirs.shape != ours.shape:
        raise ValueError(f"State's {name} of layer {layer} is {tuple(theirs.shape)}, not {tuple(ours.shape)}.")


def _depth(config: ModelConfig) -> int:
    return config.num_hidden_layers + config.num_nextn_predict_layers
