"""Per-Head Muon and AdamW over shards: every rank updates what it holds, a matrix visits one owner (report §5.2.2).

    M <- μ M + G,  U = G + μ M          on the shard
    U of a block -> its owner           point to point; a block that one rank holds already stays there
    O = orthogonal factor of U          at the owner, stacks of equal shape
    O -> the holders;  W <- (1 - η λ) W - η · 0.2 √max(r, c) · O

Owners are chosen by cost, the same on every rank. Blocks go in buckets of bounded size, the next one on its way while
one is computed: no rank ever holds more than two buckets of whole matrices, whatever the model's size.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.train.mesh.boxes import Box, Sizes, as_matrix, matrix
from perilune.train.optim import MOMENTUM, UPDATE_RMS, Optimizer, ParamPlan, StepReport, newton_schulz

log = logging.getLogger("perilune.train")

_BUCKET = {"cpu": 2**20, "cuda": 2**28}  # elements of whole matrices in one exchange
_SMALLEST_NORM = 1e-20


@dataclass(frozen=True)
class Part:
    """What one rank holds of a block: `box` within the parameter's matrix."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Block:
    """One matrix that is orthogonalised by itself: rows of parameter `name`, and the ranks that hold parts of it."""

    name: str
    box: Box
    parts: tuple[Part, ...]
    group: tuple[Any, ...]  # blocks of one group may share a stack: shape, rate, decay
    owner: int = -1

    @property
    def local(self) -> bool:
        return len(self.parts) == 1

    @property
    def tall(self) -> bool:
        return self.box.shape[0] > self.box.shape[1]


def blocks_of(plan: ParamPlan, shape: Sequence[int], boxes: Sequence[Box]) -> list[Block]:
    """The blocks of a Muon parameter of this whole shape, laid out as `boxes` over the ranks."""
    rows, columns = matrix(shape)
    height = rows // plan.blocks
    group = (min(height, columns), max(height, columns), plan.lr_scale, plan.weight_decay)
    made = []
    for b in range(plan.blocks):
        box = Box(b * height, (b + 1) * height, 0, columns)
        parts = tuple(Part(rank, found) for rank, held in enumerate(boxes) if (found := box & held).size)
        made.append(Block(plan.name, box, parts, group))
    return made


def assign(blocks: Sequence[Block], ranks: int) -> list[Block]:
    """Blocks with owners: who holds all of one owns it; the rest go, costly ones first, to the least busy rank."""
    busy = [0.0] * ranks
    cost = lambda b: b.group[0] ** 2 * b.group[1]  # noqa: E731
    owners: dict[int, int] = {}
    for i, b in enumerate(blocks):
        if b.local:
            owners[i] = b.parts[0].rank
            busy[owners[i]] += cost(b)
    for i in sorted((i for i, b in enumerate(blocks) if not b.local), key=lambda i: (-cost(blocks[i]), i)):
        owners[i] = min(range(ranks), key=lambda r: (busy[r], r))
        busy[owners[i]] += cost(blocks[i])
    return [replace(b, owner=owners[i]) for i, b in enumerate(blocks)]


def buckets(blocks: Sequence[Block], limit: int, ranks: int) -> list[list[Block]]:
    """Blocks of one group together, cut where any owner would hold more than `limit` elements."""
    made: list[list[Block]] = []
    groups: dict[tuple[Any, ...], list[Block]] = {}
    for b in blocks:
        groups.setdefault((*b.group, b.local), []).append(b)
    for members in groups.values():
        held, current = [0] * ranks, list[Block]()
        for b in members:
            if current and held[b.owner] + b.box.size > limit:
                made.append(current)
                held, current = [0] * ranks, []
            held[b.owner] += b.box.size
            current.append(b)
        made.append(current)
    return made


Pairs = list[list[tuple[Block, Box]]]  # by rank: parts of blocks, in one order on both sides


@dataclass
class _Muon:
    """A parameter's shard as matrices: weight and momentum, and the gradient of the step."""

    plan: ParamPlan
    box: Box
    weight: Tensor
    momentum: Tensor
    update: Tensor | None = None


@dataclass
class _Visit:
    """One bucket: what I send to each owner, what arrives, and the blocks I own, in one order everywhere."""

    blocks: list[Block]
    rank: int
    ranks: int
    mine: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mine = [b for b in self.blocks if b.owner == self.rank]
        self.place = {(b.name, b.box): i for i, b in enumerate(self.mine)}
        self.travels = not all(b.local for b in self.blocks)
        self.going: Pairs = [[] for _ in range(self.ranks)]  # by owner
        self.coming: Pairs = [[] for _ in range(self.ranks)]  # by holder
        for b in self.blocks:
            for part in b.parts:
                if part.rank == self.rank:
                    self.going[b.owner].append((b, part.box))
                if b.owner == self.rank:
                    self.coming[part.rank].append((b, part.box))

    @staticmethod
    def sizes(pairs: Pairs) -> list[int]:
        return [sum(box.size for _, box in to) for to in pairs]


class ShardedOptimizer:
    """`train.optim.Optimizer` over the shards of a stage: same steps, same state names, boxes instead of tensors."""

    def __init__(
        self, plans: Sequence[ParamPlan], shapes: Mapping[str, tuple[int, ...]], sizes: Sizes, rank: int,
        group: dist.ProcessGroup, repeats: Callable[[str], bool], replicas: int = 1,
    ) -> None:  # fmt: skip
        """plans: of the local shards. shapes: of the whole parameters. group: the ranks that hold them once, `rank`
        within it; `replicas` groups do the same. repeats: True for a parameter that another stage holds too and counts
        in the gradient norm."""
        self.plans = sorted(plans, key=lambda p: p.name)
        self.shapes, self.sizes, self.rank, self.group, self.repeats = shapes, sizes, rank, group, repeats
        self.skipped, self.replicas = 0, replicas
        self.boxes = {p.name: sizes.boxes(p.name, shapes[p.name]) for p in self.plans}
        self._muon = {p.name: self._hold(p) for p in self.plans if p.kind == "muon"}
        self._adamw = Optimizer([p for p in self.plans if p.kind == "adamw" and p.param.numel()])
        blocks = [b for p in self.plans if p.kind == "muon" for b in blocks_of(p, shapes[p.name], self.boxes[p.name])]
        device = self.plans[0].param.device.type
        cut = buckets(assign(blocks, sizes.stage), _BUCKET.get(device, 2**28), sizes.stage)
        self._visits = [_Visit(bucket, rank, sizes.stage) for bucket in cut]

    def _hold(self, plan: ParamPlan) -> _Muon:
        box = self.boxes[plan.name][self.rank]
        weight = plan.param.detach().reshape(box.shape)
        return _Muon(plan, box, weight, torch.zeros_like(weight, dtype=torch.float32))

    # --- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float, max_norm: float | None = 1.0) -> StepReport:
        """Clip to `max_norm` over all parameters of all stages, and update; a collective call of every process."""
        grads = {p.name: p.param.grad for p in self.plans if p.param.grad is not None}
        norm = self._norm(grads)
        if not math.isfinite(norm):
            self.skipped += 1
            log.warning("Step skipped: the gradient norm is %s (%d skipped so far).", norm, self.skipped)
            return StepReport(norm, skipped=True)
        if max_norm is not None and norm > max_norm:
            torch._foreach_mul_([g for g in grads.values() if g.numel()], max_norm / norm)
        self._momentum(grads)
        self._orthogonalise(lr)
        if self._adamw.plans:
            self._adamw.step(lr, None)
        return StepReport(norm, skipped=False)

    def _norm(self, grads: Mapping[str, Tensor]) -> float:
        device = self.plans[0].param.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, grad in grads.items():
            if not self.repeats(name) and grad.numel():
                total += torch.linalg.vector_norm(grad).double() ** 2
        dist.all_reduce(total)
        return float((total / self.replicas).sqrt())

    def _momentum(self, grads: Mapping[str, Tensor]) -> None:
        for name, held in self._muon.items():
            held.update = None
            if name in grads:
                g = as_matrix(grads[name]).view(held.box.shape)
                held.momentum.mul_(MOMENTUM).add_(g)
                held.update = g.add(held.momentum, alpha=MOMENTUM)

    def _orthogonalise(self, lr: float) -> None:
        """The buckets in order, each one's parts under way while the one before is computed."""
        ahead = self._send(self._visits[0]) if self._visits else None
        for i, visit in enumerate(self._visits):
            arrived, work = ahead  # type: ignore[misc]
            ahead = self._send(self._visits[i + 1]) if i + 1 < len(self._visits) else None
            if work is not None:
                work.wait()
            self._apply(visit, self._return(visit, self._solve(visit, arrived)), lr)

    def _send(self, visit: _Visit) -> tuple[Tensor, Any]:
        return self._swap(visit, [self._view(b, box) for to in visit.going for b, box in to], visit.going, visit.coming)

    def _view(self, block: Block, box: Box) -> Tensor:
        held = self._muon[block.name]
        if held.update is None:  # a part of the model that took no part in this loss
            held.update = torch.zeros_like(held.momentum)
        return box.of(held.box, held.update)

    def _swap(self, visit: _Visit, parts: list[Tensor], going: Pairs, coming: Pairs) -> tuple[Tensor, Any]:
        device = self.plans[0].param.device
        sent = torch.cat([p.reshape(-1) for p in parts]) if parts else torch.empty(0, device=device)
        if not visit.travels:
            return sent, None
        got = torch.empty(sum(visit.sizes(coming)), device=device)
        work = dist.all_to_all_single(got, sent, visit.sizes(coming), visit.sizes(going), self.group, async_op=True)
        return got, work

    def _solve(self, visit: _Visit, arrived: Tensor) -> list[Tensor]:
        """Orthogonal factors of my blocks, each [rows, columns]; wide side last while they are computed."""
        if not visit.mine:
            return []
        r, c, *_ = visit.mine[0].group
        U = arrived.new_empty(len(visit.mine), r, c)
        views = [u.mT if b.tall else u for b, u in zip(visit.mine, U)]
        pairs = [pair for source in visit.coming for pair in source]
        for (b, box), values in zip(pairs, arrived.split([box.size for _, box in pairs])):
            box.of(b.box, views[visit.place[b.name, b.box]]).copy_(values.view(box.shape))
        X = U.div_(torch.linalg.vector_norm(U, dim=(1, 2), keepdim=True).clamp_min_(_SMALLEST_NORM))
        X = X.to(torch.bfloat16) if X.is_cuda else X
        A = X.new_empty(len(visit.mine), r, r)
        solved = newton_schulz(X, torch.empty_like(X), A, torch.empty_like(A)).float()
        return [x.mT if b.tall else x for b, x in zip(visit.mine, solved)]

    def _return(self, visit: _Visit, solved: list[Tensor]) -> list[tuple[Block, Box, Tensor]]:
        parts = [box.of(b.box, solved[visit.place[b.name, b.box]]) for to in visit.coming for b, box in to]
        got, work = self._swap(visit, parts, visit.coming, visit.going)
        if work is not None:
            work.wait()
        pairs = [pair for to in visit.going for pair in to]
        return [(b, box, v.view(box.shape)) for (b, box), v in zip(pairs, got.split([box.size for _, box in pairs]))]

    def _apply(self, visit: _Visit, updates: list[tuple[Block, Box, Tensor]], lr: float) -> None:
        _, longest, scale, decay = visit.blocks[0].group
        rate = lr * scale
        for b, box, update in updates:
            weight = box.of(self._muon[b.name].box, self._muon[b.name].weight)
            weight.mul_(1 - rate * decay).add_(update, alpha=-rate * UPDATE_RMS * math.sqrt(longest))

    def zero_grad(self) -> None:
        for p in self.plans:
            p.param.grad = None

    # --- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, tuple[str, Tensor]]:
        """State name -> (parameter, this rank's values in the parameter's box or, for counters, a scalar)."""
        found = {f"muon.{name}": (name, held.momentum) for name, held in self._muon.items()}
        for key, value in self._adamw.state_dict().items():
            if key != "skipped":
                found[key] = (key.split(".", 2)[2], value)
        return found
