"""Decoding a KDA layer in place: one call does everything between the layer's input and output projections (§5.4.2).

    y = SiLU(conv(qkv))    q, k of unit length    S ← recurrence    o = RMSNorm(Sᵀq) · w · σ(out_gate)

A window holds one certain token and W − 1 drafts. The state that is written back is the one after the certain token;
of the drafts only the projected inputs are kept (`Drafts`), a thousandth of the state. When the next call says how
many of them were `accepted`, those are replayed on chip before the new window. The result does not depend on how
tokens were grouped into windows.
"""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from perilune.ops.kda.reference import accumulating, log_decay, spread, step, unit
from perilune.ops.precision import own_precision

TAPS = 4


@dataclass
class Drafts:
    """Projected inputs of the last drafts, by row: qkv [rows,D,C], gate [rows,D,HV,K], beta [rows,D,HV]."""

    qkv: Tensor
    gate: Tensor
    beta: Tensor

    @classmethod
    def empty(cls, rows: int, drafts: int, qkv: Tensor, gate: Tensor, beta: Tensor) -> "Drafts":
        """Room for `drafts` tokens of tensors like these [R,W,...]."""
        return cls(*(x.new_zeros(rows, drafts, *x.shape[2:]) for x in (qkv, gate, beta)))


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
        drafts: cache of this layer, updated in place; needed when W > 1.
        accepted: [R] integers, how many of the drafts cached by the last call were right; none by default.
        rows: [R] integers, the row of `drafts` that each request has; its slot by default.
        impl: "auto" (the kernel on CUDA, the equations elsewhere) | "kernel" | "reference".
    Returns:
        o [R,W,HV,V] in qkv's dtype.
    Raises:
        ValueError: one sentence that names the argument.
    """
    _check(qkv, gate, beta, out_gate, conv_weight, state, tail, slots, drafts)
    if scale is None:
        scale = state.shape[2] ** -0.5
    if accepted is None and drafts is not None:
        accepted = torch.zeros_like(slots)
    rows = slots if rows is None else rows
    kernel = impl == "kernel" or (impl == "auto" and qkv.is_cuda)
    run = importlib.import_module("perilune.ops.kda.decode_launch").launch if kernel else reference
    dt_bias = dt_bias.reshape(gate.shape[2:])
    conv_weight = conv_weight.reshape(-1, TAPS)
    return run(
        qkv, gate, beta, out_gate, conv_weight, A_log, dt_bias, lower_bound, norm_weight, state, tail, slots,
        scale, eps, drafts, accepted, rows,
    )  # fmt: skip


def _check(
    qkv: Tensor, gate: Tensor, beta: Tensor, out_gate: Tensor, conv_weight: Tensor, state: Tensor, tail: Tensor,
    slots: Tensor, drafts: Drafts | None,
) -> None:  # fmt: skip
    R, W, C = qkv.shape
    _, HV, K, V = state.shape
    width = C - HV * V
    if width <= 0 or width % (2 * K) or HV % (width // (2 * K)):
        raise ValueError(f"decode: qkv has {C} channels, which is not 2·H·{K} + {HV}·{V} with {HV} a multiple of H.")
    for name, x, want in (
        ("gate", gate, (R, W, HV, K)),
        ("beta", beta, (R, W, HV)),
        ("out_gate", out_gate, (R, W, HV, V)),
    ):
        if x.shape != want:
            raise ValueError(f"decode: {name} must be {list(want)}, got {tuple(x.shape)}.")
    if conv_weight.numel() != C * TAPS:
        raise ValueError(f"decode: conv_weight must be [{C},{TAPS}], got {tuple(conv_weight.shape)}.")
    by_head = (state.shape[0], 3, HV, K, TAPS - 1)
    if tail.shape != (state.shape[0], C, TAPS - 1) and not (tail.shape == by_head and C == 3 * HV * K):
        raise ValueError(f"decode: tail must be {[state.shape[0], C, TAPS - 1]}, got {tuple(tail.shape)}.")
    if slots.shape != (R,):
        raise ValueError(f"decode: slots must be [{R}], got {tuple(slots.shape)}.")
    if drafts is None and W > 1:
        raise ValueError(f"decode: a window of {W} tokens needs `drafts`.")
    if drafts is not None and drafts.qkv.shape[1] < W - 1:
        raise ValueError(f"decode: drafts hold {drafts.qkv.shape[1]} tokens but the window has {W - 1}.")


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
        most, rows = int(accepted.max()), rows.clamp(min=0)
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
