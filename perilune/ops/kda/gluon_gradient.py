# mypy: allow-untyped-defs
"""Gradients inside a chunk on Hopper, for bounded gates: `triton_backward`'s last three kernels in one pass.

Everything lies transposed, [channels,tokens], a warp with 16 channels, so a factor is the left operand of a product as
it stands and sums over tokens are products with a triangle of ones. With m_I the running log2-decay G at the middle of
block I (16 tokens), rise = 2^(G − m_I), fall = 2^(m_I − G), rows = s·q·rise and −k·rise, cols = k·fall (16 bits), S the
state before the chunk and D the gradient of the one after it:

    x = S·dOᵀ;   for J = 0..3: x[blocks ≥ J] ← 2^(m_J − m_{J−1})·x,  x += cols_J·dAqkᵀ_J        dq = s·rise∘x
    y = S·dRᵀ;   the same with dN, the gradient of the pairs of rows and columns of k           dk_read = −rise∘y
    w = D·Uᵀ;    for I = 3..0: w[blocks ≤ I] ← 2^(m_{I+1} − m_I)·w,  w += rows_I·dA_I           dk_write = fall∘w

so what crosses the chunk is one more block before the first or after the last (m_{−1} = 0, m_4 = G_C), every scale is
at most 1 and in fp32, and both sides of a pair are products of the same 16-bit factors (why: `through_pairs`). Then

    dG = rows∘(x, y) − cols∘w     dg_t = Σ_{s≥t} dG_s + Σ_v 2^G_C S∘D + Σ_j cols∘w (of D alone)

and the sums over channels that unit q and k need are those of the same products.

One program a processor: a warp brings the next chunk while the others work on this one. `raw` (q, k, gate) is free
again when the factors are made, `near` (S, dO, dR) when the products are. D and U are done with after the first of
them; until the chunk's end their memory holds what registers cannot: the decay's slope, rise, and the rows of q.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from perilune.ops.kda.gluon_chain import accumulator, tile
from perilune.ops.kda.gluon_prepare import LOG2E, reciprocal, widen

STEEPEST = gl.constexpr(1.3e36)  # 2^120: e^-x beyond it would overflow where only its product with the sigmoid counts


@gluon.constexpr_function
def work_layout(warps):
    """[16·warps,64]: registers as a wgmma accumulator's, for products whose right operand is loaded."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def lines(warps):
    """[64,n] by rows, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def pairs_layout(warps):
    """[64,64]"""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 256 // warps, 16])


@gluon.jit
def wide(x):
    return x.to(gl.int64)


@gluon.jit
def by_blocks(x):
    """[K,64] as the left operands of its four blocks [K,16]."""
    K: gl.constexpr = x.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, work_layout(K // 16), 2)
    even, odd = gl.split(gl.permute(gl.reshape(x, (K, 2, 2, 16)), (0, 3, 1, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        gl.convert_layout(x0, left, assert_trivial=True),
        gl.convert_layout(x1, left, assert_trivial=True),
        gl.convert_layout(x2, left, assert_trivial=True),
        gl.convert_layout(x3, left, assert_trivial=True),
    )


@gluon.jit
def block_rows(room, J: gl.constexpr, K: gl.constexpr):
    """Rows of block J of [64,64] as a right operand."""
    return room.slice(16 * J, 16, dim=0).load(gl.DotOperandLayout(1, work_layout(K // 16), 2))


@gluon.jit
def at_token(G, token: gl.constexpr, t):
    """[K]: column `token`."""
    return gl.max(gl.where(t == token, G, -3e38), 1)


@gluon.jit
def times_triangle(x, triangle):
    """x·triangle for fp32 x [K,64], as two 16-bit parts: 17 bits of each number, sums in fp32."""
    K: gl.constexpr = x.shape[0]
    acc: gl.constexpr = accumulator(64, K // 16)
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    high = x.to(gl.bfloat16)
    low = (x - widen(high)).to(gl.bfloat16)
    out = gl.zeros((K, 64), gl.float32, acc)
    out = warpgroup_mma(gl.convert_layout(high, left), triangle, out, is_async=True)
    out = warpgroup_mma(gl.convert_layout(low, left), triangle, out, is_async=True)
    out = warpgroup_mma_wait(0, deps=[out])
    return gl.convert_layout(out, work_layout(K // 16), assert_trivial=True)


@gluon.jit
def blank(room, count, warps: gl.constexpr):
    """Zeros below row `count`: what the copy engine brought is another sequence's."""
    x = room.load(lines(warps))
    i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, lines(warps))), 1)
    room.store(gl.where(i < count, x, gl.zeros_like(x)))


@gluon.jit
def inverse_norms(x, to, warps: gl.constexpr):
    x = widen(x.load(lines(warps)))
    to.store(gl.rsqrt(gl.sum(x * x, 1) + 1e-6))


@gluon.jit
def transposed(room, layout: gl.constexpr):
    return room.permute((1, 0)).load(layout)


@gluon.jit
def transposed_store(room, x):
    room.permute((1, 0)).store(x)


@gluon.jit
def by_token(room, layout: gl.constexpr):
    """A number a token, to broadcast over channels."""
    return gl.expand_dims(room.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def put(x, room, to, count, row, warps: gl.constexpr):
    """x [K,64] in 16 bits to rows of `to`."""
    lay: gl.constexpr = lines(warps)
    K: gl.constexpr = x.shape[0]
    room.permute((1, 0)).store(x.to(gl.bfloat16))
    i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, lay)), 1)
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, lay)), 0)
    gl.store(to + i * row + c, room.load(lay), mask=i < count)


@gluon.jit
def of_both_rows(x):
    """A thread's two channels of every token added: [K/16,8,64]."""
    K: gl.constexpr = x.shape[0]
    return gl.sum(gl.reshape(x, (K // 16, 2, 8, 64)), 1)


@gluon.jit
def over_channels(x, layout: gl.constexpr):
    """[64]"""
    return gl.convert_layout(gl.sum(gl.reshape(x, (x.shape[0] * 8, 64)), 0), gl.SliceLayout(0, layout))


@gluon.jit
def bring(raw_of, deep_of, buffers, signals, chunks, total, size, first, q_h, k_h, g_h, o_h, v_h,
          HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr):  # fmt: skip
    qs, ks, gs, hs, ds, dos, drs, us = buffers
    raw, deep, raw_free, near_free, far_free = signals
    q, k, gate = raw_of
    states, do, dv, u = deep_of
    step = 0
    for pid in range(gl.program_id(0), total, gl.num_programs(0)):
        head = pid % HV
        token = gl.load(chunks + 2 * (pid // HV + first))
        if step > 0:
            mbarrier.wait(raw_free, (step - 1) & 1)
        mbarrier.expect(raw, 3 * 64 * K * 2)
        tma.async_copy_global_to_shared(gate, [token, head * g_h], raw, gs.index(0))
        tma.async_copy_global_to_shared(q, [token, (head // GROUP) * q_h], raw, qs.index(0))
        tma.async_copy_global_to_shared(k, [token, (head // GROUP) * k_h], raw, ks.index(0))
        if step > 0:
            mbarrier.wait(near_free, (step - 1) & 1)
        mbarrier.expect(deep, 2 * V * K * 2 + 3 * 64 * V * 2)
        tma.async_copy_global_to_shared(do, [token, head * o_h], deep, dos.index(0))
        tma.async_copy_global_to_shared(dv, [token, head * v_h], deep, drs.index(0))
        tma.async_copy_global_to_shared(states, [pid * V, 0], deep, hs.index(0))
        if step > 0:
            mbarrier.wait(far_free, (step - 1) & 1)
        tma.async_copy_global_to_shared(u, [pid * V, 0], deep, us.index(0))
        tma.async_copy_global_to_shared(states, [(size + pid) * V, 0], deep, ds.index(0))
        step += 1  # noqa: SIM113


@gluon.jit
def gradients(
    buffers, signals, rooms, gate, chunks, beta, A_log, dt_bias, dq, dk, dgate, dbeta, dA_part, dbias_part,
    g_b, g_t, g_h, b_b, b_t, b_h, T, scale, lower_bound, total, first,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    qs, ks, gs, hs, ds, dos, drs, us = buffers
    raw, deep, raw_free, near_free, far_free = signals
    spare, third, room, pa, pat, pn, pnt, triangle, norms = rooms
    W: gl.constexpr = K // 16
    bf16: gl.constexpr = gl.bfloat16
    lay: gl.constexpr = work_layout(W)
    acc: gl.constexpr = accumulator(64, W)
    sq: gl.constexpr = pairs_layout(W)
    channel = gl.arange(0, K, layout=gl.SliceLayout(1, lay))
    t = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, lay)), 0)
    pi = gl.arange(0, 64, layout=gl.SliceLayout(1, sq))
    ri, rj = gl.expand_dims(pi, 1), gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, sq)), 0)
    li = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, lines(W))), 1)
    lc = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, lines(W))), 0)
    zero = gl.zeros((K, 64), gl.float32, acc)
    step = 0
    for pid in range(gl.program_id(0), total, gl.num_programs(0)):
        chunk, head = pid // HV + first, wide(pid % HV)
        start = gl.load(chunks + 2 * chunk)
        count = gl.load(chunks + 2 * chunk + 1)
        here = count >> 7  # 0, which the compiler must not know: it would keep all addresses in registers
        q_rows, k_rows, g_rows = qs.index(here), ks.index(here), gs.index(here)
        S, D, dO, dR, U = hs.index(here), ds.index(here), dos.index(here), drs.index(here), us.index(here)
        stage, ones, q_norm, k_norm = room.index(here), triangle.index(here), norms.index(here), norms.index(here + 1)
        A, At, N, Nt = pa.index(here), pat.index(here), pn.index(here), pnt.index(here)
        keep_slope, keep_rise, keep_rows = spare.index(here), spare.index(here + 1), third.index(here)
        b, at = (start // T).to(gl.int64), (start % T).to(gl.int64)
        out = (start.to(gl.int64) * HV + head) * K

        # The factors.
        mbarrier.wait(raw, step & 1)
        if count < 64:
            blank(g_rows, count, W)
            blank(q_rows, count, W)
            blank(k_rows, count, W)
            fence_async_shared()  # before the copy engine writes there again
        inverse_norms(q_rows, q_norm, W)
        inverse_norms(k_rows, k_norm, W)
        rate = gl.minimum(gl.maximum(gl.exp(gl.load(A_log + head).to(gl.float32)), 1e-30), 1e37)
        bias = gl.expand_dims(gl.load(dt_bias + head * K + channel).to(gl.float32), 1)
        z = widen(transposed(g_rows, lay)) + bias
        e = gl.minimum(gl.exp2(z * (-LOG2E * rate)), STEEPEST)
        s = reciprocal(1.0 + e)
        live = gl.where(t < count, s, 0.0)
        transposed_store(stage, (live * e * s * (lower_bound * rate)).to(bf16))
        G = times_triangle(live * (lower_bound * LOG2E), ones)
        m0, m1, m2, m3 = at_token(G, 7, t), at_token(G, 23, t), at_token(G, 39, t), at_token(G, 55, t)
        end = at_token(G, 63, t)
        f0, f1, f2, f3, f4 = gl.exp2(m0), gl.exp2(m1 - m0), gl.exp2(m2 - m1), gl.exp2(m3 - m2), gl.exp2(end - m3)
        f0, f1, f2 = gl.expand_dims(f0, 1), gl.expand_dims(f1, 1), gl.expand_dims(f2, 1)
        f3, f4 = gl.expand_dims(f3, 1), gl.expand_dims(f4, 1)
        low = gl.where(t < 16, gl.expand_dims(m0, 1), gl.expand_dims(m1, 1))
        G -= gl.where(t < 32, low, gl.where(t < 48, gl.expand_dims(m2, 1), gl.expand_dims(m3, 1)))
        rise = gl.exp2(G)
        kept_rise = rise.to(bf16)
        k_unit = widen(transposed(k_rows, lay)) * by_token(k_norm, lay)
        cols = (k_unit * reciprocal(rise)).to(bf16)
        rows_k = (-k_unit * rise).to(bf16)
        q_unit = widen(transposed(q_rows, lay)) * (by_token(q_norm, lay) * scale)
        rows_q = (q_unit * rise).to(bf16)
        gl.thread_barrier()
        mbarrier.arrive(raw_free, count=1)

        # Gradients of the pairs, and of β.
        mbarrier.wait(deep, step & 1)
        if count < 64:
            blank(dO, count, W)
            blank(dR, count, W)
            fence_async_shared()
            gl.thread_barrier()
        a = warpgroup_mma(dO, U, gl.zeros((64, 64), gl.float32, sq), is_async=True)
        n = warpgroup_mma(dR, U, gl.zeros((64, 64), gl.float32, sq), is_async=True)
        both = gl.zeros((K, 16), gl.float32, lay)
        for part in gl.static_range(V // 16):
            s_part = transposed(S.slice(16 * part, 16, dim=0), lay)
            d_part = transposed(D.slice(16 * part, 16, dim=0), lay)
            both += widen(s_part) * widen(d_part)
        last = gl.sum(both, 1) * gl.exp2(end)
        v = warpgroup_mma(D.permute((1, 0)), U, zero, is_async=True)
        a, n = warpgroup_mma_wait(1, deps=[a, n])
        a = gl.where(ri >= rj, a, 0.0).to(bf16)
        raw_beta = gl.load(beta + b * b_b + (at + pi) * b_t + head * b_h, mask=pi < count, other=0.0).to(gl.float32)
        be = reciprocal(1.0 + gl.exp2(-LOG2E * raw_beta))
        own = gl.sum(gl.where(ri == rj, n, 0.0), 1)
        own = gl.where(be > 1e-18, own * (1.0 - be) / be, 0.0)
        gl.store(dbeta + (start + pi) * HV + head, own.to(dbeta.dtype.element_ty), mask=pi < count)
        n = gl.where(ri > rj, n, 0.0).to(bf16)
        A.store(a)
        At.permute((1, 0)).store(a)
        N.store(n)
        Nt.permute((1, 0)).store(n)

        # k: what it writes.
        by_col, by_q, by_k = by_blocks(cols), by_blocks(rows_q), by_blocks(rows_k)
        f = (f0, f1, f2, f3, f4)
        v = warpgroup_mma_wait(0, deps=[v])
        gl.thread_barrier()  # both warpgroups are done with D: what follows overwrites it
        transposed_store(keep_slope, transposed(stage, lay))
        transposed_store(keep_rise, kept_rise)
        y = warpgroup_mma(
            S.permute((1, 0)),
            dR.permute((1, 0)),
            zero,
            is_async=True,
        )
        v = gl.convert_layout(v, lay, assert_trivial=True)
        c2, c1, c0 = f4 * f3, f4 * f3 * f2, f4 * f3 * f2 * f1
        far = gl.where(t < 32, gl.where(t < 16, c0, c1), gl.where(t < 48, c2, f4))
        last += gl.sum(widen(cols) * v * far, 1)
        for back in gl.static_range(4):
            v *= gl.where(t < 64 - 16 * back, f[4 - back], 1.0)
            v = mma_v2(by_q[3 - back], block_rows(A, 3 - back, K), v)
            v = mma_v2(by_k[3 - back], block_rows(N, 3 - back, K), v)
        dG = widen(cols) * v
        along = of_both_rows(dG)
        transposed_store(keep_rows, rows_q)

        # k: what it reads.
        y = warpgroup_mma_wait(0, deps=[y])
        y = gl.convert_layout(y, lay, assert_trivial=True)
        for J in gl.static_range(4):
            y *= gl.where(t >= 16 * J, f[J], 1.0)
            y = mma_v2(by_col[J], block_rows(Nt, J, K), y)
        from_k = widen(rows_k) * y
        dG = from_k - dG
        along = gl.expand_dims(over_channels(along + of_both_rows(from_k), lay), 0)
        rise = widen(transposed(keep_rise, lay))
        norm = by_token(k_norm, lay)
        y = v * reciprocal(rise) - rise * (y + widen(cols) * along)
        x = warpgroup_mma(
            S.permute((1, 0)),
            dO.permute((1, 0)),
            zero,
            is_async=True,
        )
        put(y * norm, stage, dk + out, count, HV * K, W)

        # q.
        x = warpgroup_mma_wait(0, deps=[x])
        gl.thread_barrier()
        mbarrier.arrive(near_free, count=1)
        x = gl.convert_layout(x, lay, assert_trivial=True)
        for J in gl.static_range(4):
            x *= gl.where(t >= 16 * J, f[J], 1.0)
            x = mma_v2(by_col[J], block_rows(At, J, K), x)
        rows_q = widen(transposed(keep_rows, lay))
        from_q = rows_q * x
        dG += from_q
        along = over_channels(of_both_rows(from_q), lay)
        norm = by_token(q_norm, lay)
        rise = widen(transposed(keep_rise, lay))
        along = gl.expand_dims(along, 0) * (norm * (1.0 / scale))
        x = x * (norm * scale) * rise - rows_q * (reciprocal(rise) * along)
        put(x, stage, dq + out, count, HV * K, W)

        # The gate.
        dg = times_triangle(dG, ones.permute((1, 0))) + gl.expand_dims(last, 1)
        dz = dg * widen(transposed(keep_slope, lay))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(far_free, count=1)
        put(dz, stage, dgate + out, count, HV * K, W)
        gl.store(dbias_part + wide(pid) * K + channel, gl.sum(dz, 1))
        raw_gate = gl.load(gate + b * g_b + at * g_t + head * g_h + li * g_t + lc, mask=li < count, other=0.0)
        weighted = gl.sum(widen(stage.load(lines(W))) * widen(raw_gate), 1)
        gl.store(dA_part + wide(pid) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, lines(W))), weighted)
        step += 1  # noqa: SIM113


@gluon.jit
def gradient_kernel(
    q, k, gate, states, do, dv, u, raw_gate, chunks, beta, A_log, dt_bias, dq, dk, dgate, dbeta, dA_part, dbias_part,
    q_h, k_h, g_b, g_t, g_h, o_h, v_h, b_b, b_t, b_h, T, scale, lower_bound, total, size, first,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    bf16: gl.constexpr = gl.bfloat16
    W: gl.constexpr = K // 16
    qs = gl.allocate_shared_memory(bf16, [1, 64, K], tile(16))
    ks = gl.allocate_shared_memory(bf16, [1, 64, K], tile(16))
    gs = gl.allocate_shared_memory(bf16, [1, 64, K], tile(16))
    hs = gl.allocate_shared_memory(bf16, [1, V, K], tile(16))
    ds = gl.allocate_shared_memory(bf16, [1, V, K], tile(16))
    dos = gl.allocate_shared_memory(bf16, [1, 64, V], tile(16))
    drs = gl.allocate_shared_memory(bf16, [1, 64, V], tile(16))
    us = gl.allocate_shared_memory(bf16, [1, V, 64], tile(16))
    if V == 128:
        spare = ds._reinterpret(bf16, [2, 64, K], tile(16))
    else:
        spare = gl.allocate_shared_memory(bf16, [2, 64, K], tile(16))
    if K * 64 <= V * 64:
        third = us._reinterpret(bf16, [1, 64, K], tile(16))
    else:
        third = gl.allocate_shared_memory(bf16, [1, 64, K], tile(16))
    room = gl.allocate_shared_memory(bf16, [1, 64, K], tile(16))
    pa = gl.allocate_shared_memory(bf16, [1, 64, 64], tile(16))
    pat = gl.allocate_shared_memory(bf16, [1, 64, 64], tile(16))
    pn = gl.allocate_shared_memory(bf16, [1, 64, 64], tile(16))
    pnt = gl.allocate_shared_memory(bf16, [1, 64, 64], tile(16))
    triangle = gl.allocate_shared_memory(bf16, [1, 64, 64], tile(16))
    norms = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, lines(W))), 1)
    j = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, lines(W))), 0)
    triangle.index(0).store(gl.where(i <= j, 1.0, 0.0).to(bf16))
    raw = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    deep = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    raw_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    near_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    far_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(raw, count=1)
    mbarrier.init(deep, count=1)
    mbarrier.init(raw_free, count=1)
    mbarrier.init(near_free, count=1)
    mbarrier.init(far_free, count=1)
    fence_async_shared()
    buffers, signals = (qs, ks, gs, hs, ds, dos, drs, us), (raw, deep, raw_free, near_free, far_free)
    rooms = (spare, third, room, pa, pat, pn, pnt, triangle, norms)
    gl.warp_specialize(
        [
            (gradients, (buffers, signals, rooms, raw_gate, chunks, beta, A_log, dt_bias, dq, dk, dgate, dbeta,
                         dA_part, dbias_part, g_b, g_t, g_h, b_b, b_t, b_h, T, scale, lower_bound, total, first,
                         HV, K, V)),
            (bring, ((q, k, gate), (states, do, dv, u), buffers, signals, chunks, total, size, first,
                     q_h, k_h, g_h, o_h, v_h, HV, GROUP, K, V)),
        ],
        [1],
        [24],
    )  # fmt: skip
