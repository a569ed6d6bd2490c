"""KDA over a sequence cut across ranks: one all-gather forward, one backward (report §5.1.2, equation 17).

A rank's tokens act on the state that enters them as an affine map, S_out = M S_in + B, with M = Π (I − β k kᵀ) Diag(α)
and B the state they make from zero. Both come from local tokens alone:

    forward   every rank computes (M, B) of its last document's part and all gather them. Each folds those of its own
              first document from the left, S ← M_j S + B_j, and runs its tokens from the true S.
    backward  every rank computes dS, what its own tokens ask of the state that entered, and all gather it. Each folds
              from the right, X_j = dS_j + M_jᵀ X_{j+1}: the missing gradient of the state that left it.

The fragments are fp32 (fp64 for fp64 inputs): [M | B] is H·K·(K + V) numbers, whatever the length; backward sends
H·K·V. M needs no kernel of its own: from the state I, with values of zero, the same recurrence ends in M. A fold stops
where a document begins; ranks whose last document ends with them send zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.kda import kda
from perilune.ops.precision import own_precision
from perilune.parallel.fabric import Collective, accumulating
from perilune.parallel.shards import Shard

Kda = Callable[..., tuple[Tensor, Tensor, Tensor | None]]


def kda_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    fabric: Collective,
    piece: Shard,
    scale: float | None = None,
    state: Tensor | None = None,
    delta: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`perilune.ops.kda.kda` on this rank's tokens [1, T, ...] of the packed sequence `piece`.

    state: [N, HV, K, V] initial states of the N local documents; that of a first document begun elsewhere is not read.
    Returns o [1, T, HV, V] and the states [N, HV, K, V] after the local part of each document: the final one where the
    document ends here. Every rank must call it. Backward runs the local part again and keeps only the inputs.
    Gradients of A_log and dt_bias are those of the local tokens: their sum over ranks is the whole.
    """
    if (piece.rank, piece.size) != (fabric.rank, fabric.size):
        raise ValueError(
            f"kda_parallel: the piece is rank {piece.rank}'s of {piece.size}, "
            f"the fabric rank {fabric.rank} of {fabric.size}"
        )
    if q.dim() != 4 or q.shape[0] != 1 or q.shape[1] != piece.tokens:
        raise ValueError(f"kda_parallel: rank {piece.rank} holds {piece.tokens} tokens, q is {tuple(q.shape)}")
    options = {"lower_bound": lower_bound, "scale": q.shape[-1] ** -0.5 if scale is None else scale, "delta": delta}
    return _Scan.apply(q, k, v, gate, beta, A_log, dt_bias, state, fabric, piece, options | {"impl": impl})


@own_precision  # autocast would round the states that documents carry
def compose(fragments_RHKC: Tensor, piece: Shard, K: int) -> Tensor:
    """State entering this rank [H, K, V] from all ranks' [M | B]; zeros where its first document begins here."""
    S = torch.zeros_like(fragments_RHKC[0, ..., K:])
    for j in range(piece.rank):
        M, B = fragments_RHKC[j].split([K, S.shape[-1]], -1)
        S = M @ S + B  # M is zero where the document began on rank j
    return S if piece.carried else torch.zeros_like(S)


@own_precision
def decompose(dS_RHKV: Tensor, fragments_RHKC: Tensor, piece: Shard) -> Tensor:
    """Gradient of the state that leaves this rank [H, K, V] from what later ranks ask of the states that enter them."""
    K = dS_RHKV.shape[-2]
    X = torch.zeros_like(dS_RHKV[0])
    for j in range(piece.size - 1, piece.rank, -1):
        X = dS_RHKV[j] + fragments_RHKC[j, ..., :K].mT @ X if piece.reach[j] else torch.zeros_like(X)
    return X


def _fragment(inputs: tuple[Tensor, ...], state: Tensor | None, piece: Shard, options: dict[str, Any]) -> Tensor:
    """[M | B] of this rank's part of its last document, [HV, K, K + V]; zeros where nobody needs it."""
    q, k, v, gate, beta, A_log, dt_bias = inputs
    HV, V, K = v.shape[2], v.shape[3], q.shape[-1]
    wide = accumulating(q.dtype)
    if not piece.continues:
        return v.new_zeros(HV, K, K + V, dtype=wide)
    n, through = piece.lengths[-1], piece.through[piece.rank]
    _, k, v, gate, beta = (x[:, x.shape[1] - n :] for x in (q, k, v, gate, beta))

    def final(values: Tensor, start: Tensor) -> Tensor:
        args = {"A_log": A_log, "dt_bias": dt_bias, "state": start, "lengths": [n], **options}
        return kda(k, k, values, gate, beta, **args)[1][0]

    zero = v.new_zeros(1, HV, K, V, dtype=wide)
    if not through:  # begins here, from its own state: nothing to pass on
        B = final(v, zero if state is None else state[-1:])
        return torch.cat([B.new_zeros(HV, K, K), B], -1)
    eye = torch.eye(K, dtype=wide, device=v.device).expand(1, HV, K, K)
    return torch.cat([final(v.new_zeros(*v.shape[:3], K), eye), final(v, zero)], -1)


def _local(inputs: tuple[Tensor, ...], states: Tensor, piece: Shard, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    q, k, v, gate, beta, A_log, dt_bias = inputs
    lengths = list(piece.lengths)
    o, final, _ = kda(q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, state=states, lengths=lengths, **options)
    return o, final


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        *inputs, state, fabric, piece, options = args
        q, v = inputs[0], inputs[2]
        fragments = fabric.gather(_fragment(tuple(inputs), state, piece, options))
        entering = compose(fragments, piece, q.shape[-1])[None]
        if state is None:
            state = entering.new_zeros(len(piece.lengths), v.shape[2], q.shape[-1], v.shape[-1])
        states = torch.cat([entering, state[1:]]) if piece.carried else state
        ctx.save_for_backward(*inputs, states, fragments)
        ctx.fabric, ctx.piece, ctx.options = fabric, piece, options
        return _local(tuple(inputs), states, piece, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, states, fragments = ctx.saved_tensors
        piece = ctx.piece
        needed = [*ctx.needs_input_grad[:7], True]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(need) for x, need in zip([*inputs, states], needed)]
            o, final = _local(tuple(leaves[:7]), leaves[7], piece, ctx.options)
            asked = torch.autograd.grad((o, final), leaves[7], (do, dfinal), retain_graph=True)[0]
        dS = ctx.fabric.gather(asked[0])
        dfinal = torch.cat([dfinal[:-1], dfinal[-1:] + decompose(dS, fragments, piece)])
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad((o, final), wanted, (do, dfinal)))
        *grads, dstates = [next(found) if x.requires_grad else None for x in leaves]
        if piece.carried and dstates is not None:  # that state was computed, not given
            dstates = torch.cat([torch.zeros_like(dstates[:1]), dstates[1:]])
        return *grads, dstates if ctx.needs_input_grad[7] else None, None, None, None
