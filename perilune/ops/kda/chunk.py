"""KDA by chunks of C tokens: dense products instead of a step a token, with its own backward.

With G the running log-decay of a chunk, S the state before it, for all rows of a chunk at once (Kimi Linear §3):

    A_qk[i≥j], A_kk[i>j] = Σ_d (q or k)_i k_j exp(G_i − G_j)          decay.py
    U = (I + β A_kk)⁻¹ (β v − β (k e^G) S)                             what each token writes, corrections included
    O = (q e^G) S + A_qk U
    S ← e^{G_C} S + (k e^{G_C − G})ᵀ U

Only the last line (and U's use of S) is sequential. Backward, with P = (I + βA_kk)⁻ᵀ dU:
    dU = A_qkᵀ dO + (k e^{G_C−G}) dS,   dv = β P,   d raw β = (1 − β) Σ_v P ⊙ U,   dA_qk = dO Uᵀ,   dA_kk = −β P Uᵀ
    dg = reverse running sum of (q ⊙ dq + k ⊙ dk_read − k ⊙ dk_write), plus Σ_v S ⊙ dS at each chunk's end.
Products of e^G are never undone by a division: e^G k ⊙ d(e^G k) is k ⊙ dk.

fp32 inside (fp64 for fp64 inputs). On a CPU a pass over memory costs as much as a small product, so what the forward
made is kept for the backward, about 350 numbers a token and head at K = V = 32.
Shapes: M chunks, h = value heads, m = M·h, C tokens, K and V head sizes, G = K or 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.kda.decay import Decay, clamped, decay_of, floor, products, products_backward, scaled
from perilune.ops.kda.plan import Plan, chunk_size, plan_chunks
from perilune.ops.kda.reference import L2_EPS, accumulating, log_decay
from perilune.ops.kept import kept
from perilune.ops.precision import own_precision


@torch.compiler.disable  # chunk sizes and tiles depend on lengths and gates: a break in the graph, not a trace
def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float,
    state: Tensor | None,
    lengths: Sequence[int] | None,
    export_at: Sequence[tuple[int, int]] | None,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`kda` by chunks; arguments as `api` has checked them. Gradients of every tensor, not differentiable again."""
    spans = tuple(lengths) if lengths is not None else (v.shape[1],) * v.shape[0]
    places = None if export_at is None else tuple(export_at)
    plan = plan_chunks(spans, chunk_size(spans, largest_chunk(q.shape[3], v.device)), places, v.device)
    return _Chunk.apply(q, k, v, gate, beta, A_log, dt_bias, state, plan, lower_bound, scale, delta)


def largest_chunk(K: int, device: torch.device) -> int:
    """As measured: products per chunk against products per state on a CPU, number of launches on an accelerator.

    At 16 tokens a tile under K3's bound (−5 a token) is always the whole chunk.
    """
    if device.type != "cpu":
        return 64
    return 16 if K <= 32 else 32


class _Chunk(torch.autograd.Function):
    @staticmethod
    @own_precision
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state: Tensor | None,
        plan: Plan,
        lower_bound: float | None,
        scale: float,
        delta: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        HV, V, K = v.shape[2], v.shape[3], q.shape[3]
        g = _cut_decay(gate, A_log, dt_bias, lower_bound, plan)
        decay = decay_of(g, lower_bound)
        b = _cut_beta(beta, plan)
        q_norm, k_norm = _inverse_norm(q), _inverse_norm(k)
        rows, cols = _rows_and_cols(q, k, q_norm, k_norm, decay, plan, HV, scale)

        A = products(decay, rows, cols)
        see, before = _causal(plan.C, A.dtype, A.device)
        A_qk = A[:, 0] * see
        U = _cut(v, plan, b)
        W = inverse = None
        if delta:
            inverse = unit_lower_inverse(A[:, 1], before * b)
            U = torch.bmm(inverse, U)
            W = torch.bmm(inverse, scaled(rows[:, 1], decay.head).mul_(-b))
        write = scaled(cols, decay.rest)

        states = U.new_empty(plan.M + plan.N, HV, K, V)
        _place_initial(states, state, plan)
        _scan(states, U, W, write, decay.total, plan)

        o = torch.bmm(A_qk, U).baddbmm_(scaled(rows[:, 0], decay.head), _starts(states, plan))
        final = states[plan.M :].clone() if plan.rank is None else states[plan.M :].index_select(0, plan.rank)
        exports = None if plan.exports is None else states.index_select(0, plan.exports)
        ctx.save_for_backward(q, k, gate, A_log, dt_bias, g, b, rows, cols, write, A_qk, inverse, U, W, states)
        ctx.decay, ctx.norms, ctx.plan = decay, (q_norm, k_norm), plan
        ctx.lower_bound, ctx.scale = lower_bound, scale
        ctx.like = (v.shape, v.dtype, beta.dtype, None if state is None else state.dtype)
        ctx.set_materialize_grads(False)
        return _joined(o, v.shape, v.dtype, plan), final, exports

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(  # type: ignore[override]
        ctx: Any, do: Tensor | None, dfinal: Tensor | None, dexports: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, gate, A_log, dt_bias, g, b, rows, cols, write, A_qk, inverse, U, W, states = ctx.saved_tensors
        plan, decay = ctx.plan, ctx.decay
        v_shape, v_dtype, beta_dtype, state_dtype = ctx.like
        m, C, V = U.shape

        # [dO; −β P], the left factors of every product that concerns q and k.
        outer = torch.zeros(m, 2, C, V, dtype=U.dtype, device=U.device)
        if do is not None:
            outer[:, 0].view(_cut_shape(do, plan)).copy_(_view(do, plan))
            _blank(outer[:, 0], plan)
        dU = torch.bmm(A_qk.transpose(1, 2), outer[:, 0])
        read = scaled(rows[:, 0], decay.head)
        dafter, dstate = _scan_backward(dU, W, write, read, outer[:, 0], decay.total, dfinal, dexports, states, plan)
        P = dU if inverse is None else torch.bmm(inverse.transpose(1, 2), dU)
        dbeta = torch.linalg.vecdot(P, U).unsqueeze(-1).mul_(1.0 - b)
        dv = P.mul_(b)
        if inverse is not None:
            torch.neg(dv, out=outer[:, 1])

        # Gradients of q and k as rows (what reads) and of k as columns (what writes).
        dA = torch.bmm(outer.view(m, 2 * C, V), U.transpose(1, 2)).view(m, 2, C, C)
        dA.mul_(_causal(C, dA.dtype, dA.device))
        drows, dcols = products_backward(decay, dA, rows, cols)
        tiles = (C // decay.c, decay.c, q.shape[3])
        dread = torch.bmm(outer.view(m, 2 * C, V), _starts(states, plan).transpose(1, 2)).view(m, 2, *tiles)
        drows.view(dread.shape).addcmul_(dread, decay.head.unsqueeze(1))
        dwrite = torch.bmm(U, dafter.transpose(1, 2)).view(m, *tiles)
        dcols.view(dwrite.shape).addcmul_(dwrite, decay.rest)

        along_q, along_k, along_write = rows[:, 0] * drows[:, 0], rows[:, 1] * drows[:, 1], cols * dcols
        drows[:, 0].mul_(decay.grow)
        drows[:, 1].mul_(decay.grow).addcmul_(dcols, decay.shrink)
        dq = _unnormed(q, ctx.norms[0], drows[:, 0], along_q.sum(-1, keepdim=True), ctx.scale, v_shape[2], plan)
        along_both = (along_k + along_write).sum(-1, keepdim=True)
        dk = _unnormed(k, ctx.norms[1], drows[:, 1], along_both, 1.0, v_shape[2], plan)
        dg = _decay_gradient(along_q.add_(along_k).sub_(along_write), states, dafter, g, ctx.lower_bound, plan)
        dgate, dA_log, dbias = _gate_gradients(gate, A_log, dt_bias, dg, g, ctx.lower_bound, plan)
        return (
            dq,
            dk,
            _joined(dv, v_shape, v_dtype, plan),
            dgate,
            _joined(dbeta, (*v_shape[:3], 1), beta_dtype, plan).squeeze(-1),
            dA_log,
            dbias,
            None if state_dtype is None else dstate.to(state_dtype),
            *[None] * 4,
        )


def unit_lower_inverse(A_mCC: Tensor, mask_mCC: Tensor) -> Tensor:
    """(I + L)⁻¹ of L = A ⊙ mask, strictly lower, C a power of two, by halving: exact products, no power series.

    [[A, 0], [X, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ X A⁻¹, B⁻¹]]. Entries stay of the size of the true inverse at every
    level, which a series in powers of L does not give (identical keys: true entries ≤ 1, powers above 3,000).
    """
    m, C, _ = A_mCC.shape
    # One row to spare in each matrix puts the diagonal blocks of all matrices at one stride: batches without a copy.
    store = A_mCC.new_empty(m, C + 1, C)
    inverse = store[:, :C]
    torch.mul(A_mCC, mask_mCC, out=inverse)
    inverse.diagonal(dim1=1, dim2=2).fill_(1.0)
    s = 1
    while s < C:
        h = C // (2 * s)

        def block(row: int, col: int, s: int = s, h: int = h) -> Tensor:
            return store.as_strided((m * h, s, s), (2 * s * (C + 1), C, 1), (row * C + col) * s)

        corner = block(1, 0)
        if s == 1:
            corner.neg_()
        else:
            torch.neg(torch.bmm(torch.bmm(block(1, 1), corner), block(0, 0)), out=corner)
        s *= 2
    return inverse


@kept()
def _causal(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Masks [2,C,C]: the query sees its own token, the key does not."""
    ones = torch.ones(C, C, dtype=dtype, device=device)
    return torch.stack([ones.tril(), ones.tril(-1)])


# Between [B,T,heads,...] and chunks.


def _view(x: Tensor, plan: Plan) -> Tensor:
    """[B,T,heads,D] as chunks, heads before tokens: [..., heads, C, D], a view or one gather."""
    B, T, heads, D = x.shape
    if plan.tokens is None:
        # Equal sequences, whether batched (B = N) or packed end to end (B = 1): step by step, as the scan walks.
        return x.reshape(plan.N, -1, plan.C, heads, D).permute(1, 0, 3, 2, 4)
    return x.reshape(B * T, heads, D).index_select(0, plan.tokens).view(plan.M, plan.C, heads, D).transpose(1, 2)


def _cut_shape(x: Tensor, plan: Plan) -> tuple[int, ...]:
    """The shape of `_view`."""
    B, T, heads, D = x.shape
    steps = B * T // (plan.N * plan.C) if plan.tokens is None else 0
    return (steps, plan.N, heads, plan.C, D) if plan.tokens is None else (plan.M, heads, plan.C, D)


def _cut(x: Tensor, plan: Plan, factor_mC1: Tensor) -> Tensor:
    """[B,T,heads,D] times a factor a token -> a new [m,C,D]. Padding repeats the sequence's last token."""
    view = _view(x, plan)
    out = torch.empty(view.shape, dtype=accumulating(x.dtype), device=x.device)
    torch.mul(view, factor_mC1.view(*view.shape[:-1], 1), out=out)
    return out.view(-1, plan.C, x.shape[3])


def _joined(x_mCD: Tensor, shape: tuple[int, ...], dtype: torch.dtype, plan: Plan) -> Tensor:
    """[m,C,D] -> [B,T,heads,D] of this shape and dtype."""
    heads, D = shape[2:]
    out = torch.empty(shape, dtype=dtype, device=x_mCD.device)  # not a view: the caller may write into its result
    if plan.slots is None:
        _view(out, plan).copy_(x_mCD.view(-1, plan.N, heads, plan.C, D))
        return out
    packed = x_mCD.view(plan.M, heads, plan.C, D).transpose(1, 2).reshape(plan.M * plan.C, heads, D)
    flat = out.view(-1, heads, D)
    if dtype == packed.dtype:
        torch.index_select(packed, 0, plan.slots, out=flat)
    else:
        flat.copy_(packed.index_select(0, plan.slots))
    return out


def _blank(x_mCD: Tensor, plan: Plan) -> None:
    """Zeroes the padding in place, whatever it holds."""
    if plan.padded is not None:
        x_mCD.unflatten(0, (plan.M, -1)).masked_fill_(plan.padded.view(plan.M, 1, plan.C, 1), 0.0)


def _cut_decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, plan: Plan) -> Tensor:
    """g [m,C,G], zero in the padding, so that padding changes no state."""
    dtype = accumulating(gate.dtype)
    view, bias = _view(gate, plan), dt_bias.to(dtype).unsqueeze(-2)
    z = torch.empty(view.shape, dtype=dtype, device=gate.device)
    torch.add(view, bias, out=z)
    if lower_bound is None:
        g = clamped(log_decay(z, A_log.unsqueeze(-1), torch.zeros_like(A_log).view(-1, 1, 1), None))
    else:
        g = z.mul_(A_log.to(dtype).exp().view(-1, 1, 1)).sigmoid_().mul_(lower_bound)
    g = g.view(-1, plan.C, gate.shape[3])
    _blank(g, plan)
    return g


def _cut_beta(beta: Tensor, plan: Plan) -> Tensor:
    """sigmoid(β) [m,C,1], zero in the padding."""
    b = _view(beta.unsqueeze(-1), plan).to(accumulating(beta.dtype)).sigmoid().reshape(-1, plan.C, 1)
    _blank(b, plan)
    return b


def _inverse_norm(x: Tensor) -> Tensor:
    """1/sqrt(Σx² + 1e-6) [B,T,H,1]."""
    x = x.to(accumulating(x.dtype))
    return torch.rsqrt(torch.linalg.vecdot(x, x).add_(L2_EPS)).unsqueeze(-1)


def _rows_and_cols(
    q: Tensor, k: Tensor, q_norm: Tensor, k_norm: Tensor, decay: Decay, plan: Plan, HV: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows [m,2,C,K] (q·scale·grow, k·grow) and columns [m,C,K] (k·shrink) of unit q and k, spread to value heads."""
    H, K = q.shape[2:]
    m = plan.M * HV
    rows = q_norm.new_empty(m, 2, plan.C, K)
    cols = q_norm.new_empty(m, plan.C, K)
    # [chunks, H, HV/H, C, K]: key heads broadcast over their value heads.
    grouped = (*_cut_shape(q, plan)[:-3], H, HV // H, plan.C, K)
    for x, norm, out in ((q, q_norm * scale, rows[:, 0]), (k, k_norm, cols)):
        unit = _view(x, plan).unsqueeze(-3).expand(*grouped[:-2], -1, -1)
        torch.mul(unit, _view(norm, plan).unsqueeze(-3), out=out.view(grouped))
    rows[:, 0].mul_(decay.grow)
    torch.mul(cols, decay.grow, out=rows[:, 1])
    return rows, cols.mul_(decay.shrink)


# The scan over chunks.


def _starts(states: Tensor, plan: Plan) -> Tensor:
    """State before each chunk, [m,K,V]."""
    return states[: plan.M].flatten(0, 1)


def _place_initial(states: Tensor, state: Tensor | None, plan: Plan) -> None:
    """Initial states at the first step's rows; of empty sequences, at their final rows."""
    begun = plan.steps[0][1] if plan.steps else 0
    for rows, order in ((states[:begun], slice(0, begun)), (states[plan.M + begun :], slice(begun, None))):
        if state is None:
            rows.zero_()
        elif plan.rank is None:
            rows.copy_(state[order])
        else:
            rows.copy_(state.index_select(0, torch.argsort(plan.rank)[order]))


def _moves(t: int, plan: Plan) -> list[tuple[slice, slice]]:
    """Where step t's states go: (rows of the step, rows of `states` after it): on to the next step, or final."""
    first, count = plan.steps[t]
    following, going = plan.steps[t + 1] if t + 1 < len(plan.steps) else (0, 0)
    moves = [(slice(first, first + going), slice(following, following + going))]
    if going < count:
        moves.append((slice(first + going, first + count), slice(plan.M + going, plan.M + count)))
    return [pair for pair in moves if pair[0].start < pair[0].stop]


def _scan(states: Tensor, U: Tensor, W: Tensor | None, write: Tensor, total: Tensor, plan: Plan) -> None:
    """S ← e^{G_C} S + writeᵀ U from step to step, U ← U + W S on the way, in place."""
    h = states.shape[1]
    flat = states.flatten(0, 1)
    write_T = write.transpose(1, 2)
    for t, (first, count) in enumerate(plan.steps):
        step = slice(first * h, (first + count) * h)
        if W is not None:
            U[step].baddbmm_(W[step], flat[step])
        for source, target in _moves(t, plan):
            of, to = (slice(x.start * h, x.stop * h) for x in (source, target))
            torch.mul(flat[of], total[of], out=flat[to])
            flat[to].baddbmm_(write_T[of], U[of])


def _scan_backward(
    dU: Tensor,
    W: Tensor | None,
    write: Tensor,
    read: Tensor,
    do: Tensor,
    total: Tensor,
    dfinal: Tensor | None,
    dexports: Tensor | None,
    states: Tensor,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """From the last step to the first: dU ← dU + write dS (in place) and dS ← e^{G_C} dS + readᵀ dO + Wᵀ dU.

    Returns dS after each chunk [m,K,V], and that of the initial states [N,h,K,V] in the caller's order.
    """
    h = states.shape[1]
    # Rows as in `states`: what flows in from exports and final states, then what the scan adds.
    dstates = torch.empty_like(states) if dexports is None else torch.zeros_like(states)
    if dfinal is None:
        dstates[plan.M :] = 0.0
    else:
        order = slice(None) if plan.rank is None else torch.argsort(plan.rank)
        dstates[plan.M :] = dfinal[order]
    if dexports is not None and plan.exports is not None:
        dstates.index_add_(0, plan.exports, dexports.to(dstates.dtype))
    flat = dstates.flatten(0, 1)
    dafter = torch.empty_like(flat[: plan.M * h])
    read_T, W_T = read.transpose(1, 2), None if W is None else W.transpose(1, 2)
    for t in range(len(plan.steps) - 1, -1, -1):
        first, count = plan.steps[t]
        step = slice(first * h, (first + count) * h)
        for source, target in _moves(t, plan):
            of, to = (slice(x.start * h, x.stop * h) for x in (source, target))
            dafter[of] = flat[to]
        dU[step].baddbmm_(write[step], dafter[step])
        if dexports is None:
            torch.mul(dafter[step], total[step], out=flat[step])
        else:
            flat[step].addcmul_(dafter[step], total[step])
        flat[step].baddbmm_(read_T[step], do[step])
        if W_T is not None:
            flat[step].baddbmm_(W_T[step], dU[step])
    begun = plan.steps[0][1] if plan.steps else 0
    initial = torch.cat([dstates[:begun], dstates[plan.M + begun :]])
    return dafter, initial if plan.rank is None else initial.index_select(0, plan.rank)


# Gradients of what went into the chunks.


def _decay_gradient(
    along_mCK: Tensor, states: Tensor, dafter: Tensor, g: Tensor, lower_bound: float | None, plan: Plan
) -> Tensor:
    """dg [m,C,G] from q⊙dq + k⊙dk_read − k⊙dk_write and the states after each chunk."""
    after = states[plan.N :] if plan.after is None else states.index_select(0, plan.after)
    at_end = torch.linalg.vecdot(after.flatten(0, 1), dafter).unsqueeze(1)
    if g.shape[2] == 1:
        along_mCK, at_end = along_mCK.sum(-1, keepdim=True), at_end.sum(-1, keepdim=True)
    later = _causal(plan.C, g.dtype, g.device)[0].T
    dg = torch.matmul(later, along_mCK).add_(at_end)
    if lower_bound is None:
        # Where exp(g) is zero so is its gradient; roundoff there would meet the large slope of a softplus gate.
        dg.masked_fill_(g <= floor(g.dtype), 0.0)
    return dg


def _unnormed(x: Tensor, norm: Tensor, dunit: Tensor, along: Tensor, scale: float, HV: int, plan: Plan) -> Tensor:
    """Gradient of x [B,T,H,K] from that of its scaled unit vector at value heads [m,C,K] and ⟨unit, gradient⟩ [m,C,1].

    x/‖x‖: dx = r (du − u ⟨u, du⟩) with u = r x, after summing over a key head's value heads.
    """
    H, K = x.shape[2:]
    grouped = (plan.M, H, HV // H, plan.C)
    if H != HV:
        dunit = dunit.reshape(*grouped, K).sum(2)
        along = along.view(*grouped, 1).sum(2)
    r = _view(norm, plan)
    d = dunit.reshape(r.shape[:-1] + dunit.shape[-1:]) * (r * scale)
    shrink = r.square() * along.reshape(r.shape)
    # Two binary passes: a ternary one over a transposed view leaves torch's vector loop and takes five times as long.
    d -= _view(x, plan) * shrink
    return _joined(d.view(-1, plan.C, K), x.shape, x.dtype, plan)


def _gate_gradients(
    gate: Tensor, A_log: Tensor, dt_bias: Tensor, dg: Tensor, g: Tensor, lower_bound: float | None, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """d gate, d A_log, d dt_bias from dg [m,C,G]."""
    dtype, HV, G = g.dtype, gate.shape[2], gate.shape[3]
    rate = A_log.to(dtype).exp().view(HV, 1, 1)
    bias = dt_bias.to(dtype).view(HV, 1, G)
    view = _view(gate, plan)
    dg, g = dg.view(view.shape), g.view(view.shape)
    if lower_bound is None:
        dz = (view + bias).sigmoid_().mul_(dg).mul_(-rate)
    else:
        dz = torch.addcmul(g, g, g, value=-1.0 / lower_bound).mul_(dg).mul_(rate)
    dz = dz.contiguous()
    _blank(dz.view(-1, plan.C, G), plan)
    dbias = dz.flatten(0, -4).sum((0, 2))
    if lower_bound is None:
        dA_log = (dg * g).flatten(0, -4).sum((0, 2, 3))
    else:  # Σ dz (z + bias), the second part from sums already made
        dA_log = (dz * view).flatten(0, -4).sum((0, 2, 3))
        dA_log += (dbias * bias.squeeze(1)).sum(-1)
    dgate = _joined(dz.view(-1, plan.C, G), gate.shape, gate.dtype, plan)
    return dgate, dA_log.to(A_log.dtype), dbias.to(dt_bias.dtype).view(dt_bias.shape)
