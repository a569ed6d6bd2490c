# mypy: allow-untyped-defs
"""`triton_forward`'s chain for Hopper: one warp brings the factors by the copy engine, the others only multiply.

    D = v + kd·S      U = P D      o = qd·S + Aqk·U      S ← diag(2^G_C) S + krᵀ U

All transposed, so that every left operand is the previous accumulator, straight from registers. vᵀ starts the
accumulator of D. The output of a chunk leaves while the first products of the next one run; in the same moment the
buffers of the chunk before are handed back (`free`, two in turn, since one could turn twice before it is looked at).
`early` holds what a chunk needs at once, `late` what it needs after its first product: rings of three and of two, which
is what 227 KB hold.

A program owns 64 value columns of one head of one run, or 128: then two groups of four warps walk 64 each, on the same
factors and without waiting for one another, so that one multiplies while the other rounds its accumulators.

Tables and SCAN as in `triton_forward`. C = 64 tokens; BV columns of one walker.
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


@gluon.constexpr_function
def accumulator(n, warps):
    """[16·warps,n]"""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 16])


@gluon.constexpr_function
def left(n, warps):
    return gl.DotOperandLayout(0, accumulator(n, warps), 2)


@gluon.constexpr_function
def tile(bits):
    return gl.NVMMASharedLayout(128 if bits == 16 else 0, bits, 2)


@gluon.jit
def find_state(initial, final, carry, kind, index, head, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, c, e, HV, K, V):
    """The state [BV,K] a run starts from: zeros, the caller's, an earlier panel's, or a merged one."""
    S = gl.zeros_like(c.to(gl.float32) + e)
    if kind == 1:
        S = gl.load(initial + index * i_n + head * i_h + c * i_k + e * i_v)
    elif kind == 2:
        S = gl.load(final + index * f_n + head * f_h + c * f_k + e * f_v)
    elif kind == 3:
        S = gl.load(carry + ((index * HV + head) * V + e) * K + c)
    return S


@gluon.jit
def settled():
    """Waits for the end of the kernel before, where this one was launched ahead of it."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def extent(pieces, piece, last):
    """The first chunk of the pieces before `last`, and how many there are."""
    some = last > piece
    chunk = gl.load(pieces + 4 * piece + 2, mask=some, other=0)
    count = gl.load(pieces + 4 * last - 2, mask=some, other=0) - chunk
    count += (gl.load(pieces + 4 * last - 3, mask=some, other=0) + 63) // 64
    return chunk, count


@gluon.jit
def bring(rows, squares, decays, values, buffers, signals, chunks, pieces, runs, total, first, v_h,
          HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, SCAN: gl.constexpr,
          WALKERS: gl.constexpr):  # fmt: skip
    """The warp that starts all copies: two chunks ahead what a chunk needs at once, one ahead the rest."""
    kd, qd, kr, p, aqk, vs, ds = buffers
    early, late, free = signals
    FULL: gl.constexpr = not SCAN
    head, run = gl.program_id(0) % HV, gl.program_id(0) // HV
    column = head * v_h + gl.program_id(1) * (WALKERS * BV)
    if SCAN:
        column = gl.where(gl.program_id(1) * (WALKERS * BV) < V, column, 0)
    piece, last = gl.load(runs + 5 * run), gl.load(runs + 5 * run + 1)
    chunk, count = extent(pieces, piece, last)
    settled()
    for step in range(-2, count):
        if step >= 0:
            mbarrier.wait(free.index(step & 1), (step >> 1) & 1)
        if step + 2 < count:
            stage, half = (step + 2) % 3, step & 1
            at = (chunk + step + 2) * HV + head
            bar = early.index(stage)
            token = gl.load(chunks + 2 * (first + chunk + step + 2))
            mbarrier.expect(bar, (2 if FULL else 1) * 64 * K * 2 + 64 * WALKERS * BV * 2 + K * 4)
            tma.async_copy_global_to_shared(rows, [at * 64, 0], bar, kd.index(stage))
            for n in gl.static_range(WALKERS):
                tma.async_copy_global_to_shared(values, [token, column + n * BV], bar, vs.index(half * WALKERS + n))
            if FULL:
                tma.async_copy_global_to_shared(rows, [(total * HV + at) * 64, 0], bar, qd.index(stage))
            tma.async_copy_global_to_shared(decays, [at, 0], bar, ds.index(stage))
        if (step + 1 >= 0) & (step + 1 < count):
            half = (step + 1) & 1
            at = (chunk + step + 1) * HV + head
            bar = late.index(half)
            mbarrier.expect(bar, 64 * K * 2 + (2 if FULL else 1) * 64 * 64 * 2)
            tma.async_copy_global_to_shared(squares, [at * 64, 0], bar, p.index(half))
            tma.async_copy_global_to_shared(rows, [(2 * total * HV + at) * 64, 0], bar, kr.index(half))
            if FULL:
                tma.async_copy_global_to_shared(squares, [(total * HV + at) * 64, 0], bar, aqk.index(half))


@gluon.jit
def walk(
    buffers, signals, room, tensors, numbers,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, SCAN: gl.constexpr,
    WALKERS: gl.constexpr, WALKER: gl.constexpr,
):  # fmt: skip
    o, runs, pieces, initial, final, carry, transfer, exports = tensors
    o_b, o_t, o_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T = numbers
    kd, qd, kr, p, aqk, vs, ds = buffers
    early, late, free = signals
    C: gl.constexpr = 64
    FULL: gl.constexpr = not SCAN
    W: gl.constexpr = BV // 16
    bf16: gl.constexpr = gl.bfloat16
    acc_c: gl.constexpr = accumulator(C, W)
    acc_k: gl.constexpr = accumulator(K, W)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [W, 1], [1, 0])
    head = gl.program_id(0) % HV
    head_l = head.to(gl.int64)
    run = gl.program_id(0) // HV
    column = (gl.program_id(1) * WALKERS + WALKER) * BV
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, acc_k)), 0)
    e = column + gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(1, acc_k)), 1)
    t = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, acc_c)), 0)
    piece, last = gl.load(runs + 5 * run), gl.load(runs + 5 * run + 1)
    index = gl.load(runs + 5 * run + 3).to(gl.int64)
    target = gl.load(runs + 5 * run + 4).to(gl.int64)
    writes = True  # the part of a scan that builds M reads no values
    if SCAN:
        writes = column < V
        S = gl.where(e - V == c, 1.0, 0.0)
    else:
        kind = gl.load(runs + 5 * run + 2)
        S = find_state(initial, final, carry, kind, index, head_l, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v,
                       c, e, HV, K, V)  # fmt: skip
    out = gl.zeros((BV, C), bf16, acc_c)  # of the chunk before, on its way out
    out_at = o
    out_count = 0
    i = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, lines)), 1)
    j = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(0, lines)), 0)
    o += head_l * o_h + column
    stage, phase, step = 0, 0, 0
    while piece < last:
        start = gl.load(pieces + 4 * piece)
        count = gl.load(pieces + 4 * piece + 1)
        row = gl.load(pieces + 4 * piece + 3).to(gl.int64)
        b, at = (start // T).to(gl.int64), (start % T).to(gl.int64)
        for n in range(0, (count + C - 1) // C):
            half = step & 1
            mbarrier.wait(early.index(stage), phase)
            Sw = gl.convert_layout(S.to(bf16), left(C, W))
            v = vs.index(half * WALKERS + WALKER).permute((1, 0)).load(acc_c).to(gl.float32)
            v = gl.where((t < count - n * C) & writes, v, 0.0)
            D = warpgroup_mma(Sw, kd.index(stage).permute((1, 0)), v, is_async=True)
            if FULL:
                room.permute((1, 0)).store(out)
            gl.thread_barrier()
            mbarrier.arrive(free.index(half), count=1)
            if FULL:
                acc = warpgroup_mma_init(gl.zeros((BV, C), gl.float32, acc_c))
                acc = warpgroup_mma(Sw, qd.index(stage).permute((1, 0)), acc, use_acc=False, is_async=True)
                gl.store(out_at + i * o_t + j, room.load(lines), mask=i < out_count)
                D = warpgroup_mma_wait(1, deps=[D])
            else:
                D = warpgroup_mma_wait(0, deps=[D])
            Dw = gl.convert_layout(D.to(bf16), left(C, W))
            mbarrier.wait(late.index(half), (step >> 1) & 1)
            U = warpgroup_mma_init(gl.zeros((BV, C), gl.float32, acc_c))
            U = warpgroup_mma(Dw, p.index(half).permute((1, 0)), U, use_acc=False, is_async=True)
            S *= gl.expand_dims(ds.index(stage).reshape([K]).load(gl.SliceLayout(0, acc_k)), 0)
            if FULL:
                U, acc = warpgroup_mma_wait(0, deps=[U, acc])
            else:
                U = warpgroup_mma_wait(0, deps=[U])
            Uw = U.to(bf16)
            S = warpgroup_mma(gl.convert_layout(Uw, left(K, W)), kr.index(half), S, is_async=True)
            if FULL:
                acc = warpgroup_mma(
                    gl.convert_layout(Uw, left(C, W)), aqk.index(half).permute((1, 0)), acc, is_async=True
                )
                S, acc = warpgroup_mma_wait(0, deps=[S, acc])
                out = acc.to(bf16)
                out_at = o + b * o_b + (at + n * C) * o_t
                out_count = gl.minimum(count - n * C, C)
            else:
                S = warpgroup_mma_wait(0, deps=[S])
            step += 1
            phase = gl.where(stage == 2, phase ^ 1, phase)
            stage = gl.where(stage == 2, 0, stage + 1)
        if FULL and row >= 0:
            gl.store(exports + ((row * HV + head_l) * K + c) * V + e, S)
        piece += 1
    if SCAN:
        gl.store(transfer + ((target * HV + head_l) * (V + K) + e) * K + c, S)
    else:
        gl.thread_barrier()
        room.permute((1, 0)).store(out)
        gl.thread_barrier()
        gl.store(out_at + i * o_t + j, room.load(lines), mask=i < out_count)
        if target >= 0:
            gl.store(final + target * f_n + head_l * f_h + c * f_k + e * f_v, S)


@gluon.jit
def chain_kernel(
    rows, squares, decays, values, o, runs, pieces, chunks, initial, final, carry, transfer, exports,
    o_b, o_t, o_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T, total, first, v_h,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, SCAN: gl.constexpr,
    WALKERS: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 64
    bf16: gl.constexpr = gl.bfloat16
    kd = gl.allocate_shared_memory(bf16, [3, C, K], tile(16))
    kr = gl.allocate_shared_memory(bf16, [2, C, K], tile(16))
    p = gl.allocate_shared_memory(bf16, [2, C, C], tile(16))
    vs = gl.allocate_shared_memory(bf16, [2 * WALKERS, C, BV], tile(16))
    ds = gl.allocate_shared_memory(gl.float32, [3, 1, K], tile(32))
    qd, aqk, rooms = kd, p, vs
    if not SCAN:
        qd = gl.allocate_shared_memory(bf16, [3, C, K], tile(16))
        aqk = gl.allocate_shared_memory(bf16, [2, C, C], tile(16))
        rooms = gl.allocate_shared_memory(bf16, [WALKERS, C, BV], tile(16))
    early = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    late = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(3):
        mbarrier.init(early.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(late.index(s), count=1)
        mbarrier.init(free.index(s), count=WALKERS)
    fence_async_shared()
    buffers, signals = (kd, qd, kr, p, aqk, vs, ds), (early, late, free)
    tensors = (o, runs, pieces, initial, final, carry, transfer, exports)
    numbers = (o_b, o_t, o_h, i_n, i_h, i_k, i_v, f_n, f_h, f_k, f_v, T)
    if WALKERS == 1:
        gl.warp_specialize(
            [
                (walk, (buffers, signals, rooms.index(0), tensors, numbers, HV, K, V, BV, SCAN, 1, 0)),
                (bring, (rows, squares, decays, values, buffers, signals, chunks, pieces, runs, total, first, v_h,
                         HV, K, V, BV, SCAN, 1)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (walk, (buffers, signals, rooms.index(0), tensors, numbers, HV, K, V, BV, SCAN, 2, 0)),
                (walk, (buffers, signals, rooms.index(1), tensors, numbers, HV, K, V, BV, SCAN, 2, 1)),
                (bring, (rows, squares, decays, values, buffers, signals, chunks, pieces, runs, total, first, v_h,
                         HV, K, V, BV, SCAN, 2)),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip
