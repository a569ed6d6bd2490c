"""The recurrence itself, three steps a token (technical report §2.1.1, eq. 1; Kimi Linear eq. 1).

    S ← diag(exp g_t) S                          forget, one rate a key channel
    S ← S + k_t (β_t (v_t − Sᵀ k_t))ᵀ            correct what the state answers to k_t
    o_t = Sᵀ q_t                                  read the corrected state

with q, k of unit length, β = sigmoid(raw), q scaled, and the log-decay g of `log_decay`. Without the delta term the
second step writes k_t (β_t v_t)ᵀ. Everything here is differentiable and runs in fp64 when the inputs are fp64.

Shapes: B batch, T tokens, N sequences, H key heads, HV value heads, K and V head sizes;
G is K, or 1 for one rate a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from perilune.ops.precision import own_precision

L2_EPS = 1e-6


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Natural log of the decay, never positive.

    gate: raw [..., HV, G]; A_log [HV]; dt_bias [HV, G]. With a lower bound (K3: −5), g = lb·sigmoid(exp(A_log)(z + b));
    with None (Kimi Linear), g = −exp(A_log)·softplus(z + b). Result has gate's shape and the accumulating dtype.
    """
    dtype = accumulating(gate.dtype)
    rate = A_log.to(dtype).exp().unsqueeze(-1)
    z = gate.to(dtype) + dt_bias.to(dtype)
    if lower_bound is None:
        # torch's default threshold (20) costs 2e-9, which fp64 would see.
        return -rate * F.softplus(z, threshold=40.0)
    return lower_bound * torch.sigmoid(rate * z)


def unit(x: Tensor) -> Tensor:
    """x / sqrt(Σx² + 1e-6) over the last axis, in the accumulating dtype."""
    x = x.to(accumulating(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def spread(x: Tensor, heads: int) -> Tensor:
    """Key heads to value heads on axis −2: value head h reads key head h // (HV / H)."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], dim=-2)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, delta: bool) -> tuple[Tensor, Tensor]:
    """One token: q, k [N,HV,K], v [N,HV,V], g [N,HV,G], beta [N,HV], state [N,HV,K,V] -> (o [N,HV,V], new state)."""
    state = state * g.exp().unsqueeze(-1)
    if delta:
        v = v - torch.einsum("nhkv,nhk->nhv", state, k)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * v).unsqueeze(-2)
    return torch.einsum("nhkv,nhk->nhv", state, q), state


def _recur(
    inputs: tuple[Tensor, ...], state: Tensor, delta: bool, wanted: dict[int, list[int]]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Runs [B,T,...] inputs from state [B,HV,K,V]; `wanted` maps a token count to the export rows it fills."""
    v = inputs[2]
    outputs, found = [], {}
    for t in range(v.shape[1]):
        q_t, k_t, v_t, g_t, beta_t = (x[:, t] for x in inputs)
        o, state = step(q_t, k_t, v_t, g_t, beta_t, state, delta)
        outputs.append(o)
        for row in wanted.get(t + 1, ()):
            found[row] = state
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)
    return o, state, found


@own_precision
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float,
    state: Tensor | None,
    lengths: Sequence[int] | None,
    export_at: Sequence[tuple[int, int]] | None,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`kda` by the recurrence. `export_at` holds (sequence, tokens of it) pairs; `api` has checked the rest."""
    dtype, heads = accumulating(q.dtype), v.shape[2]
    inputs = (
        spread(unit(q), heads) * scale,
        spread(unit(k), heads),
        v.to(dtype),
        log_decay(gate, A_log, dt_bias, lower_bound),
        torch.sigmoid(beta.to(dtype)),
    )
    sequences = v.shape[0] if lengths is None else len(lengths)
    if state is None:
        state = torch.zeros(sequences, heads, q.shape[-1], v.shape[-1], dtype=dtype, device=v.device)
    wanted: list[dict[int, list[int]]] = [{} for _ in range(sequences)]
    for row, (n, count) in enumerate(export_at or ()):
        wanted[n].setdefault(count, []).append(row)

    outputs, finals, found = [], [], {}
    start = 0
    for n in range(sequences):
        if lengths is None:
            piece = tuple(x[n : n + 1] for x in inputs)
        else:
            piece = tuple(x[:, start : start + lengths[n]] for x in inputs)
            start += lengths[n]
        o, final, got = _recur(piece, state[n : n + 1].to(dtype), delta, wanted[n])
        outputs.append(o)
        finals.append(final)
        found.update(got)
    out = torch.cat(outputs, 0 if lengths is None else 1).to(v.dtype) if outputs else torch.zeros_like(v)
    final = torch.cat(finals) if finals else state
    exports = None
    if export_at is not None:
        rows = [found[row] for row in range(len(export_at))]
        exports = torch.cat(rows) if rows else state.new_zeros(0, *state.shape[1:])
    return out, final, exports
