"""The call shape of `fla.ops.kda.chunk_kda`, so that a flash-linear-attention model runs on these kernels.

`switch_on()` puts it where fla's layers look. Only the fused form exists here: norms, gate and β inside.
"""

import importlib
from typing import Any

from torch import Tensor

from perilune.ops.kda.api import kda

INSIDE = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
IGNORED = {"safe_gate", "disable_recompute", "chunk_size"}  # they choose how fla computes, not what


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **flags: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla's arguments and results: q, k [B,T,H,K]; v [B,T,HV,V]; g raw [B,T,HV,K]; beta raw [B,T,HV].

    States are [N,HV,K,V], or [N,HV,V,K] with state_v_first (a view here: nothing is copied). With cu_seqlens_cpu the
    device is not asked for the lengths.
    Raises ValueError for what would change the result and is not done here.
    """
    for name in INSIDE:
        if not flags.pop(name, False):
            raise ValueError(f"chunk_kda: {name} must be true; norms, gate and beta are inside these kernels.")
    if unknown := [name for name, value in flags.items() if name not in IGNORED and value not in (None, False)]:
        raise ValueError(f"chunk_kda: {unknown[0]} is not supported.")
    if flags.get("safe_gate") and lower_bound is None:
        raise ValueError("chunk_kda: safe_gate needs a lower_bound.")
    if dt_bias is None:
        dt_bias = A_log.new_zeros(g.shape[2:].numel())
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, final, _ = kda(
        q, k, v, g, beta, A_log=A_log.reshape(-1), dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        state=initial_state, cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
    )  # fmt: skip
    if not output_final_state:
        return o, None
    return o, final.transpose(-1, -2) if state_v_first else final


def switch_on() -> None:
    """From now on fla's KDA layers call these kernels in training and over prompts (needs fla installed).

    Steps of up to 64 tokens, which its layers take by `fused_recurrent_kda` in inference, stay fla's own.
    """
    for name in ("fla.ops.kda", "fla.layers.kda"):
        importlib.import_module(name).__dict__["chunk_kda"] = chunk_kda
