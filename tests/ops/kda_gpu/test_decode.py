"""Decoding by windows against the same tokens one at a time, and against `kda` after a short convolution."""

import pytest
import torch

from perilune.ops.conv import short_conv
from perilune.ops.kda import kda
from perilune.ops.kda.decode import Drafts, decode

R, H, HV, K, V, SLOTS = 2, 1, 2, 8, 4, 3
C = 2 * H * K + HV * V


def layer(seed: int = 0) -> tuple[dict, dict]:
    torch.manual_seed(seed)
    weights = {
        "conv_weight": torch.randn(C, 4, dtype=torch.float64),
        "A_log": torch.rand(HV, dtype=torch.float64),
        "dt_bias": torch.rand(HV, K, dtype=torch.float64),
        "norm_weight": torch.rand(V, dtype=torch.float64),
        "lower_bound": -5.0,
    }
    store = {
        "state": torch.randn(SLOTS, HV, V, K, dtype=torch.float64).transpose(2, 3),
        "tail": torch.randn(SLOTS, C, 3, dtype=torch.float64),
    }
    return weights, store


def tokens(count: int) -> list[torch.Tensor]:
    shapes = ((C,), (HV, K), (HV,), (HV, V))
    return [torch.randn(R, count, *shape, dtype=torch.float64) for shape in shapes]


def test_one_token_at_a_time_equals_the_sequence() -> None:
    weights, store = layer()
    x, gate, beta, z = tokens(7)
    slots = torch.tensor([2, 0])
    before = {name: s.clone() for name, s in store.items()}
    got = [decode(*(y[:, t : t + 1] for y in (x, gate, beta, z)), slots=slots, **weights, **store) for t in range(7)]
    qkv, tail = short_conv(x, weights["conv_weight"], tail=before["tail"][slots])
    q, k, v = qkv.split([H * K, H * K, HV * V], -1)
    o, state, _ = kda(
        q.view(R, 7, H, K), k.view(R, 7, H, K), v.view(R, 7, HV, V), gate, beta, state=before["state"][slots],
        impl="reference", **{n: weights[n] for n in ("A_log", "dt_bias", "lower_bound")},
    )  # fmt: skip
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * weights["norm_weight"] * torch.sigmoid(z)
    torch.testing.assert_close(torch.cat(got, 1), o)
    torch.testing.assert_close(store["state"][slots], state)
    torch.testing.assert_close(store["tail"][slots], tail)
    assert torch.equal(store["state"][1], before["state"][1])


@pytest.mark.parametrize("accepted", [[0, 0], [3, 1], [2, 3]])
def test_windows_replay_what_was_accepted(accepted: list[int]) -> None:
    """A window of one certain token and three drafts, some accepted, then the next window: as if never drafted."""
    weights, store = layer(1)
    slots = torch.tensor([0, 1])
    first, second = tokens(4), tokens(4)
    drafts = Drafts.empty(SLOTS, 3, *first[:3])
    plain = {name: s.clone() for name, s in store.items()}
    a = decode(*first, slots=slots, drafts=drafts, **weights, **store)
    b = decode(*second, slots=slots, drafts=drafts, accepted=torch.tensor(accepted), **weights, **store)
    for r in range(R):
        kept = accepted[r] + 1
        row = [torch.cat([x[r : r + 1, :kept], y[r : r + 1]], 1) for x, y in zip(first, second)]
        one = {name: s.clone() for name, s in plain.items()}
        outs = []
        for t in range(kept + 4):
            outs.append(decode(*(y[:, t : t + 1] for y in row), slots=slots[r : r + 1], **weights, **one))
            if t == kept:  # the second window's certain token
                certain = one["state"][r].clone()
        want = torch.cat(outs, 1)[0]
        torch.testing.assert_close(a[r, :kept], want[:kept])
        torch.testing.assert_close(b[r], want[kept:])
        torch.testing.assert_close(store["state"][r], certain)


def test_padding_touches_nothing() -> None:
    weights, store = layer(2)
    before = {name: s.clone() for name, s in store.items()}
    x = [y.fill_(float("nan")) for y in tokens(1)]
    o = decode(*x, slots=torch.tensor([-1, -1]), **weights, **store)
    assert not o.any() and all(torch.equal(store[n], before[n]) for n in store)


def test_bad_input_is_named() -> None:
    weights, store = layer()
    x = tokens(2)
    with pytest.raises(ValueError, match="a window of 2 tokens needs `drafts`"):
        decode(*x, slots=torch.tensor([0, 1]), **weights, **store)
    with pytest.raises(ValueError, match="gate must be"):
        decode(x[0], x[1][..., :3], *x[2:], slots=torch.tensor([0, 1]), **weights, **store)


def test_a_tail_kept_head_by_head_and_drafts_in_rows_of_their_own() -> None:
    """Pages keep [state | tail] of each head together, and drafts lie by request, not by page."""
    torch.manual_seed(3)
    heads, dim = 3, 8
    channels = 3 * heads * dim
    weights = {
        "conv_weight": torch.randn(channels, 4, dtype=torch.float64),
        "A_log": torch.rand(heads, dtype=torch.float64),
        "dt_bias": torch.rand(heads, dim, dtype=torch.float64),
        "norm_weight": torch.rand(dim, dtype=torch.float64),
        "lower_bound": -5.0,
        "slots": torch.tensor([4, 1]),
    }
    state = torch.randn(6, heads, dim, dim, dtype=torch.float64)
    tail = torch.randn(6, channels, 3, dtype=torch.float64)
    paged = tail.view(6, 3, heads, dim, 3).transpose(1, 2).contiguous().transpose(1, 2)
    outs = []
    for by_head in (False, True):
        torch.manual_seed(4)
        shapes = ((channels,), (heads, dim), (heads,), (heads, dim))
        x = [torch.randn(2, 3, *shape, dtype=torch.float64) for shape in shapes]
        store = {"state": state.clone(), "tail": paged.clone() if by_head else tail.clone()}
        drafts = Drafts.empty(2 if by_head else 6, 2, *x[:3])
        rows = torch.tensor([1, 0]) if by_head else None
        for accepted in ([0, 0], [2, 1]):
            outs.append(decode(*x, drafts=drafts, accepted=torch.tensor(accepted), rows=rows, **weights, **store))
        outs += [store["state"], store["tail"].flatten(1, -2)]
    for flat, by_head in zip(outs[:4], outs[4:]):
        assert torch.equal(flat, by_head)


def test_both_kernels_take_what_the_launcher_gives() -> None:
    """Arguments go by position, and only one of the two kernels runs without a Hopper."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from perilune.ops.kda import gluon_decode, triton_decode

    assert gluon_decode.decode_kernel.arg_names == [*triton_decode.decode_kernel.arg_names, "KEY_FIRST"]
