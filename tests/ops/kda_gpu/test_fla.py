"""The adapter: fla's call shape against `kda`, both state layouts, and what it refuses."""

import pytest
import torch
from ops.kda_gpu.cases import case

from perilune.ops.kda import kda
from perilune.ops.kda.fla import INSIDE, chunk_kda

FLAGS = dict.fromkeys(INSIDE, True)


@pytest.mark.parametrize("v_first", [False, True])
def test_same_numbers_as_kda(v_first: bool) -> None:
    it = case([20, 9], heads=1, values=2, key=8, value=16)
    q, k, v, gate, beta, A_log, bias, state = (x.detach() for x in it.leaves)
    keep = {"A_log": A_log, "dt_bias": bias.flatten(), "lower_bound": -5.0, "cu_seqlens": torch.tensor([0, 20, 29])}
    o, final, _ = kda(q, k, v, gate, beta, state=state, **keep)
    given = state.transpose(-1, -2) if v_first else state
    got, end = chunk_kda(
        q, k, v, gate, beta, initial_state=given, output_final_state=True, state_v_first=v_first,
        safe_gate=True, **FLAGS, **keep,
    )  # fmt: skip
    assert end is not None
    torch.testing.assert_close(got, o)
    torch.testing.assert_close(end.transpose(-1, -2) if v_first else end, final)


def test_refuses_what_it_would_get_wrong() -> None:
    it = case([5], heads=1, key=8, value=8)
    q, k, v, gate, beta, A_log, bias, _ = (x.detach() for x in it.leaves)
    with pytest.raises(ValueError, match="use_gate_in_kernel must be true"):
        chunk_kda(q, k, v, gate, beta, A_log=A_log, dt_bias=bias, **(FLAGS | {"use_gate_in_kernel": False}))
    with pytest.raises(ValueError, match="allow_neg_eigval is not supported"):
        chunk_kda(q, k, v, gate, beta, A_log=A_log, dt_bias=bias, allow_neg_eigval=True, **FLAGS)
