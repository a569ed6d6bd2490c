"""Launches `gluon_token` or `gluon_decode` (Hopper), or `triton_decode` (others, and the interpreter) for `decode`."""

import functools

import torch
from torch import Tensor

from perilune.ops.kda.drafts import Drafts
from perilune.ops.kda.triton_decode import decode_kernel

WARPS = 8
REGISTERS = 128  # two programs a processor: one's loads hide the other's arithmetic


@functools.cache
def on_hopper(device: torch.device) -> bool:
    """Whether the hand-laid-out kernels run here."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def launch(
    qkv: Tensor, gate: Tensor, beta: Tensor, out_gate: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, norm_weight: Tensor, state: Tensor, tail: Tensor, slots: Tensor,
    scale: float, eps: float, drafts: Drafts | None, accepted: Tensor | None, rows: Tensor,
) -> Tensor:  # fmt: skip
    """`decode` by the kernel; one program a request and key head."""
    R, W, C = qkv.shape
    _, HV, K, V = state.shape
    H = (C - HV * V) // (2 * K)
    for name, x in (("qkv", qkv), ("gate", gate), ("out_gate", out_gate)):
        if x.stride(-1) != 1:
            raise ValueError(f"decode: {name} must have unit stride on its last axis, got strides {x.stride()}.")
    for x in () if drafts is None else (drafts.qkv[0, 0], drafts.gate[0, 0], drafts.beta[0, 0]):
        if not x.is_contiguous():
            raise ValueError("decode: a token's cached inputs must be contiguous.")
    o = torch.empty(R, W, HV, V, dtype=qkv.dtype, device=qkv.device)
    settings = {"H": H, "GROUP": HV // H, "K": K, "V": V, "FLOORED": lower_bound is not None}
    key_first = state.stride(2) == 1
    hopper = on_hopper(qkv.device)
    if hopper and W == 1 and drafts is None and streams(state):
        from perilune.ops.kda import gluon_token

        gluon_token.decode_kernel[(R * H,)](
            qkv, gate, beta, out_gate, o, conv_weight, A_log, dt_bias.contiguous(), norm_weight, state, tail, slots,
            qkv.stride(0), *gate.stride()[::2][:2], *beta.stride()[::2], *out_gate.stride()[::2][:2],
            *conv_weight.stride(), *state.stride(), *_tail_strides(tail, H, K, V), slots.stride(0),
            scale, lower_bound or 0.0, eps, **settings, KEY_FIRST=key_first,
            num_warps=4, maxnreg=168,  # three programs a processor
        )  # fmt: skip
        return o
    past = (qkv, gate, beta) if drafts is None else (drafts.qkv, drafts.gate, drafts.beta)
    arguments = (
        qkv, gate, beta, out_gate, o, conv_weight, A_log, dt_bias.contiguous(), norm_weight, state, tail, slots,
        slots if accepted is None else accepted, rows, *past,
        *qkv.stride()[:2], *gate.stride()[:3], *beta.stride(), *out_gate.stride()[:3], *conv_weight.stride(),
        *state.stride(), *_tail_strides(tail, H, K, V), slots.stride(0), rows.stride(0),
        *(x for p in past for x in p.stride()[:2]), scale, lower_bound or 0.0, eps,
    )  # fmt: skip
    settings |= {"W": W, "REPLAY": drafts is not None}
    if hopper:
        from perilune.ops.kda import gluon_decode

        gluon_decode.decode_kernel[(R * H,)](
            *arguments, **settings, KEY_FIRST=key_first, num_warps=WARPS, maxnreg=REGISTERS
        )
    else:
        decode_kernel[(R * H,)](*arguments, **settings, num_warps=WARPS if K == 128 else 4)
    return o


def streams(state: Tensor) -> bool:
    """Whether `gluon_token` takes this state: heads of 128 by 128 whose rows are copied 16 bytes at a time."""
    n, h, k, v = state.stride()
    rows = 1 in (k, v) and all(s % 16 == 0 for s in (n, h, max(k, v)))
    return rows and tuple(state.shape[2:]) == (128, 128) and state.data_ptr() % 16 == 0


def _tail_strides(tail: Tensor, H: int, K: int, V: int) -> tuple[int, ...]:
    """Of slots, of the q, k and v parts, of key heads, of value heads, of channels, of taps."""
    if tail.dim() == 5:
        n, part, head, channel, tap = tail.stride()
        return n, part, head, head, channel, tap
    n, channel, tap = tail.stride()
    return n, H * K * channel, K * channel, V * channel, channel, tap
