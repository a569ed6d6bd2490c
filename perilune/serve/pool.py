"""One pool of equal pages for both caches (report §5.4.1), with one allocator, one reference count, one LRU.

A page holds P tokens of one MLA layer, or the state of one KDA layer. P is the smallest multiple of the hash block
whose latents need at least the bytes of a state: 6,144 for K3 with fp32 states and bf16 latents. Inside a KDA page each
head's bytes lie together, [K, V] state then [q|k|v, K, W−1] conv tail: heads move between engines by copying ranges.

Layers advance together, so pages are taken and given back as a `Block`: one page of every MLA layer, for the same P
tokens, or one page of every KDA layer, a state. A checkpoint is thus there for all KDA layers or for none.
Page 0 is never given out and stays zero: it pads index arrays. After the last, page `scratch` takes what nobody reads.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from perilune.config import ModelConfig

Kind = Literal["kda", "mla"]


@dataclass(frozen=True)
class Geometry:
    """Bytes and tokens of a page. drafts: the MTP layer's latents are kept too. shares: ranks that share a page's
    tokens; page_tokens counts them all, page_bytes those of one. All sizes derive from these fields."""

    config: ModelConfig
    block_tokens: int
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    drafts: bool = False
    shares: int = 1

    @cached_property
    def kda_layers(self) -> tuple[int, ...]:
        return self.config.kda_layers

    @cached_property
    def mla_layers(self) -> tuple[int, ...]:
        c = self.config
        last = c.num_hidden_layers + (c.num_nextn_predict_layers if self.drafts else 0)
        return (*c.mla_layers, *range(c.num_hidden_layers, last))

    @cached_property
    def head_bytes(self) -> int:
        """One head of one KDA layer: its state, then its tail."""
        dim, taps = self.config.kda_head_dim, self.config.short_conv_kernel_size - 1
        return _up(dim * dim * self.state_dtype.itemsize + 3 * dim * taps * self.dtype.itemsize, 8)

    @cached_property
    def state_bytes(self) -> int:
        return self.head_bytes * self.config.kda_num_heads if self.kda_layers else 0

    @cached_property
    def token_bytes(self) -> int:
        return self.config.latent_width * self.dtype.itemsize

    @cached_property
    def page_tokens(self) -> int:
        """P: at least one hash block, at least a state's bytes."""
        least = max(math.ceil(self.state_bytes / self.token_bytes), 1) * self.shares
        return _up(least, math.lcm(self.block_tokens, self.shares))

    @cached_property
    def tokens_here(self) -> int:
        """Of a page's tokens, those that one rank holds."""
        return self.page_tokens // self.shares

    @cached_property
    def page_bytes(self) -> int:
        return _up(self.tokens_here * self.token_bytes if self.mla_layers else self.state_bytes, 64)

    def pages(self, kind: Kind) -> int:
        """Pages of a block."""
        return len(self.kda_layers if kind == "kda" else self.mla_layers)

    def blocks_for(self, tokens: int) -> int:
        """MLA blocks that hold `tokens`."""
        return -(-tokens // self.page_tokens) if self.mla_layers else 0

    def pages_for(self, tokens: int) -> int:
        """Pages a running request of `tokens` holds."""
        return self.pages("kda") + self.blocks_for(tokens) * self.pages("mla")


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def default_block(config: ModelConfig) -> int:
    """512 hash tokens where contexts are long; a 64th of a short context, a power of two, at least 16."""
    return max(16, min(512, 1 << (config.max_position_embeddings // 64).bit_length() - 1))


@dataclass(eq=False)
class Block:
    """Pages of all layers of a kind. refs: who uses it now. keys: prefix hashes it can be found under."""

    kind: Kind
    pages: tuple[int, ...]
    refs: int = 1
    keys: set[bytes] = field(default_factory=set)


class Pool:
    """Pages in one tensor [pages + 1, page_bytes]. A block is held (refs > 0), or idle and findable, or free again.

    below: a pool in slower memory that receives what is evicted here.
    """

    def __init__(
        self, geometry: Geometry, pages: int, device: torch.device | str, below: "Pool | None" = None, pin: bool = False
    ) -> None:
        self.geometry, self.below, self.evictions = geometry, below, 0
        self.pages, self.scratch = pages, pages
        self.memory = torch.zeros(pages + 1, geometry.page_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
        self._free = list(range(pages - 1, 0, -1))
        self._idle: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._held: set[Block] = set()
        self._idle_pages = 0
        self._named: dict[Kind, dict[bytes, Block]] = {"kda": {}, "mla": {}}
        self.states, self.tails, self.latents = _views(self.memory, geometry)

    # --- taking and giving back -----------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that `take` could give, evicting what is idle."""
        return len(self._free) + self._idle_pages

    @property
    def free(self) -> int:
        """Pages that hold nothing anybody could find."""
        return len(self._free)

    def usage(self) -> dict[str, int]:
        """Pages held, cached and free; they add up to all but the zero page."""
        held = self.pages - 1 - self.available
        return {"held": held, "cached": self._idle_pages, "free": len(self._free)}

    def take(self, kind: Kind) -> Block | None:
        """A block of one reference, evicting the least recently used; None when what is left is in use.

        Latents are zeroed: whatever the pages held must not read as NaN. A state is left for its writer.
        """
        count = self.geometry.pages(kind)
        if self.available < count:
            return None
        while len(self._free) < count:
            self._evict()
        block = Block(kind, tuple(self._free.pop() for _ in range(count)))
        self._held.add(block)
        if kind == "mla":
            self.memory[self._index(block)] = 0
        return block

    def hold(self, block: Block) -> Block:
        """One more user."""
        if block.refs == 0:
            self._wake(block)
            self._held.add(block)
        block.refs += 1
        return block

    def drop(self, block: Block) -> None:
        """One user less: at zero the block stays findable under its keys, or is freed when it has none."""
        block.refs -= 1
        if block.refs:
            return
        self._held.remove(block)
        if block.keys:
            self._idle[block] = None
            self._idle_pages += len(block.pages)
        else:
            self._free.extend(block.pages)

    def touch(self, block: Block) -> None:
        if block.refs == 0:
            self._idle.move_to_end(block)

    # --- finding --------------------------------------------------------------------------------------------

    def publish(self, block: Block, key: bytes) -> bool:
        """Make a written block findable; False when another block has this key already."""
        named = self._named[block.kind]
        if key in named:
            return named[key] is block
        named[key] = block
        block.keys.add(key)
        return True

    def find(self, kind: Kind, key: bytes) -> Block | None:
        return self._named[kind].get(key)

    def forget(self, block: Block) -> None:
        """Take a block's names away; freed now when nobody uses it, else when its last user drops it."""
        for key in block.keys:
            del self._named[block.kind][key]
        block.keys.clear()
        if block.refs == 0:
            self._wake(block)
            self._free.extend(block.pages)

    def _wake(self, block: Block) -> None:
        del self._idle[block]
        self._idle_pages -= len(block.pages)

    def clear(self) -> None:
        """Forget every prefix (the weights have changed), here and below."""
        for named in self._named.values():
            for block in set(named.values()):
                self.forget(block)
        if self.below is not None:
            self.below.clear()

    def _evict(self) -> None:
        block = next(iter(self._idle))
        if self.below is not None:
            self.below.receive(block, self)
        self.evictions += 1
        self.forget(block)

    # --- bytes ----------------------------------------------------------------------------------------------

    def copy(self, source: Block, target: Block, origin: "Pool | None" = None) -> None:
        """All bytes of a block, from this pool or another, in the order of the device's stream."""
        if origin is None or origin is self:
            self.memory[self._index(target)] = self.memory[self._index(source)]
            return
        for page, theirs in zip(target.pages, source.pages):
            self.memory[page].copy_(origin.memory[theirs], non_blocking=True)

    def receive(self, block: Block, origin: "Pool") -> None:
        """Keep a copy of another pool's block under the same keys, unless it is here or does not fit."""
        known = [self.find(block.kind, key) for key in block.keys]
        for old in {b for b in known if b is not None}:
            self.touch(old)
        if None not in known or (mine := self.take(block.kind)) is None:
            return
        self.copy(block, mine, origin)
        for key in block.keys:
            self.publish(mine, key)
        self.drop(mine)

    def _index(self, block: Block) -> Tensor:
        return torch.tensor(block.pages, dtype=torch.int64, device=self.memory.device)

    # --- invariants (tests call this after every step) ------------------------------------------------------

    def audit(self) -> None:
        """Raise AssertionError unless every page is free, idle or held exactly once and every name is honest."""
        blocks = [*self._held, *self._idle]
        pages = sorted([*self._free, *(p for b in blocks for p in b.pages)])
        assert pages == list(range(1, self.pages)), "a page is lost or owned twice"
        assert self._idle_pages == sum(len(b.pages) for b in self._idle)
        assert all(b.refs > 0 for b in self._held) and all(b.refs == 0 and b.keys for b in self._idle)
        assert all(len(b.pages) == self.geometry.pages(b.kind) for b in blocks)
        names = {(b.kind, key): b for b in blocks for key in b.keys}
        assert names == {(kind, key): b for kind, named in self._named.items() for key, b in named.items()}
        assert not self.memory[0].any(), "the zero page was written"


def _views(memory: Tensor, g: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """The same bytes as states [pages, H, K, V], tails [pages, q|k|v, H, K, W−1] and latents [pages, P, R]."""
    c, n = g.config, len(memory)
    heads, dim, taps = c.kda_num_heads, c.kda_head_dim, c.short_conv_kernel_size - 1
    flat_state, flat = memory.view(-1).view(g.state_dtype), memory.view(-1).view(g.dtype)
    page, head = g.page_bytes // g.state_dtype.itemsize, g.head_bytes // g.state_dtype.itemsize
    if g.kda_layers:
        states = flat_state.as_strided((n, heads, dim, dim), (page, head, dim, 1))
        page, head = g.page_bytes // g.dtype.itemsize, g.head_bytes // g.dtype.itemsize
        start = dim * dim * g.state_dtype.itemsize // g.dtype.itemsize
        shape, strides = (n, 3, heads, dim, taps), (page, dim * taps, head, taps, 1)
        tails = flat.as_strided(shape, strides, start)
    else:
        states, tails = flat_state[:0], flat[:0]
    if not g.mla_layers:
        return states, tails, flat[:0]
    tokens, width = g.tokens_here, c.latent_width
    return states, tails, flat.as_strided((n, tokens, width), (g.page_bytes // g.dtype.itemsize, width, 1))
