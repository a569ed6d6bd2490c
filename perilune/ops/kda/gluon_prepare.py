# mypy: allow-untyped-defs
"""`triton_prepare` for bounded gates on Hopper, with the data laid out by hand: same factors, a third of the time.

A thread owns two channels of one 16-token block and a warp owns the block, so running sums and block borders stay in
the thread, and rows of a tile leave as whole 128-byte lines. Pair products go to the tensor cores 16 columns at a
time: then a level's mask is one number a row, and the sum over levels costs one multiply-add an element. The inverse
is the doubling of `triton_prepare`: blocks of 16 in 3xTF32, merges with operands split into two bf16 (16 bits).

Shapes: C = 64 tokens, K channels; K/16 warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def columns(K):
    """[64,K]: a warp has one block of 16 tokens and 64 channels, a thread two of them."""
    return gl.BlockedLayout([16, 2], [1, 32], [4, K // 64], [1, 0])


@gluon.constexpr_function
def lines(width, K):
    """[64,width] as whole rows, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [K // 16, 1], [1, 0])


@gluon.constexpr_function
def accumulator(n, K):
    return gl.NVMMADistributedLayout([3, 0], [4, K // 64], [16, n * 64 // K, 16])


@gluon.constexpr_function
def small(K):
    return gl.NVMMADistributedLayout([2, 0], [4, 1, K // 64], [1, 16, 8])


@gluon.constexpr_function
def tile():
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def widen(x):
    """bf16 to fp32 by shifting: the conversion instruction runs at a quarter of the rate."""
    return (x.to(gl.int16, bitcast=True).to(gl.int32) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def sigmoid(x):
    """1 / (1 + 2^(−x·log2 e)) by the approximate reciprocal, an ulp from the exact one."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + gl.exp2(-LOG2E * x)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def over_rows(x):
    """[4,64], a number per block and channel, to broadcast over [4,16,64]."""
    return gl.expand_dims(x, 1)


@gluon.jit
def product(rows, cols, first: gl.constexpr, K: gl.constexpr):
    """rows [64,K] times 16 tokens' columns from `first` on: [64,16], started."""
    zero = warpgroup_mma_init(gl.zeros((64, 16), gl.float32, accumulator(16, K)))
    right = cols.slice(first, 16, dim=0).permute((1, 0))
    return warpgroup_mma(rows, right, zero, use_acc=False, is_async=True)


@gluon.jit
def block_is(first: gl.constexpr, last: gl.constexpr, K: gl.constexpr):
    """1.0 in rows of blocks first … last of a [64,16] accumulator."""
    block = gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(16, K))) // 16
    return gl.expand_dims(gl.where((block >= first) & (block <= last), 1.0, 0.0), 1)


@gluon.jit
def near_pairs(rows, cols, x0, x1, x2, x3, K: gl.constexpr):
    """Adds the products of tokens of the same block to four tiles of 16 columns."""
    a0, a1 = product(rows, cols, 0, K), product(rows, cols, 16, K)
    a2, a3 = product(rows, cols, 32, K), product(rows, cols, 48, K)
    a0, a1, a2, a3 = warpgroup_mma_wait(0, deps=[a0, a1, a2, a3])
    x0 += a0 * block_is(0, 0, K)
    x1 += a1 * block_is(1, 1, K)
    x2 += a2 * block_is(2, 2, K)
    x3 += a3 * block_is(3, 3, K)
    return x0, x1, x2, x3


@gluon.jit
def far_pairs(rows_16, rows_32, cols_16, cols_32, x0, x1, x2, K: gl.constexpr):
    """Adds those of different blocks: 1 with 0, 3 with 2, and 2 and 3 with 0 and 1."""
    b0, b2 = product(rows_16, cols_16, 0, K), product(rows_16, cols_16, 32, K)
    c0, c1 = product(rows_32, cols_32, 0, K), product(rows_32, cols_32, 16, K)
    b0, b2, c0, c1 = warpgroup_mma_wait(0, deps=[b0, b2, c0, c1])
    late = block_is(2, 3, K)
    x0 += b0 * block_is(1, 1, K) + c0 * late
    x1 += c1 * late
    x2 += b2 * block_is(3, 3, K)
    return x0, x1, x2


@gluon.jit
def flat(x):
    """[4,16,K] in registers to a bf16 tile."""
    K: gl.constexpr = x.shape[2]
    return gl.convert_layout(gl.reshape(x, (64, K)).to(gl.bfloat16), columns(K), assert_trivial=True)


@gluon.jit
def side(x, K: gl.constexpr):
    """Tiles of 16 columns to one of 64."""
    both = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))  # [64,16,2 (second half),2 (odd)]
    return gl.convert_layout(gl.reshape(gl.permute(both, (0, 2, 3, 1)), (64, 64)), accumulator(64, K))


@gluon.jit
def upper_bits(x):
    """The part of an fp32 that TF32 keeps."""
    return (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def small_dot(a, b, K: gl.constexpr):
    """Products of four pairs [4,16,16] in 3xTF32."""
    left: gl.constexpr = gl.DotOperandLayout(0, small(K), 1)
    right: gl.constexpr = gl.DotOperandLayout(1, small(K), 1)
    a, b = gl.convert_layout(a, left), gl.convert_layout(b, right)
    ah, bh = upper_bits(a), upper_bits(b)
    out = gl.zeros((4, 16, 16), gl.float32, small(K))
    out = mma_v2(a - ah, bh, out, input_precision="tf32")
    out = mma_v2(ah, b - bh, out, input_precision="tf32")
    return mma_v2(ah, bh, out, input_precision="tf32")


@gluon.jit
def grow_small(X, L, i, j, size: gl.constexpr, K: gl.constexpr):
    part = gl.where(((i // (2 * size)) == (j // (2 * size))) & ((i // size) > (j // size)), L, 0.0)
    return X - small_dot(X, small_dot(part, X, K), K)


@gluon.jit
def split_dot(a, b, room_high, room_low, K: gl.constexpr):
    """a·b for [64,64] fp32 in accumulator layout, 16-bit operands: three bf16 products."""
    left: gl.constexpr = gl.DotOperandLayout(0, accumulator(64, K), 2)
    bh = b.to(gl.bfloat16)
    gl.thread_barrier()
    room_high.store(bh)
    room_low.store((b - bh.to(gl.float32)).to(gl.bfloat16))
    ah = a.to(gl.bfloat16)
    al = gl.convert_layout((a - ah.to(gl.float32)).to(gl.bfloat16), left)
    ah = gl.convert_layout(ah, left)
    fence_async_shared()
    gl.thread_barrier()
    out = warpgroup_mma_init(gl.zeros((64, 64), gl.float32, accumulator(64, K)))
    out = warpgroup_mma(al, room_high, out, use_acc=False, is_async=True)
    out = warpgroup_mma(ah, room_low, out, is_async=True)
    out = warpgroup_mma(ah, room_high, out, is_async=True)
    return warpgroup_mma_wait(0, deps=[out])


@gluon.jit
def grow(X, L, size: gl.constexpr, room_high, room_low, K: gl.constexpr):
    i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator(64, K))), 1)
    j = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, accumulator(64, K))), 0)
    part = gl.where(((i // (2 * size)) == (j // (2 * size))) & ((i // size) > (j // size)), L, 0.0)
    return X - split_dot(X, split_dot(part, X, room_high, room_low, K), room_high, room_low, K)


@gluon.jit
def unit_lower_inverse(L, room_high, room_low, K: gl.constexpr):
    """(I + L)⁻¹ for strictly lower L [64,64] in accumulator layout."""
    four = gl.reshape(L, (4, 16, 4, 16))
    whole: gl.constexpr = four.type.layout
    a = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, whole))))
    b = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, whole))))
    a = gl.expand_dims(gl.expand_dims(gl.expand_dims(a, 1), 2), 3)
    b = gl.expand_dims(gl.expand_dims(gl.expand_dims(b, 0), 1), 3)
    D = gl.convert_layout(gl.sum(gl.where(a == b, four, 0.0), 2), small(K))
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, small(K)))), 0), 2)
    j = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, small(K)))), 0), 1)
    X = gl.where(i == j, 1.0, 0.0) - gl.where(((i // 2) == (j // 2)) & (i > j), D, 0.0)
    X = grow_small(X, D, i, j, 2, K)
    X = grow_small(X, D, i, j, 4, K)
    X = grow_small(X, D, i, j, 8, K)
    X = gl.expand_dims(gl.convert_layout(X, gl.SliceLayout(2, whole)), 2)
    X = gl.convert_layout(gl.reshape(gl.where(a == b, X, 0.0), (64, 64)), accumulator(64, K))
    X = grow(X, L, 16, room_high, room_low, K)
    return grow(X, L, 32, room_high, room_low, K)


@gluon.jit
def load_lines(ptr, stride, live, K: gl.constexpr):
    rows = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, lines(K, K))), 1)
    cols = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, lines(K, K))), 0)
    return gl.load(ptr + rows * stride + cols, mask=live, other=0.0)


@gluon.jit
def store_lines(ptr, x, K: gl.constexpr):
    width: gl.constexpr = x.shape[1]
    layout: gl.constexpr = lines(width, K)
    rows = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(gl.arange(0, width, layout=gl.SliceLayout(0, layout)), 0)
    gl.store(ptr + rows * width + cols, gl.convert_layout(x, layout))


@gluon.jit
def squares(x):
    x = widen(x)
    return gl.sum(x * x, 1)


@gluon.jit
def prepare_kernel(
    q, k, gate, beta, A_log, dt_bias, chunks,
    kd, qd, kr, p, aqk, decay,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, b_b, b_t, b_h, T, scale, lower_bound, first,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 64
    bf16: gl.constexpr = gl.bfloat16
    pid = gl.program_id(0).to(gl.int64)
    chunk, head = pid // HV + first, pid % HV
    start = gl.load(chunks + 2 * chunk).to(gl.int64)
    count = gl.load(chunks + 2 * chunk + 1)
    b, t = start // T, start % T
    q += b * q_b + t * q_t + (head // GROUP) * q_h
    k += b * k_b + t * k_t + (head // GROUP) * k_h
    gate += b * g_b + t * g_t + head * g_h
    row_l = gl.arange(0, C, layout=gl.SliceLayout(1, lines(K, K)))
    live_l = gl.expand_dims(row_l < count, 1)

    gx, kx, qx = load_lines(gate, g_t, live_l, K), load_lines(k, k_t, live_l, K), load_lines(q, q_t, live_l, K)
    rate = gl.exp(gl.load(A_log + head).to(gl.float32))
    rows = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, columns(K))), 1)
    col = gl.arange(0, K, layout=gl.SliceLayout(0, columns(K)))
    z = widen(gl.convert_layout(gx, columns(K)))
    z += gl.expand_dims(gl.load(dt_bias + head * K + col).to(gl.float32), 0)
    g = gl.where(rows < count, lower_bound * LOG2E * sigmoid(rate * z), 0.0)
    G = gl.reshape(gl.associative_scan(g, 0, add), (4, 16, K))
    whole: gl.constexpr = G.type.layout
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, whole))), 0), 2)
    here = gl.sum(gl.where(row == 7, G, 0.0), 1)  # the middle of a thread's own block
    end = gl.sum(gl.where(row == 15, G, 0.0), 1)
    before = gl.sum(gl.where(row == 0, G - gl.reshape(g, (4, 16, K)), 0.0), 1)
    n = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, whole))), 1)
    total = gl.sum(gl.where(n == 3, end, 0.0), 0)
    border = gl.expand_dims(gl.sum(gl.where(n == 1, end, 0.0), 0), 0)
    to_start, to_end = gl.exp2(here), gl.exp2(gl.expand_dims(total, 0) - here)
    near = gl.exp2(gl.where(n % 2 == 1, here - before, end - here))
    far = gl.exp2(gl.where(n >= 2, here - border, border - here))
    gl.store(decay + pid * K + gl.arange(0, K, layout=total.type.layout), gl.exp2(total))

    rk = gl.convert_layout(gl.rsqrt(squares(kx) + 1e-6), gl.SliceLayout(1, columns(K)))
    rq = gl.convert_layout(gl.rsqrt(squares(qx) + 1e-6) * scale, gl.SliceLayout(1, columns(K)))
    D = G - over_rows(here)
    rise, fall = gl.exp2(D), gl.exp2(-D)
    kn = gl.reshape(widen(gl.convert_layout(kx, columns(K))) * gl.expand_dims(rk, 1), (4, 16, K))
    k_rise, k_fall = kn * rise, kn * fall
    qn = widen(gl.convert_layout(qx, columns(K))) * gl.expand_dims(rq, 1)
    q_rise = gl.reshape(qn, (4, 16, K)) * rise
    store_lines(kd + pid * C * K, flat(k_rise * over_rows(to_start)), K)
    store_lines(qd + pid * C * K, flat(q_rise * over_rows(to_start)), K)
    store_lines(kr + pid * C * K, flat(k_fall * over_rows(to_end)), K)

    s0 = gl.allocate_shared_memory(bf16, [C, K], tile())
    s1 = gl.allocate_shared_memory(bf16, [C, K], tile())
    s2 = gl.allocate_shared_memory(bf16, [C, K], tile())
    s3 = gl.allocate_shared_memory(bf16, [C, K], tile())
    zero = gl.zeros((C, 16), gl.float32, accumulator(16, K))
    s0.store(flat(k_rise))
    s1.store(flat(q_rise))
    s2.store(flat(k_fall))
    fence_async_shared()
    gl.thread_barrier()
    L0, L1, L2, L3 = near_pairs(s0, s2, zero, zero, zero, zero, K)
    A0, A1, A2, A3 = near_pairs(s1, s2, zero, zero, zero, zero, K)
    gl.thread_barrier()
    s0.store(flat(gl.where(over_rows(n % 2 == 1), k_rise, k_fall) * over_rows(near)))
    s1.store(flat(q_rise * over_rows(near)))
    s2.store(flat(gl.where(over_rows(n >= 2), k_rise, k_fall) * over_rows(far)))
    s3.store(flat(q_rise * over_rows(far)))
    fence_async_shared()
    gl.thread_barrier()
    L0, L1, L2 = far_pairs(s0, s2, s0, s2, L0, L1, L2, K)
    A0, A1, A2 = far_pairs(s1, s3, s0, s2, A0, A1, A2, K)

    r0 = gl.allocate_shared_memory(bf16, [C, C], tile())
    r1 = gl.allocate_shared_memory(bf16, [C, C], tile())
    wide: gl.constexpr = accumulator(64, K)
    ri = gl.arange(0, C, layout=gl.SliceLayout(1, wide))
    rj = gl.arange(0, C, layout=gl.SliceLayout(0, wide))
    beta += b * b_b + t * b_t + head * b_h
    bi = gl.load(beta + ri * b_t, mask=ri < count, other=0.0).to(gl.float32)
    bj = gl.load(beta + rj * b_t, mask=rj < count, other=0.0).to(gl.float32)
    bi = gl.where(ri < count, sigmoid(bi), 0.0)
    bj = gl.where(rj < count, sigmoid(bj), 0.0)
    ri, rj = gl.expand_dims(ri, 1), gl.expand_dims(rj, 0)
    A = gl.where(ri >= rj, side((A0, A1, A2, A3), K), 0.0).to(bf16)
    store_lines(aqk + pid * C * C, A, K)
    L = gl.where(ri > rj, side((L0, L1, L2, L3), K), 0.0) * gl.expand_dims(bi, 1)
    X = unit_lower_inverse(L, r0, r1, K) * gl.expand_dims(bj, 0)
    store_lines(p + pid * C * C, X.to(bf16), K)
