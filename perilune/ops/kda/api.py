"""`kda` and `kda_step`: the contract, its checks, and which implementation runs.

Every implementation takes the checked arguments and returns (o, final state, exports); `reference` is the equation.
"""

import functools
import importlib.util
import itertools
import logging
import math
import operator
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from perilune.ops.kda.chunk import chunk
from perilune.ops.kda.reference import accumulating, log_decay, reference, spread, step, unit
from perilune.ops.precision import own_precision

log = logging.getLogger(__name__)

EXPORT_MULTIPLE = 16
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)

AMPERE = 8

Implementation = Callable[..., tuple[Tensor, Tensor, Tensor | None]]

IMPLS: dict[str, Implementation] = {"chunk": chunk, "reference": reference}  # on any device

TRITON = importlib.util.find_spec("triton") is not None


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    export_at: Tensor | Sequence[int] | None = None,
    delta: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences (technical report §2.1.1): norms, gate and β inside.

    Args:
        q, k: [B,T,H,K], not normalised; L2 norm (sum, eps 1e-6) is taken here.
        v: [B,T,HV,V] with HV a multiple of H; value head h reads key head h // (HV/H).
        gate: raw [B,T,HV,K], or [B,T,HV,1] for one decay a head (Gated DeltaNet).
        beta: raw logits [B,T,HV]. These five: 16 to 64 bits, not necessarily alike, but fp64 all or none.
        A_log: [HV]. dt_bias: [HV,K] or flat [HV·K] ([HV,1] with a scalar gate).
        lower_bound: −5 in K3: g = lb·sigmoid(exp(A_log)(z+b)). None: g = −exp(A_log)·softplus(z+b).
        scale: of q; K^−½ by default.
        state: [N,HV,K,V] fp32 (fp64 for fp64 inputs), any strides; zeros by default. N = B, or the number of sequences.
        cu_seqlens: [N+1] integers: sequences packed on the token axis of a B = 1 batch; empty ones are fine.
        lengths: the same on the host, N integers; saves the device sync of reading cu_seqlens, may replace it. Where
            both are given and cu_seqlens lies on a GPU, only their number is compared.
        export_at: E token counts along the flattened [B·T] axis. Entry p asks for the state right after token p−1, in
            the sequence that holds that token, a multiple of 16 tokens from its start.
        delta: False drops the delta term (a Mamba2-like gated linear attention).
        impl: "auto" | "fused" (bf16, head sizes 64 and 128, NVIDIA) | "chunk" | "reference".
    Returns:
        o [B,T,HV,V] in v's dtype; final state [N,HV,K,V]; exports [E,HV,K,V] or None. New tensors: the given state
        is not written. An empty sequence returns its initial state.
        Differentiable once (`reference`: as often as asked) in every tensor of floats.
    Raises:
        ValueError: one sentence that names the argument.
    """
    dt_bias = _check(q, k, v, gate, beta, A_log, dt_bias, lower_bound)
    lengths = _lengths(cu_seqlens, lengths)
    if lengths is not None:
        _check_lengths(lengths, v)
    _check_state(state, q, v, v.shape[0] if lengths is None else len(lengths))
    places = None if export_at is None else _places(export_at, v, lengths)
    return _choose(impl, q, v, delta)(
        q,
        k,
        v,
        gate,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        state=state,
        lengths=lengths,
        export_at=places,
        delta=delta,
    )


@own_precision
def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    scale: float | None = None,
    delta: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token a sequence: `kda` with T = 1, without the token axis.

    q, k [N,H,K]; v [N,HV,V]; gate raw [N,HV,K] or [N,HV,1]; beta raw [N,HV]; state [N,HV,K,V].
    Returns (o [N,HV,V] in v's dtype, new state); the given state is not written.
    """
    for name, x, axes in (("q", q, 3), ("k", k, 3), ("v", v, 3), ("gate", gate, 3), ("beta", beta, 2)):
        if x.dim() != axes:
            raise ValueError(f"kda_step: {name} must have {axes} axes, one token a sequence, got {tuple(x.shape)}.")
    one = [x.unsqueeze(1) for x in (q, k, v, gate, beta)]
    dt_bias = _check(one[0], one[1], one[2], one[3], one[4], A_log, dt_bias, lower_bound)
    _check_state(state, q, v, v.shape[0])
    dtype, heads = accumulating(q.dtype), v.shape[1]
    q = spread(unit(q), heads) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    k = spread(unit(k), heads)
    g = log_decay(gate, A_log, dt_bias, lower_bound)
    o, state = step(q, k, v.to(dtype), g, torch.sigmoid(beta.to(dtype)), state, delta)
    return o.to(v.dtype), state


def _choose(impl: str, q: Tensor, v: Tensor, delta: bool) -> Implementation:
    if impl == "auto":
        why = "there is no NVIDIA GPU" if v.device.type != "cuda" else _unfit(q, v, delta)
        if not torch.compiler.is_compiling():  # a tracer would look through the cache, and warn
            _say(v.device.type, why)
        return _fused() if why is None else chunk
    if impl == "fused":
        if (why := _unfit(q, v, delta)) is not None:
            raise ValueError(f"kda: the fused implementation cannot run this: {why}.")
        return _fused()
    if impl not in IMPLS:
        raise ValueError(f"kda: impl is {impl!r}; known are auto, fused, {', '.join(IMPLS)}.")
    return IMPLS[impl]


def _unfit(q: Tensor, v: Tensor, delta: bool) -> str | None:
    """None, or why the fused kernels cannot take these inputs. Triton's interpreter takes those of a CPU."""
    if v.device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "there is no NVIDIA GPU"
    elif torch.cuda.get_device_properties(v.device).major < AMPERE:  # not its capability: a tracer folds this one
        return "the GPU is older than Ampere"
    if not TRITON:
        return "triton is not installed"
    from perilune.ops.kda.hopper import accepts

    return accepts(q, v, delta)


def _fused() -> Implementation:
    from perilune.ops.kda.fused import fused  # Triton is an extra

    return fused


@functools.cache
def _say(device: str, why: str | None) -> None:
    """Said once for each reason."""
    name = "fused" if why is None else "chunk"
    log.info("kda on %s runs the %s implementation%s", device, name, "" if why is None else f": {why}")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
) -> Tensor:
    """Shapes and dtypes; returns dt_bias as [HV,G]."""
    for name, x, dims in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("gate", gate, 4), ("beta", beta, 3)):
        if x.dim() != dims:
            raise ValueError(f"kda: {name} must have {dims} axes, got shape {tuple(x.shape)}.")
        if (x.dtype == torch.float64) != (q.dtype == torch.float64):
            raise ValueError(f"kda: {name} is {x.dtype} but q is {q.dtype}; fp64 goes all the way or not at all.")
    named = {"q": q, "k": k, "v": v, "gate": gate, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    for name, x in named.items():
        if not x.is_floating_point() or x.dtype.itemsize < 2:
            raise ValueError(f"kda: {name} must be floating point of 16 bits or more, got {x.dtype}.")
        if x.device != q.device:
            raise ValueError(f"kda: {name} is on {x.device} but q is on {q.device}.")
    B, T, H, K = q.shape
    HV = v.shape[2]
    if k.shape != q.shape:
        raise ValueError(f"kda: k {tuple(k.shape)} must have the shape of q {tuple(q.shape)}.")
    if v.shape[:2] != (B, T):
        raise ValueError(f"kda: v {tuple(v.shape)} must start with q's [B,T] = [{B},{T}].")
    if H == 0 or HV == 0 or HV % H:
        raise ValueError(f"kda: v has {HV} heads, which is not a multiple of q's {H}.")
    if K == 0 or v.shape[3] == 0:
        raise ValueError(f"kda: heads of q and v must not be empty, got sizes {K} and {v.shape[3]}.")
    if gate.shape[:3] != (B, T, HV) or gate.shape[3] not in (K, 1):
        raise ValueError(f"kda: gate must be [{B},{T},{HV},{K}] or [{B},{T},{HV},1], got {tuple(gate.shape)}.")
    if beta.shape != (B, T, HV):
        raise ValueError(f"kda: beta must be [{B},{T},{HV}], got {tuple(beta.shape)}.")
    G = gate.shape[3]
    if A_log.shape != (HV,):
        raise ValueError(f"kda: A_log must be [{HV}], got {tuple(A_log.shape)}.")
    if dt_bias.shape not in ((HV, G), (HV * G,)):
        raise ValueError(f"kda: dt_bias must be [{HV},{G}] or [{HV * G}], got {tuple(dt_bias.shape)}.")
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise ValueError(f"kda: lower_bound must be negative and finite, or None, got {lower_bound}.")
    return dt_bias.reshape(HV, G)


def _check_state(state: Tensor | None, q: Tensor, v: Tensor, sequences: int) -> None:
    if state is None:
        return
    want = (sequences, v.shape[-2], q.shape[-1], v.shape[-1])
    if state.shape != want:
        raise ValueError(f"kda: state must be {list(want)}, got {tuple(state.shape)}.")
    if state.dtype != accumulating(q.dtype):
        raise ValueError(f"kda: state must be {accumulating(q.dtype)}, got {state.dtype}.")
    if state.device != q.device:
        raise ValueError(f"kda: state is on {state.device} but q is on {q.device}.")


def _lengths(cu_seqlens: Tensor | None, lengths: Sequence[int] | None) -> list[int] | None:
    """Tokens of each packed sequence, from the host where it knows them."""
    known = None if lengths is None else _integers("lengths", lengths)
    if cu_seqlens is None:
        return known
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in INTEGERS or len(cu_seqlens) < 1:
        raise ValueError(f"kda: cu_seqlens must be [N+1] integers, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}.")
    if known is not None and len(cu_seqlens) != len(known) + 1:
        raise ValueError(f"kda: cu_seqlens names {len(cu_seqlens) - 1} sequences, lengths {len(known)}.")
    if known is not None and cu_seqlens.device.type != "cpu":
        return known
    borders = cu_seqlens.tolist()
    if borders[0] != 0:
        raise ValueError(f"kda: cu_seqlens must start with 0, got {borders[0]}.")
    read = [b - a for a, b in itertools.pairwise(borders)]
    if known is not None and read != known:
        raise ValueError(f"kda: cu_seqlens and lengths disagree: {_few(read)} and {_few(known)}.")
    return read


def _integers(name: str, values: Tensor | Sequence[int]) -> list[int]:
    """On the host; a fraction is refused, not cut off."""
    try:
        return [operator.index(n) for n in (values.tolist() if isinstance(values, Tensor) else values)]
    except TypeError:
        raise ValueError(f"kda: {name} must be a row of integers, got {values}.") from None


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _check_lengths(lengths: Sequence[int], v: Tensor) -> None:
    if v.shape[0] != 1:
        raise ValueError(f"kda: packed sequences need B = 1, got B = {v.shape[0]}.")
    if min(lengths, default=0) < 0:
        raise ValueError("kda: a sequence cannot have fewer than 0 tokens; cu_seqlens must not decrease.")
    if sum(lengths) != v.shape[1]:
        raise ValueError(f"kda: the sequences hold {sum(lengths)} tokens but T is {v.shape[1]}.")


def _places(export_at: Tensor | Sequence[int], v: Tensor, lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """Positions on the flattened token axis as (sequence, tokens of it) pairs."""
    wanted = _integers("export_at", export_at)
    spans = [v.shape[1]] * v.shape[0] if lengths is None else lengths
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    places = [(0, 0)] * len(wanted)
    n, start = 0, 0
    for e in order:
        p = wanted[e]
        while n < len(spans) and p > start + spans[n]:
            start += spans[n]
            n += 1
        if n == len(spans) or p <= start or (p - start) % EXPORT_MULTIPLE:
            raise ValueError(
                f"kda: export_at {p} is not a multiple of {EXPORT_MULTIPLE} tokens inside a sequence."
                if n < len(spans)
                else f"kda: export_at {p} is past the last token."
            )
        places[e] = (n, p - start)
    return places
