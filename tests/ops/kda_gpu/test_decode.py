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


def test_the_kernel_of_one_token_gets_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on a Hopper alone: its launch is caught, and every stride compared with the tensor it belongs to."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from perilune.ops.kda import decode_launch, gluon_token

    names, got = gluon_token.decode_kernel.arg_names, {}

    class Kernel:
        def __getitem__(self, grid: tuple[int]):
            return lambda *args, **settings: got.update(zip(names, args), grid=grid, **settings)

    monkeypatch.setattr(gluon_token, "decode_kernel", Kernel())
    monkeypatch.setattr(decode_launch, "on_hopper", lambda _: True)
    monkeypatch.setattr("perilune.ops.kda.decode._launcher", lambda _: decode_launch.launch)
    x, gate, beta, z = torch.empty(4, 1, 3 * 256), *(torch.empty(4, 1, 2, *d) for d in ((128,), (), (128,)))
    state, tail = torch.empty(5, 2, 128, 128).transpose(2, 3), torch.empty(5, 3 * 256, 3)
    weights = {"conv_weight": torch.empty(3 * 256, 4), "A_log": torch.empty(2), "dt_bias": torch.empty(2, 128)}
    slots = torch.tensor([0, 9, 4, 9, 1, 9, 3, 9])[::2]
    weights |= {"norm_weight": torch.empty(128), "state": state, "tail": tail, "slots": slots}
    decode(x, gate, beta, z, lower_bound=-5.0, eps=0.5, impl="kernel", **weights)
    assert set(got) == {*names, "grid", "num_warps", "maxnreg"} and got["grid"] == (8,)
    strides = {"x_r": 768, "g_r": 256, "g_h": 128, "b_r": 2, "b_h": 1, "z_r": 256, "z_h": 128, "c_c": 4, "c_t": 1}
    strides |= {"s_n": 32768, "s_h": 16384, "s_k": 1, "s_v": 128, "t_n": 2304, "t_p": 768, "t_h": 384, "t_v": 384}
    strides |= {"t_c": 3, "t_w": 1, "slot_r": 2, "eps": 0.5, "lower_bound": -5.0, "KEY_FIRST": True}
    assert {name: got[name] for name in strides} == strides
    assert got["state"] is state and got["slots"] is slots and got["out_gate"] is z


def test_states_are_streamed_where_their_rows_are_whole() -> None:
    """Either axis may be the contiguous one; smaller heads and rows that are not aligned take the other kernel."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from perilune.ops.kda.decode_launch import streams

    state = torch.zeros(2, 3, 128, 128)
    assert streams(state) and streams(state.transpose(2, 3))
    assert not streams(state[..., ::2, ::2])
    assert not streams(torch.zeros(2, 3, 64, 64))
    assert not streams(torch.zeros(2, 3, 128, 136)[..., :128])
    assert not streams(torch.zeros(2 * 3 * 128 * 128 + 1)[1:].view(2, 3, 128, 128))


def drafts(rows: int = SLOTS, width: int = 1, **wrong: torch.Tensor) -> Drafts:
    made = Drafts.empty(rows, width, *tokens(1)[:3])
    return Drafts(**vars(made) | wrong)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"impl": "fast"}, "impl is 'fast'; known are"),
        ({"impl": "kernel"}, "there is no NVIDIA GPU"),
        ({"A_log": torch.zeros(1)}, r"A_log must be \[2\]"),
        ({"dt_bias": torch.zeros(3)}, r"dt_bias must be \[2, 8\]"),
        ({"norm_weight": torch.ones(1)}, r"norm_weight must be \[4\]"),
        ({"conv_weight": torch.zeros(4, C)}, rf"conv_weight must be \[{C}, 4\]"),
        ({"state": torch.zeros(SLOTS, HV, K, V, dtype=torch.float32)}, "state must be torch.float64"),
        ({"tail": torch.zeros(SLOTS, C, 2)}, "tail must be"),
        ({"lower_bound": 5.0}, "lower_bound must be negative"),
        ({"slots": torch.tensor([2, SLOTS])}, r"slots must lie in 0\.\.2"),
        ({"slots": torch.tensor([1, 1])}, "slots must differ"),
        ({"slots": torch.tensor([2.0, 0.0])}, "slots must be int32 or int64"),
        ({"accepted": torch.tensor([1, 0])}, "accepted counts cached drafts"),
        ({"drafts": drafts(2)}, r"rows must lie in 0\.\.1"),
        ({"drafts": drafts(), "rows": torch.tensor([1])}, r"rows must be \[2\]"),
        ({"drafts": drafts(), "rows": torch.tensor([1, 1])}, "rows must differ"),
        ({"drafts": drafts(), "accepted": torch.tensor([2, 0])}, r"accepted must lie in 0\.\.1"),
        ({"drafts": drafts(gate=torch.zeros(SLOTS, 1, HV, K + 1))}, "drafts.gate must be"),
        ({"drafts": drafts(beta=torch.zeros(SLOTS, 1, HV))}, r"drafts.beta must be .* torch.float64"),
        ({"drafts": drafts(width=0)}, "drafts hold 0 tokens but the window has 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_whatever_is_wrong_nothing_is_written(change: dict, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    weights, store = layer(5)
    given = {"slots": torch.tensor([2, 0]), **weights, **store} | change
    kept = [given["state"], given["tail"], *vars(given.get("drafts", drafts())).values()]
    before = [x.clone() for x in kept]
    with pytest.raises(ValueError, match=says) as error:
        decode(*tokens(2 if "drafts" in change else 1), **given)
    assert "\n" not in str(error.value) and all(torch.equal(a, b) for a, b in zip(kept, before))


def test_padding_may_name_any_row_and_count() -> None:
    """A padded batch carries rows and counts of nobody; and a batch may be empty."""
    weights, store = layer(6)
    cache = drafts()
    decode(*tokens(2), slots=torch.tensor([2, 0]), drafts=cache, **weights, **store)
    alone = [{n: s.clone() for n, s in store.items()}, Drafts(*(x.clone() for x in vars(cache).values()))]
    x = tokens(2)
    padded = {"slots": torch.tensor([2, -1]), "rows": torch.tensor([2, 2]), "accepted": torch.tensor([1, 9])}
    o = decode(*x, drafts=cache, **padded, **weights, **store)
    one = {key: y[:1] for key, y in padded.items()}
    want = decode(*(y[:1] for y in x), drafts=alone[1], **one, **weights, **alone[0])
    assert torch.equal(o[:1], want) and not o[1].any()
    assert all(torch.equal(store[n], alone[0][n]) for n in store)
    empty = decode(*(y[:0] for y in x), slots=torch.zeros(0, dtype=torch.int64), drafts=cache, **weights, **store)
    assert empty.shape == (0, 2, HV, V)


def test_autocast_changes_no_bit() -> None:
    weights, store = layer(7)
    twin = {n: s.float().clone() for n, s in store.items()}
    store = {n: s.float() for n, s in store.items()}
    weights = {n: w.float() if isinstance(w, torch.Tensor) else w for n, w in weights.items()}
    x = [y.float() for y in tokens(1)]
    plain = decode(*x, slots=torch.tensor([2, 0]), **weights, **store)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decode(*x, slots=torch.tensor([2, 0]), **weights, **twin), plain)
    assert torch.equal(store["state"], twin["state"])
