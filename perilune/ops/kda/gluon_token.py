# mypy: allow-untyped-defs
"""`gluon_decode` for windows of one token: the state rests in shared memory, which bounds nothing but its traffic.

    S ← diag(d) S      u = σ(β) (v − Sᵀk)      S ← S + k uᵀ      o = Sᵀq = (dq)ᵀS_before + u (k·q)

The copy of a head's state starts before anything else and lands while conv, norms and gate of the token are computed.
Both reads of the state need only d·k and d·q, so one pass serves both. Values do not touch one another: a piece of 32
of them with all their keys is waited for, read, answered, updated and stored in one visit, while the next still lands.
Four warps, so that three programs fit a processor and one's copies hide another's pieces.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from perilune.ops.kda.gluon_decode import decay_of, history, remember, sigmoid, silu_conv


@gluon.constexpr_function
def flat(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@gluon.constexpr_function
def piece(key_first):
    """32 values of the state with all their keys, 16 bytes an access: [32,128], or [128,32] by contiguous values.

    A warp has its values whole: 8 of them, two by two or one sector a row, spread over eight or sixteen lanes.
    """
    if key_first:
        return gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    return gl.BlockedLayout([1, 4], [16, 2], [1, 4], [1, 0])


@gluon.constexpr_function
def pieces(key_first):
    """[n,...] of them, as they are fetched: rows of 512 or 128 bytes."""
    return gl.BlockedLayout([1, 1, 4], [1, 1, 32] if key_first else [1, 4, 8], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def resting(key_first, rank):
    """Where values are contiguous, four rows that are read at once lie in different banks."""
    order = list(range(rank))[::-1]
    return gl.SwizzledSharedLayout(1, 1, 1, order) if key_first else gl.SwizzledSharedLayout(8, 1, 4, order)


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def bring(room, at, step, stride, layout: gl.constexpr):
    """Starts the copies of pieces [n,rows,F], `step` numbers apart, and their rows `stride`, each to be waited for."""
    i = gl.arange(0, room.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    j = gl.arange(0, room.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    i, j = gl.expand_dims(gl.expand_dims(i, 0), 2), gl.expand_dims(gl.expand_dims(j, 0), 1)
    N: gl.constexpr = room.shape[0]
    for n in gl.static_range(N):
        async_copy.async_copy_global_to_shared(room.slice(n, 1, dim=0), at + n * step + (i * stride + j))
        async_copy.commit_group()


@gluon.jit
def keep(x):
    """A vector where every thread can read it."""
    room = gl.allocate_shared_memory(gl.float32, x.shape, flat(1))
    room.store(x)
    return room


@gluon.jit
def part(room, n, parts: gl.constexpr, layout: gl.constexpr):
    """The n-th of `parts` of a kept vector."""
    room = room._reinterpret(gl.float32, [parts, room.shape[0] // parts], flat(1))
    return room.index(n).load(layout)


@gluon.jit
def along(room, axis: gl.constexpr, layout: gl.constexpr):
    """A kept vector, to broadcast over the other axis."""
    return gl.expand_dims(room.load(gl.SliceLayout(1 - axis, layout)), 1 - axis)


@gluon.jit
def step(room, at, move, dq, dk, d, k, v, o, b, qk, KEYS: gl.constexpr, layout: gl.constexpr):
    """Piece by piece: read, answer, update, store. Keys are axis KEYS; a thread's part of the first lies `at`."""
    N: gl.constexpr = room.shape[0]
    VALUES: gl.constexpr = gl.SliceLayout(KEYS, layout)
    o = o._reinterpret(gl.float32, [N, o.shape[0] // N], flat(1))
    dq, dk, d, k = along(dq, KEYS, layout), along(dk, KEYS, layout), along(d, KEYS, layout), along(k, KEYS, layout)
    for n in gl.static_range(N):
        async_copy.wait_group(N - 1 - n)
        gl.thread_barrier()
        S = room.index(n).load(layout)
        seen, out = gl.reduce((S * dk, S * dq), KEYS, add2)
        u = b * (part(v, n, N, VALUES) - seen)
        o.index(n).store(out + u * qk)
        gl.store(at + n * move, S * d + k * gl.expand_dims(u, KEYS))


@gluon.jit
def decode_kernel(
    x, gate, beta, out_gate, o, conv, A_log, dt_bias, norm, state, tail, slots,
    x_r, g_r, g_h, b_r, b_h, z_r, z_h, c_c, c_t, s_n, s_h, s_k, s_v, t_n, t_p, t_h, t_v, t_c, t_w, slot_r,
    scale, lower_bound, eps, H: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    FLOORED: gl.constexpr, KEY_FIRST: gl.constexpr,
):  # fmt: skip
    """One program a request and key head; arguments as in `gluon_decode`."""
    HV: gl.constexpr = H * GROUP
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile: gl.constexpr = piece(KEY_FIRST)
    ROWS: gl.constexpr = 32 if KEY_FIRST else K  # of a piece
    LONG: gl.constexpr = K if KEY_FIRST else 32
    N: gl.constexpr = V // 32
    row, key_head = (gl.program_id(0) // H).to(gl.int64), gl.program_id(0) % H
    c, e = gl.arange(0, K, layout=line), gl.arange(0, V, layout=line)
    slot = gl.load(slots + row * slot_r).to(gl.int64)
    if slot < 0:
        for j in gl.static_range(GROUP):
            at = (row * HV + key_head * GROUP + j) * V
            gl.store(o + at + e, gl.zeros((V,), o.dtype.element_ty, line))
        return
    room = gl.allocate_shared_memory(gl.float32, [N, ROWS, LONG], resting(KEY_FIRST, 3))
    by_piece = room._reinterpret(gl.float32, [N, ROWS, LONG], resting(KEY_FIRST, 2))
    room_o = gl.allocate_shared_memory(gl.float32, [V], flat(1))
    i = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, tile)), 1)
    j = gl.expand_dims(gl.arange(0, LONG, layout=gl.SliceLayout(0, tile)), 0)
    stride = s_v if KEY_FIRST else s_k
    move = 32 * s_v if KEY_FIRST else 32
    qc = key_head * K + c
    kc = H * K + qc
    x += row * x_r
    tail += slot * t_n
    q_tail = tail + key_head * t_h + c * t_c
    k_tail = q_tail + t_p
    for g in gl.static_range(GROUP):
        head = key_head * GROUP + g
        sp = state + (slot * s_n + head * s_h)
        bring(room, sp, move, stride, pieces(KEY_FIRST))
        vc = 2 * H * K + head * V + e
        v_tail = tail + 2 * t_p + head * t_v + e * t_c
        q0, q1, q2 = history(q_tail, t_w)
        k0, k1, k2 = history(k_tail, t_w)
        v0, v1, v2 = history(v_tail, t_w)
        xq, xk, xv = gl.load(x + qc).to(gl.float32), gl.load(x + kc).to(gl.float32), gl.load(x + vc).to(gl.float32)
        z = gl.load(gate + row * g_r + head * g_h + c).to(gl.float32) + gl.load(dt_bias + head * K + c).to(gl.float32)
        b = sigmoid(gl.load(beta + row * b_r + head * b_h).to(gl.float32))
        y_gate = gl.load(out_gate + row * z_r + head * z_h + e).to(gl.float32)
        weight = gl.load(norm + e).to(gl.float32)
        rate = gl.exp(gl.load(A_log + head).to(gl.float32))
        q = silu_conv(xq, q0, q1, q2, conv + qc * c_c, c_t)
        k = silu_conv(xk, k0, k1, k2, conv + kc * c_c, c_t)
        v = silu_conv(xv, v0, v1, v2, conv + vc * c_c, c_t)
        d = decay_of(z, rate, lower_bound, FLOORED)
        qq, kk, qk = gl.reduce((q * q, k * k, q * k), 0, add3)
        q_unit, k_unit = gl.rsqrt(qq + 1e-6) * scale, gl.rsqrt(kk + 1e-6)
        q, k, qk = q * q_unit, k * k_unit, qk * q_unit * k_unit
        kept = keep(q * d), keep(k * d), keep(d), keep(k), keep(v)
        remember(v_tail, t_w, v1, v2, xv)
        if g == GROUP - 1:
            remember(q_tail, t_w, q1, q2, xq)
            remember(k_tail, t_w, k1, k2, xk)
        step(by_piece, sp + (i * stride + j), move, kept[0], kept[1], kept[2], kept[3], kept[4],
             room_o, b, qk, 1 if KEY_FIRST else 0, tile)  # fmt: skip
        gl.thread_barrier()
        y = room_o.load(line)
        y *= gl.rsqrt(gl.sum(y * y, 0) / V + eps) * weight * sigmoid(y_gate)
        gl.store(o + (row * HV + head) * V + e, y.to(o.dtype.element_ty))
