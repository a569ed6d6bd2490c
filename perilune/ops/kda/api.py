"""`kda` and `kda_step`: the contract, its checks, and which implementation runs.

Every implementation takes the checked arguments and returns (o, final state, exports); `reference` is the equation.
"""

import functools
import importlib
import importlib.util
import itertools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from perilune.ops.kda.chunk import chunk
from perilune.ops.kda.reference import accumulating, log_decay, reference, spread, step, unit

log = logging.getLogger(__name__)

EXPORT_MULTIPLE = 16

FUSED_CAPABILITY = (8, 0)

IMPLS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor | None]]] = {"reference": reference, "chunk": chunk}


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
        beta: raw logits [B,T,HV].
        A_log: [HV]. dt_bias: [HV,K] or flat [HV·K] ([HV,1] with a scalar gate).
        lower_bound: −5 in K3: g = lb·sigmoid(exp(A_log)(z+b)). None: g = −exp(A_log)·softplus(z+b).
        scale: of q; K^−½ by default.
        state: [N,HV,K,V] fp32 (fp64 for fp64 inputs), any strides; zeros by default. N = B, or the number of sequences.
        cu_seqlens: [N+1] integers: sequences packed on the token axis of a B = 1 batch; empty ones are fine.
        lengths: the same on the host, N integers; saves the device sync of reading cu_seqlens, may replace it.
        export_at: E token counts along the flattened [B·T] axis. Entry p asks for the state right after token p−1, in
            the sequence that holds that token, a multiple of 16 tokens from its start.
        delta: False drops the delta term (a Mamba2-like gated linear attention).
        impl: "auto" | "fused" (bf16, head sizes 64 and 128, NVIDIA) | "chunk" | "reference".
    Returns:
        o [B,T,HV,V] in v's dtype; final state [N,HV,K,V]; exports [E,HV,K,V] or None.
        An empty sequence returns its initial state.
    Raises:
        ValueError: one sentence that names the argument.
    """
    dt_bias = _check(q, k, v, gate, beta, A_log, dt_bias, lower_bound)
    if lengths is None and cu_seqlens is not None:
        lengths = _lengths(cu_seqlens)
    if lengths is not None:
        lengths = [int(n) for n in lengths]
        _check_lengths(lengths, v)
    _check_state(state, q, v, v.shape[0] if lengths is None else len(lengths))
    places = None if export_at is None else _places(export_at, v, lengths)
    return IMPLS[_choose(impl, q, v, delta)](
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
    if q.dim() != 3:
        raise ValueError(f"kda_step: q must be [N,H,K], one token a sequence, got {tuple(q.shape)}.")
    one = [x.unsqueeze(1) for x in (q, k, v, gate, beta)]
    dt_bias = _check(one[0], one[1], one[2], one[3], one[4], A_log, dt_bias, lower_bound)
    _check_state(state, q, v, v.shape[0])
    dtype, heads = accumulating(q.dtype), v.shape[1]
    q = spread(unit(q), heads) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    k = spread(unit(k), heads)
    g = log_decay(gate, A_log, dt_bias, lower_bound)
    o, state = step(q, k, v.to(dtype), g, torch.sigmoid(beta.to(dtype)), state, delta)
    return o.to(v.dtype), state


def _choose(impl: str, q: Tensor, v: Tensor, delta: bool) -> str:
    if impl == "auto":
        why = "there is no NVIDIA GPU" if v.device.type != "cuda" else _unfit(q, v, delta)
        return _auto(v.device.type, why)
    if impl == "fused" and "fused" not in IMPLS:
        IMPLS["fused"] = importlib.import_module("perilune.ops.kda.fused").fused
    if impl not in IMPLS:
        raise ValueError(f"kda: impl is {impl!r}; known are auto, fused, {', '.join(IMPLS)}.")
    return impl


def _unfit(q: Tensor, v: Tensor, delta: bool) -> str | None:
    """None, or why the fused kernels cannot take these inputs."""
    if torch.cuda.get_device_capability(v.device) < FUSED_CAPABILITY:
        return "the GPU is older than Ampere"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return importlib.import_module("perilune.ops.kda.hopper").accepts(q, v, delta)


@torch.compiler.disable  # a tracer would look through the cache, and warn
@functools.cache
def _auto(device: str, why: str | None) -> str:
    """Said once for each reason."""
    name = _choose_name(why)
    log.info("kda on %s runs the %s implementation%s", device, name, "" if why is None else f": {why}")
    return name


def _choose_name(why: str | None) -> str:
    if why is not None:
        return "chunk"
    if "fused" not in IMPLS:
        IMPLS["fused"] = importlib.import_module("perilune.ops.kda.fused").fused
    return "fused"


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
        if not x.is_floating_point():
            raise ValueError(f"kda: {name} must be a floating-point tensor, got {x.dtype}.")
        if (x.dtype == torch.float64) != (q.dtype == torch.float64):
            raise ValueError(f"kda: {name} is {x.dtype} but q is {q.dtype}; fp64 goes all the way or not at all.")
        if x.device != q.device:
            raise ValueError(f"kda: {name} is on {x.device} but q is on {q.device}.")
    B, T, H, K = q.shape
    HV = v.shape[2]
    if k.shape != q.shape:
        raise ValueError(f"kda: k {tuple(k.shape)} must have the shape of q {tuple(q.shape)}.")
    if v.shape[:2] != (B, T):
        raise ValueError(f"kda: v {tuple(v.shape)} must start with q's [B,T] = [{B},{T}].")
    if H == 0 or HV % H:
        raise ValueError(f"kda: v has {HV} heads, which is not a multiple of q's {H}.")
    if gate.shape[:3] != (B, T, HV) or gate.shape[3] not in (K, 1):
        raise ValueError(f"kda: gate must be [{B},{T},{HV},{K}] or [{B},{T},{HV},1], got {tuple(gate.shape)}.")
    if beta.shape != (B, T, HV):
        raise ValueError(f"kda: beta must be [{B},{T},{HV}], got {tuple(beta.shape)}.")
    G = gate.shape[3]
    if A_log.shape != (HV,):
        raise ValueError(f"kda: A_log must be [{HV}], got {tuple(A_log.shape)}.")
    if dt_bias.shape not in ((HV, G), (HV * G,)):
        raise ValueError(f"kda: dt_bias must be [{HV},{G}] or [{HV * G}], got {tuple(dt_bias.shape)}.")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kda: lower_bound must be negative or None, got {lower_bound}.")
    return dt_bias.reshape(HV, G)


def _check_state(state: Tensor | None, q: Tensor, v: Tensor, sequences: int) -> None:
    if state is None:
        return
    want = (sequences, v.shape[-2], q.shape[-1], v.shape[-1])
    if state.shape != want:
        raise ValueError(f"kda: state must be {list(want)}, got {tuple(state.shape)}.")
    if state.dtype != accumulating(q.dtype):
        raise ValueError(f"kda: state must be {accumulating(q.dtype)}, got {state.dtype}.")


def _lengths(cu_seqlens: Tensor) -> list[int]:
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 1:
        raise ValueError(f"kda: cu_seqlens must be [N+1] integers, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}.")
    borders = cu_seqlens.tolist()
    if borders[0] != 0:
        raise ValueError(f"kda: cu_seqlens must start with 0, got {borders[0]}.")
    return [b - a for a, b in itertools.pairwise(borders)]


def _check_lengths(lengths: Sequence[int], v: Tensor) -> None:
    if v.shape[0] != 1:
        raise ValueError(f"kda: packed sequences need B = 1, got B = {v.shape[0]}.")
    if min(lengths, default=0) < 0:
        raise ValueError("kda: cu_seqlens must not decrease.")
    if sum(lengths) != v.shape[1]:
        raise ValueError(f"kda: the sequences hold {sum(lengths)} tokens but T is {v.shape[1]}.")


def _places(export_at: Tensor | Sequence[int], v: Tensor, lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """Positions on the flattened token axis as (sequence, tokens of it) pairs."""
    wanted = [int(p) for p in (export_at.tolist() if isinstance(export_at, Tensor) else export_at)]
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
