# mypy: allow-untyped-defs
"""`triton_decode` for Hopper with the state laid out by hand, so that the step runs at the speed of its memory traffic.

A thread holds 64 numbers of the state, two programs fit a processor, and every access is whole 128-byte lines whichever
axis is contiguous.
The vectors of a token live one number a thread and are spread over the state's layout once (Triton by itself computes
them in every thread that will read them, and runs out of registers).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def state_layout(key_first):
    """[K,V] over 8 warps: key_first when K is the contiguous axis in memory."""
    if key_first:
        return gl.BlockedLayout([4, 4], [8, 4], [1, 8], [0, 1])
    return gl.BlockedLayout([8, 4], [2, 16], [8, 1], [1, 0])


@gluon.jit
def history(tail, t_w):
    """The three inputs before the next token, oldest first."""
    return (
        gl.load(tail).to(gl.float32),
        gl.load(tail + t_w).to(gl.float32),
        gl.load(tail + 2 * t_w).to(gl.float32),
    )


@gluon.jit
def remember(tail, t_w, x0, x1, x2):
    gl.store(tail, x0.to(tail.dtype.element_ty))
    gl.store(tail + t_w, x1.to(tail.dtype.element_ty))
    gl.store(tail + 2 * t_w, x2.to(tail.dtype.element_ty))


@gluon.jit
def silu_conv(x, older, old, newer, w, taps_stride):
    """SiLU of the four-tap convolution; w points at the channels' first taps."""
    y = older * gl.load(w) + old * gl.load(w + taps_stride)
    y += newer * gl.load(w + 2 * taps_stride) + x * gl.load(w + 3 * taps_stride)
    return y / (1.0 + gl.exp2(-LOG2E * y))


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(-LOG2E * x))


@gluon.jit
def decay_of(z, rate, lower_bound, FLOORED: gl.constexpr):
    if FLOORED:
        g = lower_bound * LOG2E * sigmoid(rate * z)
    else:
        e = gl.exp2(-LOG2E * gl.abs(z))
        soft = gl.maximum(z, 0.0) * LOG2E + gl.where(e < 1e-3, e * (1.0 - 0.5 * e) * LOG2E, gl.log2(1.0 + e))
        g = -rate * soft
    return gl.exp2(g)


@gluon.jit
def advance(S, q, k, v, decay, beta, qk):
    """One token of the recurrence; both reads of the decayed state happen in one pass over it."""
    S *= gl.expand_dims(decay, 1)
    u = beta * (v - gl.sum(S * gl.expand_dims(k, 1), 0))
    o = gl.sum(S * gl.expand_dims(q, 1), 0) + u * qk
    return S + gl.expand_dims(k, 1) * gl.expand_dims(u, 0), o


@gluon.jit
def unit(x):
    return x * gl.rsqrt(gl.sum(x * x, 0) + 1e-6)


@gluon.jit
def decode_kernel(
    x, gate, beta, out_gate, o, conv, A_log, dt_bias, norm, state, tail, slots, accepted, rows,
    past_x, past_gate, past_beta, x_r, x_w, g_r, g_w, g_h, b_r, b_w, b_h, z_r, z_w, z_h, c_c, c_t,
    s_n, s_h, s_k, s_v, t_n, t_p, t_h, t_v, t_c, t_w, slot_r, row_r,
    px_n, px_w, pg_n, pg_w, pb_n, pb_w, scale, lower_bound, eps,
    W: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    FLOORED: gl.constexpr, REPLAY: gl.constexpr, KEY_FIRST: gl.constexpr,
):  # fmt: skip
    row = (gl.program_id(0) // H).to(gl.int64)
    key_head = gl.program_id(0) % H
    HV: gl.constexpr = H * GROUP
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    grid: gl.constexpr = state_layout(KEY_FIRST)
    by_key: gl.constexpr = gl.SliceLayout(1, grid)
    by_value: gl.constexpr = gl.SliceLayout(0, grid)
    c, e = gl.arange(0, K, layout=line), gl.arange(0, V, layout=line)
    slot = gl.load(slots + row * slot_r).to(gl.int64)
    if slot < 0:
        for j in gl.static_range(GROUP):
            for w in range(W):
                at = ((row * W + w) * HV + key_head * GROUP + j) * V
                gl.store(o + at + e, gl.zeros((V,), o.dtype.element_ty, line))
        return
    replayed = 0
    kept = slot
    if REPLAY:
        replayed = gl.load(accepted + row)
        kept = gl.load(rows + row * row_r).to(gl.int64)
    qc = key_head * K + c
    kc = H * K + qc
    x += row * x_r
    past_x += kept * px_n
    tail += slot * t_n
    q_tail = tail + key_head * t_h + c * t_c
    k_tail = q_tail + t_p
    for j in gl.static_range(GROUP):
        head = key_head * GROUP + j
        vc = 2 * H * K + head * V + e
        v_tail = tail + 2 * t_p + head * t_v + e * t_c
        q0, q1, q2 = history(q_tail, t_w)
        k0, k1, k2 = history(k_tail, t_w)
        v0, v1, v2 = history(v_tail, t_w)
        kk = gl.expand_dims(gl.arange(0, K, layout=by_key), 1)
        vv = gl.expand_dims(gl.arange(0, V, layout=by_value), 0)
        sp = state + slot * s_n + head * s_h + kk * s_k + vv * s_v
        S = gl.load(sp)
        rate = gl.exp(gl.load(A_log + head).to(gl.float32))
        bias = gl.load(dt_bias + head * K + c).to(gl.float32)
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
                gl.load(xp + qc).to(gl.float32),
                gl.load(xp + kc).to(gl.float32),
                gl.load(xp + vc).to(gl.float32),
            )
            q = unit(silu_conv(xq, q0, q1, q2, conv + qc * c_c, c_t)) * scale
            k = unit(silu_conv(xk, k0, k1, k2, conv + kc * c_c, c_t))
            v = silu_conv(xv, v0, v1, v2, conv + vc * c_c, c_t)
            z = gl.load(gp + c).to(gl.float32) + bias
            decay = decay_of(z, rate, lower_bound, FLOORED)
            b = sigmoid(gl.load(bp).to(gl.float32))
            qk = gl.sum(q * k, 0)
            S, out = advance(
                S, gl.convert_layout(q, by_key), gl.convert_layout(k, by_key), gl.convert_layout(v, by_value),
                gl.convert_layout(decay, by_key), b, qk,
            )  # fmt: skip
            q0, q1, q2 = q1, q2, xq
            k0, k1, k2 = k1, k2, xk
            v0, v1, v2 = v1, v2, xv
            if w == 0:  # everything up to here is certain
                gl.store(sp, S)
                remember(v_tail, t_w, v0, v1, v2)
                if j == GROUP - 1:
                    remember(q_tail, t_w, q0, q1, q2)
                    remember(k_tail, t_w, k0, k1, k2)
            if w >= 0:
                y = gl.convert_layout(out, line)
                y *= gl.rsqrt(gl.sum(y * y, 0) / V + eps) * gl.load(norm + e).to(gl.float32)
                y *= sigmoid(gl.load(out_gate + row * z_r + w * z_w + head * z_h + e).to(gl.float32))
                gl.store(o + ((row * W + w) * HV + head) * V + e, y.to(o.dtype.element_ty))
    if REPLAY:
        # Inputs of the drafts, for the next call: read the whole old cache first (above), then overwrite it.
        gl.thread_barrier()
        for w in range(1, W):
            xp, to = x + w * x_w, past_x + (w - 1) * px_w
            gl.store(to + qc, gl.load(xp + qc))
            gl.store(to + kc, gl.load(xp + kc))
            for j in gl.static_range(GROUP):
                head = key_head * GROUP + j
                vc = 2 * H * K + head * V + e
                gl.store(to + vc, gl.load(xp + vc))
                z = gl.load(gate + row * g_r + w * g_w + head * g_h + c)
                gl.store(past_gate + kept * pg_n + (w - 1) * pg_w + head * K + c, z)
                gl.store(
                    past_beta + kept * pb_n + (w - 1) * pb_w + head, gl.load(beta + row * b_r + w * b_w + head * b_h)
                )
