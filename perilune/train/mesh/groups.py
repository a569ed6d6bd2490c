"""Which parameters FSDP2 gathers together, in what dtype, over which ranks (report §5.2; ZeRO 1, 2 and 3).

    narrow   matrices of attention, feed-forward and experts: gathered in the compute dtype, one group a sublayer
    wide     everything else, the fp32 set with it: fp32 everywhere, gathered once a step for the whole stage

A group is a set of parameters and not a module, since the model reads weights of modules that it never calls. So
`Group` is a module whose forward runs a function, and FSDP's hooks on it gather and free around that function.
ZeRO 1 and 2 keep gathered parameters for the whole step, 3 frees them after every use; 1 sums gradients over ranks at
the last micro-batch, 2 and 3 after each.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from perilune.model.weights import is_fp32
from perilune.train.mesh.boxes import Kind, Sizes
from perilune.train.mesh.devices import Mesh

# The rest stays wide: norms, router and AttnRes compute in fp32 and would see rounded weights; embedding and head sum
# gradients of many tokens in the dtype of the weight.
_NARROW = re.compile(r"\.(self_attn|mlp|block_sparse_moe)\..*(_proj|_proj_with_mqa)\.weight$|\.experts\.(w13|w2)$")


class Group(nn.Module):
    """Some parameters of `owner`, gathered while a function runs."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


def shard_parameters(
    root: nn.Module, sublayers: Iterable[nn.Module], sizes: Sizes, mesh: Mesh, dtype: torch.dtype
) -> None:
    """Shard every parameter of `root`, a stage, over its ranks; root.forward gathers what is wide.

    sublayers: the modules within it whose matrices make groups of their own. dtype: what those are gathered in.
    """
    names = {p: name for name, p in root.named_parameters()}
    groups, left = nn.ModuleList(), dict(names)
    for module in sublayers:
        mine = {p: names[p] for p in module.parameters() if _NARROW.search(names[p])}
        for kind, members in _by_kind(mine, sizes).items():
            group = _shard(Group(module), members, mesh, kind, dtype, free=mesh.config.zero == 3)
            _run_within(module, group)
            groups.append(group)
            left = {p: n for p, n in left.items() if p not in members}
    for kind, members in _by_kind(left, sizes).items():
        if kind != "whole":
            owners = nn.ModuleList(m for m in root.modules() if members.intersection(m.parameters(recurse=False)))
            group = _shard(Group(owners), members, mesh, kind, torch.float32, free=False)
            _run_within(root, group)
            groups.append(group)
    root.groups = groups
    _shard(
        root, {p for p, name in left.items() if sizes.kind(name) == "whole"}, mesh, "whole", torch.float32, free=False
    )
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is a sum over all ranks' tokens already
            module.set_force_sum_reduction_for_comms(True)
    watch_width(root)


def _by_kind(members: dict[nn.Parameter, str], sizes: Sizes) -> dict[Kind, set[nn.Parameter]]:
    kinds: dict[Kind, set[nn.Parameter]] = {}
    for p, name in members.items():
        kinds.setdefault(sizes.kind(name), set()).add(p)
    return kinds


def _shard(module: Any, members: set[nn.Parameter], mesh: Mesh, kind: Kind, dtype: torch.dtype, *, free: bool) -> Any:
    others = {p for p in module.parameters() if p not in members}
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype.itemsize < 4 else None, reduce_dtype=torch.float32 if dtype.itemsize < 4 else None,
        cast_forward_inputs=False,
    )  # fmt: skip
    ranks = mesh.sharding(kind)
    return fully_shard(module, mesh=ranks, reshard_after_forward=free, mp_policy=policy, ignored_params=others)


def _run_within(module: nn.Module, group: nn.Module) -> None:
    """From now on the module's forward runs within the group."""
    inner = module.forward
    module.forward = partial(group, inner)  # type: ignore[method-assign]


def begin_backward(root: nn.Module, zero: int, last: bool) -> None:
    """What FSDP does behind the next backward of this stage; `last`: of the step."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or zero > 1, recurse=False)
            module.set_reshard_after_backward(last or zero == 3, recurse=False)
            module.set_is_last_backward(last)


def watch_width(root: nn.Module) -> None:
    """Assert, whenever a module that owns part of the fp32 set runs, that all it has of it is whole and wide."""
    for module in root.modules():
        if any(is_fp32(name) for name, _ in module.named_parameters(recurse=False)):
            names = [name for name, _ in module.named_parameters() if is_fp32(name)]
            module.register_forward_pre_hook(partial(_check_width, names=names))


def _check_width(module: nn.Module, _: Any, names: list[str]) -> None:
    for name in names:
        value: Tensor = module.get_parameter(name)
        if value.dtype.itemsize < 4 or isinstance(value, DTensor):
            raise AssertionError(f"{type(module).__name__}.{name} must be fp32 and gathered in forward: {value.dtype}")
