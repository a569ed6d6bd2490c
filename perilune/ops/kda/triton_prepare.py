# mypy: allow-untyped-defs
"""The factors of a 64-token chunk, for all chunks at once (technical report §5.1.1; Kimi Linear eq. 6 to 9).

With G the running sum of the log2-decay inside the chunk, G_C its last row, and β = sigmoid(raw):

    kd = −k·2^G    qd = s·q·2^G    kr = k·2^(G_C − G)    A_ab[i,j] = Σ_d a_i b_j 2^(G_i − G_j)
    P = (I + diag(β) tril(A_kk, −1))⁻¹ diag(β)           Aqk = s·tril(A_qk)

The recurrence over chunks then needs nothing but these (`triton_forward`).

G_i − G_j may reach −460 in a chunk, so it is never split into 2^G_i · 2^−G_j. Pairs (i,j) are sorted by the largest
power-of-two block border between them; at one level every token has one exponent −|G − G_border| ≤ 0, so factors only
underflow where the product does too. Bounded gates (≥ −5 a token) stop at blocks of 16, whose halves span 2^±58.
The inverse is built by doubling: X ← X − X·(L_level·X) has no powers of L, so its error does not grow with |L|.

Shapes: C = 64 tokens a chunk, K key channels. Programs: one a (chunk, value head).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = 64


@triton.jit
def log2_decay(z, rate, lower_bound, FLOORED: tl.constexpr):
    """log2 of the decay for z = gate + bias: lb·σ(rate·z), or −rate·softplus(z)."""
    if FLOORED:
        return lower_bound * LOG2E / (1.0 + tl.exp2(-LOG2E * rate * z))
    else:
        e = tl.exp2(-LOG2E * tl.abs(z))
        # log1p by series where 1 + e would lose e.
        soft = tl.maximum(z, 0.0) * LOG2E + tl.where(e < 1e-3, e * (1.0 - 0.5 * e) * LOG2E, tl.log2(1.0 + e))
        return -rate * soft


@triton.jit
def inverse_norm(ptr, rows, stride, live, K: tl.constexpr):
    """1 / sqrt(Σx² + 1e-6) of rows of [T,K]."""
    cols = tl.arange(0, K)
    x = tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def same_block(i, j, size: tl.constexpr):
    return (i // size) == (j // size)


@triton.jit
def level_mask(i, j, size: tl.constexpr):
    """Row in the later half and column in the earlier half of the same block of 2·size."""
    return same_block(i, j, 2 * size) & ((i // size) > (j // size))


@triton.jit
def from_border(G, size: tl.constexpr):
    """G − G[last row of the earlier half] in every block of 2·size rows."""
    C: tl.constexpr = G.shape[0]
    K: tl.constexpr = G.shape[1]
    B = tl.reshape(G, (C // (2 * size), 2 * size, K))
    at = tl.arange(0, 2 * size)[None, :, None] == size - 1
    border = tl.sum(tl.where(at, B, 0.0), 1)
    return tl.reshape(B - border[:, None, :], (C, K))


@triton.jit
def pairs(mask, rows, k_cols, acc):
    """acc + the product rows·k_colsᵀ where the mask holds."""
    return acc + tl.where(mask, tl.dot(rows, tl.trans(k_cols), input_precision="tf32x3"), 0.0)


@triton.jit
def grow_inverse(X, L, i, j, size: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of I + L on blocks of 2·size from the inverse on blocks of size."""
    part = tl.where(level_mask(i, j, size), L, 0.0)
    return X - tl.dot(X, tl.dot(part, X, input_precision=PRECISION), input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(L, PRECISION: tl.constexpr):
    """(I + L)⁻¹ for strictly lower L [64,64]: blocks of 16 side by side, then two merges."""
    NB: tl.constexpr = 4
    S: tl.constexpr = 16
    a = tl.arange(0, NB)[:, None, None, None] == tl.arange(0, NB)[None, None, :, None]
    D = tl.sum(tl.where(a, tl.reshape(L, (NB, S, NB, S)), 0.0), 2)
    i, j = tl.arange(0, S)[None, :, None], tl.arange(0, S)[None, None, :]
    X = tl.where(i == j, 1.0, 0.0) - tl.where(level_mask(i, j, 1), D, 0.0)
    X = grow_inverse(X, D, i, j, 2, "tf32x3")
    X = grow_inverse(X, D, i, j, 4, "tf32x3")
    X = grow_inverse(X, D, i, j, 8, "tf32x3")
    X = tl.reshape(tl.where(a, X[:, :, None, :], 0.0), (NB * S, NB * S))
    i, j = tl.arange(0, NB * S)[:, None], tl.arange(0, NB * S)[None, :]
    X = grow_inverse(X, L, i, j, 16, PRECISION)
    return grow_inverse(X, L, i, j, 32, PRECISION)


@triton.jit
def prepare_kernel(
    q, k, gate, beta, A_log, dt_bias, chunks,
    kd, qd, kr, p, aqk, decay,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, b_b, b_t, b_h, T, scale, lower_bound, first,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KB: tl.constexpr,
    BOUNDED: tl.constexpr, FLOORED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 64
    work = kd.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    chunk, head = pid // HV + first, pid % HV
    start = tl.load(chunks + 2 * chunk).to(tl.int64)
    count = tl.load(chunks + 2 * chunk + 1)
    b, t = start // T, start % T
    i = tl.arange(0, C)
    live = i < count
    ri, rj = i[:, None], i[None, :]

    q += b * q_b + t * q_t + (head // GROUP) * q_h
    k += b * k_b + t * k_t + (head // GROUP) * k_h
    gate += b * g_b + t * g_t + head * g_h
    rq = inverse_norm(q, i, q_t, live, K) * scale
    rk = inverse_norm(k, i, k_t, live, K)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    L = tl.zeros((C, C), tl.float32)
    A = tl.zeros((C, C), tl.float32)
    diagonal = tl.zeros((C,), tl.float32)
    for block in range(0, K, KB):
        c = block + tl.arange(0, KB)[None, :]
        z = tl.load(gate + ri * g_t + c, mask=live[:, None], other=0.0).to(tl.float32)
        z += tl.load(dt_bias + head * K + c).to(tl.float32)
        g = tl.where(live[:, None], log2_decay(z, rate, lower_bound, FLOORED), 0.0)
        kn = tl.load(k + ri * k_t + c, mask=live[:, None], other=0.0).to(tl.float32) * rk[:, None]
        qn = tl.load(q + ri * q_t + c, mask=live[:, None], other=0.0).to(tl.float32) * rq[:, None]
        G = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
        at = pid * C * K + ri * K + c
        f = tl.exp2(G)
        tl.store(kd + at, (-kn * f).to(work))
        tl.store(qd + at, (qn * f).to(work))
        tl.store(kr + at, (kn * tl.exp2(total[None, :] - G)).to(work))
        tl.store(decay + pid * K + block + tl.arange(0, KB), tl.exp2(total))
        if BOUNDED:
            D = from_border(G, 8)
            f = tl.exp2(D)
            cols = (kn * tl.exp2(-D)).to(work)
            L = pairs(same_block(ri, rj, 16) & (ri > rj), (kn * f).to(work), cols, L)
            A = pairs(same_block(ri, rj, 16) & (ri >= rj), (qn * f).to(work), cols, A)
        else:
            diagonal += tl.sum(qn * kn, 1)
        for level in tl.static_range(4 if BOUNDED else 0, 6):
            f = tl.exp2(-tl.abs(from_border(G, 1 << level)))
            cols = (kn * f).to(work)
            L = pairs(level_mask(ri, rj, 1 << level), cols, cols, L)
            A = pairs(level_mask(ri, rj, 1 << level), (qn * f).to(work), cols, A)

    if not BOUNDED:
        A += tl.where(ri == rj, diagonal[:, None], 0.0)
    be = tl.load(beta + b * b_b + (t + i) * b_t + head * b_h, mask=live, other=0.0).to(tl.float32)
    be = tl.where(live, tl.sigmoid(be), 0.0)
    X = unit_lower_inverse(L * be[:, None], PRECISION)
    at = pid * C * C + ri * C + rj
    tl.store(p + at, (X * be[None, :]).to(work))
    tl.store(aqk + at, A.to(work))
