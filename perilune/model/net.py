"""K3: embedding, hybrid layers over an AttnRes stream, head, and the MTP layer. One forward for every use.

Layer l reads the stream, runs KDA or Gated MLA, adds; reads again, runs its feed-forward, adds. With AttnRes of block
size b the stream closes a block before layers 0, b, 2b, ... (before layer 0 the "block" is the embedding).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.cache import Cache
from perilune.model.kda import KDA
from perilune.model.layout import Layout
from perilune.model.linear import Linear, Weight, settle
from perilune.model.mla import MLA
from perilune.model.moe import MLP, Experts, LatentMoE, PackedExperts, Router
from perilune.model.norm import RMSNorm
from perilune.model.residual import Plan, Stream, read
from perilune.model.taps import Taps
from perilune.ops.router import Routing

_AHEAD = 512  # tokens up to which the reads of a whole block are prepared at once: each costs a row of the stream


@dataclass(frozen=True)
class Output:
    """hidden [T, hidden]: after the final norm, what the head reads. features [T, hidden]: before it, what the MTP
    layer and drafts read. logits [T or N, vocab] or None. routes: one per MoE layer, in order of depth."""

    hidden: Tensor
    features: Tensor
    logits: Tensor | None
    routes: dict[int, Routing]


class Layer(nn.Module):
    """One decoder layer: attention, then feed-forward, each between a read of the stream and an addition to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.config, self.layer = c, layer
        is_mtp = layer >= c.num_hidden_layers
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in "12")
        self.self_attn: KDA | MLA = MLA(c, layer) if is_mtp or c.is_mla(layer) else KDA(c, layer)
        if c.is_moe(layer) if not is_mtp else c.num_experts > 0:
            self.block_sparse_moe = LatentMoE(c)
        else:
            self.mlp = MLP(c, c.intermediate_size)
        self.attn_res = c.attn_res_block_size is not None and not is_mtp
        if self.attn_res:
            self.self_attention_res_norm, self.mlp_res_norm = Weight(c.hidden_size), Weight(c.hidden_size)
            self.self_attention_res_proj, self.mlp_res_proj = Linear(c.hidden_size, 1), Linear(c.hidden_size, 1)

    def forward(
        self, stream: Stream, layout: Layout, cache: Cache | None = None, taps: Taps | None = None
    ) -> tuple[Stream, Routing | None]:
        eps = self.config.rms_norm_eps
        if self.attn_res:
            query = self.self_attention_res_norm, self.self_attention_res_proj
            x, stream = read(stream, *query, eps, taps, then=self.input_layernorm)
            stream = stream.close(eps) if self._starts_block() else stream
        else:
            x, stream = stream.norm(self.input_layernorm)
        stream = stream.add(self.self_attn(x, layout, cache, taps))
        if self.attn_res:
            query = self.mlp_res_norm, self.mlp_res_proj
            x, stream = read(stream, *query, eps, taps, then=self.post_attention_layernorm)
            stream = stream.close(eps) if self.config.attn_res_full else stream
        else:
            x, stream = stream.norm(self.post_attention_layernorm)
        y, route = self._feed_forward(x)
        if route is not None and taps is not None and "routes" in taps.kinds:
            taps.routes[self.layer] = (route.idx, route.weight)
        return stream.add(y), route

    def _starts_block(self) -> bool:
        size = self.config.attn_res_block_size
        return size is not None and (self.config.attn_res_full or self.layer % size == 0)

    def _feed_forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        if hasattr(self, "mlp"):
            return self.mlp(x), None
        return self.block_sparse_moe(x)


class MTP(Layer):
    """Multi-token prediction: one more decoder layer that reads the next token's embedding beside the features.

        h_t = W_eh [ RMSNorm(embed(x_{t+1})) | RMSNorm(features_t) ],   then Gated MLA and MoE with plain residuals

    It predicts x_{t+2} through the shared head. The embedding is zeroed at position 0 (the layout engines load).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        h, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.eh_proj = Linear(2 * h, h)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(h, eps)})

    def predict(
        self,
        embedded: Tensor,
        features: Tensor,
        layout: Layout,
        cache: Cache | None = None,
        taps: Taps | None = None,
    ) -> tuple[Tensor, Tensor, Routing | None]:
        """embedded [T, hidden] of each position's next token, features [T, hidden] of the position itself ->
        (hidden for the head, features for a further step, route)."""
        first = (layout.position_of == 0).unsqueeze(1)
        joined = torch.cat([self.enorm(embedded).masked_fill(first, 0.0), self.hnorm(features)], -1)
        stream, route = self(Stream.start(self.eh_proj(joined)), layout, cache, taps)
        features = stream.total
        return self.shared_head["norm"](features), features, route


class K3(nn.Module):
    """A K3-family language model (text). Parameters carry the release's names below `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, layer) for layer in range(c.num_hidden_layers))
        if c.attn_res_block_size is not None:
            self.output_attn_res_norm, self.output_attn_res_proj = Weight(c.hidden_size), Linear(c.hidden_size, 1)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = nn.ModuleList(MTP(c, c.num_hidden_layers + i) for i in range(c.num_nextn_predict_layers))

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        cache: Cache | None = None,
        *,
        logits: Literal["all", "last", "none"] = "all",
        taps: Taps | None = None,
    ) -> Output:
        """Run the packed batch.

        Args:
            tokens: [T] int64, the layout's sequences end to end.
            layout: lengths and, with a cache, slots and pasts.
            cache: read and extended in place of the past; None runs whole sequences.
            logits: of every token, of each sequence's last token, or none (training computes its loss from hidden).
            taps: filled with what it asks for.
        """
        if layout.tokens == 0:
            raise ValueError("tokens is empty: a batch needs at least one token.")
        if len(tokens) != layout.tokens:
            raise ValueError(f"tokens has {len(tokens)} entries but the layout describes {layout.tokens}.")
        plan = self._plan(layout) if cache is not None and taps is None and not torch.is_grad_enabled() else None
        stream = Stream.start(_stream_dtype(self.embed_tokens(tokens)), plan)
        routes: dict[int, Routing] = {}
        for i, layer in enumerate(self.layers):
            stream, route = layer(stream, layout, cache, taps)
            if route is not None:
                routes[i] = route
            if taps is not None and "hidden" in taps.kinds:
                taps.hidden[i] = stream.total
        features = self._read_out(stream, taps)
        hidden = self.norm(features)
        if cache is not None:
            cache.advance(layout)
        return Output(hidden, features, self._logits(hidden, layout, logits), routes)

    def _read_out(self, stream: Stream, taps: Taps | None) -> Tensor:
        if self.config.attn_res_block_size is None:
            return stream.total
        query = self.output_attn_res_norm, self.output_attn_res_proj
        return read(stream, *query, self.config.rms_norm_eps, taps)[0]

    def _plan(self, layout: Layout) -> Plan | None:
        """The reads of an inference pass; None where running sums are better read as they come."""
        block = self.config.attn_res_block_size
        if block is None:
            return Plan()
        if self.config.attn_res_full or layout.tokens > _AHEAD:
            return None
        norms, projections = ([part.weight for part in parts] for parts in self._reads())
        return Plan.of(norms, projections, block)

    def _reads(self) -> tuple[list[Any], list[Any]]:
        """The norms and the projections of all reads of the stream, in order."""
        layers: list[Any] = list(self.layers)
        norms = [n for layer in layers for n in (layer.self_attention_res_norm, layer.mlp_res_norm)]
        projections = [p for layer in layers for p in (layer.self_attention_res_proj, layer.mlp_res_proj)]
        return [*norms, self.output_attn_res_norm], [*projections, self.output_attn_res_proj]

    def _logits(self, hidden: Tensor, layout: Layout, which: str) -> Tensor | None:
        if which == "none":
            return None
        return self.lm_head(hidden if which == "all" else hidden[layout.last])

    @torch.no_grad()
    def pack_experts(self) -> "K3":
        """Round the routed experts to MXFP4 and keep them packed, in place: for inference."""
        for module in self.modules():
            if isinstance(module, LatentMoE):
                module.pack()
        return self

    def round_activations(self) -> "K3":
        """From here on what enters the packed experts' products is rounded to MXFP8. Raises ValueError without any."""
        packed = [module for module in self.modules() if isinstance(module, PackedExperts)]
        if not packed:
            raise ValueError("MXFP8 activations go with packed MXFP4 experts; this model has none.")
        for module in packed:
            module.mxfp8 = True
        return self

    @torch.no_grad()
    def settle(self) -> "K3":
        """Move weights that read the same input beside each other, in place, for inference: fewer products a step."""
        for module in self.modules():
            if isinstance(module, (KDA, MLA, MLP)):
                module.settle()
        if self.config.attn_res_block_size is not None:
            for parts in self._reads():
                settle(*parts)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fresh weights from torch's global generator: normal(0, initializer_range) matrices, unit norms, zero AttnRes
        queries (a uniform mixture), KDA's own rules for decays and convolutions."""
        std = self.config.initializer_range
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding, Router)):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, Experts):
                for weight in (module.w13, module.w2):
                    nn.init.normal_(weight, std=std)
            if isinstance(module, (RMSNorm, Weight)):
                nn.init.ones_(module.weight)
            if isinstance(module, Router):
                module.e_score_correction_bias.zero_()
            if name.endswith("res_proj"):
                nn.init.zeros_(module.weight)
        for module in self.modules():
            if isinstance(module, KDA):
                module.reset_parameters()


def _stream_dtype(x: Tensor) -> Tensor:
    """Under autocast the residual stream is bf16, as the release runs it; autocast itself would leave it fp32 and cast
    at every product."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
