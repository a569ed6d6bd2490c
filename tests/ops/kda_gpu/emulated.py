# ruff: noqa: ARG005
"""The Gluon kernels and their launchers on a CPU (`gluon_cpu`): `emulated.py NAME...`; prints every worst error."""

import sys

import torch
from ops.kda_gpu import gluon_cpu, interpreted
from ops.kda_gpu.cases import case, error
from ops.kda_gpu.interpreted import EXPORTS, PACKED, worst

from perilune.ops.kda import (
    decode_launch,
    gluon_backward,
    gluon_chain,
    gluon_decode,
    gluon_gradient,
    gluon_prepare,
    gluon_token,
    hopper,
    hopper_backward,
)
from perilune.ops.kda.decode import decode


def take_over() -> None:
    """Every launch of a Gluon kernel runs here, as if on a Hopper with two processors."""
    for module in (gluon_backward, gluon_chain, gluon_decode, gluon_gradient, gluon_prepare, gluon_token):
        for name, x in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, gluon_cpu.Kernel(x))
    for module in (hopper, hopper_backward, decode_launch):
        vars(module)["on_hopper"] = lambda device: True
        vars(module)["by_hand"] = lambda inputs, problem: problem.bounded
    hopper_backward.processors = lambda device: 2


def bounded() -> float:
    return max(worst(case([70], slow=slow)) for slow in (False, True))


def packed() -> float:
    return worst(case(PACKED, heads=1, values=2, exports=EXPORTS))


def wide() -> float:
    """Segments, panels and a batch, at head sizes of 128 where one of the two is not 64."""
    return max(
        worst(case([260], heads=1, key=128, value=128), segments=2),
        worst(case([200, 3], heads=1, value=128), limit=2),
        worst(case([40, 40], heads=1, key=128, batch=2)),
    )


def steps() -> float:
    return interpreted.steps()


def tokens() -> float:
    """One token a request, grouped heads of 128 by 128, both axes of the state contiguous; a padded row."""
    return max(_tokens(value_first) for value_first in (False, True))


def _tokens(value_first: bool) -> float:
    torch.manual_seed(0)
    R, H, HV, K, V = 3, 1, 2, 128, 128
    C = 2 * H * K + HV * V
    state = torch.randn(4, HV, V, K).transpose(2, 3) if value_first else torch.randn(4, HV, K, V)
    tail, x = torch.randn(4, C, 3), (torch.randn(R, 1, C), torch.randn(R, 1, HV, K), torch.randn(R, 1, HV))
    z = torch.randn(R, 1, HV, V)
    weights = {
        "conv_weight": torch.randn(C, 4) * 0.5, "A_log": torch.rand(HV), "dt_bias": torch.rand(HV, K),
        "norm_weight": torch.rand(V) + 0.5, "lower_bound": -5.0, "slots": torch.tensor([3, -1, 0]),
    }  # fmt: skip
    sides = []
    for impl in ("reference", "kernel"):
        s, t = state.clone(), tail.clone()
        sides.append((decode(*x, z, state=s, tail=t, impl=impl, **weights), s, t))
    assert torch.equal(sides[1][1][1:3], state[1:3]), "a slot that no request names was written"
    return max(error(b, a) for a, b in zip(*sides))


if __name__ == "__main__":
    take_over()
    for name in sys.argv[1:]:
        print(name, f"{globals()[name]():.1e}")
