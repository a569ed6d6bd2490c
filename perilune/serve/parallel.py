"""One engine on several devices: heads and MLP columns divided, experts divided, the rest repeated; latents either way.

    y = Σ_ranks W_o[:, mine] (heads or columns of mine),   u = Σ_ranks Σ_{i ∈ T, E_i mine} p_i E_i(z)

Each rank runs the same engine on its share of the model: same requests, same schedule, same pages; its KDA pages hold
its heads, its MLA pages all latents or its share of the tokens' (`tokens`). The leader decides what is asked and what
is sampled, the others follow. A `State` that goes in is split by heads, one that comes out is joined, so it moves
between engines of any widths. Packed experts stay packed.
"""

import logging
import os
import secrets
import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.model.cache import State
from perilune.model.kda import KDA
from perilune.model.linear import Linear
from perilune.model.mla import MLA
from perilune.model.moe import MLP, Experts, LatentMoE, PackedExperts
from perilune.model.net import K3
from perilune.ops.experts import FEW
from perilune.ops.router import Routing
from perilune.serve.engine import Engine
from perilune.serve.request import Delta, EngineOptions, Finish, Request, Stats
from perilune.serve.tokens import Shares, interleaved

log = logging.getLogger(__name__)


def shard(model: K3, group: dist.ProcessGroup | None = None) -> K3:
    """Cut a model, in place, to this rank's share. Raises ValueError naming what does not divide."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    c = model.config
    for name, count in (
        ("kda_num_heads", c.kda_num_heads),
        ("num_attention_heads", c.num_attention_heads),
        ("intermediate_size", c.intermediate_size),
        ("num_experts", c.num_experts),
        ("the shared experts' width", c.shared_width),
    ):
        if count % size:
            raise ValueError(f"{name} {count} does not divide among {size} ranks.")
    local = c.replace(kda_num_heads=c.kda_num_heads // size, num_attention_heads=c.num_attention_heads // size)
    cut = _Cut(rank, size, group)
    for module in list(model.modules()):
        if isinstance(module, KDA):
            cut.rows(module, "q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_b_proj", "b_proj")
            cut.rows(module, "g_proj", "g_b_proj")
            module.A_log, module.dt_bias = cut.part(module.A_log), cut.part(module.dt_bias)
            cut.columns(module, "o_proj")
            module.config = local
        elif isinstance(module, MLA):
            cut.rows(module, "q_proj" if c.q_lora_rank is None else "q_b_proj", "kv_b_proj", "g_proj")
            cut.columns(module, "o_proj")
            module.config = local
        elif isinstance(module, MLP):
            cut.rows(module, "gate_proj", "up_proj")
            cut.columns(module, "down_proj")
        elif isinstance(module, LatentMoE):
            module.experts = _OwnExperts(module.experts, cut)  # type: ignore[assignment, arg-type]
    model.config = local
    return model


class _Cut:
    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def part(self, x: Tensor, dim: int = 0) -> nn.Parameter:
        return nn.Parameter(x.detach().chunk(self.size, dim)[self.rank].clone(), requires_grad=False)

    def rows(self, module: nn.Module, *names: str) -> None:
        """Keep my outputs of the named layers, where the module has them."""
        for layer in (getattr(module, name) for name in names if hasattr(module, name)):
            layer.weight = self.part(layer.weight)
            if isinstance(layer, nn.Linear):
                layer.out_features //= self.size

    def columns(self, module: nn.Module, name: str) -> None:
        """Keep my inputs of a layer; its output becomes a sum over the ranks."""
        setattr(module, name, _Summed(self.part(getattr(module, name).weight, 1), self.group))


class _Summed(Linear):
    def __init__(self, weight: nn.Parameter, group: dist.ProcessGroup | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.group = weight, group
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        dist.all_reduce(y, group=self.group)
        return y


class _OwnExperts(nn.Module):
    """This rank's experts; choices of others' are left to them, without the host's looking where rows are few."""

    def __init__(self, whole: Experts | PackedExperts, cut: _Cut) -> None:
        super().__init__()
        for name, x in (*whole.named_parameters(), *whole.named_buffers()):
            share = x.detach().chunk(cut.size)[cut.rank].clone()
            if isinstance(x, nn.Parameter):
                setattr(whole, name, nn.Parameter(share, requires_grad=False))
            else:
                whole.register_buffer(name, share)
        self.mine, self.group = whole, cut.group
        self.count = len(next(iter(whole.state_dict().values())))
        self.first = cut.rank * self.count

    def forward(self, z: Tensor, routing: Routing) -> Tensor:
        """z [T, width] -> the sum over all ranks' experts, in fp32 until it is complete."""
        local = routing.idx - self.first
        own = (local >= 0) & (local < self.count)
        u = self.mine.share(z, torch.where(own, local, self.count), routing.weight)
        wide = u.to(torch.promote_types(z.dtype, torch.float32))
        dist.all_reduce(wide, group=self.group)
        return wide.to(z.dtype)


def recordable(model: K3, options: EngineOptions) -> EngineOptions:
    """Without graphs where the full batch of a cut model has more rows than `ops.experts` takes without a look at the
    host: a recording cannot hold one. Packed experts never look."""
    rows = options.max_batch * (1 + options.speculate) * model.config.num_experts_per_token
    looks = [m for m in model.modules() if isinstance(m, _OwnExperts) and isinstance(m.mine, Experts)]
    if not options.cuda_graphs or all(rows <= FEW * m.count for m in looks):
        return options
    log.warning(
        "Decoding is not recorded: a batch of %d has %d rows for %d experts, whose own are found on the host; pack "
        "them, or have smaller batches.", options.max_batch, rows, looks[0].count,
    )  # fmt: skip
    return replace(options, cuda_graphs=False)


def join_world() -> dist.ProcessGroup:
    """Join the processes that torchrun started, on this one's GPU where there are some; the group for `Ranks`' orders.
    A leader may say nothing for days. Ends by the leader's word: a signal to all must not take a follower away from
    requests that the leader still lets finish."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    assert orders is not None
    return orders


class Ranks:
    """An engine on every rank of a group, spoken to through the leader, with an Engine's face.

    The leader's submit, cancel and step are repeated by the others, who sit in `follow` until `close`.
    """

    def __init__(
        self,
        model: K3,
        options: EngineOptions | None = None,
        group: dist.ProcessGroup | None = None,
        orders: dist.ProcessGroup | None = None,
        shard_latents: bool = False,
    ) -> None:
        """model: the whole model, on every rank; it is cut here. orders: the group that the leader's words go through,
        where it is another. shard_latents: each rank keeps its share of the tokens' MLA latents instead of all."""
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        cut = shard(model, group)
        self._shares = Shares(self.rank, self.size, group) if shard_latents else None
        self._speech = orders or group
        self.engine = Engine(cut, recordable(cut, options or EngineOptions()), self._broadcast, self._shares)
        self._orders: list[tuple[str, Any]] = []

    @property
    def busy(self) -> bool:
        return self.engine.busy

    @property
    def context(self) -> int:
        return self.engine.context

    def submit(self, request: Request) -> None:
        """As Engine.submit; a state covers all heads."""
        if request.sampling.seed is None:  # drawn here, so that all ranks have the same
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        self._do("submit", request)
        self._orders.append(("submit", request))

    def cancel(self, id: str, finish: Finish = "cancelled", message: str = "") -> None:
        order = (id, finish, message)
        self._do("cancel", order)
        self._orders.append(("cancel", order))

    def step(self) -> list[Delta]:
        orders, self._orders = self._orders, []
        self._broadcast([*orders, ("step", None)])
        return self._step()

    def stats(self) -> Stats:
        return self.engine.stats()

    def close(self) -> None:
        """Release the followers."""
        self._broadcast([("close", None)])

    def follow(self) -> None:
        """What the other ranks do: repeat the leader's orders until it closes."""
        while True:
            for name, argument in self._broadcast(None):
                if name == "close":
                    return
                if name == "step":
                    self._step()
                else:
                    self._do(name, argument)

    def _do(self, name: str, argument: Any) -> None:
        if name == "cancel":
            self.engine.cancel(*argument)
            return
        state = None if argument.state is None else argument.state.split(self.size)[self.rank]
        self.engine.submit(replace(argument, state=state))

    def _step(self) -> list[Delta]:
        return [d if d.state is None else replace(d, state=self._join(d.state)) for d in self.engine.step()]

    def _join(self, share: State) -> State:
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, share, group=self._speech)
        whole = State.join(shares)
        return whole if self._shares is None else replace(whole, mla=interleaved(shares))

    def _broadcast(self, value: Any) -> Any:
        """The leader's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._speech)
        return box[0]
