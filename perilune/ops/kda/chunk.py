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

fp32 inside (fp64 for fp64 inputs). Kept for the backward: g, the two C×C matrices, U, W, the state before each chunk;
the rest is recomputed. Shapes: M chunks, h = value heads, m = M·h, C tokens, K and V head sizes, G = K or 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.kda.decay import Decay, clamped, decay_of, floor, products, products_backward, scaled
from perilune.ops.kda.plan import Plan, chunk_size, plan_chunks
from perilune.ops.kda.reference import L2_EPS, accumulating, log_decay

CHUNK = 32


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
    plan = plan_chunks(spans, chunk_size(spans, CHUNK), places, v.device)
    return _Chunk.apply(q, k, v, gate, beta, A_log, dt_bias, state, plan, lower_bound, scale, delta)


class _Chunk(torch.autograd.Function):
    @staticmethod
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
        rows, cols, _, _ = _keys(q, k, decay, plan, HV, scale)

        A = products(decay, rows, cols)
        A.mul_(_causal(plan.C, A.dtype, A.device))
        U = _cut(v, plan).mul_(b)
        W = None
        if delta:
            inverse = unit_lower_inverse(A[:, 1].mul_(b))
            A[:, 1] = inverse  # kept in its place: A_kk itself is not needed again
            U = torch.bmm(inverse, U)
            W = torch.bmm(inverse, scaled(rows[:, 1], decay.head).mul_(-b))
        write = scaled(cols, decay.rest)

        states = U.new_empty(plan.M + plan.N, HV, K, V)
        _place_initial(states, state, plan)
        _scan(states, U, W, write, decay.total, plan)

        o = torch.bmm(A[:, 0], U).baddbmm_(scaled(rows[:, 0], decay.head), _starts(states, plan))
        final = states[plan.M :] if plan.rank is None else states[plan.M :].index_select(0, plan.rank)
        exports = None if plan.exports is None else states.index_select(0, plan.exports)
        ctx.save_for_backward(q, k, v, gate, beta, A_log, dt_bias, g, A, U, W, states)
        ctx.plan, ctx.lower_bound, ctx.scale, ctx.delta = plan, lower_bound, scale, delta
        ctx.state_dtype = None if state is None else state.dtype
        ctx.set_materialize_grads(False)
        return _joined(o, v, plan), final.clone() if plan.rank is None else final, exports

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, do: Tensor | None, dfinal: Tensor | None, dexports: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, gate, beta, A_log, dt_bias, g, A, U, W, states = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        HV = v.shape[2]
        decay, b = decay_of(g, ctx.lower_bound), _cut_beta(beta, plan)
        rows, cols, q_norm, k_norm = _keys(q, k, decay, plan, HV, scale)
        write = scaled(cols, decay.rest)
        do_mCV = torch.zeros_like(U) if do is None else _cut(do, plan)
        if plan.padded is not None:
            _blank(do_mCV, plan, HV)

        # dU and, from the last chunk to the first, the gradient of the state after each chunk.
        dU = torch.bmm(A[:, 0].transpose(1, 2), do_mCV)
        read = scaled(rows[:, 0], decay.head)
        dafter, dstate = _scan_backward(dU, W, write, read, do_mCV, decay.total, dfinal, dexports, states, plan)

        P = torch.bmm(A[:, 1].transpose(1, 2), dU) if ctx.delta else dU
        dbeta = torch.linalg.vecdot(P, U).unsqueeze(-1).mul_(1.0 - b)
        dv = P.mul_(b)

        # Gradients of [q; k] as rows, of k as columns, then of their decays.
        outer = torch.stack([do_mCV, dv.neg() if ctx.delta else torch.zeros_like(dv)], 1)
        m, _, C, V = outer.shape
        starts = _starts(states, plan)
        dA = torch.bmm(outer.view(m, 2 * C, V), U.transpose(1, 2)).view(m, 2, C, C)
        dA.mul_(_causal(C, dA.dtype, dA.device))
        drows, dcols = products_backward(decay, dA, rows, cols)
        dread = torch.bmm(outer.view(m, 2 * C, V), starts.transpose(1, 2)).view(m, 2, *decay_tiles(decay, C), -1)
        drows.view(dread.shape).addcmul_(dread, decay.head.unsqueeze(1))
        dwrite = torch.bmm(U, dafter.transpose(1, 2))
        dcols.view(m, *decay_tiles(decay, C), -1).addcmul_(dwrite.view(m, *decay_tiles(decay, C), -1), decay.rest)

        along_q, along_k = rows[:, 0].mul_(drows[:, 0]), rows[:, 1].mul_(drows[:, 1])
        along_write = cols.mul_(dcols)
        c_q, c_k = along_q.sum(-1, keepdim=True), (along_k + along_write).sum(-1, keepdim=True)
        dg = _decay_gradient(along_q.add_(along_k).sub_(along_write), states, dafter, g, plan)
        dq, dk = _key_gradients(q, k, drows, dcols, decay, q_norm, k_norm, c_q, c_k, plan, scale, HV)
        dgate, dA_log, dbias = _gate_gradients(gate, A_log, dt_bias, dg, g, ctx.lower_bound, plan)
        return (
            dq,
            dk,
            _joined(dv, v, plan),
            dgate,
            _joined(dbeta, beta.unsqueeze(-1), plan).squeeze(-1),
            dA_log,
            dbias,
            None if ctx.state_dtype is None else dstate.to(ctx.state_dtype),
            *[None] * 4,
        )


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)⁻¹ of strictly lower L [m,C,C], C a power of two, by halving: exact products, no power series.

    [[A, 0], [X, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ X A⁻¹, B⁻¹]]. Entries stay of the size of the true inverse at every
    level, which a series in powers of L does not give (identical keys: true entries ≤ 1, powers above 3,000).
    """
    m, C, _ = L.shape
    inverse = torch.eye(C, dtype=L.dtype, device=L.device).repeat(m, 1, 1)
    s = 1
    while s < C:
        h = C // (2 * s)
        grid = inverse.view(m, h, 2, s, h, 2, s)
        corner = L.view(m, h, 2, s, h, 2, s)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        target = grid[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        if s == 1:
            target.copy_(-corner)
        else:
            early = grid[:, :, 0, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, s, s)
            late = grid[:, :, 1, :, :, 1].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, s, s)
            block = torch.bmm(torch.bmm(late, corner.reshape(-1, s, s)), early).neg_()
            target.copy_(block.view(m, h, s, s))
        s *= 2
    return inverse


def decay_tiles(decay: Decay, C: int) -> tuple[int, int]:
    return C // decay.c, decay.c


def _causal(C: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Masks [2,C,C]: the query sees its own token, the key does not."""
    ones = torch.ones(C, C, dtype=dtype, device=device)
    return torch.stack([ones.tril(), ones.tril(-1)])


# Between [B,T,heads,...] and chunks.


def _view(x: Tensor, plan: Plan) -> Tensor:
    """[B,T,heads,D] as chunks, heads before tokens: [..., heads, C, D], a view or one gather."""
    B, T, heads, D = x.shape
    if plan.tokens is None:
        return x.reshape(B, T // plan.C, plan.C, heads, D).permute(1, 0, 3, 2, 4)
    return x.reshape(B * T, heads, D).index_select(0, plan.tokens).view(plan.M, plan.C, heads, D).transpose(1, 2)


def _cut(x: Tensor, plan: Plan) -> Tensor:
    """[B,T,heads,D] -> a new [m,C,D] in the accumulating dtype. Padding repeats the sequence's last token."""
    cut = _view(x, plan)
    out = torch.empty(cut.shape, dtype=accumulating(x.dtype), device=x.device)
    return out.copy_(cut).view(-1, plan.C, x.shape[3])


def _joined(x_mCD: Tensor, like: Tensor, plan: Plan) -> Tensor:
    """[m,C,D] -> [B,T,heads,D] with the shape and dtype of `like`."""
    B, T, heads, D = like.shape
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if plan.tokens is None:
        chunks = x_mCD.view(T // plan.C, B, heads, plan.C, D)
        out.view(B, T // plan.C, plan.C, heads, D).copy_(chunks.permute(1, 0, 3, 2, 4))
        return out
    packed = x_mCD.view(plan.M, heads, plan.C, D).transpose(1, 2).reshape(plan.M * plan.C, heads, D)
    return out.copy_(packed[plan.slots].view(like.shape))


def _blank(x_mCD: Tensor, plan: Plan, heads: int) -> None:
    """Zeroes the padding in place, whatever it holds."""
    if plan.padded is not None:
        x_mCD.view(plan.M, heads, plan.C, -1).masked_fill_(plan.padded.view(plan.M, 1, plan.C, 1), 0.0)


def _cut_decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, plan: Plan) -> Tensor:
    """g [m,C,G], zero in the padding, so that padding changes no state."""
    dtype, heads = accumulating(gate.dtype), gate.shape[2]
    chunks = _view(gate, plan)
    z = torch.empty(chunks.shape, dtype=dtype, device=gate.device).copy_(chunks)
    z.add_(dt_bias.to(dtype).unsqueeze(-2))
    if lower_bound is None:
        g = clamped(log_decay(z, A_log.unsqueeze(-1), torch.zeros_like(A_log).view(-1, 1, 1), None))
    else:
        g = z.mul_(A_log.to(dtype).exp().view(-1, 1, 1)).sigmoid_().mul_(lower_bound)
    g = g.view(-1, plan.C, gate.shape[3])
    _blank(g, plan, heads)
    return g


def _cut_beta(beta: Tensor, plan: Plan) -> Tensor:
    """sigmoid(β) [m,C,1], zero in the padding."""
    b = _cut(beta.unsqueeze(-1), plan).sigmoid_()
    _blank(b, plan, beta.shape[2])
    return b


def _keys(
    q: Tensor, k: Tensor, decay: Decay, plan: Plan, HV: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows [m,2,C,K] (q·scale·grow, k·grow), columns [m,C,K] (k·shrink), and the inverse norms [M·H,C,1] of q and k."""
    q_cut, k_cut = _cut(q, plan), _cut(k, plan)
    norms = [torch.rsqrt(torch.linalg.vecdot(x, x).add_(L2_EPS)).unsqueeze(-1) for x in (q_cut, k_cut)]
    q_unit, k_unit = (_spread(x.mul_(r), plan, HV) for x, r in zip((q_cut, k_cut), norms, strict=True))
    m, C, K = k_unit.shape
    rows = k_unit.new_empty(m, 2, C, K)
    torch.mul(q_unit, decay.grow, out=rows[:, 0])
    rows[:, 0].mul_(scale)
    torch.mul(k_unit, decay.grow, out=rows[:, 1])
    return rows, k_unit * decay.shrink, norms[0], norms[1]


def _spread(x: Tensor, plan: Plan, HV: int) -> Tensor:
    """Key heads to value heads: [M·H,C,K] -> [M·HV,C,K]."""
    H = x.shape[0] // plan.M if plan.M else HV
    if H == HV:
        return x
    return x.view(plan.M, H, 1, *x.shape[1:]).expand(-1, -1, HV // H, -1, -1).reshape(plan.M * HV, *x.shape[1:])


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
    dstates = torch.zeros_like(states)
    if dfinal is not None:
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
        flat[step].addcmul_(dafter[step], total[step]).baddbmm_(read_T[step], do[step])
        if W_T is not None:
            flat[step].baddbmm_(W_T[step], dU[step])
    begun = plan.steps[0][1] if plan.steps else 0
    initial = torch.cat([dstates[:begun], dstates[plan.M + begun :]])
    return dafter, initial if plan.rank is None else initial.index_select(0, plan.rank)


# Gradients of what went into the chunks.


def _decay_gradient(along_mCK: Tensor, states: Tensor, dafter: Tensor, g: Tensor, plan: Plan) -> Tensor:
    """dg [m,C,G] from q⊙dq + k⊙dk_read − k⊙dk_write and the states after each chunk."""
    C = along_mCK.shape[1]
    after = states[plan.N :] if plan.after is None else states.index_select(0, plan.after)
    at_end = torch.linalg.vecdot(after.flatten(0, 1), dafter).unsqueeze(1)
    if g.shape[2] == 1:
        along_mCK, at_end = along_mCK.sum(-1, keepdim=True), at_end.sum(-1, keepdim=True)
    ones = torch.ones(C, C, dtype=g.dtype, device=g.device).triu()
    dg = torch.matmul(ones, along_mCK).add_(at_end)
    # Where exp(g) is zero so is its gradient; roundoff there would meet the large slope of a softplus gate.
    return dg.masked_fill_(g <= floor(g.dtype), 0.0)


def _key_gradients(
    q: Tensor,
    k: Tensor,
    drows: Tensor,
    dcols: Tensor,
    decay: Decay,
    q_norm: Tensor,
    k_norm: Tensor,
    c_q: Tensor,
    c_k: Tensor,
    plan: Plan,
    scale: float,
    HV: int,
) -> tuple[Tensor, Tensor]:
    """dq, dk in their inputs' shapes: through the decay, the sum over a key head's value heads, and the L2 norm."""
    dq_unit = drows[:, 0].mul_(decay.grow)
    dk_unit = drows[:, 1].mul_(decay.grow).addcmul_(dcols, decay.shrink)
    found = []
    for x, dx, norm, along, factor in ((q, dq_unit, q_norm, c_q, scale), (k, dk_unit, k_norm, c_k, 1.0)):
        dx, along = _gathered(dx, plan, x.shape[2], HV), _gathered(along, plan, x.shape[2], HV)
        # x/‖x‖: d = r (du − u ⟨u, du⟩), with u = r x and ⟨u, du⟩ already summed.
        d = dx.mul(norm * factor).addcmul_(_cut(x, plan), norm.square().mul_(along), value=-1.0)
        found.append(_joined(d, x, plan))
    return found[0], found[1]


def _gathered(x: Tensor, plan: Plan, H: int, HV: int) -> Tensor:
    """Sums over the value heads of each key head."""
    if H == HV:
        return x
    return x.reshape(plan.M, H, HV // H, *x.shape[1:]).sum(2).view(plan.M * H, *x.shape[1:])


def _gate_gradients(
    gate: Tensor, A_log: Tensor, dt_bias: Tensor, dg: Tensor, g: Tensor, lower_bound: float | None, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """d gate, d A_log, d dt_bias from dg [m,C,G]."""
    dtype, HV, G = g.dtype, gate.shape[2], gate.shape[3]
    rate = A_log.to(dtype).exp().view(1, HV, 1, 1)
    bias = dt_bias.to(dtype).view(1, HV, 1, G)
    dg, g = dg.view(-1, HV, plan.C, G), g.view(-1, HV, plan.C, G)
    z = _cut(gate, plan).view(dg.shape).add_(bias)
    if lower_bound is None:
        dA_log = torch.linalg.vecdot(dg, g).sum((0, 2))
        dz = z.sigmoid_().mul_(dg).mul_(-rate)
    else:
        dz = torch.addcmul(g, g, g, value=-1.0 / lower_bound).mul_(dg).mul_(rate)
        dA_log = torch.linalg.vecdot(dz, z).sum((0, 2))
    if plan.padded is not None:
        dz.masked_fill_(plan.padded.view(plan.M, 1, plan.C, 1), 0.0)
    dbias = dz.sum((0, 2))
    dgate = _joined(dz.view(-1, plan.C, G), gate, plan)
    return dgate, dA_log.to(A_log.dtype), dbias.to(dt_bias.dtype)
