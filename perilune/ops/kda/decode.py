"""Decoding a KDA layer in place: one call does everything between the layer's input and output projections (§5.4.2).

    y = SiLU(conv(qkv))    q, k of unit length    S ← recurrence    o = RMSNorm(Sᵀq) · w · σ(out_gate)

A window holds one certain token and W − 1 drafts. The state that is written back is the one after the certain token;
of the drafts only the projected inputs are kept (`Drafts`), a thousandth of the state. When the next call says how
many of them were `accepted`, those are replayed on chip before the new window. The result does not depend on how
tokens were grouped into windows.
"""

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from perilune.ops.dispatch import readable
from perilune.ops.kda.drafts import Drafts
from perilune.ops.kda.reference import accumulating, log_decay, spread, step, unit
from perilune.ops.precision import own_precision

TAPS = 4


def decode(
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    norm_weight: Tensor,
    state: Tensor,
    tail: Tensor,
    slots: Tensor,
    scale: float | None = None,
    eps: float = 1e-5,
    drafts: Drafts | None = None,
    accepted: Tensor | None = None,
    rows: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """One step of R requests, W tokens each.

    Args:
        qkv: [R,W,C] projections before the convolution, channels q heads | k heads | v heads (C = 2·H·K + HV·V).
        gate: raw [R,W,HV,K]. beta: raw [R,W,HV]. out_gate: raw [R,W,HV,V].
        conv_weight: [C,4] or [C,1,4]. A_log [HV], dt_bias [HV,K] or flat, norm_weight [V].
        lower_bound: as in `kda`.
        state: [slots,HV,K,V] fp32, any strides, updated in place.
        tail: [slots,C,3], or [slots,3,H,K,3] of any strides on its first four axes (C = 3·H·K: pages that keep each
            head's bytes together): the inputs before the next token, oldest first, updated in place.
        slots: [R] integers, any stride; −1 marks padding, which reads and writes nothing and returns zeros. Distinct.
            Of these three, values are checked where they lie on a CPU; a kernel trusts them.
        drafts: cache of this layer, updated in place; needed when W > 1.
        accepted: [R] integers, how many of the drafts cached by the last call were right; none by default. A slot of −1
            replays nothing.
        rows: [R] integers, the row of `drafts` that each request has; its slot by default. Distinct.
        impl: "auto" (the kernel on CUDA, the equations elsewhere) | "kernel" | "reference".
    Returns:
        o [R,W,HV,V] in qkv's dtype.
    Raises:
        ValueError: one sentence that names the argument; nothing has been written then.
    """
    if impl not in ("auto", "kernel", "reference"):
        raise ValueError(f"decode: impl is {impl!r}; known are auto, kernel, reference.")
    tensors = _tensors(qkv, gate, beta, out_gate, conv_weight, A_log, dt_bias, norm_weight, state, tail, slots)
    _check_inputs(tensors, lower_bound)
    _check_drafts(qkv, gate, beta, slots, drafts, accepted, rows)
    if scale is None:
        scale = state.shape[2] ** -0.5
    if accepted is None and drafts is not None:
        accepted = torch.zeros_like(slots)
    rows = slots if rows is None else rows
    kernel = impl == "kernel" or (impl == "auto" and qkv.is_cuda)
    run = _launcher(qkv) if kernel else reference
    dt_bias = dt_bias.reshape(gate.shape[2:])
    conv_weight = conv_weight.reshape(-1, TAPS)
    return run(
        qkv, gate, beta, out_gate, conv_weight, A_log, dt_bias, lower_bound, norm_weight, state, tail, slots,
        scale, eps, drafts, accepted, rows,
    )  # fmt: skip


def _launcher(x: Tensor) -> Callable[..., Tensor]:
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("decode: the kernel cannot run this: there is no NVIDIA GPU.")
    from perilune.ops.kda.decode_launch import launch  # Triton is an extra

    return launch


def _tensors(
    qkv: Tensor, gate: Tensor, beta: Tensor, out_gate: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, state: Tensor, tail: Tensor, slots: Tensor,
) -> dict[str, tuple[Tensor, tuple[tuple[int, ...], ...]]]:  # fmt: skip
    """By name: a tensor and the shapes it may have, the first of which an error names."""
    if qkv.dim() != 3 or qkv.shape[1] == 0:
        raise ValueError(f"decode: qkv must be [R,W,C] with W ≥ 1, got {tuple(qkv.shape)}.")
    if state.dim() != 4:
        raise ValueError(f"decode: state must be [slots,HV,K,V], got {tuple(state.shape)}.")
    (R, W, C), (N, HV, K, V) = qkv.shape, state.shape
    width = C - HV * V
    if min(HV, K, V) == 0 or width <= 0 or width % (2 * K) or HV % (width // (2 * K)):
        raise ValueError(f"decode: qkv has {C} channels, which is not 2·H·{K} + {HV}·{V} with {HV} a multiple of H.")
    by_head = ((N, 3, HV, K, TAPS - 1),) if C == 3 * HV * K and K == V else ()
    return {
        "qkv": (qkv, ((R, W, C),)),
        "gate": (gate, ((R, W, HV, K),)),
        "beta": (beta, ((R, W, HV),)),
        "out_gate": (out_gate, ((R, W, HV, V),)),
        "conv_weight": (conv_weight, ((C, TAPS), (C, 1, TAPS))),
        "A_log": (A_log, ((HV,),)),
        "dt_bias": (dt_bias, ((HV, K), (HV * K,))),
        "norm_weight": (norm_weight, ((V,),)),
        "state": (state, ((N, HV, K, V),)),
        "tail": (tail, ((N, C, TAPS - 1), *by_head)),
        "slots": (slots, ((R,),)),
    }


def _check_inputs(tensors: dict[str, tuple[Tensor, tuple[tuple[int, ...], ...]]], lower_bound: float | None) -> None:
    """Everything that has a shape of its own; a kernel would read past the end of what is too short."""
    qkv, state = tensors["qkv"][0], tensors["state"][0]
    for name, (x, shapes) in tensors.items():
        if x.shape not in shapes:
            raise ValueError(f"decode: {name} must be {list(shapes[0])}, got {tuple(x.shape)}.")
        if x.device != qkv.device:
            raise ValueError(f"decode: {name} is on {x.device} but qkv is on {qkv.device}.")
        if name != "slots" and not x.is_floating_point():
            raise ValueError(f"decode: {name} must be floating point, got {x.dtype}.")
    if state.dtype != accumulating(qkv.dtype):
        raise ValueError(f"decode: state must be {accumulating(qkv.dtype)}, got {state.dtype}.")
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise ValueError(f"decode: lower_bound must be negative and finite, or None, got {lower_bound}.")
    slots = tensors["slots"][0]
    _check_places("slots", slots, slots, state.shape[0])


def _check_drafts(
    qkv: Tensor, gate: Tensor, beta: Tensor, slots: Tensor, drafts: Drafts | None, accepted: Tensor | None,
    rows: Tensor | None,
) -> None:  # fmt: skip
    R, W = qkv.shape[:2]
    if drafts is None:
        if W > 1:
            raise ValueError(f"decode: a window of {W} tokens needs `drafts`.")
        if accepted is not None:
            raise ValueError("decode: accepted counts cached drafts, so it needs `drafts`.")
        return
    count, held = drafts.qkv.shape[:2] if drafts.qkv.dim() == 3 else (0, 0)
    for name, cache, x in (("qkv", drafts.qkv, qkv), ("gate", drafts.gate, gate), ("beta", drafts.beta, beta)):
        if cache.shape != (count, held, *x.shape[2:]) or cache.dtype != x.dtype or cache.device != x.device:
            raise ValueError(
                f"decode: drafts.{name} must be [rows,drafts,{str([*x.shape[2:]])[1:-1]}] {x.dtype}, "
                f"got {tuple(cache.shape)} {cache.dtype}."
            )
    if held < W - 1:
        raise ValueError(f"decode: drafts hold {held} tokens but the window has {W - 1}.")
    places = {"rows": (slots if rows is None else rows, count), "accepted": (accepted, held + 1)}
    for name, (at, limit) in places.items():
        if at is not None and at.shape != (R,):
            raise ValueError(f"decode: {name} must be [{R}], got {tuple(at.shape)}.")
        if at is not None:
            _check_places(name, at, slots, limit)


def _check_places(name: str, x: Tensor, slots: Tensor, limit: int) -> None:
    """Integers; of requests that are not padding below `limit`, read only where that waits for nobody."""
    if x.dtype not in (torch.int32, torch.int64) or x.device != slots.device:
        raise ValueError(f"decode: {name} must be int32 or int64 on {slots.device}, got {x.dtype} on {x.device}.")
    if not readable(x):
        return
    live = [n for n, slot in zip(x.tolist(), slots.tolist()) if slot != -1]
    if live and not 0 <= min(live) <= max(live) < limit:
        raise ValueError(
            f"decode: {name} must lie in 0..{limit - 1}, or be padding with a slot of −1; got {x.tolist()}."
        )
    if name != "accepted" and len({*live}) < len(live):
        raise ValueError(f"decode: {name} must differ from request to request, got {x.tolist()}.")


@torch.no_grad()
@own_precision
def reference(
    qkv: Tensor, gate: Tensor, beta: Tensor, out_gate: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, norm_weight: Tensor, state: Tensor, tail: Tensor, slots: Tensor,
    scale: float, eps: float, drafts: Drafts | None, accepted: Tensor | None, rows: Tensor,
) -> Tensor:  # fmt: skip
    """The equations, a token at a time for all requests; replays are aligned to end where the windows begin."""
    dtype, live = accumulating(qkv.dtype), slots >= 0
    weight = conv_weight.to(dtype)
    S, past = (x[slots.clamp(min=0)].to(dtype) for x in (state, tail))
    past = past.flatten(1, -2)

    def advance(x: Tensor, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = torch.cat([past, x.to(dtype).unsqueeze(-1)], -1)
        q, k, v = _heads(F.silu((seen * weight).sum(-1)), state)
        g = log_decay(z, A_log, dt_bias, lower_bound)
        return *step(q * scale, k, v, g, torch.sigmoid(b.to(dtype)), S, True), seen[..., 1:]

    if drafts is not None and accepted is not None:
        accepted, rows = accepted.masked_fill(~live, 0), rows.clamp(min=0)
        most = int(accepted.max()) if len(accepted) else 0
        for t in range(most):
            at = t - (most - accepted)
            here = rows, at.clamp(min=0)
            _, moved, seen = advance(drafts.qkv[here], drafts.gate[here], drafts.beta[here])
            S = torch.where((at >= 0)[:, None, None, None], moved, S)
            past = torch.where((at >= 0)[:, None, None], seen, past)
    outs = []
    for w in range(qkv.shape[1]):
        out, S, past = advance(qkv[:, w], gate[:, w], beta[:, w])
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
        outs.append(out * torch.sigmoid(out_gate[:, w].to(dtype)))
        if w == 0:
            state[slots[live]] = S[live].to(state.dtype)
            tail[slots[live]] = past[live].to(tail.dtype).view(-1, *tail.shape[1:])
    if drafts is not None and qkv.shape[1] > 1:
        for cache, new in ((drafts.qkv, qkv), (drafts.gate, gate), (drafts.beta, beta)):
            cache[rows[live], : qkv.shape[1] - 1] = new[live, 1:]
    return torch.stack(outs, 1).masked_fill(~live[:, None, None, None], 0.0).to(qkv.dtype)


def _heads(y: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Channels [R,C] to unit q, unit k and v of every value head."""
    _, HV, K, V = state.shape
    width = (y.shape[-1] - HV * V) // 2
    q, k, v = y.split([width, width, HV * V], -1)
    q, k = (unit(x.unflatten(-1, (-1, K))) for x in (q, k))
    return spread(q, HV), spread(k, HV), v.unflatten(-1, (HV, V))
