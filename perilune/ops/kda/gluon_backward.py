# mypy: allow-untyped-defs
"""The two chains of the backward on Hopper, both transposed as `gluon_chain`, whose copies and layouts they use.

`states_kernel` is the forward's chain once more without outputs: it keeps S before every chunk and U. `reverse_kernel`
goes from the last chunk to the first and keeps D, the gradient of the state after every chunk:

    dU = Aqkᵀ dO + kr D        dR = Pᵀ dU = dV        D ← 2^G_C D + qdᵀ dO + kdᵀ dR

What is kept leaves by the copy engine while the products run. C = 64 tokens; a program owns BV value columns of a head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from perilune.ops.kda.gluon_chain import accumulator, bring, extent, find_state, left, tile


@gluon.jit
def keep(
    buffers, signals, rooms, h, u, runs, pieces, initial, final, carry,
    i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    kd, kr, p, vs, ds = buffers
    early, late, free = signals
    room_s, room_u = rooms
    C: gl.constexpr = 64
    W: gl.constexpr = BV // 16
    bf16: gl.constexpr = gl.bfloat16
    acc_c: gl.constexpr = accumulator(C, W)
    acc_k: gl.constexpr = accumulator(K, W)
    head = gl.program_id(0) % HV
    run = gl.program_id(0) // HV
    column = gl.program_id(1) * BV
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, acc_k)), 0)
    e = column + gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(1, acc_k)), 1)
    t = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, acc_c)), 0)
    piece, last = gl.load(runs + 5 * run), gl.load(runs + 5 * run + 1)
    index = gl.load(runs + 5 * run + 3).to(gl.int64)
    S = find_state(initial, final, carry, gl.load(runs + 5 * run + 2), index, head.to(gl.int64),
                   i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, c, e, HV, K, V)  # fmt: skip
    stage, phase, step = 0, 0, 0
    while piece < last:
        count = gl.load(pieces + 4 * piece + 1)
        chunk = gl.load(pieces + 4 * piece + 2)
        for n in range(0, (count + C - 1) // C):
            half = step & 1
            row = ((chunk + n) * HV + head) * V + column
            mbarrier.wait(early.index(stage), phase)
            Sw = S.to(bf16)
            v = vs.index(half).permute((1, 0)).load(acc_c).to(gl.float32)
            v = gl.where(t < count - n * C, v, 0.0)
            D = warpgroup_mma(gl.convert_layout(Sw, left(C, W)), kd.index(stage).permute((1, 0)), v, is_async=True)
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.arrive(free.index(half), count=1)
            room_s.store(Sw)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(h, [row, 0], room_s)
            D = warpgroup_mma_wait(0, deps=[D])
            Dw = gl.convert_layout(D.to(bf16), left(C, W))
            mbarrier.wait(late.index(half), (step >> 1) & 1)
            U = warpgroup_mma_init(gl.zeros((BV, C), gl.float32, acc_c))
            U = warpgroup_mma(Dw, p.index(half).permute((1, 0)), U, use_acc=False, is_async=True)
            S *= gl.expand_dims(ds.index(stage).reshape([K]).load(gl.SliceLayout(0, acc_k)), 0)
            U = warpgroup_mma_wait(0, deps=[U])
            Uw = U.to(bf16)
            S = warpgroup_mma(gl.convert_layout(Uw, left(K, W)), kr.index(half), S, is_async=True)
            room_u.store(Uw)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(u, [row, 0], room_u)
            S = warpgroup_mma_wait(0, deps=[S])
            step += 1
            phase = gl.where(stage == 2, phase ^ 1, phase)
            stage = gl.where(stage == 2, 0, stage + 1)
        piece += 1
    tma.store_wait(0)


@gluon.jit
def states_kernel(
    rows, squares, decays, values, h, u, runs, pieces, chunks, initial, final, carry,
    i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, total, first, v_h,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 64
    bf16: gl.constexpr = gl.bfloat16
    kd = gl.allocate_shared_memory(bf16, [3, C, K], tile(16))
    kr = gl.allocate_shared_memory(bf16, [2, C, K], tile(16))
    p = gl.allocate_shared_memory(bf16, [2, C, C], tile(16))
    vs = gl.allocate_shared_memory(bf16, [2, C, BV], tile(16))
    ds = gl.allocate_shared_memory(gl.float32, [3, 1, K], tile(32))
    room_s = gl.allocate_shared_memory(bf16, [BV, K], tile(16))
    room_u = gl.allocate_shared_memory(bf16, [BV, C], tile(16))
    early = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    late = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(3):
        mbarrier.init(early.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(late.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    signals = (early, late, free)
    gl.warp_specialize(
        [
            (keep, ((kd, kr, p, vs, ds), signals, (room_s, room_u), h, u, runs, pieces, initial, final, carry,
                    i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, HV, K, V, BV)),
            (bring, (rows, squares, decays, values, (kd, kd, kr, p, p, vs, ds), signals, chunks, pieces, runs,
                     total, first, v_h, HV, K, V, BV, True, 1)),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def bring_back(rows, squares, decays, outs, buffers, signals, chunks, pieces, walks, total, first, o_h,
               HV: gl.constexpr, K: gl.constexpr, BV: gl.constexpr):  # fmt: skip
    kd, qd, kr, p, aqk, os, ds = buffers
    ready, free = signals
    head, walk = gl.program_id(0) % HV, gl.program_id(0) // HV
    piece, last = gl.load(walks + 4 * walk), gl.load(walks + 4 * walk + 1)
    chunk, count = extent(pieces, piece, last)
    for step in range(-1, count):
        if step >= 0:
            mbarrier.wait(free, step & 1)
        if step + 1 < count:
            half = (step + 1) & 1
            at = (chunk + count - 2 - step) * HV + head
            token = gl.load(chunks + 2 * (first + chunk + count - 2 - step))
            bar = ready.index(half)
            mbarrier.expect(bar, 3 * 64 * K * 2 + 2 * 64 * 64 * 2 + 64 * BV * 2 + K * 4)
            tma.async_copy_global_to_shared(squares, [(total * HV + at) * 64, 0], bar, aqk.index(half))
            tma.async_copy_global_to_shared(outs, [token, head * o_h + gl.program_id(1) * BV], bar, os.index(half))
            tma.async_copy_global_to_shared(rows, [(2 * total * HV + at) * 64, 0], bar, kr.index(half))
            tma.async_copy_global_to_shared(squares, [at * 64, 0], bar, p.index(half))
            tma.async_copy_global_to_shared(rows, [(total * HV + at) * 64, 0], bar, qd.index(half))
            tma.async_copy_global_to_shared(rows, [at * 64, 0], bar, kd.index(half))
            tma.async_copy_global_to_shared(decays, [at, 0], bar, ds.index(half))


@gluon.jit
def walk_back(
    buffers, signals, rooms, d, dv, walks, pieces, dfinal, dstate, dexports,
    v_b, v_t, v_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    kd, qd, kr, p, aqk, os, ds = buffers
    ready, free = signals
    room_d, room_v = rooms
    C: gl.constexpr = 64
    W: gl.constexpr = BV // 16
    bf16: gl.constexpr = gl.bfloat16
    acc_c: gl.constexpr = accumulator(C, W)
    acc_k: gl.constexpr = accumulator(K, W)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [W, 1], [1, 0])
    head = gl.program_id(0) % HV
    head_l = head.to(gl.int64)
    walk = gl.program_id(0) // HV
    column = gl.program_id(1) * BV
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, acc_k)), 0)
    e = column + gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(1, acc_k)), 1)
    i = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, lines)), 1)
    j = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(0, lines)), 0)
    first, piece = gl.load(walks + 4 * walk), gl.load(walks + 4 * walk + 1)
    index = gl.load(walks + 4 * walk + 3).to(gl.int64)
    D = find_state(dfinal, dstate, dstate, gl.load(walks + 4 * walk + 2), index, head_l,
                   i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, c, e, HV, K, V)  # fmt: skip
    dv += head_l * v_h + column
    step = 0
    while piece > first:
        piece -= 1
        start = gl.load(pieces + 4 * piece)
        count = gl.load(pieces + 4 * piece + 1)
        chunk = gl.load(pieces + 4 * piece + 2)
        row = gl.load(pieces + 4 * piece + 3).to(gl.int64)
        if row >= 0:
            D += gl.load(dexports + ((row * HV + head_l) * K + c) * V + e)
        b, at = (start // T).to(gl.int64), (start % T).to(gl.int64)
        for n in range((count + C - 1) // C - 1, -1, -1):
            half = step & 1
            tokens = gl.minimum(count - n * C, C)
            mbarrier.wait(ready.index(half), (step >> 1) & 1)
            if tokens < C:  # rows of another sequence
                x = os.index(half).load(lines)
                os.index(half).store(gl.where(i < tokens, x, gl.zeros_like(x)))
            Dw = D.to(bf16)
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.arrive(free, count=1)
            room_d.store(Dw)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(d, [((chunk + n) * HV + head) * V + column, 0], room_d)
            o_t = os.index(half).permute((1, 0))
            dU = warpgroup_mma(o_t, aqk.index(half), gl.zeros((BV, C), gl.float32, acc_c), is_async=True)
            dU = warpgroup_mma(gl.convert_layout(Dw, left(C, W)), kr.index(half).permute((1, 0)), dU, is_async=True)
            D *= gl.expand_dims(ds.index(half).reshape([K]).load(gl.SliceLayout(0, acc_k)), 0)
            D = warpgroup_mma(o_t, qd.index(half), D, is_async=True)
            dU = warpgroup_mma_wait(1, deps=[dU])
            dUw = gl.convert_layout(dU.to(bf16), left(C, W))
            dR = warpgroup_mma(dUw, p.index(half), gl.zeros((BV, C), gl.float32, acc_c), is_async=True)
            dR, D = warpgroup_mma_wait(0, deps=[dR, D])
            dRw = dR.to(bf16)
            D = warpgroup_mma(gl.convert_layout(dRw, left(K, W)), kd.index(half), D, is_async=True)
            room_v.permute((1, 0)).store(dRw)
            out = dv + b * v_b + (at + n * C + i) * v_t + j
            gl.store(out, room_v.load(lines), mask=i < tokens)
            D = warpgroup_mma_wait(0, deps=[D])
            step += 1
    tma.store_wait(0)
    gl.store(dstate + index * f_n + head_l * f_h + c * f_k + e * f_v, D)


@gluon.jit
def reverse_kernel(
    rows, squares, decays, outs, d, dv, walks, pieces, chunks, dfinal, dstate, dexports,
    v_b, v_t, v_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T, total, first, o_h,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 64
    bf16: gl.constexpr = gl.bfloat16
    kd = gl.allocate_shared_memory(bf16, [2, C, K], tile(16))
    qd = gl.allocate_shared_memory(bf16, [2, C, K], tile(16))
    kr = gl.allocate_shared_memory(bf16, [2, C, K], tile(16))
    p = gl.allocate_shared_memory(bf16, [2, C, C], tile(16))
    aqk = gl.allocate_shared_memory(bf16, [2, C, C], tile(16))
    os = gl.allocate_shared_memory(bf16, [2, C, BV], tile(16))
    ds = gl.allocate_shared_memory(gl.float32, [2, 1, K], tile(32))
    room_d = gl.allocate_shared_memory(bf16, [BV, K], tile(16))
    room_v = gl.allocate_shared_memory(bf16, [C, BV], tile(16))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(ready.index(s), count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    buffers, signals = (kd, qd, kr, p, aqk, os, ds), (ready, free)
    gl.warp_specialize(
        [
            (walk_back, (buffers, signals, (room_d, room_v), d, dv, walks, pieces, dfinal, dstate, dexports,
                         v_b, v_t, v_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T, HV, K, V, BV)),
            (bring_back, (rows, squares, decays, outs, buffers, signals, chunks, pieces, walks, total, first, o_h,
                          HV, K, BV)),
        ],
        [1],
        [24],
    )  # fmt: skip
