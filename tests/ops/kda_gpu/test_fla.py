"""The adapter: fla's call shape against `kda`, both state layouts, and what it refuses."""

import sys
from types import ModuleType

import pytest
import torch
from ops.kda_gpu.cases import case

from perilune.ops.kda import kda
from perilune.ops.kda.fla import INSIDE, chunk_kda, switch_on

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
    with pytest.raises(ValueError, match="safe_gate needs a lower_bound"):
        chunk_kda(q, k, v, gate, beta, A_log=A_log, dt_bias=bias, safe_gate=True, **FLAGS)


def test_it_is_put_where_flas_layers_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer module imported the name for itself, so both places count. fla itself is not needed for this."""
    for name in ("fla", "fla.ops", "fla.layers", "fla.ops.kda", "fla.layers.kda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    switch_on()
    assert sys.modules["fla.ops.kda"].chunk_kda is sys.modules["fla.layers.kda"].chunk_kda is chunk_kda


def test_lengths_on_the_host_are_preferred_and_a_released_A_log_is_flat() -> None:
    it = case([20, 9], heads=2, key=8, value=8)
    q, k, v, gate, beta, A_log, bias, _ = (x.detach() for x in it.leaves)
    keep = {"dt_bias": bias.flatten(), "lower_bound": -5.0, **FLAGS}
    borders = torch.tensor([0, 20, 29])
    want, _ = chunk_kda(q, k, v, gate, beta, A_log=A_log, cu_seqlens=borders, **keep)
    unread = torch.empty(3, dtype=torch.int64, device="meta")  # holds nothing that could be read
    released = A_log.view(1, 1, 2, 1)
    got, end = chunk_kda(q, k, v, gate, beta, A_log=released, cu_seqlens=unread, cu_seqlens_cpu=borders, **keep)
    assert torch.equal(got, want) and end is None
