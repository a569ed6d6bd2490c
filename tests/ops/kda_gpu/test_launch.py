"""Launches that skip Triton's binder run the form that the binder would have chosen."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from perilune.ops.kda import launch as module
from perilune.ops.kda.launch import launch

CONSTANTS = {"HV": 8, "K": 128}


class Kernel:
    """Stands for Triton's function: counts what goes through its binder, and what reaches a compiled form."""

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def bind(*arguments: Any, **named: Any) -> SimpleNamespace:
            self.bound.append((grid, arguments, named))
            return SimpleNamespace(run=lambda *a: self.ran.append(a), function="code", packed_metadata="packed")

        return bind


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(module, "JITFunction", Kernel)
    monkeypatch.setattr(module, "_made", {})
    return Kernel()


def test_the_second_launch_goes_straight_to_the_compiled_form(kernel: Kernel) -> None:
    x, y = torch.zeros(32), torch.zeros(32)
    for tensor in (x, y):  # other memory, the same form
        launch(kernel, (3, 2), ("rows",), (tensor,), (64, 0.5), CONSTANTS, num_warps=4)
    assert kernel.bound == [((3, 2), ("rows", x, 64, 0.5), CONSTANTS | {"num_warps": 4})]
    assert [a[:8] for a in kernel.ran] == [(3, 2, 1, "stream of 0", "code", "packed", None, None)]
    assert kernel.ran[0][9:] == ("rows", y, 64, 0.5, 8, 128)


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": (torch.zeros(32, dtype=torch.bfloat16),)},
        {"tensors": (torch.zeros(33)[1:],)},  # 4 bytes off: no 16-byte access
        {"numbers": (1, 0.5)},
        {"constants": CONSTANTS | {"K": 64}},
        {"num_warps": 8},
    ],
    ids=["type", "alignment", "number", "constant", "warps"],
)
def test_whatever_the_binder_would_look_at_goes_through_it(kernel: Kernel, change: dict[str, Any]) -> None:
    usual = {"tensors": (torch.zeros(32),), "numbers": (64, 0.5), "constants": CONSTANTS, "num_warps": 4}
    for given in (usual, usual | change):
        launch(kernel, (1, 1), (), **given)
    assert len(kernel.bound) == 2 and kernel.ran == []


def test_a_profiler_sees_every_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = SimpleNamespace(calls=[print])
    monkeypatch.setattr(module, "knobs", SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hooks)))
    for _ in range(2):
        launch(kernel, (1, 1), (), (torch.zeros(32),), (64,), CONSTANTS)
    assert len(kernel.bound) == 2 and kernel.ran == []
