"""The planner: every token in exactly one chunk, every state where it is needed, segments only where they pay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.kda_gpu.cases import case

from perilune.ops.kda import kda
from perilune.ops.kda.segments import CARRY, CHUNK, FINAL, Plan, Shape, plan, segments_for

LENGTHS = st.lists(st.integers(0, 700), min_size=1, max_size=6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int, int, bool]:
    lengths = draw(LENGTHS)
    places = [(n, 16 * m) for n, length in enumerate(lengths) for m in range(1, length // 16 + 1)]
    exports = draw(st.lists(st.sampled_from(places), unique=True, max_size=5)) if places else []
    return tuple(lengths), tuple(exports), draw(st.integers(1, 40)), draw(st.integers(1, 5)), draw(st.booleans())


def made(problem: tuple) -> Plan:
    lengths, exports, limit, segments, has_state = problem
    return plan(lengths, exports, Shape(2, 128, 128, has_state), limit=2 * limit, segments=segments)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_chunks_tile_the_tokens_in_order(problem: tuple) -> None:
    chunks = made(problem).chunks
    ends = [t + m for t, m in chunks]
    assert [t for t, _ in chunks] == [0, *ends][: len(chunks)]
    assert (ends[-1] if ends else 0) == sum(problem[0])
    assert all(0 < m <= CHUNK for _, m in chunks)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_walking_the_tables_visits_every_token_and_export_once_with_its_own_state(problem: tuple) -> None:
    """Plays the kernels on integers: a state is (sequence, tokens seen)."""
    lengths, exports, limit, _, _ = problem
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    final: dict[int, int] = {}
    exported: dict[int, tuple[int, int]] = {}
    seen = 0
    for panel in made(problem).panels:
        assert panel.count <= limit
        carry: dict[int, tuple[int, int]] = {}
        for _, index, scan, at, count in panel.merges:
            for j in range(count):
                first, last, _, _, row = panel.scans[scan + j]
                assert row == scan + j
                token, tokens, _, _ = panel.pieces[last - 1]
                carry[at + j] = (index, token + tokens - starts[index])
                assert panel.pieces[first][0] >= starts[index]
        for first, last, kind, index, target in panel.runs:
            n, tokens = carry[index] if kind == CARRY else (index, final[index] if kind == FINAL else 0)
            for token, count, chunk, row in panel.pieces[first:last]:
                assert token == starts[n] + tokens and 0 <= chunk < panel.count
                tokens, seen = tokens + count, seen + count
                if row >= 0:
                    exported[row] = (n, tokens)
            if target >= 0:
                assert target == n
                final[n] = tokens
    assert seen == sum(lengths)
    assert final == dict(enumerate(lengths))
    assert exported == dict(enumerate(exports))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([-5.0, None]), st.integers(0, 9))
@settings(deadline=None, max_examples=20)
def test_segments_compose(lengths: list[int], lower_bound: float | None, seed: int) -> None:
    """What scan and merge rely on: a segment acts as S ← M S + B, M and B its own from the identity and from zero."""
    it = case([sum(lengths)], heads=1, key=8, value=8, lower_bound=lower_bound, seed=seed).in_fp64()
    q, k, v, gate, beta, A_log, bias, state = (x.detach() for x in it.leaves)

    def end(a: int, b: int, start: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cut = (x[:, a:b] for x in (q, k, values, gate, beta))
        return kda(*cut, A_log=A_log, dt_bias=bias, lower_bound=lower_bound, state=start)[1]

    S, a = state, 0
    for n in lengths:
        M = end(a, a + n, torch.eye(8, dtype=S.dtype).view(1, 1, 8, 8), torch.zeros_like(v))
        S = M @ S + end(a, a + n, torch.zeros_like(state), v)
        a += n
    torch.testing.assert_close(S, end(0, a, state, v))


def test_worked_example() -> None:
    """T = 65536 with 4 heads leaves 124 of 132 processors idle without segments; 96 heads fill them."""
    few, many = Shape(4, 128, 128, True), Shape(96, 128, 128, True)
    assert 8 <= segments_for(1024, 1, few, 64) <= 32
    assert segments_for(128, 1, many, 128) == 1
    assert segments_for(2, 1, few, 64) == 1


def test_the_copy_engine_gets_values_it_can_read() -> None:
    """Misaligned, one odd-strided token, expanded, transposed batch: copied. Slices of a projection: as they are."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from perilune.ops.kda import hopper

    to = hopper.Workspace.empty(1, 2, 64, torch.empty(0, dtype=torch.bfloat16))
    flat = torch.randn(40000).bfloat16()
    kept = flat[:4160].view(1, 16, 260)[..., 8:136].unflatten(-1, (2, 64)), flat[:4224].view(1, 16, 264)[..., 8:136]
    assert hopper.copyable(kept[1].unflatten(-1, (2, 64))).data_ptr() == kept[1].data_ptr()
    odd = [
        kept[0],  # a row of 260 numbers is not a multiple of 16 bytes
        flat[1:2049].view(1, 16, 2, 64),
        flat[:128].as_strided((1, 1, 2, 64), (130, 130, 64, 1)),
        flat[:128].view(1, 1, 2, 64).expand(1, 16, 2, 64),
        flat[:4096].view(16, 2, 2, 64).transpose(0, 1),
    ]
    for v in odd:
        made = hopper.copyable(v)
        assert made.data_ptr() != v.data_ptr() and torch.equal(made, v)
        values = hopper.descriptors(to, made, 64)[3]
        assert values.shape == [v.shape[0] * v.shape[1], 128] and values.strides[0] == 128


def test_rows_are_fetched_sixteen_bytes_at_a_time_or_copied() -> None:
    """A compiler that is not told a stride is a multiple of 16 numbers cannot use such accesses."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from perilune.ops.kda import hopper

    flat = torch.randn(40000).bfloat16()
    kept = flat[: 16 * 272].view(1, 16, 272)[..., 16:144].unflatten(-1, (2, 64))
    assert hopper.aligned(kept) is kept
    for x in (
        flat[8 : 16 * 264 + 8].view(1, 16, 264)[..., :128].unflatten(-1, (2, 64)),
        flat[1:2049].view(1, 16, 2, 64),
    ):
        made = hopper.aligned(x)
        assert made.is_contiguous() and torch.equal(made, x)


def test_descriptors_are_kept_but_keep_no_memory() -> None:
    """The same place gives the same descriptor, which a launch reads as one of the tensor itself."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import BaseBackend
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import native_specialize_impl

    from perilune.ops.kda import hopper

    x = torch.zeros(3, 2, 1, 64, 128, dtype=torch.bfloat16)
    made = hopper.tiles(x, 64, 128)
    assert hopper.tiles(x.clone(), 64, 128) is not made
    assert hopper.tiles(x[:], 64, 128) is made
    own = TensorDescriptor.from_tensor(x.view(-1, 128), [64, 128], made.layout)
    assert not isinstance(made.base, torch.Tensor) and made.base.data_ptr() == own.base.data_ptr()
    assert (made.shape, made.strides, made.block_shape) == ([384, 128], [128, 1], own.block_shape)
    kinds = [native_specialize_impl(BaseBackend, d, False, True, True)[0] for d in (made, own)]
    assert kinds[0] == kinds[1] and kinds[0].startswith("tensordesc<bf16[64, 128]")
