"""A stage: the layers of one part of the pipeline, with the embedding at one end and head and MTP at the other.

A stage maps (micro-batch, running sum, new finished blocks) to the same of the next stage, the last one to the loss. A
finished AttnRes block never changes, so a rank keeps it for all its stages and is sent each block once: stage s sends
stage s + 1 what that one's rank has not seen, the blocks closed since stage s + 1 − pp (report §5.2.2).
Backward, a rank sums what its stages ask of a block and returns it with the stage that brought the block.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.net import K3, MTP, Layer, _stream_dtype
from perilune.model.residual import Stream, read
from perilune.model.taps import Taps
from perilune.ops.attnres import rms_scale
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.router import Routing
from perilune.train.mesh.tokens import Micro


def cuts(layers: int, stages: int) -> list[range]:
    """Layers of every stage: as even as can be, the later ones shorter, since the last also has the head."""
    borders = [-(-layers * s // stages) for s in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(borders)]


def closed(config: ModelConfig, layers: int) -> int:
    """Blocks that are finished behind the first `layers` layers."""
    if config.attn_res_block_size is None:
        return 0
    return 2 * layers if config.attn_res_full else -(-layers // config.attn_res_block_size)


@dataclass
class Held:
    """A finished block on one rank: its value for the rank's later stages, and the gradient they ask of it."""

    value: Tensor | None = None
    gradient: Tensor | None = None

    def keep(self, x: Tensor) -> None:
        """The block where this rank first has it: x's backward adds what later stages asked, and lets go of it."""
        self.value = x.detach()
        if x.requires_grad:
            x.register_hook(self._return)

    def _return(self, g: Tensor) -> Tensor:
        self.value = None
        return g if self.gradient is None else g + self.gradient

    def borrow(self) -> Tensor:
        """The block for a later stage; what its backward asks is kept here."""
        assert self.value is not None
        leaf = self.value.detach().requires_grad_(torch.is_grad_enabled())
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(self._collect)
        return leaf

    def _collect(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self.gradient = leaf.grad if self.gradient is None else self.gradient + leaf.grad
        leaf.grad = None


@dataclass
class Blocks:
    """The finished blocks that this rank has seen, by micro-batch, shared by its stages."""

    seen: dict[int, list[Held]] = field(default_factory=dict)

    def of(self, micro: int) -> list[Held]:
        return self.seen.setdefault(micro, [])


@dataclass
class Step:
    """What all stages of a rank share during one optimiser step."""

    micros: Sequence[Micro] = ()
    scale: float = 1.0
    """Of the next-token loss: 1 over the step's targets, of all ranks."""
    scale_mtp: float = 0.0
    look: bool = False
    nats: Tensor | None = None
    max_logits: dict[int, Tensor] = field(default_factory=dict)
    blocks: Blocks = field(default_factory=Blocks)
    observe: Callable[[dict[int, Routing]], None] = lambda _: None
    enter: Callable[[Micro], None] = lambda _: None
    begin_backward: Callable[[nn.Module, bool], None] = lambda _, __: None


class Stage(nn.Module):
    """Stage `index` of `stages`; takes its modules out of `model`, under the names they have there."""

    def __init__(self, model: K3, index: int, stages: int, pp: int, step: Step, dtype: torch.dtype) -> None:
        super().__init__()
        c = model.config
        self.config, self.index, self.stages, self.step, self.dtype = c, index, stages, step, dtype
        self.span = cuts(c.num_hidden_layers, stages)[index]
        self.before = closed(c, self.span.start)  # blocks that are finished when this stage begins
        self.known = closed(c, cuts(c.num_hidden_layers, stages)[index - pp].stop) if index >= pp else 0
        following = index + 1 - pp
        self.next_knows = closed(c, cuts(c.num_hidden_layers, stages)[following].stop) if following >= 0 else 0
        self.again = index + pp < stages  # whether this rank has a later stage
        self.first, self.last = index == 0, index == stages - 1
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in self.span})
        if self.first or (self.last and len(model.mtp)):
            self.embed_tokens = model.embed_tokens
        if self.last:
            if c.attn_res_block_size is not None:
                self.output_attn_res_norm, self.output_attn_res_proj = (
                    model.output_attn_res_norm,
                    model.output_attn_res_proj,
                )
            self.norm, self.lm_head, self.mtp = model.norm, model.lm_head, model.mtp
        self.cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = linear_cross_entropy
        self.gather: Callable[[Tensor], Tensor] = lambda hidden: hidden  # over what splits the head

    def all_layers(self) -> list[Layer]:
        """This stage's decoder layers, the MTP layer included."""
        return [m for m in (*self.layers.values(), *(self.mtp if self.last else ())) if isinstance(m, Layer)]

    def forward(self, index: Tensor, *received: Tensor) -> Any:
        """index: the micro-batch, a tensor of one integer. received: running sum and blocks, of all but the first."""
        n, step = int(index), self.step
        micro = step.micros[n]
        step.enter(micro)
        taps = Taps.of({"max_logit"} if step.look else ())
        kind = self._device.type
        with torch.autocast(kind, self.dtype, enabled=self.dtype.itemsize < 4):
            stream, routes = self._run(self._enter(micro, received, n), micro, taps)
            out = self._loss(stream, micro, taps, routes) if self.last else self._leave(stream, n)
        step.observe(routes)
        for layer, top in taps.max_logits.items():
            known = step.max_logits.get(layer)
            step.max_logits[layer] = top if known is None else torch.maximum(known, top)
        self._announce_backward(out, n == len(step.micros) - 1)
        return out

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _enter(self, micro: Micro, received: tuple[Tensor, ...], n: int) -> Stream:
        if self.first:
            return Stream.start(_stream_dtype(self.embed_tokens(micro.tokens)))
        running, *fresh = received
        held = self.step.blocks.of(n)
        blocks = [h.borrow() for h in held[: self.known]]
        blocks += [self._lend(x, held) for x in fresh]
        eps = self.config.rms_norm_eps
        return Stream(tuple(blocks), tuple(rms_scale(b, eps) for b in blocks), running)

    def _lend(self, x: Tensor, held: list[Held]) -> Tensor:
        if self.again:
            held.append(Held())
            held[-1].keep(x)
        return x

    def _run(self, stream: Stream, micro: Micro, taps: Taps) -> tuple[Stream, dict[int, Routing]]:
        routes: dict[int, Routing] = {}
        for name, layer in self.layers.items():
            stream, route = layer(stream, micro.layout, None, taps)
            if route is not None:
                routes[int(name)] = route
        return stream, routes

    def _leave(self, stream: Stream, n: int) -> tuple[Tensor, ...]:
        """Running sum and blocks for the next stage's rank; blocks closed here stay for this rank's later stages."""
        held = self.step.blocks.of(n)
        own = [self._lend(x, held) for x in stream.finished[self.before :]]
        finished = [*stream.finished[: self.before], *own]
        assert stream.running is not None
        return stream.running, *finished[self.next_knows :]

    def _loss(self, stream: Stream, micro: Micro, taps: Taps, routes: dict[int, Routing]) -> Tensor:
        c, step = self.config, self.step
        features = stream.running
        if c.attn_res_block_size is not None:
            features, _ = read(stream, self.output_attn_res_norm, self.output_attn_res_proj, c.rms_norm_eps)
        assert features is not None
        nats = self._nats(self.norm(features), micro.head_targets)
        step.nats = nats.detach() if step.nats is None else step.nats + nats.detach()
        total = nats * step.scale
        for i, layer in enumerate(self.mtp if torch.is_grad_enabled() else ()):
            assert isinstance(layer, MTP)
            embedded = self.embed_tokens(micro.targets.clamp(min=0))
            hidden, _, route = layer.predict(embedded, features, micro.layout, taps=taps)
            if route is not None:
                routes[c.num_hidden_layers + i] = Routing(*(part[micro.real] for part in route))
            total = total + self._nats(hidden, micro.second) * step.scale_mtp
        return total

    def _nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self.gather(hidden).to(self.dtype), self.lm_head.weight, targets)

    def _announce_backward(self, out: Any, last: bool) -> None:
        """FSDP is told what this micro-batch's backward is before any of it runs."""
        tensors = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
        for t in tensors:
            t.register_hook(lambda _: self.step.begin_backward(self, last))

    # --- what the pipeline needs to know of its borders -------------------------------------------------------------

    def takes(self, tokens: int) -> tuple[Tensor, ...]:
        """Empty tensors like those received, on the meta device."""
        return self._like(tokens, 1 + self.before - self.known)

    def gives(self, tokens: int) -> tuple[Tensor, ...]:
        return self._like(tokens, 1 + closed(self.config, self.span.stop) - self.next_knows)

    def _like(self, tokens: int, count: int) -> tuple[Tensor, ...]:
        like = torch.empty(tokens, self.config.hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
        return (like,) * count
