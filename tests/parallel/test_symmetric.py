"""The symmetric fabric: its kernels in Triton's interpreter, on threads that share memory; on GPUs, the same over
NVLink.
"""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from parallel.test_planner_triton import script

from perilune.parallel import symmetric
from perilune.parallel.fabric import FabricError, Terms
from perilune.parallel.symmetric import Symmetric, preflight


def test_near_the_equation() -> None:
    assert script("symmetric_cases.py", "check_near_the_equation", interpret=True) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    ["check_layer", "check_half_precision", "check_many_blocks", "check_two_layers", "check_packed", "check_barriers"],
)
def test_equals_the_collectives_bit_for_bit(check: str) -> None:
    assert script("symmetric_cases.py", check, interpret=True) == "ok"


@pytest.mark.slow
def test_compiles_for_hopper() -> None:
    assert script("compile_hopper.py", "symmetric", interpret=False).count("symmetric ") == 12


def test_a_late_rank_is_named() -> None:
    """What the device leaves behind when a barrier gives up becomes one sentence."""
    fabric = Symmetric.__new__(Symmetric)
    fabric.rank, fabric._status = 0, torch.tensor([2, 1, 17])
    with pytest.raises(FabricError, match=r"^rank 0: rank 1 did not reach combine \(barrier 17\)$"):
        fabric.check()


def test_preflight_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks, one runs with multicast, one on another host, one on a card that cannot be reached."""
    ranks = [("here", 0, "1"), ("here", 1, "1"), ("there", 0, "1"), ("here", 2, "")]
    monkeypatch.setattr(symmetric.dist, "get_world_size", lambda _: len(ranks))
    monkeypatch.setattr(symmetric.dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(symmetric.dist, "all_gather_object", lambda seen, *_: seen.__setitem__(slice(None), ranks))
    monkeypatch.setattr(symmetric.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert preflight(None) == ["rank 0 has no CUDA device"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other: other != 2)
    assert preflight(None) == [
        "rank 2 is on host there, not here: peers must share a host",
        "rank 3 runs without TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
        "GPU 0 cannot reach GPU 2 of rank 3",
    ]
    with pytest.raises(FabricError, match=r"^no symmetric fabric: rank 2 is on host there"):
        Symmetric(object())  # type: ignore[arg-type]


def test_what_has_no_fixed_shapes_is_refused() -> None:
    fabric = Symmetric.__new__(Symmetric)
    ids = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="fixed shapes"):
        fabric.route(ids, Terms(4, 2, 0, 1, None, chained=True))
    with pytest.raises(ValueError, match="one payload a token and host"):
        fabric.route(ids, Terms(4, 2, 0, 1, 8, chained=False))
