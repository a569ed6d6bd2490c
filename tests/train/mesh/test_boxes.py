"""Where elements lie: boxes tile every matrix, owners hold what they orthogonalise, stages share blocks once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train.mesh.world import MODEL, OPTIONS

from perilune.config import preset
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.recipe import RecipeError, build
from perilune.train.mesh.boxes import Box, Sizes, as_matrix, matrix
from perilune.train.mesh.config import MeshConfig
from perilune.train.mesh.groups import watch_width
from perilune.train.mesh.optimizer import assign, blocks_of, buckets
from perilune.train.mesh.stage import closed, cuts
from perilune.train.optim import plan

SIZES = st.sampled_from(
    [Sizes(1, 1, 8), Sizes(2, 4, 8), Sizes(4, 8, 8), Sizes(2, 2, 6), Sizes(1, 1, 1), Sizes(4, 1, 4)]
)
SHAPES = {
    "layers.0.self_attn.q_proj.weight": (32, 24),
    "layers.0.self_attn.o_proj.weight": (24, 32),
    "layers.0.self_attn.A_log": (4,),
    "layers.0.self_attn.q_conv1d.weight": (32, 1, 4),
    "layers.1.block_sparse_moe.experts.w13": (8, 6, 5),
    "layers.1.input_layernorm.weight": (7,),
    "embed_tokens.weight": (13, 3),
    "lm_head.weight": (16, 3),
}


@given(SIZES, st.sampled_from(sorted(SHAPES)))
def test_boxes_of_a_stage_tile_the_matrix(sizes: Sizes, name: str) -> None:
    rows, columns = matrix(SHAPES[name])
    times = torch.zeros(rows, columns)
    for box in sizes.boxes(name, SHAPES[name]):
        times[box.top : box.bottom, box.left : box.right] += 1
    assert (times == 1).all()


def test_a_box_is_what_cutting_and_chunking_leave() -> None:
    """Against torch's own chunks: tp or ep first, then FSDP's first axis."""
    for sizes in (Sizes(2, 4, 8), Sizes(4, 2, 8)):
        for name, shape in SHAPES.items():
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            for rank, box in enumerate(sizes.boxes(name, shape)):
                axis, part, parts = sizes.cut(name, rank)
                local = whole.chunk(parts, axis)[part]
                chunks = local.chunk(sizes.stage // parts)
                at = rank // parts
                want = chunks[at] if at < len(chunks) else local[:0]
                got = as_matrix(whole)[box.top : box.bottom, box.left : box.right]
                assert torch.equal(got.reshape(-1), want.reshape(-1)), (name, rank)


def test_parts_of_a_box() -> None:
    a, b = Box(2, 6, 0, 8), Box(4, 9, 3, 5)
    assert (a & b) == Box(4, 6, 3, 5) and (a & b).size == 4
    assert (a & Box(6, 9, 0, 8)).size == 0
    values = torch.arange(32).view(4, 8)
    assert torch.equal((a & b).of(a, values), values[2:4, 3:5])


@settings(deadline=None)
@given(SIZES)
def test_every_block_has_one_owner_and_all_its_parts(sizes: Sizes) -> None:
    model = K3(MODEL)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    plans = [p for p in plan(model.named_parameters(), MODEL) if p.kind == "muon"]
    blocks = [b for p in plans for b in blocks_of(p, shapes[p.name], sizes.boxes(p.name, shapes[p.name]))]
    owned = assign(blocks, sizes.stage)
    assert sum(b.box.size for b in owned) == sum(p.param.numel() for p in plans)
    for b in owned:
        assert sum(part.box.size for part in b.parts) == b.box.size
        assert 0 <= b.owner < sizes.stage and (not b.local or b.owner == b.parts[0].rank)
    work = [sum(b.group[0] ** 2 * b.group[1] for b in owned if b.owner == r) for r in range(sizes.stage)]
    assert max(work) <= sum(work) / sizes.stage + max(b.group[0] ** 2 * b.group[1] for b in owned) or any(
        b.local for b in owned
    )
    cut = buckets(owned, 2000, sizes.stage)
    assert sorted(map(id, (b for bucket in cut for b in bucket))) == sorted(map(id, owned))
    for bucket in cut:
        held = [sum(b.box.size for b in bucket if b.owner == r) for r in range(sizes.stage)]
        assert max(held) <= 2000 or max(sum(b.owner == r for b in bucket) for r in range(sizes.stage)) == 1


def test_whole_experts_stay_where_they_are() -> None:
    """With as many experts a rank as it holds, no matrix of theirs travels."""
    model = K3(MODEL)
    for p in plan(model.named_parameters(), MODEL):
        if ".experts." in p.name:
            shape = tuple(p.param.shape)
            assert all(b.local for b in blocks_of(p, shape, Sizes(1, 4, 8).boxes(p.name, shape)))


@pytest.mark.parametrize("layers,stages", [(5, 2), (93, 8), (4, 4), (7, 3)])
def test_stages_are_even_and_share_blocks_once(layers: int, stages: int) -> None:
    spans = cuts(layers, stages)
    assert [i for s in spans for i in s] == list(range(layers))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    config = preset("k3")
    assert [closed(config, n) for n in (0, 1, 12, 13, 93)] == [0, 1, 1, 2, 8]


@pytest.mark.parametrize(
    "table,message",
    [
        ({"zero": 4}, "mesh.zero must be one of 1, 2, 3"),
        ({"tp": 0}, "mesh.tp must be at least 1"),
        ({"ep": 3}, r"mesh.ep 3 must divide dp · cp · tp / replicas = 8"),
        ({"replicas": 3}, "mesh.replicas 3 must divide mesh.dp 8"),
        ({"replicas": 4, "ep": 4}, r"mesh.ep 4 must divide dp · cp · tp / replicas = 2"),
        ({"tp": 8}, r"kda_num_heads 4 is not divided by the mesh \(8 ways\)"),
        ({"cp": 8}, r"num_attention_heads 4 is not divided"),
        ({"pp": 8}, r"mesh.pp · mesh.virtual = 8 stages are more than the model's 5 layers"),
        ({"virtual": 2}, "mesh.virtual is 2, but mesh.pp is 1"),
        ({"dp": 3}, "needs 3 processes, there are 8"),
        ({"activations": {"kda": "fp4"}}, "unknown policy 'fp4'"),
        ({"activations": {"gdn": "keep"}}, "mesh.activations.gdn is no tensor class"),
        ({"activations": {"kda": "keep+fp8"}}, "joins with nothing"),
        ({"shards": 2}, "Unknown recipe key 'mesh.shards'"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_sentence(table: dict, message: str) -> None:
    with pytest.raises((ValueError, RecipeError), match=message):
        build(MeshConfig, table, "mesh.").resolve(8).check(MODEL, OPTIONS)


def test_dp_is_what_the_other_axes_leave() -> None:
    assert MeshConfig(tp=2, pp=2).resolve(8).dp == 2
    assert MeshConfig().resolve(1).dp == 1


def test_a_narrowed_fp32_set_is_caught_in_forward() -> None:
    """What every mesh asserts, seen to fire: a conv, a decay or a norm in bf16 stops the layer that reads it."""
    for name in ("q_conv1d.weight", "A_log", "dt_bias", "o_norm.weight"):
        model = K3(MODEL)
        watch_width(model)
        tokens, layout = torch.arange(8), Layout.packed([8])
        model(tokens, layout)
        p = model.layers[0].self_attn.get_parameter(name)
        p.data = p.data.bfloat16()
        with pytest.raises(AssertionError, match=f"KDA.{name} must be fp32"):
            model(tokens, layout)
