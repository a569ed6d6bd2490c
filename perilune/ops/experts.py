"""Routed experts as grouped products: rows sorted by expert, no loop over experts (technical report §2.3, §5.2.2).

    E_e(z) = down_e · act(gate_e z, up_e z);   out_t = Σ_i p_{t,i} E_{e(t,i)}(z_t)

The routing weight multiplies the activation before the down product (the product is linear), so its gradient is
⟨act, downᵀ·d out⟩, which the backward has anyway: the expert output is neither kept nor recomputed.
On an NVIDIA GPU what surrounds the grouped products is a kernel each (`experts_triton`); few rows without a gradient
have kernels of their own (`few_triton`), and so have a few tokens (`one_triton`).
Rows R = T·k; L width of the rows; I expert width; E experts. Weights in the released orientation:
gate_up [E,2I,L] (gate first, then up), down [E,L,I].
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from perilune.ops.dispatch import fused, kernels, readable, rows_of
from perilune.ops.precision import own_precision
from perilune.ops.situ import (
    ACTIVATIONS,
    keeps_slopes,
    packed_glu,
    situ_glu_forward,
    situ_glu_gradients,
    situ_glu_reference,
    situ_glu_slopes,
    swiglu,
    swiglu_gradients,
    swiglu_slopes,
)

ONE = 4  # tokens up to which each reads the weights of its own experts
FEW = 8  # rows an expert, on average, up to which the bytes of the weights are what a step costs

_FEW_TOKENS = 16  # of a gated MLP, one tile
_ORDERED = 4096  # rows up to which counting, which compares each with each, beats sorting


class Activation(NamedTuple):
    """`situ` with its two betas, or `swiglu`."""

    name: str = "situ"
    beta: float | None = 4.0
    linear_beta: float | None = 25.0

    @property
    def swiglu(self) -> bool:
        if self.name not in ACTIVATIONS:
            raise ValueError(f"experts: the activation is {self.name!r}; known are {', '.join(ACTIVATIONS)}.")
        return self.name == "swiglu"

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.swiglu:
            return F.silu(gate.float()) * up if gate.dtype != torch.float64 else F.silu(gate) * up
        return situ_glu_forward(gate, up, float(self.beta or 1.0), self.linear_beta)

    def gradients(self, gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(value, d gate, d up)."""
        if self.swiglu:
            return swiglu_gradients(gate, up, dout)
        return situ_glu_gradients(gate, up, dout, float(self.beta or 1.0), self.linear_beta)

    def slopes(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(value, its derivatives by gate and by up)."""
        if self.swiglu:
            return swiglu_slopes(gate, up)
        return situ_glu_slopes(gate, up, float(self.beta or 1.0), self.linear_beta)

    @property
    def rules(self) -> tuple[float, float, int]:
        """(β₁, β₂, kind) as the kernels take them."""
        kind = kernels("situ_triton").kind_of(self.swiglu, self.linear_beta)
        return float(self.beta or 1.0), float(self.linear_beta or 1.0), kind


class Order(NamedTuple):
    """Rows sorted by expert. `source` [R]: the (token·k + slot) of each sorted row; `place` [T·k] its inverse;
    `ends` [E] int32: cumulative row counts, as grouped products want them."""

    source: Tensor
    place: Tensor
    ends: Tensor


def order_rows(idx: Tensor, experts: int) -> Order:
    """Sorts the choices idx [T,k] by expert, ties by token: one stable sort of short keys, no host sync."""
    flat = idx.flatten().to(torch.int16 if experts < 2**15 else torch.int32)
    ordered, source = torch.sort(flat, stable=True)
    place = torch.empty_like(source).scatter_(0, source, torch.arange(len(flat), device=idx.device))
    every = torch.arange(experts, device=idx.device, dtype=flat.dtype)
    return Order(source, place, torch.searchsorted(ordered, every, right=True, out_int32=True))


def experts(
    z: Tensor,
    idx: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation | None = None,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
    partial: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Σ_i weight[t,i] · E_{idx[t,i]}(z_t), summed in fp32.

    z [T,L] in the dtype of the expert weights, idx [T,k] int64, weight [T,k] fp32 -> [T,L] in z's dtype.
    shared: gate_up [2S,L] and down [L,S] of an expert that everybody takes with weight one; without a gradient.
    partial: choices of E, one past the last expert, are somebody else's and add nothing; without a gradient.
    Raises ValueError naming the argument that does not fit. Choices are read where they lie on a CPU; elsewhere one
    outside 0..E−1 gives rows that mean nothing.
    """
    _check(z, gate_up, down)
    check_choices("experts", z, idx, weight, gate_up.shape[0], partial)
    quick = fused("experts", impl, z)
    if quick and len(z) <= ONE and not torch.is_grad_enabled() and not partial:
        return _one(z, idx, weight, gate_up, down, activation or Activation(), shared)
    if shared is not None:
        routed = experts(z, idx, weight, gate_up, down, activation, partial=partial, impl=impl)
        return routed + gated_mlp(z, *shared, activation)
    if quick and not torch.is_grad_enabled() and idx.numel() <= FEW * gate_up.shape[0]:
        return _few(z, idx, weight, gate_up, down, activation or Activation(), partial)
    if partial:
        return _share(z, idx, weight, gate_up, down, activation, impl)
    if quick:
        return _Fused.apply(z, idx, weight, gate_up, down, activation or Activation())
    order = order_rows(idx, gate_up.shape[0])
    rows = _Spread.apply(z, order.source, order.place, idx.shape[1])
    row_weight = _Permute.apply(weight.flatten(), order.source, order.place)
    y = grouped_mlp(rows, order.ends, row_weight, gate_up, down, activation, impl="eager")
    return _Gather.apply(y, order.source, order.place, idx.shape[1])


def _one(
    z: Tensor, idx: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, act: Activation,
    shared: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Few tokens, hardly two of which choose the same expert."""
    apart = shared if shared is not None and shared[1].shape[1] % down.shape[2] else None
    chosen = idx.contiguous(), weight.contiguous()
    both, extra = (gate_up.contiguous(), down.contiguous()), None if apart is not None else shared
    y: Tensor = kernels("one_triton").rows(rows_of(z), *chosen, *both, extra, *act.rules)
    return y if apart is None else y + gated_mlp(z, *apart, act)


def _few(
    z: Tensor, idx: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, act: Activation, partial: bool
) -> Tensor:
    order, expert = order_few(idx, len(gate_up))
    both, k = (gate_up.contiguous(), down.contiguous()), idx.shape[1]
    y = kernels("few_triton").rows(
        rows_of(z), order.source, expert, order.ends, weight.reshape(-1), *both, k, partial, *act.rules
    )
    out: Tensor = kernels("experts_triton").combine(y, order.place, k)
    return out


def order_few(idx: Tensor, experts: int) -> tuple[Order, Tensor]:
    """`order_rows` and the expert of each sorted row, on a GPU, in one launch where the rows are few."""
    if idx.numel() > _ORDERED:
        order = order_rows(idx, experts)
        return order, idx.flatten()[order.source]
    source, place, ends, expert = kernels("few_triton").order(idx, experts)
    return Order(source, place, ends), expert


@torch.no_grad()
def _share(
    z: Tensor, idx: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, activation: Activation | None, impl: str
) -> Tensor:
    """The rows of these experts alone, found on the host."""
    token, slot = (idx < len(gate_up)).nonzero(as_tuple=True)
    u = torch.zeros(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
    if len(token):
        chosen = idx[token, slot].unsqueeze(1), weight[token, slot].unsqueeze(1)
        u.index_add_(0, token, experts(z[token], *chosen, gate_up, down, activation, impl=impl).to(u.dtype))
    return u.to(z.dtype)


@torch.no_grad()
def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, activation: Activation | None = None) -> Tensor:
    """down · act(gate x, up x): x [T,L], gate_up [2I,L] (gate first), down [O,I] -> [T,O]. No gradient."""
    act = activation or Activation()
    if len(x) <= ONE and fused("gated_mlp", "auto", x):
        single: Tensor = kernels("one_triton").mlp(rows_of(x), gate_up, down, *act.rules)
        return single
    if len(x) <= _FEW_TOKENS and fused("gated_mlp", "auto", x):
        out: Tensor = kernels("few_triton").mlp(rows_of(x), gate_up, down, *act.rules)
        return out
    return F.linear(packed_glu(F.linear(x, gate_up), *act), down)


@own_precision
def experts_reference(
    z: Tensor, idx: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, activation: Activation | None = None
) -> Tensor:
    """The equation, one expert after another, by autograd."""
    act = activation or Activation()
    out = torch.zeros(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
    for e in range(gate_up.shape[0]):
        token, slot = torch.nonzero(idx == e, as_tuple=True)
        gate, up = F.linear(z[token], gate_up[e]).chunk(2, -1)
        h = swiglu(gate, up) if act.swiglu else situ_glu_reference(gate, up, act.beta, act.linear_beta)
        y = F.linear(h, down[e]) * weight[token, slot].unsqueeze(-1)
        out = out.index_add(0, token, y.to(out.dtype))
    return out.to(z.dtype)


def grouped_mlp(
    rows: Tensor,
    ends: Tensor,
    row_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Rows already sorted by expert (what an exchange between devices delivers): rows [R,L], ends [E] int32 cumulative
    counts (ends[−1] = R), row_weight [R] -> weighted expert outputs [R,L]."""
    act = activation or Activation()
    _check_rows(rows, ends, row_weight, gate_up, down)
    if fused("grouped_mlp", impl, rows):
        return _FusedMlp.apply(rows, ends, row_weight, gate_up, down, act)
    return _GroupedMlp.apply(rows, ends, row_weight, gate_up, down, act, keeps_slopes(rows))


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Products by group: [R,K] with [E,K,N] -> [R,N], or [M,R] with [R,N] -> [E,M,N] (sums over each group's rows)."""
    if a.dtype == torch.float64:
        return _product_by_product(a, b, ends)
    return F.grouped_mm(a, b, offs=ends)


def _product_by_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The same in fp64, which torch's grouped product refuses: for gradient checks."""
    borders = [0, *ends.tolist()]
    if b.dim() == 3:
        pieces = [a[i:j] @ b[e] for e, (i, j) in enumerate(itertools.pairwise(borders))]
        return torch.cat(pieces)
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in itertools.pairwise(borders)])


class _GroupedMlp(torch.autograd.Function):
    """Keeps the rows and gate_up's product, from which activations are recomputed; or, where `keep` says that they are
    dearer than memory, the activations and their slopes in the product's place."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: Tensor,
        ends: Tensor,
        row_weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        act: Activation,
        keep: bool,
    ) -> Tensor:
        h = grouped_mm(rows, gate_up.transpose(1, 2), ends)
        made: tuple[Tensor, ...]
        if keep:
            a, *slopes = act.slopes(*h.chunk(2, -1))
            made = (a, torch.stack(slopes, 1))
            a = a * row_weight.unsqueeze(-1)
        else:
            made = (h,)
            a = act.forward(*h.chunk(2, -1)).mul_(row_weight.unsqueeze(-1))
        ctx.save_for_backward(rows, ends, row_weight, gate_up, down, *made)
        ctx.act = act
        return grouped_mm(a.to(rows.dtype), down.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, ends, row_weight, gate_up, down, *made = ctx.saved_tensors
        dy = dy.to(rows.dtype).contiguous()  # grouped products refuse expanded cotangents
        da = grouped_mm(dy, down, ends)
        wide = da.to(torch.promote_types(da.dtype, torch.float32))
        per_row = row_weight.unsqueeze(-1).to(wide.dtype)
        if len(made) == 2:
            a, dh = made[0], (made[1] * (wide * per_row).unsqueeze(1)).flatten(1)
        else:
            a, dgate, dup = ctx.act.gradients(*made[0].chunk(2, -1), wide * per_row)
            dh = torch.cat([dgate, dup], -1)
        dh = dh.to(rows.dtype)
        d_row_weight = torch.linalg.vecdot(a, wide)
        a = a * per_row if len(made) == 2 else a.mul_(per_row)
        ddown = grouped_mm(dy.t(), a.to(rows.dtype), ends)
        dgate_up = grouped_mm(dh.t(), rows, ends)
        drows = grouped_mm(dh, gate_up, ends)
        return drows, None, d_row_weight.to(row_weight.dtype), dgate_up, ddown, None, None


def _fused_forward(
    rows: Tensor, ends: Tensor, weight: Tensor, source: Tensor | None, gate_up: Tensor, down: Tensor, act: Activation
) -> tuple[Tensor, Tensor]:
    """(weighted expert outputs [R,L], the gate and up product that the backward wants)."""
    h = grouped_mm(rows, gate_up.transpose(1, 2), ends)
    a = kernels("experts_triton").activate(h, weight, source, *act.rules)
    return grouped_mm(a, down.transpose(1, 2), ends), h


def _fused_backward(
    dy: Tensor, rows: Tensor, ends: Tensor, weight: Tensor, source: Tensor | None, gate_up: Tensor, down: Tensor,
    h: Tensor, act: Activation,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (rows, weight, gate_up, down)."""
    da = grouped_mm(dy, down, ends)
    dh, a, dweight = kernels("experts_triton").activate_backward(h, da, weight, source, *act.rules)
    ddown = grouped_mm(dy.t(), a, ends)
    dgate_up = grouped_mm(dh.t(), rows, ends)
    return grouped_mm(dh, gate_up, ends), dweight.to(weight.dtype), dgate_up, ddown


class _FusedMlp(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, ends: Tensor, row_weight: Tensor, gate_up: Tensor, down: Tensor, act: Activation
    ) -> Tensor:
        y, h = _fused_forward(rows, ends, row_weight, None, gate_up, down, act)
        ctx.save_for_backward(rows, ends, row_weight, gate_up, down, h)
        ctx.act = act
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, ends, row_weight, gate_up, down, h = ctx.saved_tensors
        dy = dy.to(rows.dtype).contiguous()
        got = _fused_backward(dy, rows, ends, row_weight, None, gate_up, down, h, ctx.act)
        return got[0], None, *got[1:], None


class _Fused(torch.autograd.Function):
    """The whole path from tokens to tokens: no copy of rows but the one that the grouped product reads."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, z: Tensor, idx: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, act: Activation
    ) -> Tensor:
        k, order = idx.shape[1], order_rows(idx, gate_up.shape[0])
        flat = weight.reshape(-1)
        rows = kernels("experts_triton").gather(rows_of(z), order.source, k)
        y, h = _fused_forward(rows, order.ends, flat, order.source, gate_up, down, act)
        ctx.save_for_backward(rows, *order, weight, gate_up, down, h)
        ctx.act = act
        return kernels("experts_triton").combine(y, order.place, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, source, place, ends, weight, gate_up, down, h = ctx.saved_tensors
        k = weight.shape[1]
        dy = kernels("experts_triton").gather(rows_of(dout.to(rows.dtype)), source, k)
        flat = weight.reshape(-1)
        drows, dweight, dgate_up, ddown = _fused_backward(dy, rows, ends, flat, source, gate_up, down, h, ctx.act)
        dz = kernels("experts_triton").combine(drows, place, k)
        return dz, None, dweight.view(weight.shape), dgate_up, ddown, None


class _Spread(torch.autograd.Function):
    """Tokens [T,L] to sorted rows [R,L]; the gradient gathers k rows a token, in a fixed order, in fp32."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, source: Tensor, place: Tensor, k: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(place)
        ctx.k = k
        return z.index_select(0, source // k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _sum_slots(drows, ctx.saved_tensors[0], ctx.k), None, None, None


class _Gather(torch.autograd.Function):
    """Sorted rows [R,L] to tokens [T,L], summing each token's k rows: the adjoint of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, place: Tensor, k: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(source)
        ctx.k = k
        return _sum_slots(y, place, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return dout.index_select(0, ctx.saved_tensors[0] // ctx.k), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(place)
        return x.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return dx.index_select(0, ctx.saved_tensors[0]), None, None


def _sum_slots(rows: Tensor, place: Tensor, k: int) -> Tensor:
    picked = rows.index_select(0, place).unflatten(0, (-1, k))
    if k == 1:
        return picked.squeeze(1)
    return picked.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


def _check(z: Tensor, gate_up: Tensor, down: Tensor) -> None:
    _check_weights(z, gate_up, down)
    L = gate_up.shape[2]
    if z.dim() != 2 or z.shape[1] != L:
        raise ValueError(f"experts: z must be [T,{L}], got {tuple(z.shape)}.")


def _check_weights(x: Tensor, gate_up: Tensor, down: Tensor) -> None:
    if gate_up.dim() != 3 or gate_up.shape[1] % 2:
        raise ValueError(f"experts: gate_up must be [E,2I,L], got {tuple(gate_up.shape)}.")
    E, I2, L = gate_up.shape
    if down.shape != (E, L, I2 // 2):
        raise ValueError(f"experts: down must be [{E},{L},{I2 // 2}], got {tuple(down.shape)}.")
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"experts: rows and weights must share a dtype, not {x.dtype}, {gate_up.dtype}, {down.dtype}.")


def _check_rows(rows: Tensor, ends: Tensor, row_weight: Tensor, gate_up: Tensor, down: Tensor) -> None:
    _check_weights(rows, gate_up, down)
    R, E, L = len(rows), gate_up.shape[0], gate_up.shape[2]
    if rows.shape != (R, L) or row_weight.shape != (R,):
        raise ValueError(
            f"grouped_mlp: need rows [R,{L}] and row_weight [R], got {[*rows.shape]}, {[*row_weight.shape]}."
        )
    if ends.shape != (E,) or ends.dtype != torch.int32:
        raise ValueError(f"grouped_mlp: ends must be [{E}] int32, got {tuple(ends.shape)} {ends.dtype}.")
    if readable(ends) and ((rising := ends.tolist()) != sorted(rising) or rising[-1] != R or rising[0] < 0):
        raise ValueError(f"grouped_mlp: ends must rise to the {R} rows, got {rising}.")


def check_choices(op: str, z: Tensor, idx: Tensor, weight: Tensor, experts: int, partial: bool) -> None:
    """Shapes and dtypes, and values where they can be looked at."""
    if idx.dim() != 2 or idx.shape != weight.shape or idx.shape[0] != z.shape[0] or idx.shape[1] == 0:
        raise ValueError(f"{op}: idx {tuple(idx.shape)} and weight {tuple(weight.shape)} must be [{z.shape[0]},k].")
    if idx.dtype not in (torch.int64, torch.int32) or not weight.is_floating_point():
        raise ValueError(f"{op}: idx must be integers and weight floating point, got {idx.dtype} and {weight.dtype}.")
    if readable(idx) and idx.numel():
        low, high = (int(x) for x in idx.aminmax())
        if low < 0 or high >= experts + partial:
            raise ValueError(f"{op}: choices must lie in 0..{experts - 1 + partial}, got {low}..{high}.")
