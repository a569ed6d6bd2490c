"""Laws of the one forward: cuts, neighbours, forks, states; every variant of the architecture obeys them."""

import copy
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.config import ModelConfig, preset
from perilune.model.cache import Dense, State
from perilune.model.layout import Layout
from perilune.model.net import K3

SMALL = preset("tiny").replace(
    vocab_size=61, hidden_size=32, num_hidden_layers=5,
    mla_layers=(3, 4), kda_num_heads=2, kda_head_dim=16, num_attention_heads=3, q_lora_rank=24,
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, intermediate_size=48, num_experts=6,
    num_experts_per_token=2, moe_intermediate_size=16, routed_expert_hidden_size=16, initializer_range=0.2,
    max_position_embeddings=256,
)  # fmt: skip
VARIANTS = {
    "k3": {},
    "plain residual": {"attn_res_block_size": None},
    "full AttnRes": {"attn_res_full": True},
    "all MLA": {"mla_layers": (0, 1, 2, 3, 4)},
    "all KDA": {"mla_layers": ()},
    "scalar decay": {"kda_decay": "head"},
    "no delta": {"kda_delta": False},
    "softplus gate": {"gate_lower_bound": None},
    "no output gate": {"kda_output_gate": False, "mla_use_output_gate": False},
    "low-rank gate": {"use_full_rank_gate": False},
    "no latent": {"routed_expert_hidden_size": None},
    "no routed norm": {"latent_moe_use_norm": False},
    "swiglu": {"hidden_act": "silu"},
    "direct queries": {"q_lora_rank": None},
    "dense": {"num_experts": 0},
}


def make(config: ModelConfig = SMALL, seed: int = 0) -> K3:
    torch.manual_seed(seed)
    model = K3(config)
    model.reset_parameters()
    for name, p in model.named_parameters():  # zero queries would hide a wrong mixture
        if name.endswith("res_proj.weight"):
            torch.nn.init.normal_(p)
    return model


def tokens(n: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> K3:
    return make()


@pytest.fixture(scope="module")
def exact() -> K3:
    return make().double()


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_pieces_equal_the_whole(name: str) -> None:
    """In fp64, where a wrong state cannot hide behind rounding."""
    model = make(SMALL.replace(**VARIANTS[name])).double()
    ids = tokens(70)
    whole = model(ids, Layout.packed([70])).logits
    assert whole.std() > 0.05
    cache = Dense(model.config, 1, dtype=torch.float64)
    parts = [model(part, cache.layout([len(part)]), cache).logits for part in ids.split([33, 1, 1, 20, 15])]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-9, rtol=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_any_cut_of_any_batch(exact: K3, lengths: list[int], seed: int) -> None:
    """Several sequences advance by random pieces, sometimes by nothing, in one batch; in fp64, since a rounding that
    flips a route is no wrong state."""
    model = exact
    random = Random(seed)
    ids = [tokens(n, seed) for seed, n in enumerate(lengths)]
    cache = Dense(model.config, len(lengths), dtype=torch.float64)
    logits: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(cache.lengths[s] < n for s, n in enumerate(lengths)):
        steps = [random.randint(0, min(17, n - cache.lengths[s])) for s, n in enumerate(lengths)]
        if sum(steps) == 0:
            continue
        feed = torch.cat([x[cache.lengths[s] : cache.lengths[s] + n] for s, (x, n) in enumerate(zip(ids, steps))])
        out = model(feed, cache.layout(steps), cache).logits
        for mine, part in zip(logits, out.split(steps)):
            mine.append(part)
    for mine, x in zip(logits, ids):
        alone = model(x, Layout.packed([len(x)])).logits
        torch.testing.assert_close(torch.cat(mine), alone, atol=1e-9, rtol=0)


@torch.no_grad()
def test_neighbours_do_not_matter(model: K3) -> None:
    a, b, c = tokens(20, 1), tokens(31, 2), tokens(20, 3)
    first = model(torch.cat([a, b]), Layout.packed([20, 31])).logits[20:]
    second = model(torch.cat([c, b]), Layout.packed([20, 31])).logits[20:]
    assert torch.equal(first, second)


@torch.no_grad()
def test_forks_are_independent(model: K3) -> None:
    cache = Dense(model.config, 2, dtype=torch.float32)
    prefix = tokens(24)
    model(prefix, cache.layout([24], [0]), cache)
    fork = cache.export(0)
    before = fork.clone()
    cache.load(1, fork)
    model(tokens(9, 5), cache.layout([9], [0]), cache)  # the original moves on
    for part, same in ((fork.kda, before.kda), (fork.conv, before.conv), (fork.mla, before.mla)):
        assert all(torch.equal(part[layer], same[layer]) for layer in part)
    tail = tokens(7, 6)
    forked = model(tail, cache.layout([7], [1]), cache).logits
    whole = model(torch.cat([prefix, tail]), Layout.packed([31])).logits[24:]
    torch.testing.assert_close(forked, whole, atol=1e-4, rtol=0)


@torch.no_grad()
def test_state_saves_splits_and_measures(model: K3, tmp_path) -> None:
    cache = Dense(model.config, 1, dtype=torch.float32)
    model(tokens(24), cache.layout([24]), cache)
    state = cache.export(0)
    c = model.config
    kda = len(c.kda_layers) * (2 * 16 * 16 + 3 * c.kda_width * 3) * 4
    assert state.nbytes == kda + len(c.mla_layers) * 24 * c.latent_width * 4
    state.save(tmp_path / "s.safetensors")
    for other in (State.load(tmp_path / "s.safetensors"), State.join(state.split(2))):
        assert other.length == 24
        for part, same in ((state.kda, other.kda), (state.conv, other.conv), (state.mla, other.mla)):
            assert all(torch.equal(part[layer], same[layer]) for layer in part)
    with pytest.raises(ValueError, match="does not split 3 ways"):
        state.split(3)
    with pytest.raises(ValueError, match="not"):
        Dense(c.replace(kda_head_dim=32), 1, dtype=torch.float32).load(0, state)


@torch.no_grad()
def test_a_reused_row_remembers_nothing(model: K3) -> None:
    cache = Dense(model.config, 1, dtype=torch.float32)
    model(tokens(24), cache.layout([24]), cache)
    cache.reset(0)
    ids = tokens(12, 9)
    again = model(ids, cache.layout([12]), cache).logits
    torch.testing.assert_close(again, model(ids, Layout.packed([12])).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["k3", "full AttnRes", "scalar decay", "swiglu"])
def test_gradients_match_finite_differences(name: str) -> None:
    """Through every layer at once, in fp64, along one random direction a parameter."""
    model = make(SMALL.replace(num_nextn_predict_layers=1, **VARIANTS[name])).double()
    ids, layout = tokens(40), Layout.packed([25, 15])

    def loss() -> torch.Tensor:
        out = model(ids, layout)
        embedded = model.embed_tokens(ids.roll(-1))
        hidden, _, _ = model.mtp[0].predict(embedded, out.features, layout)
        return out.logits.square().mean() + hidden.square().mean()

    loss().backward()
    for key, p in model.named_parameters():
        if key.startswith("layers.0.self_attention_res"):  # a lone source has nothing to weigh
            assert p.grad is None
            continue
        direction = torch.randn_like(p)
        direction /= direction.norm()
        slope = (p.grad * direction).sum()
        with torch.no_grad():
            p += 1e-6 * direction
            up = loss()
            p -= 2e-6 * direction
            down = loss()
            p += 1e-6 * direction
        numeric = (up - down) / 2e-6
        torch.testing.assert_close(slope, numeric, atol=2e-6, rtol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_gradients_flow_through_a_cache(model: K3) -> None:
    """Dense is functional: a loss after a cut reaches the embedding of tokens before it."""
    model = make()
    ids = tokens(30)
    cache = Dense(model.config, 1, dtype=torch.float32)
    model(ids[:20], cache.layout([20]), cache)
    model(ids[20:], cache.layout([10]), cache).logits.square().sum().backward()
    cut = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(ids, Layout.packed([30])).logits[20:].square().sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(cut[name], p.grad, atol=1e-3, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_the_fp32_set_survives_narrowing() -> None:
    from perilune.model.weights import cast, is_fp32

    model = make()
    cast(model, torch.bfloat16)
    wide = {n for n, p in (*model.named_parameters(), *model.named_buffers()) if p.dtype == torch.float32}
    assert wide == {n for n, _ in (*model.named_parameters(), *model.named_buffers()) if is_fp32(n)}
    assert any(n.endswith("A_log") for n in wide)
    out = model(tokens(40), Layout.packed([40]))
    assert out.logits.dtype == torch.bfloat16
    cache = Dense(model.config, 1, dtype=torch.bfloat16)
    model(tokens(40), cache.layout([40]), cache)
    assert all(x.dtype == torch.float32 for x in cache.kda.values())
    assert all(r.scores.dtype == torch.float32 for r in out.routes.values())


def test_wrong_token_count_is_one_sentence(model: K3) -> None:
    with pytest.raises(ValueError, match="tokens has 3 entries but the layout describes 4"):
        model(tokens(3), Layout.packed([4]))


@torch.no_grad()
def test_settled_weights_are_the_same_weights(model: K3) -> None:
    """One product where there were several, values and names as before, and a second time changes nothing."""
    ids, before = tokens(20), {name: p.clone() for name, p in model.named_parameters()}
    settled = copy.deepcopy(model).settle()
    one, other = (net(ids, Layout.packed([20])).logits for net in (model, settled))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    assert all(torch.equal(before[name], p) for name, p in settled.named_parameters())
    places = {name: p.data_ptr() for name, p in settled.named_parameters()}
    assert {name: p.data_ptr() for name, p in settled.settle().named_parameters()} == places
    layer = settled.layers[0].self_attn
    assert layer.k_proj.weight.data_ptr() == layer.q_proj.weight.data_ptr() + layer.q_proj.weight.nbytes
