"""The part of a K3 that one rank holds: its stages, cut by tp and ep, set to work together, sharded by FSDP.

Every rank makes the whole model's weights from one seed, a tensor at a time, and keeps its part (see `fresh`), so that
the weights a run begins with are the same on any mesh. A parameter is a DTensor in the modules and a plain local shard
here.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.kda import KDA
from perilune.model.mla import MLA
from perilune.model.moe import LatentMoE
from perilune.model.net import Layer
from perilune.parallel import Collective
from perilune.train.mesh import fresh, groups, routed, sequence, tensors
from perilune.train.mesh.activations import apply_policy
from perilune.train.mesh.boxes import Box, Sizes, as_matrix, take, whole
from perilune.train.mesh.devices import Mesh
from perilune.train.mesh.places import Held
from perilune.train.mesh.stage import Stage, Step
from perilune.train.optim import plan
from perilune.train.options import TrainConfig

_SUBLAYERS = ("self_attn", "mlp", "block_sparse_moe")
_EMBEDDING = "embed_tokens.weight"


class MeshModel:
    """stages: of this rank. shapes: of all whole parameters and buffers. plans: of all whole parameters.

    locals: this rank's shards, whose gradients `take_gradients` fills. sizes: where everyone's shards lie.
    """

    def __init__(self, config: ModelConfig, options: TrainConfig, mesh: Mesh, dtype: torch.dtype, step: Step) -> None:
        self.config, self.options, self.mesh, self.step = config, options, mesh, step
        c = mesh.config
        self.sizes = Sizes(c.tp, c.ep, c.shard)
        torch.manual_seed(options.seed)
        whole_model = fresh.skeleton(config)
        begun = torch.get_rng_state()
        model = deepcopy(whole_model)
        self.shapes = {n: tuple(p.shape) for n, p in (*model.named_parameters(), *model.named_buffers())}
        self.plans = plan(
            model.named_parameters(), config, mode=options.optimizer, weight_decay=options.weight_decay,
            adamw_lr_scale=options.adamw_lr_scale,
        )  # fmt: skip
        self.stages = [Stage(model, s, c.stages, c.pp, step, dtype) for s in range(mesh.pp, c.stages, c.pp)]
        self._parallelise()
        for stage in self.stages:
            sublayers = [getattr(layer, n) for layer in stage.all_layers() for n in _SUBLAYERS if hasattr(layer, n)]
            groups.shard_parameters(stage, sublayers, self.sizes, mesh, dtype)
            stage.to_empty(device=mesh.device)
            if config.tie_word_embeddings:  # which to_empty undoes
                stage.lm_head.weight = stage.embed_tokens.weight
        step.begin_backward = lambda stage, last: groups.begin_backward(stage, c.zero, last)
        self.parameters = {n: p for stage in self.stages for n, p in stage.named_parameters()}
        self.buffers = {n: b for stage in self.stages for n, b in stage.named_buffers()}
        self.locals = {n: p.detach().to_local() for n, p in self.parameters.items()}  # type: ignore[attr-defined]
        torch.set_rng_state(begun)
        fresh.fill(whole_model, self._take)
        self._twins = twin_group(mesh) if c.pp > 1 and config.num_nextn_predict_layers else None

    def _take(self, name: str, values: Tensor) -> None:
        """This rank's box of a whole parameter, or a whole bias."""
        if name in self.locals:
            box = self.box(name)
            self.locals[name].view(box.shape).copy_(box.of(whole(values.shape), as_matrix(values)))
        elif name in self.buffers:
            self.buffers[name].copy_(values)

    @property
    def layers(self) -> list[Layer]:
        return [layer for stage in self.stages for layer in stage.all_layers()]

    def box(self, name: str) -> Box:
        """What this rank holds of a parameter."""
        return self.sizes.boxes(name, self.shapes[name])[self.mesh.shard_rank]

    def repeats(self, name: str) -> bool:
        """Whether another stage holds this parameter too, counts it and saves it."""
        return name == _EMBEDDING and self.mesh.config.pp > 1 and self.mesh.last

    def held(self, *, reading: bool = False) -> Iterator[Held]:
        """This rank's boxes of parameters and biases; for writing, each box of all ranks once."""
        for name, value in self.locals.items():
            if reading or not (self.mesh.replica or self.repeats(name)):
                yield Held(name, self.box(name), value.view(self.box(name).shape))
        for name, value in self.buffers.items():
            if reading or self.mesh.stage_rank == 0:
                yield Held(name, whole(value.shape), as_matrix(value))

    # --- gradients --------------------------------------------------------------------------------------------------

    def take_gradients(self) -> None:
        """From the sharded parameters to `locals`. The first and the last stage may hold one embedding: they add up."""
        for name, p in self.parameters.items():
            self.locals[name].grad = None if p.grad is None else p.grad.to_local()  # type: ignore[attr-defined]
        if self._twins is not None and _EMBEDDING in self.locals:
            local = self.locals[_EMBEDDING]
            local.grad = torch.zeros_like(local) if local.grad is None else local.grad
            dist.all_reduce(local.grad, group=self._twins)

    def forget_gradients(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self.locals[name].grad = None

    # --- building ---------------------------------------------------------------------------------------------------

    def _parallelise(self) -> None:
        """Cut weights by tp and ep, and let modules work on their part; tp wraps cp."""
        c, mesh, step = self.config, self.mesh.config, self.step
        if mesh.cp > 1:
            self.fabric = Collective(self.mesh.group("cp"))
        exchange = None
        if mesh.ep > 1:
            tokens = self.options.rows * self.options.context // mesh.stage
            exchange = routed.make_exchange(self.mesh, c.num_experts, c.num_experts_per_token, tokens)
        forced = routed.ForcedRouting() if mesh.forced_routing else None
        step.enter = (lambda micro: setattr(forced, "first", micro.layout.first)) if forced else lambda _: None
        for stage in self.stages:
            cut_parameters(stage, self.sizes, self.mesh.shard_rank)
            for layer in stage.all_layers():
                self._parallelise_layer(layer, exchange, forced)
            if stage.last and mesh.tp > 1:
                stage.gather = partial(tensors.gather_slices, group=self.mesh.group("tp"))
                stage.cross_entropy = partial(tensors.split_cross_entropy, group=self.mesh.group("tp"))

    def _parallelise_layer(self, layer: Any, exchange: Any, forced: Any) -> None:
        mesh = self.mesh.config
        attention = layer.self_attn
        if mesh.cp > 1:
            sequence.spread_sequence(attention, self.fabric)
        else:
            sequence.use_documents(attention)
        dense = [layer.mlp] if hasattr(layer, "mlp") else []
        if hasattr(layer, "block_sparse_moe"):
            moe: LatentMoE = layer.block_sparse_moe
            dense += [moe.shared_experts] if moe.shared_experts is not None else []
            if exchange is not None:
                routed.spread_experts(moe.experts, exchange)
            if forced is not None:
                forced.force(moe.gate, layer.layer)
        if mesh.tp > 1:
            tensors.use_part(attention, self.config, self.mesh.group("tp"))
            for module in dense:
                tensors.gather_around(module, self.mesh.group("tp"))
        for module, kind in classed(layer):
            if kind in mesh.activations:
                apply_policy(module, mesh.activations[kind])


def cut_parameters(stage: nn.Module, sizes: Sizes, rank: int) -> None:
    """Leave each parameter its tp or ep part."""
    for name, p in stage.named_parameters():
        axis, part, parts = sizes.cut(name, rank)
        if parts > 1:
            p.data = take(p, axis, part, parts)
    for module in stage.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def classed(layer: Any) -> Iterator[tuple[nn.Module, str]]:
    """The modules that activation policies are about, inner ones first."""
    if hasattr(layer, "mlp"):
        yield layer.mlp, "mlp"
    if hasattr(layer, "block_sparse_moe"):
        if layer.block_sparse_moe.shared_experts is not None:
            yield layer.block_sparse_moe.shared_experts, "mlp"
        yield layer.block_sparse_moe, "moe"
    if isinstance(layer.self_attn, KDA):
        yield layer.self_attn, "kda"
    elif isinstance(layer.self_attn, MLA):
        yield layer.self_attn, "mla"


def twin_group(mesh: Mesh) -> Any:
    """Of each place in a stage: its rank in the first stage and in the last. None in between."""
    c = mesh.config
    mine = None
    for place in range(c.stage):
        ranks = [place, place + (c.pp - 1) * c.stage]
        group = dist.new_group(ranks)
        if mesh.rank in ranks:
            mine = group
    return mine
