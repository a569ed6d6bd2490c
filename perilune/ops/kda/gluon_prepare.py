# mypy: allow-untyped-defs
"""`triton_prepare` for bounded gates on Hopper, with the data laid out by hand: same factors, a quarter of the time.

A program starts all its copies at once and reads every input once. A warp owns a block of 16 tokens. Its rows lie in
registers as the tensor cores want them, 16 bytes an access, so products of a block with itself exchange nothing.
Log-decays are summed where a thread holds a whole column of the block, relative to the block's middle m: 2^(G − m)
spans 2^±58. For a pair of blocks I > J only the columns are scaled once more, by 2^(m_I − m_J), in the warp that owns
them, and wait for their readers where k and the decays they came from lay:

    A_IJ = (k·2^(G − m_I))_I · (k·2^(m_J − G)·2^(m_I − m_J))_Jᵀ

A factor underflows only where the product does. The inverse doubles inside a block (X ← X + X·N·X, no powers of N),
then merges blocks 1, 0 and 3, 2, then the halves. An accumulator is the left operand of the next product as it stands
and the right operand of one with its transpose, so X and Xᵀ are carried together and nothing is shuffled; TF32.

Row i of a product is token i3·2 + i21·4 + i0 of its block (`by_token`): then four columns that a thread holds are four
tokens in a row, 8 bytes of the output.

Shapes: C = 64 tokens in 4 blocks of 16; K channels, 64 at a time for the decays and 32 for the rest; 4 warps.
Blocks (0,1,2,3) are also seen as (half, place): "beside" is 0 to 1 and 2 to 3, "beyond" is 0, 1 to 2 and to 3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

LOG2E = gl.constexpr(1.4426950408889634)
NEVER = gl.constexpr(-3e38)  # a raw gate whose decay is exactly 1
C = gl.constexpr(64)


@gluon.constexpr_function
def block():
    """[4,16,n]: accumulators; a warp has one of four blocks."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def left(width):
    return gl.DotOperandLayout(0, block(), width)


@gluon.constexpr_function
def right(width):
    return gl.DotOperandLayout(1, block(), width)


@gluon.constexpr_function
def columns():
    """[4,16,64]: a thread has all 16 tokens of two channels."""
    return gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def wide():
    """[4,16,32]: a thread has eight channels of two tokens, two apart."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 2, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 4, 0], [0, 8, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 16, 32],
    )  # fmt: skip


@gluon.constexpr_function
def copied(K, W):
    """[K/W,4,16,W]: how rows are fetched, 16 bytes an access, 8 or 4 lanes to a row of a tile."""
    lanes = [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 0, 32], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0]]
    if W == 32:
        lanes.remove([0, 0, 0, 32])
    tiles = [[1, 0, 0, 0], [2, 0, 0, 0]][: (K // W).bit_length() - 1]
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], *lanes[5:], *tiles]
    return gl.DistributedLinearLayout(registers, lanes[:5], [[0, 1, 0, 0], [0, 2, 0, 0]], [], [K // W, 4, 16, W])


@gluon.constexpr_function
def square():
    """[4,16,16] by token: an accumulator whose rows and columns are tokens again."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 2, 0]],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 4, 0], [0, 8, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 16, 16],
    )  # fmt: skip


@gluon.constexpr_function
def quads(width, swapped):
    """[2,2,16,width], blocks as (half, place in it) or, swapped, (place, half), in the layout of the products."""
    warps = [[1, 0, 0, 0], [0, 1, 0, 0]] if swapped else [[0, 1, 0, 0], [1, 0, 0, 0]]
    if width == 32:
        registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 2, 0]]
        lanes = [[0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 4, 0], [0, 0, 8, 0]]
    else:
        registers = [[0, 0, 0, 1], [0, 0, 0, 8], [0, 0, 8, 0]]
        lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [2, 2, 16, width])


@gluon.jit
def blocks(layout: gl.constexpr):
    n = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    return gl.expand_dims(gl.expand_dims(n, 1), 2)


@gluon.jit
def rows(layout: gl.constexpr):
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    return gl.expand_dims(gl.expand_dims(i, 0), 2)


@gluon.jit
def cols(n: gl.constexpr, layout: gl.constexpr):
    c = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return gl.expand_dims(gl.expand_dims(c, 0), 1)


@gluon.jit
def widen(x):
    """bf16 to fp32, two at a time: the conversion instruction runs at a quarter of the rate."""
    return gl.inline_asm_elementwise(
        "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def halves(x):
    """fp32 to bf16, two at a time, after whatever chose x."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def power(x):
    """2^x."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    return reciprocal(1.0 + gl.exp2(-LOG2E * x))


@gluon.jit
def tf32(x):
    """For the products, which drop the last 13 bits: rounded instead of cut."""
    return (x.to(gl.int32, bitcast=True) + 4096).to(gl.float32, bitcast=True)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def row_of(x, i: gl.constexpr):
    """[4,64]: row i of every block of [4,16,64] in columns layout, where it is a register."""
    bits = gl.where(rows(columns()) == i, x.to(gl.int32, bitcast=True), 0)
    return gl.sum(bits, 1).to(gl.float32, bitcast=True)


@gluon.jit
def as_left(x):
    return gl.convert_layout(x, left(2))


@gluon.jit
def as_right(x):
    """The right operand that is the transpose of an accumulator."""
    return gl.convert_layout(gl.permute(x, (0, 2, 1)), right(2))


@gluon.jit
def times_t(a, b, acc):
    """acc + a·bᵀ for accumulators [4,16,16] already rounded to TF32."""
    return mma_v2(as_left(a), as_right(b), acc, input_precision="tf32")


@gluon.jit
def in_steps(x):
    """[4,16,32] renumbered so that what a thread has of it is what a product wants of it: rows t = (t3 t2, t1, t0)
    as (t1, t3 t2, t0), and neighbouring pairs of channels in one step."""
    x = gl.permute(gl.reshape(x, (4, 4, 2, 2, 4, 4, 2)), (0, 2, 1, 3, 5, 4, 6))
    return gl.reshape(x, (4, 16, 32))


@gluon.jit
def left_rows(x):
    return gl.convert_layout(in_steps(x), left(2))


@gluon.jit
def right_rows(x):
    return gl.convert_layout(gl.permute(in_steps(x), (0, 2, 1)), right(2))


@gluon.jit
def products(rows_kq, cols_k, acc):
    """(L, A) + (k rows · colsᵀ, q rows · colsᵀ)."""
    cols_k = right_rows(cols_k)
    return mma_v2(rows_kq[0], cols_k, acc[0]), mma_v2(rows_kq[1], cols_k, acc[1])


@gluon.jit
def by_token(x):
    """An accumulator [4,16,16] with rows and columns in the order of tokens: registers renamed."""
    x = gl.permute(gl.reshape(x, (4, 2, 4, 2, 2, 4, 2)), (0, 2, 1, 3, 5, 4, 6))
    return gl.convert_layout(gl.reshape(x, (4, 16, 16)), square())


@gluon.jit
def by_row(x):
    """[4,16,16] by token, in the order of a product's rows and columns: `by_token` undone."""
    x = gl.permute(gl.reshape(x, (4, 4, 2, 2, 4, 2, 2)), (0, 2, 1, 3, 5, 4, 6))
    return gl.convert_layout(gl.reshape(x, (4, 16, 16)), block())


@gluon.jit
def first_of_half(room):
    """[4,16,n] from [2,2,16,n] by (half, place): every block gets the first of its half."""
    n: gl.constexpr = room.shape[3]
    x = room.slice(0, 1, dim=1).load(quads(n, False))
    return gl.reshape(gl.broadcast(x, gl.zeros((2, 2, 16, n), x.dtype, quads(n, False)))[0], (4, 16, n))


@gluon.jit
def for_place(room, j: gl.constexpr):
    """[4,16,32] from [2,4,16,32] by (target's place, block): what block j made for each."""
    x = room.slice(j, 1, dim=1).load(quads(32, True))
    x = gl.broadcast(x, gl.zeros((2, 2, 16, 32), x.dtype, quads(32, True)))[0]
    return gl.reshape(gl.permute(x, (1, 0, 2, 3)), (4, 16, 32))


@gluon.jit
def to_block(x):
    return gl.convert_layout(x, block())


@gluon.jit
def of_block(room, b: gl.constexpr):
    """Block b of [2,2,16,16] for every warp."""
    x = room.slice(b // 2, 1, dim=0).slice(b % 2, 1, dim=1).load(quads(16, False))
    x = gl.broadcast(x, gl.zeros((2, 2, 16, 16), x.dtype, quads(16, False)))[0]
    return to_block(gl.reshape(x, (4, 16, 16)))


@gluon.jit
def of_second(room, c: gl.constexpr):
    """Block 2 of [2 (c),4,16,16] for every warp."""
    x = room.slice(c, 1, dim=0).slice(2, 1, dim=1).load(quads(16, False))
    x = gl.broadcast(x, gl.zeros((2, 2, 16, 16), x.dtype, quads(16, False)))[0]
    return to_block(gl.reshape(x, (4, 16, 16)))


@gluon.jit
def put(room, x):
    """2^x, [4,64] by channel, into [2,4,32] by half."""
    room.store(gl.permute(gl.reshape(power(x), (4, 2, 32)), (1, 0, 2)))


@gluon.jit
def over(room, part):
    """Channels of 32-part `part` of a number a block and channel, to broadcast over [4,16,32]."""
    room = room._reinterpret(gl.float32, [2, 4, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return gl.expand_dims(room.index(part).load(gl.SliceLayout(1, wide())), 1)


@gluon.jit
def doubled(X, Xt, part):
    """X + X·part·X and its transpose: blocks of twice the size."""
    zero = gl.zeros((4, 16, 16), gl.float32, block())
    X_op, Xt_op = tf32(X), tf32(Xt)
    Pt = tf32(times_t(Xt_op, part, zero))
    return times_t(X_op, Pt, X), times_t(Pt, X_op, Xt)


@gluon.jit
def own_inverse(N):
    """X, Xᵀ for X = (I − N)⁻¹ of each block, N [4,16,16] strictly lower."""
    zero = gl.zeros((4, 16, 16), gl.float32, block())
    # Bits 0, 3, 1, 2 of a row are bits 0 to 3 of its token; a level's tiles are those that first differ in its bit.
    apart = rows(block()) ^ cols(16, block())
    one = gl.where(apart == 0, 1.0, zero)
    part = gl.where(apart == 1, N, 0.0)
    X, Xt = one + part, times_t(one, part, one)
    X, Xt = doubled(X, Xt, gl.where((apart & 14) == 8, N, 0.0))
    X, Xt = doubled(X, Xt, gl.where((apart & 6) == 2, N, 0.0))
    return doubled(X, Xt, gl.where((apart & 4) == 4, N, 0.0))


@gluon.jit
def inverse(near, pair, far0, far1):
    """(I − N)⁻¹ from N's tiles: those of a block with itself, its neighbour, and blocks 0 and 1 for the later half."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    room_x = gl.allocate_shared_memory(gl.float32, [2, 2, 16, 16], flat)
    room_t = gl.allocate_shared_memory(gl.float32, [2, 2, 16, 16], flat)
    room_y = gl.allocate_shared_memory(gl.float32, [2, 4, 16, 16], flat)
    zero = gl.zeros((4, 16, 16), gl.float32, block())
    own, own_t = own_inverse(tf32(near))
    X, Xt = tf32(own), tf32(own_t)
    room_x.store(gl.reshape(Xt, (2, 2, 16, 16)))
    Wt = tf32(times_t(to_block(first_of_half(room_x)), tf32(pair), zero))
    S = times_t(X, Wt, zero)
    room_t.store(gl.reshape(tf32(times_t(Wt, X, zero)), (2, 2, 16, 16)))
    far0, far1 = tf32(far0), tf32(far1)
    Yt0 = times_t(of_block(room_x, 0), far0, zero)
    Yt1 = tf32(times_t(of_block(room_x, 1), far1, zero))
    Yt0 = tf32(times_t(of_block(room_t, 1), far1, Yt0))
    room_y.slice(0, 1, dim=0).store(gl.reshape(Yt0, (1, 4, 16, 16)))
    room_y.slice(1, 1, dim=0).store(gl.reshape(Yt1, (1, 4, 16, 16)))
    S_late = gl.where(blocks(block()) >= 2, tf32(S), 0.0)
    Z0 = times_t(S_late, of_second(room_y, 0), times_t(X, Yt0, zero))
    Z1 = times_t(S_late, of_second(room_y, 1), times_t(X, Yt1, zero))
    return own, S, Z0, Z1


@gluon.jit
def inverse_norms(room, K: gl.constexpr):
    """1 / sqrt(Σx² + 1e-6) of a block's rows, [4,16,1]: the squares are the diagonal of the block times itself."""
    acc: gl.constexpr = block()
    xx = gl.zeros((4, 16, 16), gl.float32, acc)
    for part in gl.static_range(K // 32):
        tile = room.index(part).load(wide())
        xx = mma_v2(left_rows(tile), right_rows(tile), xx)
    r = by_token(gl.where(rows(acc) == cols(16, acc), xx, 0.0))
    r = gl.rsqrt(gl.sum(r, 2) + 1e-6)
    return gl.expand_dims(gl.convert_layout(r, gl.SliceLayout(2, wide())), 2)


@gluon.jit
def rows_of(stride):
    """Where a thread's first channels lie, [4,16,32]."""
    return (blocks(wide()) * 16 + rows(wide())) * stride + cols(32, wide())


@gluon.jit
def fetch(x, stride, count, K: gl.constexpr, W: gl.constexpr):
    """Starts to copy 64 rows of K numbers, W a tile; rows from `count` on become zeros. The tiles [K/W,4,16,W]."""
    by: gl.constexpr = copied(K, W)
    one: gl.constexpr = gl.SliceLayout(0, by)
    room = gl.allocate_shared_memory(gl.bfloat16, [K // W, 4, 16, W], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    tile = gl.arange(0, K // W, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, by))))
    tile = gl.expand_dims(gl.expand_dims(gl.expand_dims(tile, 1), 2), 3)
    place = gl.expand_dims(blocks(one) * 16 + rows(one), 0)
    at = place * stride + gl.expand_dims(cols(W, one), 0) + tile * W
    async_copy.async_copy_global_to_shared(room, x + at, mask=(place < count) & (tile >= 0))
    return room._reinterpret(gl.bfloat16, [K // W, 4, 16, W], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def betas(beta, stride, count):
    """Raw β of rows (kind 0) and of the columns of a block's four tiles (kinds 0 to 3), [4 (kind),64]."""
    by: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    kind = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, by)), 1)
    place = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, by)), 0)
    m = place >> 4
    far = ((m >> 1) ^ 1) * 2 + (kind & 1)
    of = gl.where(kind == 0, m, gl.where(kind == 1, m ^ 1, far)) * 16 + (place & 15)
    return gl.load(beta + of * stride, mask=of < count, other=NEVER)


@gluon.jit
def settle(b):
    """Their sigmoids, where all can read them."""
    room = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    room.store(sigmoid(b.to(gl.float32)))
    return room._reinterpret(gl.float32, [4, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def beta_columns(room, kind: gl.constexpr):
    return gl.expand_dims(room.index(kind).load(gl.SliceLayout(1, square())), 1)


@gluon.jit
def decays(z, slope, bias, unit):
    """Running log2-decays of each block [4,16,64] from raw gates, and those of its rows 7 and 15."""
    G = gl.associative_scan(reciprocal(power(widen(z) * slope + bias) * unit + unit), 1, add)
    return G, row_of(G, 7), row_of(G, 15)


@gluon.jit
def let_next_start():
    """The chain may take processors as they fall free; it waits for the factors itself (`gluon_chain.settled`)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prepare_kernel(
    q, k, gate, beta, A_log, dt_bias, chunks,
    factors, squares, decay,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, b_b, b_t, b_h, T, scale, lower_bound, first, size,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    bf16: gl.constexpr = gl.bfloat16
    acc: gl.constexpr = block()
    full: gl.constexpr = wide()
    thin: gl.constexpr = columns()
    flat1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    slim: gl.constexpr = gl.SliceLayout(1, thin)
    let_next_start()
    pid = gl.num_programs(0) - 1 - gl.program_id(0)  # last chunks first: the chain finds its first ones in the cache
    chunk, head = pid // HV + first, (pid % HV).to(gl.int64)
    pid = pid.to(gl.int64)
    start = gl.load(chunks + 2 * chunk)
    count = gl.load(chunks + 2 * chunk + 1)
    b, t = (start // T).to(gl.int64), (start % T).to(gl.int64)
    q += b * q_b + t * q_t + (head // GROUP) * q_h
    k += b * k_b + t * k_t + (head // GROUP) * k_h
    gate += b * g_b + t * g_t + head * g_h
    beta += b * b_b + t * b_t + head * b_h

    raw_g = fetch(gate, g_t, count, K, 64)
    raw_k = fetch(k, k_t, count, K, 32)
    raw_q = fetch(q, q_t, count, K, 32)
    async_copy.commit_group()
    raw_b = betas(beta, b_t, count)
    c2 = cols(64, thin)
    dt_bias += head * K
    bias = gl.load(dt_bias + c2)
    rate = gl.minimum(gl.maximum(gl.exp(gl.load(A_log + head).to(gl.float32)), 1e-30), 1e37)
    slope = -LOG2E * rate
    unit = 1.0 / (lower_bound * LOG2E)
    ends = gl.allocate_shared_memory(gl.float32, [4, 64], flat1)
    mids = gl.allocate_shared_memory(gl.float32, [4, 64], flat1)
    room = gl.allocate_shared_memory(gl.float32, [2, 4, 16, 32], gl.SwizzledSharedLayout(4, 1, 2, [3, 2, 1, 0]))
    to_start = gl.allocate_shared_memory(gl.float32, [2, 4, 32], plain3)
    to_end = gl.allocate_shared_memory(gl.float32, [2, 4, 32], plain3)
    to_pair = gl.allocate_shared_memory(gl.float32, [2, 4, 32], plain3)
    to_2 = gl.allocate_shared_memory(gl.float32, [2, 4, 32], plain3)
    to_3 = gl.allocate_shared_memory(gl.float32, [2, 4, 32], plain3)
    async_copy.wait_group(0)
    room_b = settle(raw_b)
    if count < C:
        place = blocks(thin) * 16 + rows(thin)
        for h in gl.static_range(K // 64):
            raw_g.index(h).store(gl.where(place < count, raw_g.index(h).load(thin), NEVER).to(bf16))
    rk = inverse_norms(raw_k, K)
    rq = inverse_norms(raw_q, K) * scale

    n = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, thin))), 1)
    c1 = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, slim)), 0)
    zero = gl.zeros((4, 16, 16), gl.float32, acc)
    near, pair, far0, far1 = (zero, zero), (zero, zero), (zero, zero), (zero, zero)
    by_half = room._reinterpret(gl.float32, [2, 4, 16, 32], gl.SwizzledSharedLayout(4, 1, 2, [2, 1, 0]))
    beyond_all = room._reinterpret(bf16, [2, 2, 4, 16, 32], plain)
    beside_all = raw_k._reinterpret(bf16, [K // 32, 2, 2, 16, 32], plain)
    out = rows_of(K)
    apart = size * HV  # of two arrays of the workspace, in (chunk, head) pairs
    kd = factors + pid * (C * K)
    qd = kd + apart * (C * K)
    kr = qd + apart * (C * K)
    for h in range(0, K // 64):
        G, mid, end = decays(raw_g.index(h).load(thin), slope, bias.to(gl.float32) * slope, unit)
        bias = gl.load(dt_bias + (64 * h + 64) % K + c2)
        D = G - gl.expand_dims(mid, 1)
        room.store(gl.permute(gl.reshape(D, (4, 16, 2, 32)), (2, 0, 1, 3)))
        mids.store(mid)
        ends.store(end)
        e0, e1, e2, e3 = (
            ends.slice(0, 1).load(slim),
            ends.slice(1, 1).load(slim),
            ends.slice(2, 1).load(slim),
            ends.slice(3, 1).load(slim),
        )
        m1 = e0 + mids.slice(1, 1).load(slim)
        m2 = e0 + e1 + mids.slice(2, 1).load(slim)
        m3 = e0 + e1 + e2 + mids.slice(3, 1).load(slim)
        total = e0 + e1 + e2 + e3
        middle = gl.where(n == 0, mid, gl.where(n == 1, m1, gl.where(n == 2, m2, m3)))
        put(to_start, middle)
        put(to_end, total - middle)
        put(to_pair, gl.where(n < 2, m1, m3) - middle)
        put(to_2, m2 - middle)
        put(to_3, m3 - middle)
        gl.store(decay + pid * K + 64 * h + c1 + n * 0, power(total + n * 0), mask=n == 0)
        for half in range(0, 2):
            part = 2 * h + half
            kn, qn = widen(raw_k.index(part).load(full)) * rk, widen(raw_q.index(part).load(full)) * rq
            Dw = by_half.index(half).load(full)
            rise, fall = power(Dw), power(-Dw)
            start_c = over(to_start, half)
            k_rise, k_fall, q_rise = -(kn * rise), kn * fall, qn * rise
            gl.store(kd + out, (k_rise * start_c).to(bf16))
            gl.store(qd + out, (q_rise * start_c).to(bf16))
            gl.store(kr + out, (k_fall * over(to_end, half)).to(bf16))
            beside, beyond = beside_all.index(part), beyond_all.index(half)
            beside.store(gl.reshape((k_fall * over(to_pair, half)).to(bf16), (2, 2, 16, 32)))
            beyond.slice(0, 1, dim=0).store(gl.reshape((k_fall * over(to_2, half)).to(bf16), (1, 4, 16, 32)))
            beyond.slice(1, 1, dim=0).store(gl.reshape((k_fall * over(to_3, half)).to(bf16), (1, 4, 16, 32)))
            kd += 32
            qd += 32
            kr += 32
            both = (left_rows(k_rise.to(bf16)), left_rows(q_rise.to(bf16)))
            near = products(both, k_fall.to(bf16), near)
            pair = products(both, first_of_half(beside), pair)
            far0 = products(both, for_place(beyond, 0), far0)
            far1 = products(both, for_place(beyond, 1), far1)

    m = blocks(square())
    i, j = rows(square()), cols(16, square())
    odd, late = (m & 1) == 1, m >= 2
    # Where the four tiles of a block go; the ones that hold nothing fill the zeros above the diagonal.
    at = (m * 16 + i) * C + j
    t0, t1, t2 = m * 16, (m ^ 1) * 16, ((m >> 1) ^ 1) * 32
    p = squares + pid * (C * C)
    aqk = p + apart * (C * C)
    gl.store(aqk + (at + t0), halves(gl.where(i >= j, by_token(near[1]), 0.0)))
    gl.store(aqk + (at + t1), halves(gl.where(odd, by_token(pair[1]), 0.0)))
    gl.store(aqk + (at + t2), halves(gl.where(late, by_token(far0[1]), 0.0)))
    gl.store(aqk + (at + t2 + 16), halves(gl.where(late, by_token(far1[1]), 0.0)))

    # k_rise has the sign of −k: the products are N already.
    bi = gl.expand_dims(room_b.index(0).load(gl.SliceLayout(2, square())), 2)
    X, S, Z0, Z1 = inverse(
        by_row(gl.where(i > j, by_token(near[0]) * bi, 0.0)), by_row(gl.where(odd, by_token(pair[0]) * bi, 0.0)),
        by_row(gl.where(late, by_token(far0[0]) * bi, 0.0)), by_row(gl.where(late, by_token(far1[0]) * bi, 0.0)),
    )  # fmt: skip
    gl.store(p + (at + t0), halves(by_token(X) * beta_columns(room_b, 0)))
    gl.store(p + (at + t1), halves(by_token(S) * beta_columns(room_b, 1)))
    gl.store(p + (at + t2), halves(by_token(Z0) * beta_columns(room_b, 2)))
    gl.store(p + (at + t2 + 16), halves(by_token(Z1) * beta_columns(room_b, 3)))
