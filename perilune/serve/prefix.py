"""The prefix cache: which tokens are already in pages, and from where a request can go on (report §5.4.1).

Blocks of B tokens are hashed in a chain, so that one hash certifies a whole prefix. Every hash endpoint inside an MLA
page names that page, also while the page is still filling. KDA checkpoints exist at few of the endpoints. Lookup has
two stages: the longest run of latents, whole pages first, then endpoints inside the first missing page; and the last
checkpoint at or before its end.

Three rules keep hits honest. A name is given only after the forward that wrote the bytes. A hit is held in all groups
before anything is allocated. Whoever goes on from a checkpoint or from a partly filled page does so in a copy; the
copies are queued on the device's stream before the forward that reads them.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from perilune.serve.pool import Block, Kind, Pool


class Chain:
    """Hashes of a sequence's complete blocks, extended as it grows."""

    def __init__(self, block: int, salt: bytes = b"") -> None:
        self.block = block
        self.hashes: list[bytes] = []
        self._root = hashlib.blake2b(salt, digest_size=16, person=b"prefix").digest()

    def extend(self, tokens: Sequence[int], upto: int) -> None:
        """Hash the blocks that are complete within the first `upto` tokens."""
        for start in range(len(self.hashes) * self.block, upto // self.block * self.block, self.block):
            before = self.hashes[-1] if self.hashes else self._root
            piece = np.asarray(tokens[start : start + self.block], dtype="<i8").tobytes()
            self.hashes.append(hashlib.blake2b(before + piece, digest_size=16).digest())

    def common(self, other: "Chain") -> int:
        """Tokens that both begin with, in whole blocks: a hash covers all before it, so the last equal one decides."""
        both = range(min(len(self.hashes), len(other.hashes)))
        return self.block * bisect.bisect_left(both, True, key=lambda i: self.hashes[i] != other.hashes[i])

    def at(self, tokens: int) -> bytes:
        """The hash of the prefix that ends at this boundary."""
        return self.hashes[tokens // self.block - 1]


@dataclass
class Found:
    """A block and the pool it lies in (the device's, or the one below)."""

    block: Block
    pool: Pool


@dataclass
class Hit:
    """tokens: where to go on, 0 for a miss. reach: how far the latents match, a branch point when beyond `tokens`.

    pages: MLA blocks from the start, the last one partly filled unless tokens is a multiple of P. state: checkpoint.
    Everything is held until `release`.
    """

    tokens: int = 0
    reach: int = 0
    pages: list[Found] = field(default_factory=list)
    state: Found | None = None

    def __iter__(self) -> Iterator[Found]:
        yield from self.pages
        if self.state is not None:
            yield self.state

    def release(self) -> None:
        for found in self:
            found.pool.drop(found.block)


class Prefix:
    """Lookup and publishing over the device's pool and the ones below it."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.geometry = pool, pool.geometry
        self.tiers = [pool] if pool.below is None else [pool, pool.below]

    @property
    def block(self) -> int:
        return self.geometry.block_tokens

    def boundary(self, tokens: int) -> int:
        """The last hash endpoint within `tokens`. The one rule everything that needs an endpoint asks."""
        return tokens // self.block * self.block

    def match(self, chain: Chain, most: int) -> Hit:
        """The longest reusable prefix of at most `most` tokens, held."""
        reach, pages = self._latents(chain, self.boundary(most))
        state = None
        tokens = reach
        if self.geometry.kda_layers:
            while tokens and (state := self._find("kda", chain.at(tokens))) is None:
                tokens -= self.block
        hit = Hit(tokens, reach, pages[: self.geometry.blocks_for(tokens)], state)
        for found in hit:
            found.pool.hold(found.block)
        return hit

    def _latents(self, chain: Chain, most: int) -> tuple[int, list[Found]]:
        """First stage: (tokens whose latents are here, their blocks)."""
        if not self.geometry.mla_layers:
            return most, []
        size, pages = self.geometry.page_tokens, list[Found]()
        for end in range(size, most + 1, size):
            found = self._find("mla", chain.at(end))
            if found is None:
                break
            pages.append(found)
        start = len(pages) * size
        for end in range(min(start + size - self.block, most), start, -self.block):
            if (found := self._find("mla", chain.at(end))) is not None:
                return end, [*pages, found]
        return start, pages

    def _find(self, kind: Kind, key: bytes) -> Found | None:
        for pool in self.tiers:
            if (block := pool.find(kind, key)) is not None:
                return Found(block, pool)
        return None

    def publish(self, chain: Chain, pages: Sequence[Block], start: int, end: int) -> None:
        """Name the endpoints in (start, end], whose latents have been written."""
        for tokens in range(self.boundary(start) + self.block, end + 1, self.block):
            if pages:
                self.pool.publish(pages[(tokens - 1) // self.geometry.page_tokens], chain.at(tokens))

    def known(self, chain: Chain, tokens: int) -> bool:
        """Whether a checkpoint at this boundary is here already."""
        return self.pool.find("kda", chain.at(tokens)) is not None
