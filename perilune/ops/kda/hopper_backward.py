"""The backward of `hopper`: panels from last to first, each recomputed from the raw inputs and the state at its border.

Factors and chain again (keeping S before every chunk and U), the chain of state gradients D from the end, then the
gradients inside every chunk: `gluon_gradient` where it applies, else the kernels of `triton_backward`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from perilune.ops.kda.decode_launch import on_hopper
from perilune.ops.kda.hopper import (
    Problem,
    Workspace,
    by_hand,
    chain,
    copyable,
    descriptors,
    prepare,
    rowwise,
    tables,
    tiles,
)
from perilune.ops.kda.launch import launch
from perilune.ops.kda.segments import CHUNK, Panel
from perilune.ops.kda.triton_backward import gradient_kernel, pair_kernel, reverse_kernel, unit_kernel

CHANNELS = 32  # of a program of `triton_backward`


@dataclass
class Kept:
    """Of one panel: S before every chunk and D after it [2,chunks,HV,V,K], U [chunks,HV,V,C]."""

    states: Tensor
    u: Tensor

    @classmethod
    def empty(cls, chunks: int, problem: Problem, like: Tensor) -> "Kept":
        HV, K, V = problem.heads, problem.key, problem.value
        return cls(like.new_empty(2, chunks, HV, V, K), like.new_empty(chunks, HV, V, CHUNK))


@dataclass
class Gradients:
    """dq and dk a value head [B,T,HV,K], dgate, dbeta, dv, and sums a chunk of those of A_log and dt_bias."""

    q: Tensor
    k: Tensor
    gate: Tensor
    beta: Tensor
    v: Tensor
    A_part: Tensor
    bias_part: Tensor

    @classmethod
    def empty(cls, inputs: Sequence[Tensor], v: Tensor, problem: Problem, chunks: int) -> "Gradients":
        q, _, gate, beta = inputs[:4]
        B, T, HV, K = v.shape[0], problem.tokens, problem.heads, problem.key
        hand = by_hand(inputs, problem)
        wide = torch.float32 if problem.key_heads < HV and not hand else q.dtype

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=v.device)

        return cls(
            new(B, T, HV, K, dtype=wide), new(B, T, HV, K, dtype=wide), new(B, T, HV, K, dtype=gate.dtype),
            new(B, T, HV, dtype=beta.dtype), new(*v.shape, dtype=v.dtype),
            new(chunks, HV, CHUNK if hand else K // CHANNELS), new(chunks, HV, K),
        )  # fmt: skip


@functools.lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def reverse(
    workspace: Workspace, panel: Panel, table: dict[str, Tensor], problem: Problem, chunks: Tensor,
    do: Tensor, dv: Tensor, states: tuple[Tensor, Tensor, Tensor | None], d: Tensor,
) -> None:  # fmt: skip
    """dV of the panel and D after each of its chunks, from the gradients (after the panel, before it, of exports)."""
    HV, K, V = problem.heads, problem.key, problem.value
    ends, dstate, dexports = states
    block = 64 if V == 64 or len(panel.walks) * HV * 2 <= 132 else 128
    walks = table["ends" if ends is dstate else "given_ends"]
    strides = (*dv.stride()[:3], *ends.stride(), *dstate.stride(), problem.tokens)
    exports = dstate if dexports is None else dexports
    grid = (len(panel.walks) * HV, V // block)
    if panel.count and on_hopper(do.device):
        from perilune.ops.kda import gluon_backward

        do = copyable(do)
        launch(
            gluon_backward.reverse_kernel, grid,
            (*descriptors(workspace, do, block), tiles(d.flatten(0, 1), block, K)),
            (dv, walks, table["pieces"], chunks, ends, dstate, exports),
            (*strides, workspace.decay.shape[0], panel.first, do.stride(2)),
            {"HV": HV, "K": K, "V": V, "BV": block}, num_warps=block // 16,
        )  # fmt: skip
        return
    reverse_kernel[grid](
        *workspace.all(), do, dv, walks, table["pieces"], ends, dstate, exports, d, *do.stride()[:3], *strides,
        HV=HV, K=K, V=V, BV=block, STAGES=2, num_warps=block // 16,
    )  # fmt: skip


def inside(
    inputs: Sequence[Tensor], problem: Problem, chunks: Tensor, panel: Panel, do: Tensor, kept: Kept, to: Gradients
) -> None:
    """Gradients inside the panel's chunks, but for those of unit q and k to raw ones."""
    q, k, gate, beta, A_log, dt_bias = inputs
    T, HV, K, V = problem.tokens, problem.heads, problem.key, problem.value
    dA, dB = do.new_empty(2, panel.count, HV, CHUNK, CHUNK)
    pair_kernel[(panel.count * HV,)](
        beta, chunks, do, to.v, kept.u, dA, dB, to.beta,
        *beta.stride(), *do.stride()[:3], *to.v.stride()[:3], T, panel.first,
        HV=HV, V=V, num_warps=4,
    )  # fmt: skip
    gradient_kernel[(panel.count * HV, K // CHANNELS)](
        q, k, gate, A_log, dt_bias, chunks, do, to.v, *kept.states, kept.u, dA, dB, to.q, to.k, to.gate,
        to.A_part[panel.first :], to.bias_part[panel.first :],
        *q.stride()[:3], *k.stride()[:3], *gate.stride()[:3],
        *do.stride()[:3], *to.v.stride()[:3], T, problem.scale, problem.lower_bound or 0.0, panel.first,
        HV=HV, GROUP=HV // problem.key_heads, K=K, V=V, KB=CHANNELS,
        BOUNDED=problem.bounded, FLOORED=problem.lower_bound is not None, num_warps=4, num_stages=1,
    )  # fmt: skip


def inside_by_hand(
    inputs: Sequence[Tensor], problem: Problem, chunks: Tensor, panel: Panel, do: Tensor, kept: Kept, to: Gradients
) -> None:
    """The same, raw ones included; A_part without what the bias adds."""
    from perilune.ops.kda import gluon_gradient

    q, k, gate, beta, A_log, dt_bias = inputs
    K, V = problem.key, problem.value
    total = panel.count * problem.heads
    launch(
        gluon_gradient.gradient_kernel, (min(processors(do.device), total), 1),
        (tiles(q, CHUNK, K), tiles(k, CHUNK, K), tiles(gate, CHUNK, K), tiles(kept.states, V, K),
         tiles(do, CHUNK, V), tiles(to.v, CHUNK, V), tiles(kept.u.flatten(0, 1), V, CHUNK)),
        (gate, chunks, beta, A_log, dt_bias, to.q, to.k, to.gate, to.beta,
         to.A_part[panel.first :], to.bias_part[panel.first :]),
        (q.stride(2), k.stride(2), *gate.stride()[:3], do.stride(2), to.v.stride(2), *beta.stride(),
         problem.tokens, problem.scale, problem.lower_bound or 0.0,
         total, kept.u.shape[0] * problem.heads, panel.first),
        {"HV": problem.heads, "GROUP": problem.heads // problem.key_heads, "K": K, "V": V}, num_warps=K // 16,
    )  # fmt: skip


def unit_rows(raw: Tensor, grad: Tensor, problem: Problem) -> None:
    """In place from gradients of unit rows to those of raw rows."""
    B, T, HV, K = grad.shape
    unit_kernel[(triton.cdiv(B * T * HV, 32),)](
        raw, grad, *raw.stride()[:3], T, B * T, HV=HV, GROUP=HV // problem.key_heads, K=K, ROWS=32, num_warps=4
    )


def over_groups(grad: Tensor, like: Tensor, problem: Problem) -> Tensor:
    """Value heads of one key head added."""
    if problem.key_heads == problem.heads:
        return grad
    B, T, HV, K = grad.shape
    grouped = grad.view(B, T, problem.key_heads, HV // problem.key_heads, K)
    return grouped.sum(3, dtype=torch.float32).to(like.dtype)


def backward(
    inputs: Sequence[Tensor], v: Tensor, state: Tensor | None, borders: Tensor, problem: Problem,
    do: Tensor, dfinal: Tensor | None, dexports: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (q, k, gate, beta, A_log, dt_bias, v, state) from the raw inputs and the states at panel borders."""
    made = problem.plan(state is not None)
    chunks, panels = tables(problem, state is not None, v.device)
    HV, K, V = problem.heads, problem.key, problem.value
    hand = by_hand(inputs, problem)
    do = rowwise(do)
    if hand:
        do, inputs = copyable(do), (*map(copyable, inputs[:3]), *inputs[3:])
    dexports = None if dexports is None else dexports.contiguous()
    dstate = torch.empty(len(problem.lengths), HV, K, V, dtype=torch.float32, device=v.device)
    ends = dstate if dfinal is None else dfinal
    grads = Gradients.empty(inputs, v, problem, sum(p.count for p in made.panels))
    most = max(p.count for p in made.panels)
    workspace, kept = Workspace.empty(most, HV, K, v), Kept.empty(most, problem, v)
    for j in reversed(range(len(panels))):
        panel, table = made.panels[j], panels[j]
        if panel.count:
            prepare(inputs, problem, chunks, panel.first, panel.count, workspace)
            border = (borders[j - 1] if j else dstate[:1]).expand(len(problem.lengths), HV, K, V)
            chain(workspace, panel, table, problem, chunks, v, v, state, border, None, keep=(kept.states[0], kept.u))
        if panel.walks:
            reverse(workspace, panel, table, problem, chunks, do, grads.v, (ends, dstate, dexports), kept.states[1])
        if panel.count:
            (inside_by_hand if hand else inside)(inputs, problem, chunks, panel, do, kept, grads)
    dA, dbias = grads.A_part.sum((0, 2)), grads.bias_part.sum(0)
    if hand:
        dA += (dbias * inputs[5]).sum(1)
    else:
        unit_rows(inputs[0], grads.q, problem)
        unit_rows(inputs[1], grads.k, problem)
    dq, dk = over_groups(grads.q, inputs[0], problem), over_groups(grads.k, inputs[1], problem)
    return dq, dk, grads.gate, grads.beta, dA, dbias, grads.v, dstate
