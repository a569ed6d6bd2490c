"""The fused kernels in Triton's interpreter, fp32: `interpreted.py NAME...`; prints the worst error of each."""

import sys

import torch
from ops.kda_gpu.cases import Case, case, error

from perilune.ops.kda import hopper, hopper_backward, kda
from perilune.ops.kda.decode import Drafts, decode
from perilune.ops.kda.reference import reference

PACKED = [0, 100, 1, 0, 64, 65, 0]
EXPORTS = [(1, 16), (1, 64), (1, 96), (4, 64)]


def worst(it: Case, **settings: int) -> float:
    """Values, exports, and every gradient against fp64."""
    torch.manual_seed(0)
    q, k, v, gate, beta, A_log, bias, state = (x.detach() for x in it.leaves)
    lengths = tuple(it.lengths or [v.shape[1]] * v.shape[0])
    problem = hopper.Problem(
        lengths, tuple(it.exports), q.shape[-1] ** -0.5, it.lower_bound,
        v.shape[1], v.shape[2], q.shape[2], q.shape[3], v.shape[3], **settings,
    )  # fmt: skip
    inputs = (q, k, gate, beta, A_log, bias)
    o, final, exports, borders = hopper.forward(inputs, v, state, problem)
    wide = it.in_fp64()
    true = wide.truth()
    seeds = [torch.randn_like(x) for x in (o, final, exports)]
    dexports = seeds[2] if it.exports else None
    got = hopper_backward.backward(inputs, v, state, borders, problem, seeds[0], seeds[1], dexports)
    n = 3 if it.exports else 2
    want = torch.autograd.grad(true[:n], wide.leaves, [s.double() for s in seeds[:n]])
    order = (0, 1, 3, 4, 5, 6, 2, 7)
    errors = [error(a, b) for a, b in zip((o, final, exports)[:n], true)]
    errors += [error(x, want[j]) for x, j in zip(got, order)]
    return max(errors)


def bounded() -> float:
    return max(worst(case([70], slow=slow)) for slow in (False, True))


def softplus() -> float:
    return max(worst(case([70], heads=1, slow=slow, lower_bound=None)) for slow in (False, True))


def packed() -> float:
    return worst(case(PACKED, heads=1, values=2, exports=EXPORTS))


def segments() -> float:
    return worst(case([260], heads=1), segments=2)


def panels() -> float:
    return worst(case([200, 3], heads=1), limit=2)


def batch() -> float:
    return worst(case([40, 40], heads=1, batch=2))


def by_head() -> float:
    """Gates of one decay a head, values and every gradient."""
    from perilune.ops.kda.fused import fused

    hopper.accepts = lambda *_: None  # fp32, which the interpreter multiplies
    it = case([40, 30], heads=1, values=2, lower_bound=None).by_head()
    wide, found = it.in_fp64(), []
    for one, op in ((it, fused), (wide, reference)):
        out = op(*one.leaves[:5], **one.keywords)[:2]
        seeds = [torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape) for x in out]
        found.append([*out, *torch.autograd.grad(out, one.leaves, seeds)])
    return max(error(a, b) for a, b in zip(*found))


def operator() -> float:
    """The registered operator: schema, fake tensors, autograd, and the same gradients through `torch.compile`."""
    from perilune.ops.kda.fused import _kda

    it = case([20, 0, 70], heads=1, exports=[(2, 16)])
    arguments = (*it.leaves, it.lengths, [2, 16], 64**-0.5, -5.0)
    torch.library.opcheck(_kda, arguments)

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        o, final, exports, _ = _kda(*leaves, *arguments[8:])
        return o.square().sum() + final.sum() + exports.square().sum()

    plain = torch.autograd.grad(loss(*it.leaves), it.leaves)

    def public(*leaves: torch.Tensor) -> torch.Tensor:
        names = ("A_log", "dt_bias", "state")
        rest = {"lower_bound": -5.0, "lengths": it.lengths, "export_at": [36], "impl": "fused"}
        o, final, exports = kda(*leaves[:5], **dict(zip(names, leaves[5:])), **rest)
        assert exports is not None
        return o.square().sum() + final.sum() + exports.square().sum()

    hopper.accepts = lambda *_: None  # fp32, which the interpreter multiplies
    found = 0.0
    for function in (loss, public):
        traced = torch.compile(function, backend="aot_eager", fullgraph=True)
        compiled = torch.autograd.grad(traced(*it.leaves), it.leaves)
        found = max(found, *(error(a, b) for a, b in zip(compiled, plain)))
    return found


def steps() -> float:
    """Windows of one and of four tokens, replaying what was accepted, against the equations."""
    return max(_steps(1, -5.0, True), _steps(1, None, False), _steps(4, -5.0, False))


def _steps(window: int, lower_bound: float | None, value_first: bool) -> float:
    torch.manual_seed(0)
    R, H, HV, K, V, slots = 4, 1, 2, 32, 32, 6
    C = 2 * H * K + HV * V
    state = torch.randn(slots, HV, V, K).transpose(2, 3) if value_first else torch.randn(slots, HV, K, V)
    tail = torch.randn(slots, C, 3)
    weights = {
        "conv_weight": torch.randn(C, 4) * 0.5,
        "A_log": torch.rand(HV),
        "dt_bias": torch.rand(HV, K),
        "norm_weight": torch.rand(V) + 0.5,
        "lower_bound": lower_bound,
        "slots": torch.tensor([3, -1, 0, 5]),
    }
    sides, found = {}, 0.0
    for t in range(3):
        x = (torch.randn(R, window, C), torch.randn(R, window, HV, K), torch.randn(R, window, HV))
        z = torch.randn(R, window, HV, V)
        accepted = torch.tensor([t, 0, max(0, t - 1), 3]).clamp(max=window - 1) if t else None
        outs = []
        for impl in ("reference", "kernel"):
            if t == 0:
                drafts = Drafts.empty(slots, window - 1, *x) if window > 1 else None
                sides[impl] = (state.clone(), tail.clone(), drafts)
            s, c, d = sides[impl]
            given = accepted if d is not None else None
            outs.append(decode(*x, z, state=s, tail=c, drafts=d, accepted=given, impl=impl, **weights))
        found = max(found, error(outs[1], outs[0]), *(error(sides["kernel"][i], sides["reference"][i]) for i in (0, 1)))
        assert torch.equal(sides["kernel"][0][1], state[1]), "a slot that no request names was written"
        assert not outs[1][1].any(), "a padding row is not zero"
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, f"{globals()[name]():.1e}")
