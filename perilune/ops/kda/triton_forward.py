# mypy: allow-untyped-defs
"""The chain over chunks, state held in the tensor cores' accumulators from first to last token.

    U = P (v + kd·S)      o = qd·S + Aqk·U      S ← diag(2^G_C) S + krᵀ U

Everything is kept transposed, Sᵀ [V,K] and Uᵀ [V,C]: then each product takes the previous accumulator as its left
operand straight from registers, and only the chunk's factors pass through shared memory.

With KEEP the outputs are what the backward needs instead: S before every chunk and U, both in 16 bits.

`scan` runs the same chain without outputs, from zero (giving B) and from the identity with v = 0 (giving M), and
`merge_kernel` chains the pairs: S ← M S + B (technical report eq. 17; `segments` says when).

Tables are those of `segments`; C = 64 tokens a chunk. A program owns BV value columns of one head of one run.
"""

import triton
import triton.language as tl


@triton.jit
def find_state(initial, final, carry, kind, index, head, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, c, e, HV, K, V):
    """The state [BV,K] a run starts from: zeros, the caller's, an earlier panel's, or a merged one."""
    S = tl.zeros((e.shape[0], c.shape[1]), tl.float32)
    if kind == 1:
        S = tl.load(initial + index * i_n + head * i_h + c * i_k + e * i_v)
    elif kind == 2:
        S = tl.load(final + index * f_n + head * f_h + c * f_k + e * f_v)
    elif kind == 3:
        S = tl.load(carry + ((index * HV + head) * V + e) * K + c)
    return S


@triton.jit
def chain_kernel(
    kd, qd, kr, p, aqk, decay, v, o, runs, pieces, initial, final, carry, transfer, exports, h, u,
    v_b, v_t, v_h, o_b, o_t, o_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 64
    work = kd.dtype.element_ty
    head = (tl.program_id(0) % HV).to(tl.int64)
    run = tl.program_id(0) // HV
    i = tl.arange(0, C)
    c = tl.arange(0, K)[None, :]
    e = tl.program_id(1) * BV + tl.arange(0, BV)[:, None]
    first = tl.load(runs + 5 * run)
    last = tl.load(runs + 5 * run + 1)
    index = tl.load(runs + 5 * run + 3).to(tl.int64)
    target = tl.load(runs + 5 * run + 4).to(tl.int64)
    writes = True  # the part of a scan that builds M reads no values
    if SCAN:
        writes = tl.program_id(1) * BV < V
        S = tl.where(e - V == c, 1.0, 0.0)
    else:
        kind = tl.load(runs + 5 * run + 2)
        S = find_state(initial, final, carry, kind, index, head, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, c, e, HV, K, V)
    for piece in range(first, last):
        start = tl.load(pieces + 4 * piece).to(tl.int64)
        count = tl.load(pieces + 4 * piece + 1)
        chunk = tl.load(pieces + 4 * piece + 2).to(tl.int64)
        row = tl.load(pieces + 4 * piece + 3).to(tl.int64)
        b, t = start // T, start % T
        vp = v + b * v_b + t * v_t + head * v_h + i[:, None] * v_t + tl.trans(e)
        op = o + b * o_b + t * o_t + head * o_h + i[:, None] * o_t + tl.trans(e)
        at = (chunk * HV + head) * (C * K) + i[:, None] * K + c
        sq = (chunk * HV + head) * (C * C) + i[:, None] * C + i[None, :]
        dp = decay + (chunk * HV + head) * K + c
        for n in tl.range(0, tl.cdiv(count, C), num_stages=STAGES):
            live = (i < count - n * C)[:, None]
            b_kd = tl.load(kd + at)
            b_p = tl.load(p + sq)
            b_v = tl.load(vp, mask=live & writes, other=0.0)
            Sw = S.to(work)
            R = tl.dot(Sw, tl.trans(b_kd))
            U = tl.dot(tl.trans(b_v), tl.trans(b_p))
            U = tl.dot(R.to(work), tl.trans(b_p), acc=U)
            Uw = U.to(work)
            if KEEP:  # for the backward: the state before the chunk and U
                tile = (chunk + n) * HV + head
                tl.store(h + (tile * V + e) * K + c, Sw)
                tl.store(u + (tile * V + e) * C + i[None, :], Uw)
            elif not SCAN:
                b_qd = tl.load(qd + at)
                b_a = tl.load(aqk + sq)
                out = tl.dot(Sw, tl.trans(b_qd))
                out = tl.dot(Uw, tl.trans(b_a), acc=out)
                tl.store(op, tl.trans(out).to(o.dtype.element_ty), mask=live)
            b_kr = tl.load(kr + at)
            S = tl.dot(Uw, b_kr, acc=S * tl.load(dp))
            at += HV * C * K
            sq += HV * C * C
            dp += HV * K
            vp += C * v_t
            op += C * o_t
        if not SCAN and not KEEP and row >= 0:
            tl.store(exports + ((row * HV + head) * K + c) * V + e, S)
    if SCAN:
        tl.store(transfer + ((target * HV + head) * (V + K) + e) * K + c, S)
    elif not KEEP and target >= 0:
        tl.store(final + target * f_n + head * f_h + c * f_k + e * f_v, S)


@triton.jit
def merge_kernel(
    transfer, merges, initial, final, carry,
    i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state before every segment but the first of one sequence, fp32 throughout."""
    head = (tl.program_id(0) % HV).to(tl.int64)
    merge = tl.program_id(0) // HV
    c = tl.arange(0, K)[None, :]
    e = tl.program_id(1) * BV + tl.arange(0, BV)[:, None]
    kind = tl.load(merges + 5 * merge)
    index = tl.load(merges + 5 * merge + 1).to(tl.int64)
    scan = tl.load(merges + 5 * merge + 2).to(tl.int64)
    at = tl.load(merges + 5 * merge + 3).to(tl.int64)
    S = find_state(initial, final, carry, kind, index, head, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, c, e, HV, K, V)
    for j in range(0, tl.load(merges + 5 * merge + 4)):
        pair = transfer + ((scan + j) * HV + head) * (V + K) * K
        M = tl.load(pair + (V + tl.arange(0, K)[:, None]) * K + c)
        S = tl.dot(S, M, input_precision="tf32x3") + tl.load(pair + e * K + c)
        tl.store(carry + (((at + j) * HV + head) * V + e) * K + c, S)
