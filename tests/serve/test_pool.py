"""Pages, blocks and the sizes they have."""

import pytest
import torch
from serve.toy import CONFIG, make

from perilune.config import preset
from perilune.model.cache import Dense, State
from perilune.serve.paged import Paged
from perilune.serve.pool import Geometry, Pool, default_block

K3 = preset("k3")


@pytest.mark.parametrize(
    "state, latents, heads, tokens",
    [
        (torch.float32, torch.bfloat16, 96, 6144),  # the report's
        (torch.bfloat16, torch.float8_e4m3fn, 96, 6144),
        (torch.float32, torch.bfloat16, 24, 1536),  # four tensor-parallel ranks, latents replicated
        (torch.float32, torch.bfloat16, 12, 1024),
    ],
)
def test_page_tokens_follow_from_the_config(state: torch.dtype, latents: torch.dtype, heads: int, tokens: int) -> None:
    geometry = Geometry(K3.replace(kda_num_heads=heads), 512, latents, state)
    assert geometry.page_tokens == tokens


def test_k3_bytes() -> None:
    geometry = Geometry(K3, 512, torch.bfloat16)
    assert geometry.state_bytes == 6_512_640
    assert geometry.page_bytes == 7_077_888
    assert geometry.pages("kda") == 69 and geometry.pages("mla") == 24
    assert default_block(K3) == 512
    assert default_block(preset("tiny")) == 32


def pool(pages: int = 40, **changes: object) -> Pool:
    return Pool(Geometry(CONFIG.replace(**changes), 16, torch.float32), pages, "cpu")


def test_least_recently_used_goes_first_and_held_never() -> None:
    p = pool(1 + 4 * 2)
    blocks = [p.take("kda") for _ in range(4)]
    assert p.take("kda") is None
    for i, block in enumerate(blocks):
        p.publish(block, bytes([i]))
    for block in blocks[:3]:
        p.drop(block)
    p.touch(blocks[0])
    p.take("kda")
    p.audit()
    assert [p.find("kda", bytes([i])) for i in range(4)] == [blocks[0], None, blocks[2], blocks[3]]
    p.hold(blocks[2])
    p.take("kda")
    assert p.take("kda") is None
    assert p.find("kda", b"\0") is None, "all layers' pages of a checkpoint go together"
    p.audit()


def test_latents_of_a_recycled_state_page_read_as_zeros() -> None:
    p = pool(1 + 2)
    state = p.take("kda")
    p.memory[list(state.pages)] = 255  # NaN in every float format
    p.drop(state)
    block = p.take("mla")
    assert not p.latents[list(block.pages)].any()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_state_passes_through_pages_unchanged_and_one_head_is_one_range(dtype: torch.dtype) -> None:
    model = make(dtype=dtype)
    dense = Dense(model.config, 1, dtype=dtype)
    model(torch.arange(40), dense.layout([40]), dense)
    value = dense.export(0)
    p = Pool(Geometry(CONFIG, 16, dtype, torch.promote_types(dtype, torch.float32)), 60, "cpu")
    paged = Paged(p, 1, 128)
    blocks = p.take("kda"), [p.take("mla") for _ in range(p.geometry.blocks_for(40))]
    paged.load(value, *blocks)
    back = paged.export(*blocks, 40)
    for name in ("kda", "conv"):
        for layer, x in getattr(value, name).items():
            assert torch.equal(getattr(back, name)[layer], x)
    for layer in CONFIG.mla_layers:
        assert torch.equal(back.mla[layer], value.mla[layer])
    # Head 1 of the first KDA layer, as bytes: state, then tail.
    g = p.geometry
    raw = p.memory[blocks[0].pages[0], g.head_bytes : 2 * g.head_bytes]
    layer = CONFIG.kda_layers[0]
    half = State.split(value, 2)[1]
    state = half.kda[layer].contiguous().view(-1).view(torch.uint8)
    assert torch.equal(raw[: len(state)], state)
    tail = half.conv[layer].contiguous().view(-1).view(torch.uint8)
    assert torch.equal(raw[len(state) : len(state) + len(tail)], tail)
