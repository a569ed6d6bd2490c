# mypy: allow-untyped-defs
"""One decoding step of a KDA layer between its projections, in one kernel (technical report §5.4.2).

Short convolution, norms, gate, recurrence, output norm and output gate for one request and one key head; the state
[K,V] is read once, kept in registers over replayed, certain and drafted tokens, and written once. `decode` holds the
contract. The convolution's history is in registers too: `older` to `newer` are the three inputs before the token.

A program serves every value head of its key head, so no other program reads the tail that it overwrites.
"""

import triton
import triton.language as tl

from perilune.ops.kda.triton_prepare import LOG2E, log2_decay


@triton.jit
def history(tail, t_w):
    """The three inputs before the next token, oldest first."""
    return (
        tl.load(tail).to(tl.float32),
        tl.load(tail + t_w).to(tl.float32),
        tl.load(tail + 2 * t_w).to(tl.float32),
    )


@triton.jit
def remember(tail, t_w, x0, x1, x2):
    tl.store(tail, x0.to(tail.dtype.element_ty))
    tl.store(tail + t_w, x1.to(tail.dtype.element_ty))
    tl.store(tail + 2 * t_w, x2.to(tail.dtype.element_ty))


@triton.jit
def silu_conv(x, older, old, newer, w, taps_stride):
    """SiLU of the four-tap convolution; w points at the channels' first taps."""
    y = older * tl.load(w) + old * tl.load(w + taps_stride)
    y += newer * tl.load(w + 2 * taps_stride) + x * tl.load(w + 3 * taps_stride)
    return y / (1.0 + tl.exp2(-LOG2E * y))


@triton.jit
def advance(S, q, k, v, g, beta):
    """One token of the recurrence, g the decay itself; both reads of the decayed state happen in one pass over it."""
    S *= g[:, None]
    u = beta * (v - tl.sum(S * k[:, None], 0))
    o = tl.sum(S * q[:, None], 0) + u * tl.sum(q * k)
    return S + k[:, None] * u[None, :], o


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def decode_kernel(
    x, gate, beta, out_gate, o, conv, A_log, dt_bias, norm, state, tail, slots, accepted, rows,
    past_x, past_gate, past_beta, x_r, x_w, g_r, g_w, g_h, b_r, b_w, b_h, z_r, z_w, z_h, c_c, c_t,
    s_n, s_h, s_k, s_v, t_n, t_p, t_h, t_v, t_c, t_w, slot_r, row_r,
    px_n, px_w, pg_n, pg_w, pb_n, pb_w, scale, lower_bound, eps,
    W: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    FLOORED: tl.constexpr, REPLAY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // H).to(tl.int64)
    key_head = tl.program_id(0) % H
    HV: tl.constexpr = H * GROUP
    c, e = tl.arange(0, K), tl.arange(0, V)
    slot = tl.load(slots + row * slot_r).to(tl.int64)
    if slot < 0:
        for j in tl.static_range(GROUP):
            for w in range(W):
                at = ((row * W + w) * HV + key_head * GROUP + j) * V
                tl.store(o + at + e, tl.zeros((V,), o.dtype.element_ty))
        return
    replayed = 0
    kept = slot
    if REPLAY:
        replayed = tl.load(accepted + row)
        kept = tl.load(rows + row * row_r).to(tl.int64)
    qc = key_head * K + c
    kc = H * K + qc
    x += row * x_r
    past_x += kept * px_n
    tail += slot * t_n
    q_tail = tail + key_head * t_h + c * t_c
    k_tail = q_tail + t_p
    for j in tl.static_range(GROUP):
        head = key_head * GROUP + j
        vc = 2 * H * K + head * V + e
        v_tail = tail + 2 * t_p + head * t_v + e * t_c
        q0, q1, q2 = history(q_tail, t_w)
        k0, k1, k2 = history(k_tail, t_w)
        v0, v1, v2 = history(v_tail, t_w)
        sp = state + slot * s_n + head * s_h + c[:, None] * s_k + e[None, :] * s_v
        S = tl.load(sp)
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head * K + c).to(tl.float32)
        for step in range(0, replayed + W):
            w = step - replayed
            if step < replayed:
                xp = past_x + step * px_w
                gp = past_gate + kept * pg_n + step * pg_w + head * K
                bp = past_beta + kept * pb_n + step * pb_w + head
            else:
                xp = x + w * x_w
                gp = gate + row * g_r + w * g_w + head * g_h
                bp = beta + row * b_r + w * b_w + head * b_h
            xq, xk, xv = (
                tl.load(xp + qc).to(tl.float32),
                tl.load(xp + kc).to(tl.float32),
                tl.load(xp + vc).to(tl.float32),
            )
            q = unit(silu_conv(xq, q0, q1, q2, conv + qc * c_c, c_t)) * scale
            k = unit(silu_conv(xk, k0, k1, k2, conv + kc * c_c, c_t))
            v = silu_conv(xv, v0, v1, v2, conv + vc * c_c, c_t)
            z = tl.load(gp + c).to(tl.float32) + bias
            g = tl.exp2(log2_decay(z, rate, lower_bound, FLOORED))
            b = tl.sigmoid(tl.load(bp).to(tl.float32))
            S, out = advance(S, q, k, v, g, b)
            q0, q1, q2 = q1, q2, xq
            k0, k1, k2 = k1, k2, xk
            v0, v1, v2 = v1, v2, xv
            if w == 0:  # everything up to here is certain
                tl.store(sp, S)
                remember(v_tail, t_w, v0, v1, v2)
                if j == GROUP - 1:
                    remember(q_tail, t_w, q0, q1, q2)
                    remember(k_tail, t_w, k0, k1, k2)
            if w >= 0:
                out *= tl.rsqrt(tl.sum(out * out) / V + eps) * tl.load(norm + e).to(tl.float32)
                out *= tl.sigmoid(tl.load(out_gate + row * z_r + w * z_w + head * z_h + e).to(tl.float32))
                tl.store(o + ((row * W + w) * HV + head) * V + e, out.to(o.dtype.element_ty))
    if REPLAY:
        # Inputs of the drafts, for the next call: read the whole old cache first (above), then overwrite it.
        tl.debug_barrier()
        for w in range(1, W):
            xp, to = x + w * x_w, past_x + (w - 1) * px_w
            tl.store(to + qc, tl.load(xp + qc))
            tl.store(to + kc, tl.load(xp + kc))
            for j in tl.static_range(GROUP):
                head = key_head * GROUP + j
                vc = 2 * H * K + head * V + e
                tl.store(to + vc, tl.load(xp + vc))
                z = tl.load(gate + row * g_r + w * g_w + head * g_h + c)
                tl.store(past_gate + kept * pg_n + (w - 1) * pg_w + head * K + c, z)
                tl.store(
                    past_beta + kept * pb_n + (w - 1) * pb_w + head, tl.load(beta + row * b_r + w * b_w + head * b_h)
                )
