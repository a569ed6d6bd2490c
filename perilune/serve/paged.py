"""`Paged`: the model's Cache protocol in place, on the pages of a pool.

Each running request owns a row of two page tables, which are static buffers: kda_pages [layers, rows] and mla_pages
[layers, rows, pages a row]. A `Pages` layout carries the rows of one batch; the forward reads no other indices. One
more row is nobody's, to pad a batch with: it has no state, and its latents go to a page that no one reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from perilune.model.cache import Book, Place, State
from perilune.model.kda import KDA
from perilune.model.layout import Layout
from perilune.ops.kda.decode import TAPS, Drafts
from perilune.serve.pool import Block, Geometry, Pool
from perilune.serve.tokens import SharedBook, Shares


@dataclass(frozen=True)
class Pages(Layout):
    """A batch on a pool: kda_pages [KDA layers, N], mla_pages [MLA layers, N, J], page_tokens P.

    export_pages [KDA layers, E]: where the states of export_at go. shares: this rank's share of the tokens, others' are
    written to page `elsewhere`.
    """

    kda_pages: Tensor = field(default_factory=lambda: torch.empty(0))
    mla_pages: Tensor = field(default_factory=lambda: torch.empty(0))
    page_tokens: int = 1
    export_pages: Tensor = field(default_factory=lambda: torch.empty(0))
    shares: Shares | None = None
    elsewhere: int = 0

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """For each new token [T]: its page in every MLA layer [layers, T], its offset there."""
        at = torch.div(self.position_of, self.page_tokens, rounding_mode="floor")
        pages, offsets = self.mla_pages[:, self.sequence_of, at], self.position_of - at * self.page_tokens
        return (pages, offsets) if self.shares is None else self.shares.place(pages, offsets, self.elsewhere)

    @cached_property
    def longest(self) -> int:
        return max(p + n for p, n in zip(self.past, self.lengths))


@dataclass(frozen=True)
class Window(Pages):
    """A batch that is decoded in place, W tokens of every sequence. Where each stands is known to the device alone, so
    that a graph of the step can be replayed.

    start int64 [N]: tokens before the window. accepted [N]: how many of each row's cached drafts it continues from.
    """

    start: Tensor = field(default_factory=lambda: torch.empty(0))
    accepted: Tensor | None = None

    @property
    def fresh(self) -> bool:
        return False

    @cached_property
    def sequence_of(self) -> Tensor:
        N, W = self.sequences, self.lengths[0]
        return torch.arange(N, device=self.device).unsqueeze(1).expand(N, W).flatten()

    @cached_property
    def position_of(self) -> Tensor:
        return (self.start.unsqueeze(1) + torch.arange(self.lengths[0], device=self.device)).flatten()

    @cached_property
    def ends(self) -> Tensor:
        """int64 [N]: tokens of each sequence with the new ones."""
        return self.start + self.lengths[0]


class Paged:
    """Rows of page tables over a pool. The scheduler assigns blocks; the model's layers read and write through them."""

    def __init__(
        self,
        pool: Pool,
        rows: int,
        context: int,
        layers: Mapping[int, KDA] | None = None,
        drafts: int = 0,
        shares: Shares | None = None,
    ) -> None:
        """layers: the model's KDA layers, needed with `drafts`, how many tokens a window may draft. shares: of the
        tokens' latents, where several ranks share them out."""
        self.pool, self.geometry, self.shares = pool, pool.geometry, shares
        g, device = self.geometry, pool.memory.device
        self.wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        self._kda = {layer: i for i, layer in enumerate(g.kda_layers)}
        self._mla = {layer: i for i, layer in enumerate(g.mla_layers)}
        self.kda_pages = torch.zeros(len(self._kda), rows + 1, dtype=torch.int64, device=device)
        self.mla_pages = torch.zeros(len(self._mla), rows + 1, g.blocks_for(context), dtype=torch.int64, device=device)
        self.nobody = rows
        self.kda_pages[:, rows], self.mla_pages[:, rows] = -1, pool.scratch
        self._layers = layers or {}
        self._drafts = {layer: _drafts(g, rows + 1, drafts, device) for layer in self._kda} if drafts else {}
        self._in_place = windowed(g)

    # --- the tables -----------------------------------------------------------------------------------------

    def assign(self, row: int, state: Block | None, latents: Sequence[Block], start: int = 0) -> None:
        """Give a row its state's pages and its latents' from block `start` on."""
        if state is not None:
            self.kda_pages[:, row] = torch.tensor(state.pages, device=self.kda_pages.device)
        if latents and self._mla:
            pages = torch.tensor([b.pages for b in latents], device=self.mla_pages.device)
            self.mla_pages[:, row, start : start + len(latents)] = pages.T

    def release(self, row: int) -> None:
        """Point a row at the zero page, so that a stale read is plainly wrong."""
        self.kda_pages[:, row] = 0
        self.mla_pages[:, row] = 0

    def layout(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        past: Sequence[int],
        accepted: Sequence[int] | None = None,
        exports: Sequence[tuple[int, Block]] = (),
    ) -> Pages:
        """The batch that appends lengths[i] tokens to row rows[i], which holds past[i].

        accepted: makes it a window, and says how many drafts of each row's last window were right.
        exports: (offset on the token axis, block that receives the KDA states there).
        """
        device = self.kda_pages.device
        reach = self.geometry.blocks_for(max(p + n for p, n in zip(past, lengths)))
        if accepted is not None or (self._in_place and all(n == 1 for n in lengths)):
            at, start = torch.tensor([list(rows), list(past)], device=device)
            right = None if accepted is None else torch.tensor(accepted, device=device)
            return self.window(at, start, lengths[0], right, reach)
        plain = Layout.cached(lengths, rows, past, device)
        assert plain.slots is not None
        outgoing = torch.tensor([b.pages for _, b in exports], dtype=torch.int64, device=device)
        return Pages(
            **{name: getattr(plain, name) for name in ("lengths", "cu_seqlens", "slots", "past")},
            export_at=tuple(at for at, _ in exports),
            kda_pages=self.kda_pages[:, plain.slots],
            mla_pages=self.mla_pages[:, plain.slots, :reach],
            page_tokens=self.geometry.page_tokens,
            export_pages=outgoing.view(len(exports), len(self._kda)).T,
            shares=self.shares,
            elsewhere=self.pool.scratch,
        )

    def window(
        self, rows: Tensor, start: Tensor, width: int, accepted: Tensor | None = None, reach: int | None = None
    ) -> Window:
        """`width` tokens of each row, which holds `start`; nothing here waits for the device. reach: pages a row."""
        N = len(rows)
        return Window(
            lengths=(width,) * N,
            cu_seqlens=torch.arange(0, N * width + 1, width, device=rows.device),
            slots=rows,
            kda_pages=self.kda_pages[:, rows],
            mla_pages=self.mla_pages[:, rows, :reach],
            page_tokens=self.geometry.page_tokens,
            shares=self.shares,
            elsewhere=self.pool.scratch,
            start=start,
            accepted=accepted,
        )

    # --- the Cache protocol ---------------------------------------------------------------------------------

    def read_kda(self, layer: int, layout: Layout) -> tuple[Tensor, Tensor]:
        assert isinstance(layout, Pages)
        pages = layout.kda_pages[self._kda[layer]]
        return self.pool.states[pages].to(self.wide), self.pool.tails[pages].flatten(1, 3)

    def write_kda(
        self, layer: int, layout: Layout, state: Tensor, tail: Tensor, exports: tuple[Tensor, Tensor] | None = None
    ) -> None:
        assert isinstance(layout, Pages)
        i = self._kda[layer]
        self._put(layout.kda_pages[i], state, tail)
        if exports is not None:
            self._put(layout.export_pages[i], *exports)

    def _put(self, pages: Tensor, state: Tensor, tail: Tensor) -> None:
        states, tails = self.pool.states, self.pool.tails
        states[pages] = state.to(states.dtype)
        tails[pages] = tail.to(tails.dtype).reshape(-1, *tails.shape[1:])

    def place_kda(self, layer: int, layout: Layout) -> Place | None:
        if not isinstance(layout, Window):
            return None
        pages, pool = layout.kda_pages[self._kda[layer]], self.pool
        return Place(pool.states, pool.tails, pages, self._drafts.get(layer), layout.accepted, layout.slots)

    def extend_mla(self, layer: int, layout: Layout, latents: Tensor) -> Tensor | Book | None:
        assert isinstance(layout, Pages)
        i, stored = self._mla[layer], self.pool.latents
        pages, offsets = layout.places
        stored[pages[i], offsets] = latents.to(stored.dtype)
        if isinstance(layout, Window):
            where = stored, layout.mla_pages[i], layout.ends
            return Book(*where) if self.shares is None else SharedBook(*where, self.shares)
        if layout.fresh:
            return None
        context = stored[layout.mla_pages[i]].flatten(1, 2)
        return context[:, : layout.longest] if self.shares is None else self.shares.whole(context, layout.longest)

    def advance(self, layout: Layout) -> None:
        """Lengths are the scheduler's: nothing to do."""

    # --- states as values -----------------------------------------------------------------------------------

    def clear(self, state: Block) -> None:
        """The state before the first token."""
        index = torch.tensor(state.pages, device=self.kda_pages.device)
        self.pool.memory[index] = 0

    def copy_latents(self, source: Block, target: Block, tokens: int, origin: Pool | None = None) -> None:
        """The first `tokens` of a page, in every MLA layer."""
        latents, tokens = (origin or self.pool).latents, self._here(tokens)
        for theirs, page in zip(source.pages, target.pages):
            self.pool.latents[page, :tokens].copy_(latents[theirs, :tokens], non_blocking=True)

    def export(
        self, state: Block | None, latents: Sequence[Block], length: int, row: int = 0, replay: int = 0
    ) -> State:
        """A copy of what the blocks hold of the first `length` tokens, the row's accepted drafts included; of latents
        that are shared out, this rank's."""
        parts = {layer: self._after(layer, page, row, replay) for layer, page in self._state_pages(state)}
        kda = {layer: s.to(self.wide) for layer, (s, _) in parts.items()}
        conv = {layer: tail for layer, (_, tail) in parts.items()}
        mla = {}
        for i, layer in enumerate(self._mla):
            index = torch.tensor([b.pages[i] for b in latents], dtype=torch.int64, device=self.kda_pages.device)
            mla[layer] = self.pool.latents[index].flatten(0, 1)[: self._here(length)].clone()
        return State(length, kda, conv, mla)

    def checkpoint(self, state: Block, target: Block, row: int, replay: int) -> None:
        """The state after the first `replay` drafts of the row's last window."""
        if replay == 0:
            self.pool.copy(state, target)
            return
        for (layer, page), to in zip(self._state_pages(state), target.pages):
            after, tail = self._after(layer, page, row, replay)
            self.pool.states[to] = after.to(self.pool.states.dtype)
            self.pool.tails[to] = tail.view(self.pool.tails.shape[1:])

    def _here(self, tokens: int) -> int:
        """How many of a page's or a sequence's first tokens lie here."""
        return tokens if self.shares is None else self.shares.count(tokens)

    def _state_pages(self, state: Block | None) -> list[tuple[int, int]]:
        return list(zip(self._kda, state.pages)) if state is not None else []

    def _after(self, layer: int, page: int, row: int, replay: int) -> tuple[Tensor, Tensor]:
        """(state [H, K, V], tail [C, W−1]) of a page, as a copy, with some drafts replayed."""
        state, tail = self.pool.states[page].clone(), self.pool.tails[page].flatten(0, 2).clone()
        if replay == 0:
            return state.contiguous(), tail
        kept = self._drafts[layer]
        some = Drafts(*(x[row, :replay] for x in (kept.qkv, kept.gate, kept.beta)))
        return self._layers[layer].replay(some, state.to(self.wide), tail)

    def load(self, value: State, state: Block | None, latents: Sequence[Block]) -> None:
        """Write a State into blocks; `check` has passed. Latents of a draft that it lacks are zero."""
        if state is not None:
            for layer, page in zip(self._kda, state.pages):
                self.pool.states[page] = value.kda[layer].to(self.pool.states)
                self.pool.tails[page] = value.conv[layer].to(self.pool.tails).view(self.pool.tails.shape[1:])
        for i, layer in enumerate(self._mla):
            theirs = value.mla.get(layer, self.pool.latents[0, :0])
            for j, block in enumerate(latents):
                part = theirs[j * self.geometry.page_tokens :][: self.geometry.page_tokens]
                part = part if self.shares is None else part[self.shares.rank :: self.shares.size]
                self.pool.latents[block.pages[i], : len(part)] = part.to(self.pool.latents)

    def check(self, value: State) -> None:
        """Raise ValueError naming the first layer of a State that does not fit this model."""
        c = self.geometry.config
        want = {
            "kda": (self._kda, value.kda, (c.kda_num_heads, c.kda_head_dim, c.kda_head_dim)),
            "conv": (self._kda, value.conv, (3 * c.kda_width, c.short_conv_kernel_size - 1)),
            "mla": (c.mla_layers, value.mla, (value.length, c.latent_width)),
        }
        for name, (layers, values, shape) in want.items():
            for layer in layers:
                x = values.get(layer)
                if x is None or tuple(x.shape) != shape:
                    found = "is missing" if x is None else f"is {tuple(x.shape)}, not {shape}"
                    raise ValueError(f"The request's state {found} in {name} of layer {layer}.")


def windowed(g: Geometry) -> bool:
    """Whether `ops.kda.decode` knows this model's KDA layers: it has no variants."""
    c = g.config
    plain = c.kda_decay == "channel" and c.kda_delta and c.kda_output_gate
    return plain and c.short_conv_kernel_size == TAPS


def _drafts(g: Geometry, rows: int, count: int, device: torch.device) -> Drafts:
    c = g.config
    shapes = (3 * c.kda_width,), (c.kda_num_heads, c.kda_head_dim), (c.kda_num_heads,)
    return Drafts(*(torch.zeros(rows, count, *shape, dtype=g.dtype, device=device) for shape in shapes))
