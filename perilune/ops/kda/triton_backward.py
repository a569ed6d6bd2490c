# mypy: allow-untyped-defs
"""Gradients of the chunk form, everything recomputed from the raw inputs (technical report §5.1.1).

With R = v + kd·S, U = P R, and D the gradient of the state after the chunk, per chunk and head:

    dU = Aqkᵀ dO + kr D        dR = Pᵀ dU = dV        D ← 2^G_C D + qdᵀ dO + kdᵀ dR      (`reverse_kernel`)
    dqd = dO Sᵀ    dkd = dR Sᵀ    dkr = U Dᵀ    dAqk = tril(dO Uᵀ)    dAkk = −tril(dR Uᵀ, −1)
    dβ_raw = (1 − β)/β · diag(dR Uᵀ)                                                       (`pair_kernel`)

The last line needs no inverse: with Y = (I+L)⁻ᵀ dU, dβ_i = Y_i·(R_i − Σ_j Akk_ij U_j) = Y_i·U_i/β_i and dR = β Y.
For the gate, with a read and a write side of k, dG = q∘dq + k∘(dk_read − dk_write), the last row gains
Σ_j kr∘dkr + 2^G_C Σ_v S∘D, and dg is its running sum from the chunk's end.

Nothing is added atomically: per-chunk partial sums of dA_log and dt_bias are reduced in a fixed order afterwards.
Shapes: C = 64 tokens a chunk. D, S, U lie transposed as in `triton_forward`.
"""

import triton
import triton.language as tl

from perilune.ops.kda.triton_forward import find_state
from perilune.ops.kda.triton_prepare import LOG2E, from_border, inverse_norm, level_mask, log2_decay, same_block


@triton.jit
def reverse_kernel(
    kd, qd, kr, p, aqk, decay, do, dv, walks, pieces, dfinal, dstate, dexports, d,
    o_b, o_t, o_h, v_b, v_t, v_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walks chunks from the last to the first; keeps D after every chunk, writes dV and dS of the start."""
    C: tl.constexpr = 64
    work = kd.dtype.element_ty
    head = (tl.program_id(0) % HV).to(tl.int64)
    walk = tl.program_id(0) // HV
    i = tl.arange(0, C)
    c = tl.arange(0, K)[None, :]
    e = tl.program_id(1) * BV + tl.arange(0, BV)[:, None]
    first = tl.load(walks + 4 * walk)
    last = tl.load(walks + 4 * walk + 1)
    kind = tl.load(walks + 4 * walk + 2)
    index = tl.load(walks + 4 * walk + 3).to(tl.int64)
    D = find_state(dfinal, dstate, dstate, kind, index, head, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, c, e, HV, K, V)
    for back in range(0, last - first):
        piece = last - 1 - back
        start = tl.load(pieces + 4 * piece).to(tl.int64)
        count = tl.load(pieces + 4 * piece + 1)
        chunk = tl.load(pieces + 4 * piece + 2).to(tl.int64)
        row = tl.load(pieces + 4 * piece + 3).to(tl.int64)
        if row >= 0:
            D += tl.load(dexports + ((row * HV + head) * K + c) * V + e)
        b, t = start // T, start % T
        chunks = tl.cdiv(count, C)
        end = chunk + chunks - 1
        t += (chunks - 1) * C
        op = do + b * o_b + t * o_t + head * o_h + i[:, None] * o_t + tl.trans(e)
        vp = dv + b * v_b + t * v_t + head * v_h + i[:, None] * v_t + tl.trans(e)
        at = (end * HV + head) * (C * K) + i[:, None] * K + c
        sq = (end * HV + head) * (C * C) + i[:, None] * C + i[None, :]
        dp = decay + (end * HV + head) * K + c
        hp = d + ((end * HV + head) * V + e) * K + c
        for n in tl.range(0, chunks, num_stages=STAGES):
            live = (i < count - (chunks - 1 - n) * C)[:, None]
            Dw = D.to(work)
            tl.store(hp, Dw)
            b_do = tl.load(op, mask=live, other=0.0)
            b_a = tl.load(aqk + sq)
            b_kr = tl.load(kr + at)
            b_p = tl.load(p + sq)
            b_qd = tl.load(qd + at)
            b_kd = tl.load(kd + at)
            dU = tl.dot(tl.trans(b_do), b_a)
            dU = tl.dot(Dw, tl.trans(b_kr), acc=dU)
            dR = tl.dot(dU.to(work), b_p)
            D = tl.dot(tl.trans(b_do), b_qd, acc=D * tl.load(dp))
            D = tl.dot(dR.to(work), b_kd, acc=D)
            tl.store(vp, tl.trans(dR).to(dv.dtype.element_ty), mask=live)
            at -= HV * C * K
            sq -= HV * C * C
            dp -= HV * K
            hp -= HV * V * K
            op -= C * o_t
            vp -= C * v_t
    tl.store(dstate + index * f_n + head * f_h + c * f_k + e * f_v, D)


@triton.jit
def through_pairs(dA, dB, mask, rows_k, rows_q, cols, row, col, dq, read, write, dG):
    """Adds what the pairs under the mask say: dA of q-k pairs, dB of k-k pairs; factors `row` and `col` a token.

    A pair adds x to dG at its row and −x at its column, and dg, a running sum, must see the two cancel: so both are
    products of the same 16-bit factors. (From dq and dk the error of fast gates would be 7%, not 0.5%.)
    """
    work = cols.dtype
    a = tl.where(mask, dA, 0.0).to(work)
    b = tl.where(mask, dB, 0.0).to(work)
    from_q = tl.dot(a, cols, input_precision="tf32x3")
    from_k = tl.dot(b, cols, input_precision="tf32x3")
    to = tl.dot(tl.trans(b), rows_k, input_precision="tf32x3")
    to = tl.dot(tl.trans(a), rows_q, acc=to, input_precision="tf32x3")
    dG += from_q * rows_q.to(tl.float32) + from_k * rows_k.to(tl.float32) - to * cols.to(tl.float32)
    return dq + row * from_q, read + row * from_k, write + col * to, dG


@triton.jit
def pair_kernel(
    beta, chunks, do, dv, u, dA, dB, dbeta,
    b_b, b_t, b_h, o_b, o_t, o_h, v_b, v_t, v_h, T, first,
    HV: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dAqk, dAkk and the gradient of raw β for one (chunk, head)."""
    C: tl.constexpr = 64
    pid = tl.program_id(0).to(tl.int64)
    chunk, head = pid // HV + first, pid % HV
    start = tl.load(chunks + 2 * chunk).to(tl.int64)
    count = tl.load(chunks + 2 * chunk + 1)
    b, t = start // T, start % T
    i = tl.arange(0, C)
    live = (i < count)[:, None]
    ri, rj = i[:, None], i[None, :]
    e = tl.arange(0, V)
    b_do = tl.load(do + b * o_b + t * o_t + head * o_h + ri * o_t + e[None, :], mask=live, other=0.0)
    b_dr = tl.load(dv + b * v_b + t * v_t + head * v_h + ri * v_t + e[None, :], mask=live, other=0.0)
    b_u = tl.load(u + (pid * V + e[:, None]) * C + rj)
    at = pid * C * C + ri * C + rj
    tl.store(dA + at, tl.where(ri >= rj, tl.dot(b_do, b_u, input_precision="tf32x3"), 0.0).to(dA.dtype.element_ty))
    pairs = tl.dot(b_dr, b_u, input_precision="tf32x3")
    tl.store(dB + at, tl.where(ri > rj, -pairs, 0.0).to(dB.dtype.element_ty))
    be = tl.sigmoid(tl.load(beta + b * b_b + (t + i) * b_t + head * b_h, mask=i < count, other=0.0).to(tl.float32))
    raw = tl.sum(tl.where(ri == rj, pairs, 0.0), 1) * (1.0 - be) / be
    raw = tl.where(be > 1e-18, raw, 0.0)
    tl.store(dbeta + (b * T + t + i) * HV + head, raw.to(dbeta.dtype.element_ty), mask=i < count)


@triton.jit
def unit_kernel(
    raw, d, x_b, x_t, x_h, T, tokens,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """In place from gradients d [B,T,HV,K] of unit rows to those of the raw rows: r (d − x r (x r · d))."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HV, row % HV
    live = (row < tokens.to(tl.int64) * HV)[:, None]
    c = tl.arange(0, K)[None, :]
    at = (token // T) * x_b + (token % T) * x_t + (head // GROUP) * x_h
    x = tl.load(raw + at[:, None] + c, mask=live, other=0.0).to(tl.float32)
    g = tl.load(d + row[:, None] * K + c, mask=live, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    x *= r
    g = r * (g - x * tl.sum(x * g, 1)[:, None])
    tl.store(d + row[:, None] * K + c, g.to(d.dtype.element_ty), mask=live)


@triton.jit
def gradient_kernel(
    q, k, gate, A_log, dt_bias, chunks, do, dv, h, d, u, dA, dB, dq, dk, dgate, dA_part, dbias_part,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
    o_b, o_t, o_h, v_b, v_t, v_h, T, scale, lower_bound, first,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KB: tl.constexpr,
    BOUNDED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """Gradients of unit q and k, raw gate and its parameters for KB channels of one (chunk, value head)."""
    C: tl.constexpr = 64
    work = h.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    chunk, head = pid // HV + first, pid % HV
    start = tl.load(chunks + 2 * chunk).to(tl.int64)
    count = tl.load(chunks + 2 * chunk + 1)
    b, t = start // T, start % T
    i = tl.arange(0, C)
    live = (i < count)[:, None]
    ri, rj = i[:, None], i[None, :]
    e = tl.arange(0, V)
    channel = tl.program_id(1) * KB + tl.arange(0, KB)
    c = channel[None, :]

    q += b * q_b + t * q_t + (head // GROUP) * q_h
    k += b * k_b + t * k_t + (head // GROUP) * k_h
    gate += b * g_b + t * g_t + head * g_h
    out = ((b * T + t) * HV + head) * K + ri * (HV * K) + c
    rq = inverse_norm(q, i, q_t, i < count, K)
    rk = inverse_norm(k, i, k_t, i < count, K)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    z = tl.load(gate + ri * g_t + c, mask=live, other=0.0).to(tl.float32)
    z += tl.load(dt_bias + head * K + c).to(tl.float32)
    g = tl.where(live, log2_decay(z, rate, lower_bound, FLOORED), 0.0)
    G = tl.cumsum(g, 0)
    total = tl.sum(g, 0)[None, :]
    f = tl.exp2(G)
    tile_h = tl.load(h + (pid * V + e[:, None]) * K + c)
    b_do = tl.load(do + b * o_b + t * o_t + head * o_h + ri * o_t + e[None, :], mask=live, other=0.0)
    gq = tl.dot(b_do, tile_h, input_precision="tf32x3") * f
    b_dr = tl.load(dv + b * v_b + t * v_t + head * v_h + ri * v_t + e[None, :], mask=live, other=0.0)
    read = -tl.dot(b_dr, tile_h, input_precision="tf32x3") * f
    tile_d = tl.load(d + (pid * V + e[:, None]) * K + c)
    b_u = tl.load(u + (pid * V + e[:, None]) * C + rj)
    write = tl.dot(tl.trans(b_u), tile_d, input_precision="tf32x3") * tl.exp2(total - G)
    last = tl.sum(tile_h.to(tl.float32) * tile_d.to(tl.float32), 0)[None, :] * tl.exp2(total)
    kn = tl.load(k + ri * k_t + c, mask=live, other=0.0).to(tl.float32) * rk[:, None]
    qn = tl.load(q + ri * q_t + c, mask=live, other=0.0).to(tl.float32) * (rq * scale)[:, None]
    last += tl.sum(kn * write, 0)[None, :]
    dG = qn * gq + kn * (read - write)

    sq = pid * C * C + ri * C + rj
    b_A = tl.load(dA + sq)
    b_B = tl.load(dB + sq)
    if BOUNDED:
        D = from_border(G, 8)
        row, col = tl.exp2(D), tl.exp2(-D)
        gq, read, write, dG = through_pairs(
            b_A, b_B, same_block(ri, rj, 16), (kn * row).to(work), (qn * row).to(work), (kn * col).to(work),
            row, col, gq, read, write, dG,
        )  # fmt: skip
    else:
        own = tl.sum(tl.where(ri == rj, b_A.to(tl.float32), 0.0), 1)[:, None]
        gq += own * kn
        write += own * qn
    for level in tl.static_range(4 if BOUNDED else 0, 6):
        f = tl.exp2(-tl.abs(from_border(G, 1 << level)))
        kf = (kn * f).to(work)
        gq, read, write, dG = through_pairs(
            b_A, b_B, level_mask(ri, rj, 1 << level), kf, (qn * f).to(work), kf, f, f, gq, read, write, dG
        )
    tl.store(dq + out, (gq * scale).to(dq.dtype.element_ty), mask=live)
    tl.store(dk + out, (read + write).to(dk.dtype.element_ty), mask=live)
    dg = tl.cumsum(dG, 0, reverse=True) + last
    if FLOORED:
        s = 1.0 / (1.0 + tl.exp2(-LOG2E * rate * z))
        # 1 − s through the other exponential: 1.0 − s would lose it where s rounds to 1.
        dz = dg * lower_bound * (s / (1.0 + tl.exp2(LOG2E * rate * z))) * rate
        dz = tl.where(live, dz, 0.0)
        dA_sum = tl.sum(dz * z)
    else:
        dz = tl.where(live, -dg * rate / (1.0 + tl.exp2(-LOG2E * z)), 0.0)
        dA_sum = tl.sum(dg * g) / LOG2E
    tl.store(dgate + out, dz.to(dgate.dtype.element_ty), mask=live)
    tl.store(dbias_part + pid * K + channel, tl.sum(dz, 0))
    tl.store(dA_part + pid * (K // KB) + tl.program_id(1), dA_sum)
