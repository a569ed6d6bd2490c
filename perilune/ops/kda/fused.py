"""`kda` on NVIDIA GPUs as one operator that torch knows: `torch.compile`, autograd, autocast, CUDA graphs.

The kernels are in `triton_prepare`, `triton_forward` and `triton_backward`; `hopper` launches them.
Under a captured graph the sequence lengths are fixed, because the plan is made on the host from them: run the same
lengths once before capture, so that their tables are on the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from perilune.ops.kda import hopper, hopper_backward
from perilune.ops.kda.hopper import Problem, problem_of, rowwise


def _problem(
    q: Tensor, v: Tensor, lengths: Sequence[int], exports: Sequence[int], scale: float, lower_bound: float | None
) -> Problem:
    places = tuple(zip(map(int, exports[::2]), map(int, exports[1::2])))
    _, T, HV, V = v.shape
    _, _, H, K = q.shape
    return problem_of(tuple(map(int, lengths)), places, scale, lower_bound, *map(int, (T, HV, H, K, V)))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor | None,
    lengths: Sequence[int], exports: Sequence[int], scale: float, lower_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final state, exports, the state entering each panel but the first)."""
    inputs = [rowwise(x) for x in (q, k, gate)] + [beta, A_log, dt_bias]
    problem = _problem(q, v, lengths, exports, scale, lower_bound)
    o, final, kept, borders = hopper.forward(inputs, rowwise(v), state, problem)
    return o, final, kept, borders


_kda = torch.library.custom_op("perilune::kda", _forward, mutates_args=())


def _watched(*inputs: Tensor | None) -> bool:
    """Whether anyone follows the call: autograd, a tracer, a subclass. If not, the operator's 70 us are saved."""
    tensors = [x for x in inputs if x is not None]
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or any(type(x) is not Tensor and not isinstance(x, torch.nn.Parameter) for x in tensors)
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )


@_kda.register_fake
def _kda_fake(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor,  # noqa: ARG001
    A_log: Tensor, dt_bias: Tensor, state: Tensor | None,  # noqa: ARG001
    lengths: Sequence[int], exports: Sequence[int], scale: float, lower_bound: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    N, HV, K, V = len(lengths), v.shape[2], q.shape[3], v.shape[3]
    panels = len(_problem(q, v, lengths, exports, scale, lower_bound).plan(state is not None).panels)
    final = v.new_empty(N, HV, K, V, dtype=torch.float32) if state is None else torch.empty_like(state)
    kept, borders = (v.new_empty(n, HV, K, V, dtype=torch.float32) for n in (len(exports) // 2, panels - 1))
    return v.new_empty(v.shape), final, kept, borders


@torch.library.custom_op("perilune::kda_backward", mutates_args=())
def _kda_backward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor | None,
    borders: Tensor, do: Tensor, dfinal: Tensor | None, dexports: Tensor | None,
    lengths: Sequence[int], exports: Sequence[int], scale: float, lower_bound: float | None,
) -> list[Tensor]:  # fmt: skip
    inputs = [rowwise(x) for x in (q, k, gate)] + [beta, A_log, dt_bias]
    problem = _problem(q, v, lengths, exports, scale, lower_bound)
    dq, dk, dgate, dbeta, dA, dbias, dv, dstate = hopper_backward.backward(
        inputs, rowwise(v), state, borders, problem, do, dfinal, dexports
    )
    out = [dq, dk, dv, dgate, dbeta, dA.to(A_log.dtype), dbias.view(dt_bias.shape).to(dt_bias.dtype)]
    return out if state is None else [*out, dstate]


@_kda_backward.register_fake
def _kda_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor | None,
    *_: Any,
) -> list[Tensor]:  # fmt: skip
    like = [q, k, v, gate, beta, A_log, dt_bias] + ([] if state is None else [state])
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], output[3])
    ctx.settings = inputs[8:]
    ctx.exported = len(inputs[9]) > 0
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, do: Tensor | None, dfinal: Tensor | None, dexports: Tensor | None, _: Any) -> tuple[Any, ...]:
    *inputs, borders = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(inputs[2])
    if ctx.exported and dexports is None:
        dexports = torch.zeros(len(ctx.settings[1]) // 2, *_state_shape(inputs), device=do.device)
    got = _kda_backward(*inputs, borders, do, dfinal, dexports if ctx.exported else None, *ctx.settings)
    return (*got, *([None] * (12 - len(got))))


def _state_shape(inputs: Sequence[Tensor]) -> tuple[int, int, int]:
    return inputs[2].shape[2], inputs[0].shape[3], inputs[2].shape[3]


_kda.register_autograd(_gradient, setup_context=_setup)


def fused(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, scale: float, state: Tensor | None, lengths: Sequence[int] | None,
    export_at: Sequence[tuple[int, int]] | None, delta: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`kda` by the fused kernels; `api` has checked the arguments. Autocast casts q, k, v, gate, beta."""
    if torch.is_autocast_enabled(v.device.type):
        low = torch.get_autocast_dtype(v.device.type)
        q, k, v, gate, beta = (x.to(low) for x in (q, k, v, gate, beta))
    if (why := hopper.accepts(q, v, delta)) is not None:
        raise ValueError(f"kda: the fused implementation cannot run this: {why}.")
    if gate.shape[3] < q.shape[3]:  # one decay a head: every channel's
        gate, dt_bias = (x.expand(*x.shape[:-1], q.shape[3]).contiguous() for x in (gate, dt_bias))
    spans = [v.shape[1]] * v.shape[0] if lengths is None else list(lengths)
    places = list(dict.fromkeys(export_at or ()))
    flat = [x for place in places for x in place]
    run = _kda if _watched(q, k, v, gate, beta, A_log, dt_bias, state) else _forward
    o, final, exports, _ = run(q, k, v, gate, beta, A_log, dt_bias, state, spans, flat, scale, lower_bound)
    if export_at is None:
        return o, final, None
    rows = [places.index(place) for place in export_at]
    return o, final, exports if rows == list(range(len(places))) else exports[rows]
