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

TAPS = 4


@dataclass
class Drafts:
    """Projected inputs of the last drafts, by slot: qkv [slots,D,C], gate [slots,D,HV,K], beta [slots,D,HV]."""

    qkv: Tensor
    gate: Tensor
    beta: Tensor

    @classmethod
    def empty(cls, slots: int, drafts: int, qkv: Tensor, gate: Tensor, beta: Tensor) -> "Drafts":
        """Room for `drafts` tokens of tensors like these [R,W,...]."""
        return cls(*(x.new_zeros(slots, drafts, *x.shape[2:]) for x in (qkv, gate, beta)))


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
    impl: str = "auto",
) -> Tensor:
    """One step of R requests, W tokens each.

    Args:
        qkv: [R,W,C] projections before the convolution, channels q heads | k heads | v heads (C = 2·H·K + HV·V).
        gate: raw [R,W,HV,K]. beta: raw [R,W,HV]. out_gate: raw [R,W,HV,V].
        conv_weight: [C,4] or [C,1,4]. A_log [HV], dt_bias [HV,K] or flat, norm_weight [V].
        lower_bound: as in `kda`.
        state: [slots,HV,K,V] fp32, any strides, updated in place.
        tail: [slots,C,3], the inputs before the next token, oldest first, updated in place.
        slots: [R] integers, any stride; −1 marks padding, which reads and writes nothing and returns zeros. Distinct.
        drafts: cache of this layer, updated in place; needed when W > 1.
        accepted: [R] integers, how many of the drafts cached by the last call were right; none by default.
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
    kernel = impl == "kernel" or (impl == "auto" and qkv.is_cuda)
    run = importlib.import_module("perilune.ops.kda.decode_launch").launch if kernel else reference
    dt_bias = dt_bias.reshape(gate.shape[2:])
    conv_weight = conv_weight.reshape(-1, TAPS)
    return run(
        qkv, gate, beta, out_gate, conv_weight, A_log, dt_bias, lower_bound, norm_weight, state, tail, slots,
        scale, eps, drafts, accepted,
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
    if tail.shape != (state.shape[0], C, TAPS - 1):
        raise ValueError(f"decode: tail must be {[state.shape[0], C, TAPS - 1]}, got {tuple(tail.shape)}.")
    if slots.shape != (R,):
        raise ValueError(f"decode: slots must be [{R}], got {tuple(slots.shape)}.")
    if drafts is None and W > 1:
        raise ValueError(f"decode: a window of {W} tokens needs `drafts`.")
    if drafts is not None and drafts.qkv.shape[1] < W - 1:
        raise ValueError(f"decode: drafts hold {drafts.qkv.shape[1]} tokens but the window has {W - 1}.")


@torch.no_grad()
def reference(
    qkv: Tensor, gate: Tensor, beta: Tensor, out_gate: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, norm_weight: Tensor, state: Tensor, tail: Tensor, slots: Tensor,
    scale: float, eps: float, drafts: Drafts | None, accepted: Tensor | None,
) -> Tensor:  # fmt: skip
    """The equations, request by request and token by token."""
    R, W, _ = qkv.shape
    dtype = accumulating(qkv.dtype)
    o = torch.zeros(R, W, state.shape[1], state.shape[3], dtype=qkv.dtype, device=qkv.device)
    for r in range(R):
        slot = int(slots[r])
        if slot < 0:
            continue
        rows = [(qkv[r, w], gate[r, w], beta[r, w]) for w in range(W)]
        replayed = 0 if accepted is None else int(accepted[r])
        if drafts is not None:
            rows = [(drafts.qkv[slot, t], drafts.gate[slot, t], drafts.beta[slot, t]) for t in range(replayed)] + rows
        S, past = state[slot].to(dtype), tail[slot].to(dtype)
        for t, (x, z, b) in enumerate(rows):
            past = torch.cat([past, x.to(dtype).unsqueeze(-1)], -1)
            q, k, v = _heads(F.silu((past * conv_weight.to(dtype)).sum(-1)), state)
            past = past[:, 1:]
            g, b = log_decay(z, A_log, dt_bias, lower_bound), torch.sigmoid(b.to(dtype))
            one = [y.unsqueeze(0) for y in (q * scale, k, v, g, b, S)]
            out, S = (y[0] for y in step(one[0], one[1], one[2], one[3], one[4], one[5], True))
            if t == replayed:
                state[slot], tail[slot] = S.to(state.dtype), past.to(tail.dtype)
            if t >= replayed:
                out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
                o[r, t - replayed] = (out * torch.sigmoid(out_gate[r, t - replayed].to(dtype))).to(o.dtype)
        if drafts is not None:
            for cache, new in ((drafts.qkv, qkv), (drafts.gate, gate), (drafts.beta, beta)):
                cache[slot, : W - 1] = new[r, 1:]
    return o


def _heads(y: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Channels to unit q, unit k and v of every value head."""
    _, HV, K, V = state.shape
    width = (y.shape[0] - HV * V) // 2
    q, k, v = y.split([width, width, HV * V])
    return spread(unit(q.view(-1, K)), HV), spread(unit(k.view(-1, K)), HV), v.view(HV, V)
