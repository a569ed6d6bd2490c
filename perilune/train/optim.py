"""Per-Head Muon and AdamW in one optimiser, driven by an explicit plan (report §2.5).

    M <- μ M + G,   U = G + μ M                                    Nesterov momentum of each matrix, μ = 0.95
    X_0 = U_b / ‖U_b‖_F,   A = X Xᵀ,   X <- a X + (b A + c A²) X   five times, each block b by itself
    W_b <- (1 - η λ) W_b - η · 0.2 √max(r, c) · X_5                λ = 0.1

A block is one attention head's rows of q, k, v (KDA) or of q_b and kv_b (MLA), one routed expert's matrix, or a whole
matrix. Blocks of one shape are stacked over the model and go through each product together, wide side last.
On an NVIDIA GPU the passes around the products are three kernels a stack (`muon_triton`); the first one clips.
Inferred, not in the report: coefficients, steps, μ, scale and the choice of matrices (those of Moonlight and Jordan).

Shapes: N blocks in a stack, r rows <= c columns of a block (tall blocks are stored, or on a GPU read, transposed).
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from perilune.ops.dispatch import fused

log = logging.getLogger("perilune.train")

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
UPDATE_RMS = 0.2  # RMS of an entry of a Muon update at η = 1, about AdamW's, so that both share a schedule
_SMALLEST_NORM = 1e-20  # below it squares vanish in fp32; a zero gradient gives a zero update
_STACK_ELEMENTS = {"cpu": 2**17, "cuda": 2**26}  # CPU: scratch stays in the L2 cache; GPU: it stays below 1 GiB

Mode = Literal["per_head", "whole", "adamw"]


class HeadCounts(Protocol):
    """What the plan reads of a ModelConfig."""

    @property
    def kda_num_heads(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter is trained. `blocks`: matrices that are orthogonalised separately, equal cuts of the rows."""

    name: str
    param: Tensor
    kind: Literal["muon", "adamw"]
    blocks: int = 1
    lr_scale: float = 1.0
    weight_decay: float = 0.0


# --- the plan -----------------------------------------------------------------------------------------------------

_UNDECAYED = re.compile(r"(_res_proj\.weight|norm\d?\.weight|A_log|bias)$")  # AttnRes queries, norms, gates, biases
_ADAMW = re.compile(r"((embed_tokens|lm_head|shared_head\.head|conv1d|patch_embed\.proj|pos_emb)\.weight)$")
_EXPERTS = re.compile(r"\.experts\.(w13|w2)$")  # w13 stacks each expert's gate and up matrices
_KDA_HEADS = re.compile(r"\.self_attn\.[qkv]_proj\.weight$")
_MLA_HEADS = re.compile(r"\.self_attn\.(q|q_b|kv_b)_proj\.weight$")


def plan(
    parameters: Iterable[tuple[str, Tensor]],
    config: HeadCounts,
    *,
    mode: Mode = "per_head",
    weight_decay: float = 0.1,
    adamw_lr_scale: float = 1.0,
) -> list[ParamPlan]:
    """One ParamPlan a parameter, by name and shape.

    `mode`: "per_head" (the report's), "whole" (Muon without the split into heads), "adamw" (no Muon at all).
    `adamw_lr_scale`: AdamW's learning rate over Muon's. Raises ValueError naming a parameter that no rule covers.
    """
    named = [(name, p) for name, p in parameters if p.requires_grad]
    mla = {name.removesuffix("kv_b_proj.weight") for name, _ in named if name.endswith(".kv_b_proj.weight")}
    plans = []
    for name, p in named:
        kind, blocks, decays = _classify(name, p, config, name.rpartition("self_attn.")[0] + "self_attn." in mla)
        if mode == "whole" and p.ndim == 2:
            blocks = 1
        if mode == "adamw" or kind == "adamw":
            kind, blocks = "adamw", 1
        scale = adamw_lr_scale if kind == "adamw" else 1.0
        plans.append(ParamPlan(name, p, kind, blocks, scale, weight_decay if decays else 0.0))
    return plans


def _classify(name: str, p: Tensor, config: HeadCounts, in_mla: bool) -> tuple[Literal["muon", "adamw"], int, bool]:
    """Kind, blocks and whether weight decay applies, before the mode has its say."""
    if p.ndim < 2 or _UNDECAYED.search(name):
        return "adamw", 1, False
    if _ADAMW.search(name):
        return "adamw", 1, True
    if p.ndim == 3 and (experts := _EXPERTS.search(name)):
        return "muon", p.shape[0] * (2 if experts[1] == "w13" else 1), True
    if p.ndim != 2:
        raise ValueError(f"{name} of shape {tuple(p.shape)} has no optimiser rule: neither a matrix nor named experts.")
    blocks = 1
    if in_mla and _MLA_HEADS.search(name):
        blocks = config.num_attention_heads
    elif not in_mla and _KDA_HEADS.search(name):
        blocks = config.kda_num_heads
    if p.shape[0] % blocks:
        raise ValueError(f"{name} has {p.shape[0]} rows, which {blocks} heads do not divide.")
    return "muon", blocks, True


# --- orthogonalisation --------------------------------------------------------------------------------------------


def newton_schulz(X_Nrc: Tensor, Y_Nrc: Tensor, A_Nrr: Tensor, B_Nrr: Tensor) -> Tensor:
    """Five steps towards the orthogonal factor of each X, whose Frobenius norm is at most 1; singular values end
    in about (0.68, 1.14). Overwrites all four and returns X or Y, whichever holds the result."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        torch.bmm(X_Nrc, X_Nrc.mT, out=A_Nrr)
        torch.baddbmm(A_Nrr, A_Nrr, A_Nrr, beta=b, alpha=c, out=B_Nrr)
        B_Nrr.diagonal(dim1=1, dim2=2).add_(a)  # a X joins the product: adding it afterwards would first copy X
        torch.bmm(B_Nrr, X_Nrc, out=Y_Nrc)
        X_Nrc, Y_Nrc = Y_Nrc, X_Nrc
    return X_Nrc


class _Scratch:
    """Buffers that every stack of a device reuses in turn; on GPU the products run in bf16."""

    def __init__(self, device: torch.device, elements: int, gram: int, kernels: bool):
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.G = torch.empty(0 if kernels else elements, device=device)
        shared = self.dtype == torch.float32 and not kernels
        self.X = self.G if shared else torch.empty(elements, device=device, dtype=self.dtype)
        self.Y = torch.empty(elements, device=device, dtype=self.dtype)
        self.A = torch.empty(gram, device=device, dtype=self.dtype)
        self.B = torch.empty_like(self.A)


class _Stack:
    """Muon state of equal-shape blocks: momentum [N, r, c] fp32, and each parameter's share of it.

    Where kernels run, momentum keeps the parameters' orientation and only the products see it transposed.
    """

    def __init__(self, plans: Sequence[ParamPlan]):
        self.plans = plans
        first = plans[0]
        _, rows, cols = _blocks(first, first.param).shape
        self.tall = rows > cols
        self.r, self.c = min(rows, cols), max(rows, cols)
        self.N = sum(p.blocks for p in plans)
        self.kernels = all(fused("muon", "auto", p.param) and p.param.dtype == torch.float32 for p in plans)
        shape = (rows, cols) if self.kernels else (self.r, self.c)
        self.momentum = torch.zeros(self.N, *shape, device=first.param.device)
        self.momenta = self.views(self.momentum)

    def views(self, stack_Nrc: Tensor) -> list[Tensor]:
        """Each parameter's blocks within a stack, in the parameter's own orientation."""
        cuts = stack_Nrc.split([p.blocks for p in self.plans])
        return [cut.mT if self.tall and not self.kernels else cut for cut in cuts]

    def step(self, lr: float, scratch: _Scratch, clip: float) -> None:
        """`clip` multiplies the gradients where kernels read them; elsewhere they come clipped."""
        if self.kernels:
            self._step_by_kernels(lr, scratch, clip)
        else:
            self._step(lr, scratch)

    def _step_by_kernels(self, lr: float, scratch: _Scratch, clip: float) -> None:
        from perilune.train import muon_triton

        grads = [None if p.param.grad is None else p.param.grad.float().contiguous() for p in self.plans]
        weights = [None if g is None else p.param.detach() for p, g in zip(self.plans, grads, strict=True)]
        if all(g is None for g in grads):
            return
        tables = torch.from_numpy(np.stack([self._addresses(grads), self._addresses(weights)]))
        tables = tables.to(self.momentum.device)
        size, gram, shape = self.momentum.numel(), self.N * self.r * self.r, self.momentum.shape
        X, Y = (buffer[:size].view(shape) for buffer in (scratch.X, scratch.Y))
        A, B = (buffer[:gram].view(self.N, self.r, self.r) for buffer in (scratch.A, scratch.B))
        muon_triton.momentum(tables[0], self.momentum, X, clip, MOMENTUM, _SMALLEST_NORM)
        updates = newton_schulz(X.mT, Y.mT, A, B).mT if self.tall else newton_schulz(X, Y, A, B)
        first = self.plans[0]
        lr = lr * first.lr_scale
        muon_triton.update(tables[1], updates, 1 - lr * first.weight_decay, lr * UPDATE_RMS * math.sqrt(self.c))
        torch.autograd.graph.increment_version([w for w in weights if w is not None])

    def _addresses(self, tensors: Sequence[Tensor | None]) -> np.ndarray:
        """Where each block of each parameter starts; 0 for a parameter that takes no part."""
        step = 4 * self.r * self.c
        starts = [
            np.zeros(p.blocks, np.int64) if t is None else t.data_ptr() + step * np.arange(p.blocks, dtype=np.int64)
            for p, t in zip(self.plans, tensors, strict=True)
        ]
        return np.concatenate(starts)

    def _step(self, lr: float, scratch: _Scratch) -> None:
        size, gram = self.momentum.numel(), self.N * self.r * self.r
        G, X, Y = (buffer[:size].view(self.N, self.r, self.c) for buffer in (scratch.G, scratch.X, scratch.Y))
        A, B = (buffer[:gram].view(self.N, self.r, self.r) for buffer in (scratch.A, scratch.B))
        alive = [i for i, p in enumerate(self.plans) if p.param.grad is not None]
        if not alive:  # a part of the model that took no part in this loss
            return
        if len(alive) < len(self.plans):
            G.zero_()
        slots = self.views(G)
        torch._foreach_copy_(
            [slots[i] for i in alive], [_blocks(self.plans[i], self.plans[i].param.grad) for i in alive]
        )
        torch.add(G, self.momentum, alpha=MOMENTUM, out=self.momentum)
        G.add_(self.momentum, alpha=MOMENTUM)
        norm_N11 = torch.linalg.vector_norm(G, dim=(1, 2), keepdim=True).clamp_min_(_SMALLEST_NORM)
        torch.div(G, norm_N11, out=X)
        updates = self.views(newton_schulz(X, Y, A, B))
        weights = [_blocks(self.plans[i], self.plans[i].param) for i in alive]
        first = self.plans[0]
        lr = lr * first.lr_scale
        if first.weight_decay:
            torch._foreach_mul_(weights, 1 - lr * first.weight_decay)
        torch._foreach_add_(weights, [updates[i] for i in alive], alpha=-lr * UPDATE_RMS * math.sqrt(self.c))


def _blocks(p: ParamPlan, tensor: Tensor | None) -> Tensor:
    """A parameter, or its gradient, as [blocks, rows of a block, columns]."""
    assert tensor is not None
    return tensor.detach().reshape(p.blocks, -1, tensor.shape[-1])


def _stacks(plans: Sequence[ParamPlan]) -> list[_Stack]:
    """Muon parameters by block shape, learning rate and decay, cut where a stack would outgrow the scratch."""
    groups: dict[tuple, list[ParamPlan]] = {}
    for p in plans:
        _, rows, cols = _blocks(p, p.param).shape
        groups.setdefault((p.param.device, rows, cols, p.lr_scale, p.weight_decay), []).append(p)
    stacks = []
    for (device, *_), members in groups.items():
        limit, held = _STACK_ELEMENTS.get(device.type, 2**26), 0
        pending: list[ParamPlan] = []
        for p in members:
            if pending and held + p.param.numel() > limit:
                stacks.append(_Stack(pending))
                pending, held = [], 0
            pending.append(p)
            held += p.param.numel()
        stacks.append(_Stack(pending))
    return stacks


# --- the optimiser ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """`grad_norm` before clipping; `skipped`: the gradient was not finite and nothing changed."""

    grad_norm: float
    skipped: bool


class Optimizer:
    """Muon and AdamW over a plan. One `step(lr)` clips, skips what is not finite, and updates every parameter.

    Its state is a flat mapping of tensors keyed by parameter name: exact, and indifferent to the model's order.
    """

    def __init__(self, plans: Sequence[ParamPlan], betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8):
        self.plans = sorted(plans, key=lambda p: p.name)  # sums run over names, not over the model's order
        self.skipped = 0
        self._stacks = _stacks([p for p in self.plans if p.kind == "muon"])
        self._scratch = {}
        for device in {s.momentum.device for s in self._stacks}:
            here = [s for s in self._stacks if s.momentum.device == device]
            sizes = max(s.momentum.numel() for s in here), max(s.N * s.r * s.r for s in here)
            self._scratch[device] = _Scratch(device, *sizes, kernels=all(s.kernels for s in here))
        self._adamw = _adamw([p for p in self.plans if p.kind == "adamw"], betas, eps)

    def step(self, lr: float, max_norm: float | None = 1.0) -> StepReport:
        """Clips the gradients to `max_norm` (over all parameters together; in place, unless kernels clip as they read)
        and takes one step.

        A gradient with a NaN or infinity changes nothing but the count `skipped`, and says so in the log.
        """
        grads = [p.param.grad for p in self.plans if p.param.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads, foreach=True))
        if not math.isfinite(norm):
            self.skipped += 1
            log.warning("Step skipped: the gradient norm is %s (%d skipped so far).", norm, self.skipped)
            return StepReport(norm, skipped=True)
        clip = 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
        if clip < 1.0:
            read = {p.name for s in self._stacks if s.kernels for p in s.plans}
            plain = [p.param.grad for p in self.plans if p.param.grad is not None and p.name not in read]
            if plain:
                torch._foreach_mul_(plain, clip)
        self._update(lr, clip)
        return StepReport(norm, skipped=False)

    @torch.no_grad()
    def _update(self, lr: float, clip: float) -> None:
        for stack in self._stacks:
            stack.step(lr, self._scratch[stack.momentum.device], clip)
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self._adamw.step()

    def zero_grad(self) -> None:
        for p in self.plans:
            p.param.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """`muon.NAME`, `adamw.{exp_avg,exp_avg_sq,step}.NAME`, `skipped`: views where they can be, so copy to keep."""
        state = {"skipped": torch.tensor(self.skipped)}
        for stack in self._stacks:
            for p, momentum in zip(stack.plans, stack.momenta, strict=True):
                state[f"muon.{p.name}"] = momentum.reshape(p.param.shape)
        for p in self.plans:
            if p.kind == "adamw" and self._adamw is not None:
                for key, value in self._adamw.state[p.param].items():
                    state[f"adamw.{key}.{p.name}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies `state` in. Raises ValueError naming a tensor that is missing, unknown or of another shape."""
        own = self.state_dict()
        for name in sorted(own.keys() ^ state.keys()):
            raise ValueError(f"Optimiser state: {name} is {'missing' if name in own else 'unknown'}.")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                want, got = tuple(tensor.shape), tuple(state[name].shape)
                raise ValueError(f"Optimiser state: {name} has shape {got}, this model needs {want}.")
        self.skipped = int(state["skipped"])
        for stack in self._stacks:
            for p, momentum in zip(stack.plans, stack.momenta, strict=True):
                momentum.copy_(state[f"muon.{p.name}"].reshape(momentum.shape))
        for name, tensor in own.items():
            if name.startswith("adamw."):
                tensor.copy_(state[name])


def _adamw(plans: Sequence[ParamPlan], betas: tuple[float, float], eps: float) -> torch.optim.AdamW | None:
    """torch's fused AdamW over these parameters, its state made at once so that it can be saved and loaded any time."""
    if not plans:
        return None
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for p in plans:
        groups.setdefault((p.lr_scale, p.weight_decay), []).append(p.param)
    adamw = torch.optim.AdamW(
        [{"params": ps, "lr_scale": scale, "weight_decay": decay} for (scale, decay), ps in groups.items()],
        lr=0.0,
        betas=betas,
        eps=eps,
        fused=True,
    )
    for p in plans:
        adamw.state[p.param] = {
            "step": torch.zeros((), device=p.param.device),
            "exp_avg": torch.zeros_like(p.param),
            "exp_avg_sq": torch.zeros_like(p.param),
        }
    return adamw
