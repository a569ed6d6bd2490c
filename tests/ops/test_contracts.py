"""What all the small ops promise: bad input is one sentence, autocast changes no bit, `impl` means what it says."""

import pytest
import torch
from torch import Tensor

from perilune.ops import cross_entropy
from perilune.ops.attention import attention, attention_reference
from perilune.ops.attnres import merge, mix, mix_ahead, probabilities, rms_scale
from perilune.ops.conv import short_conv, short_conv_reference, short_convs
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.experts import Activation, experts, experts_reference, grouped_mlp
from perilune.ops.mla import mla_decode
from perilune.ops.mx import pack_mxfp4, round_mxfp4, unpack_mxfp4
from perilune.ops.norm import gated_rms_norm, rms_norm, sigmoid_gate
from perilune.ops.packed import Packed, packed_experts
from perilune.ops.quantile import alternating_solver, exact_quantile, margin_histogram
from perilune.ops.router import route
from perilune.ops.situ import packed_glu, situ_glu


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


E, L, T, k = 4, 32, 5, 2
CHOICES = {"idx": torch.tensor([[0, 3]] * T), "weight": torch.full((T, k), 0.5)}
MOE = {"z": randn(T, L), **CHOICES, "gate_up": randn(E, 2 * L, L) * 0.2, "down": randn(E, L, L) * 0.2}
PACKED = {"z": randn(T, L), **CHOICES, "gate_up": Packed(*pack_mxfp4(MOE["gate_up"]))}
PACKED["down"] = Packed(*pack_mxfp4(MOE["down"]))
ROWS = {"rows": randn(6, L), "row_weight": torch.ones(6), "gate_up": MOE["gate_up"], "down": MOE["down"]}
HEAD = {"hidden": randn(6, 4), "weight": randn(9, 4), "targets": torch.tensor([0, 8, 3, -100, 1, 2])}
QKV = [randn(16, 2, 8) for _ in range(3)]
MLA = {"q": randn(2, 1, 3, 8), "latents": randn(5, 4, 8), "table": torch.tensor([[0, 1], [2, 3]])}
MLA |= {"lengths": torch.tensor([3, 8]), "values": 6, "scale": 0.3}
BLOCKS = [randn(3, 64) + i for i in range(3)]
SCORES = randn(10, 8).sigmoid()


def ends(*counts: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(counts, dtype=dtype)


WRONG = {
    "choices must lie in 0..3": [
        lambda: experts(**MOE | {"idx": torch.full((T, k), -1)}),
        lambda: experts(**MOE | {"idx": torch.full((T, k), E)}),
        lambda: packed_experts(**PACKED | {"idx": torch.full((T, k), E)}),
    ],
    "choices must lie in 0..4": [lambda: experts(**MOE | {"idx": torch.full((T, k), E + 1)}, partial=True)],
    "idx must be integers": [lambda: experts(**MOE | {"idx": torch.zeros(T, k)})],
    "must be [5,k]": [lambda: experts(**MOE | {"idx": CHOICES["idx"][:, :0], "weight": CHOICES["weight"][:, :0]})],
    "gate_up must be [E,2I,L]": [lambda: experts(**MOE | {"gate_up": MOE["gate_up"][0]})],
    "must share a dtype": [lambda: experts(**MOE | {"z": MOE["z"].bfloat16()})],
    "the activation is 'gelu'": [lambda: experts(**MOE, activation=Activation("gelu"))],
    "ends must rise to the 6 rows": [
        lambda: grouped_mlp(**ROWS, ends=ends(1, 2, 3, 4)),
        lambda: grouped_mlp(**ROWS, ends=ends(3, 2, 4, 6)),
    ],
    "ends must be [4] int32": [lambda: grouped_mlp(**ROWS, ends=ends(1, 2, 3, 6, dtype=torch.int64))],
    "gate_up must be [E,2I,L] packed": [
        lambda: packed_experts(**PACKED | {"gate_up": Packed(*(x[0] for x in PACKED["gate_up"]))})
    ],
    "scales of down do not fit": [
        lambda: packed_experts(**PACKED | {"down": Packed(PACKED["down"].codes, PACKED["down"].scales[:, :1])})
    ],
    "target -1 is not in 0..8": [lambda: linear_cross_entropy(**HEAD | {"targets": torch.full((6,), -1)})],
    "target 9 is not in 0..8": [lambda: linear_cross_entropy(**HEAD | {"targets": torch.full((6,), 9)})],
    "targets must be [6] integers": [
        lambda: linear_cross_entropy(**HEAD | {"targets": HEAD["targets"][:1]}),
        lambda: linear_cross_entropy(**HEAD | {"targets": HEAD["targets"].float()}),
    ],
    "hidden must be [T,D]": [lambda: linear_cross_entropy(**HEAD | {"weight": randn(9, 5)})],
    "lengths must be integers of 0 or more": [
        lambda: attention(*QKV, [-1, 17], 1.0),
        lambda: attention(*QKV, [8.0, 8.0], 1.0),
        lambda: short_conv(randn(1, 4, 2), randn(2, 4), lengths=[-1, 5]),
        lambda: short_conv(randn(1, 4, 2), randn(2, 4), lengths=[1.0, 3.0]),
    ],
    "share a dtype of floats": [lambda: attention(*(x.int() for x in QKV), [16], 1.0)],
    "lengths must lie in 1..8": [
        lambda: mla_decode(**MLA | {"lengths": torch.tensor([0, 8])}),
        lambda: mla_decode(**MLA | {"lengths": torch.tensor([3, 9])}),
    ],
    "table and lengths must be integers": [lambda: mla_decode(**MLA | {"table": MLA["table"].float()})],
    "4 channels in 3 parts": [lambda: short_convs(randn(1, 4, 4), randn(4, 4), 3)],
    "under 0 taps": [lambda: short_conv(randn(1, 4, 4), randn(4, 0))],
    "norm must be [64]": [lambda: mix(BLOCKS, BLOCKS[0], randn(64), norm=randn(3))],
    "block 1 is": [lambda: mix_ahead([BLOCKS[0], BLOCKS[1][:1]], randn(2, 64))],
    "read 5 is not one of the 2": [lambda: merge(mix_ahead(BLOCKS, randn(2, 64)), 5, BLOCKS[0], randn(64))],
    "merge: weight must be [64]": [lambda: merge(mix_ahead(BLOCKS, randn(2, 64)), 0, BLOCKS[0], randn(1))],
    "the partial sum (1, 64)": [lambda: merge(mix_ahead(BLOCKS, randn(2, 64)), 0, BLOCKS[0][:1], randn(64))],
    "bias must be [6]": [lambda: route(randn(2, 4), randn(6, 4), torch.zeros(1), top_k=2)],
    "x must be [T,D] and weight [E,D]": [lambda: route(randn(2, 3), randn(6, 4), None, top_k=2)],
    "0 groups": [lambda: route(randn(2, 4), randn(6, 4), None, top_k=2, groups=0)],
    "weight [D]": [
        lambda: rms_norm(randn(2, 4), randn(1), 1e-5),
        lambda: gated_rms_norm(randn(2, 4), randn(2, 4), randn(3), 1e-5),
    ],
    "must have one shape": [
        lambda: gated_rms_norm(randn(2, 3, 4), randn(3, 4), randn(4), 1e-5),
        lambda: sigmoid_gate(randn(2, 4), randn(4)),
    ],
    "must be floating point": [lambda: situ_glu(torch.ones(4).int(), torch.ones(4).int())],
    "linear_beta be positive": [lambda: situ_glu(randn(4), randn(4), 4.0, 0.0)],
    "not 'gelu' of [3, 6]": [lambda: packed_glu(randn(3, 6), "gelu")],
    "not 'situ' of [3, 5]": [lambda: packed_glu(randn(3, 5))],
    "need threshold [10]": [lambda: margin_histogram(SCORES, randn(1), torch.zeros(8))],
    "bias [8]": [lambda: margin_histogram(SCORES, randn(10), torch.zeros(3))],
    "mask must be [10] bool": [lambda: margin_histogram(SCORES, randn(10), torch.zeros(8), mask_T=torch.ones(10))],
    "there is no token": [lambda: exact_quantile(SCORES[:0], 2)],
    "8 of 8 experts": [lambda: alternating_solver(SCORES, 8)],
    "MXFP4 scales of [3, 64]": [
        lambda: pack_mxfp4(randn(3, 64), torch.full((3, 1), 127, dtype=torch.uint8)),
        lambda: pack_mxfp4(randn(3, 64), torch.full((3, 2), 127.5)),
    ],
    "not a multiple": [lambda: pack_mxfp4(torch.tensor(1.0))],
}  # fmt: skip


@pytest.mark.parametrize(("says", "call"), [(says, call) for says, calls in WRONG.items() for call in calls])
def test_bad_input_is_one_sentence(says: str, call) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert says in str(error.value) and "\n" not in str(error.value)


CALLS = {
    "mix": lambda impl: mix(BLOCKS, BLOCKS[0], randn(64), impl=impl),
    "route": lambda impl: route(randn(2, 4), randn(6, 4), None, top_k=2, activation="softmax", impl=impl),
    "short_conv": lambda impl: short_convs(randn(1, 4, 4), randn(4, 4), 2, impl=impl),
    "experts": lambda impl: experts(**MOE, partial=True, impl=impl),
    "gated_rms_norm": lambda impl: gated_rms_norm(randn(2, 4), None, randn(4), 1e-5, impl=impl),
    "mix without blocks": lambda impl: mix([], BLOCKS[0], randn(64), impl=impl),
    "attention": lambda impl: attention(*QKV, [16], 1.0, impl=impl),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_implementation_asked_for_runs_or_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in calls that the kernels do not know, which used to run torch's operations whatever was asked."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="impl is 'fast'"):
        CALLS[name]("fast")
    with pytest.raises(ValueError, match="the fused kernels cannot run this"):
        CALLS[name]("fused")
    CALLS[name]("eager")


def test_no_gradient_no_gradients_work() -> None:
    """Evaluation with trainable weights makes no gradient products."""
    called = []
    accumulate, cross_entropy._accumulate = cross_entropy._accumulate, lambda *_: called.append(1)
    try:
        with torch.no_grad():
            linear_cross_entropy(**HEAD | {"weight": torch.nn.Parameter(HEAD["weight"])})
        assert not called
        linear_cross_entropy(**HEAD | {"weight": torch.nn.Parameter(HEAD["weight"])})
        assert called
    finally:
        cross_entropy._accumulate = accumulate


def gradients(head: dict) -> tuple[Tensor, ...]:
    hidden, weight = (head[key].clone().requires_grad_() for key in ("hidden", "weight"))
    loss = linear_cross_entropy(hidden, weight, head["targets"])
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


FP32 = {
    "mix": lambda: mix(BLOCKS, BLOCKS[0], randn(64)),
    "ahead": lambda: mix_ahead(BLOCKS, randn(2, 64)),
    "merge": lambda: merge(mix_ahead(BLOCKS, randn(2, 64)), 1, BLOCKS[0], randn(64)),
    "probabilities": lambda: (probabilities(BLOCKS, BLOCKS[0], randn(64)), rms_scale(BLOCKS[0])),
    "route": lambda: route(randn(9, 4), randn(6, 4), None, top_k=2),
    "experts": lambda: (experts(**MOE), experts_reference(**MOE)),
    "head": lambda: gradients(HEAD),
    "attention": lambda: (attention(*QKV, [16], 1.0), attention_reference(*QKV, [16], 1.0)),
    "latents": lambda: mla_decode(**MLA),
    "conv": lambda: (*short_conv(randn(1, 9, 4), randn(4, 4)), *short_conv_reference(randn(1, 9, 4), randn(4, 4))),
    "norms": lambda: (rms_norm(randn(5, 8), randn(8), 1e-5), gated_rms_norm(randn(5, 8), randn(5, 8), randn(8), 1e-5)),
    "situ": lambda: situ_glu(randn(5, 8), randn(5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", FP32)
def test_autocast_changes_no_bit(name: str) -> None:
    plain = FP32[name]()
    with torch.autocast("cpu", torch.bfloat16):
        cast = FP32[name]()
    for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (plain, cast)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_edges_that_are_fine() -> None:
    y, tail = short_conv(randn(1, 4, 3), randn(3, 1), lengths=[1, 0, 3])  # one tap: nothing crosses a border
    torch.testing.assert_close((y, tail), short_conv_reference(randn(1, 4, 3), randn(3, 1), lengths=[1, 0, 3]))
    y, tail = short_conv(randn(1, 0, 3), randn(3, 4), lengths=[])
    assert y.shape == (1, 0, 3) and tail.shape == (0, 3, 4 - 1)
    assert attention(*(x[:0] for x in QKV), [], 1.0).shape == (0, 2, 8)
    nowhere = experts(**MOE | {"idx": torch.full((T, k), E)}, partial=True)
    assert not nowhere.any()
    whole = torch.full((32,), torch.nan)
    assert unpack_mxfp4(*pack_mxfp4(whole)).isnan().all()
    fixed = pack_mxfp4(whole, torch.tensor([127], dtype=torch.uint8))
    assert (unpack_mxfp4(*fixed).abs() == 6.0).all()


def test_tables_made_under_inference_or_by_a_tracer_serve_training() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, weight = randn(1, 23, 3).requires_grad_(), randn(3, 4)
    lengths = [11, 12]

    def all_of_them(x: Tensor, weight: Tensor) -> Tensor:
        y, _ = short_conv(x, weight, lengths=lengths)
        o = attention(*(x[0].unflatten(-1, (1, 3)) for _ in range(3)), lengths, 1.0)
        return y.sum() + o.sum() + round_mxfp4(y.new_zeros(32)).sum()

    want = torch.autograd.grad(all_of_them(x, weight), x)
    with torch.inference_mode():
        all_of_them(x, weight)
    with FakeTensorMode():  # with a dtype that nobody rounded to before
        assert round_mxfp4(torch.zeros(32, dtype=torch.float16)).shape == (32,)
    assert type(round_mxfp4(torch.zeros(32, dtype=torch.float16))) is Tensor
    assert torch.equal(*torch.autograd.grad(all_of_them(x, weight), x), *want)
