"""The laws of the order: once an epoch, one integer, any split over ranks and batches, exact bytes."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data import Batch, Batches, DataError, Shard, bits_per_byte, held_out_batches
from perilune.data.batches import permutation

EOS = 0


def shard(lengths: list[int]) -> Shard:
    """Documents of distinct ids (so that every token of the corpus can be told apart), each ended by EOS."""
    ids, documents = 1, []
    for length in lengths:
        documents.append([*range(ids, ids + length - 1), EOS])
        ids += length - 1
    tokens = np.array([i for document in documents for i in document], np.uint32)
    token_bytes = np.arange(ids, dtype=np.int32) % 5 + 1
    token_bytes[EOS] = 0
    sizes = np.array([token_bytes[document].sum() for document in documents])
    return Shard(tokens, np.cumsum(lengths), sizes, token_bytes)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
CONTEXT = st.integers(1, 17)
LAWS = settings(max_examples=150, deadline=None)


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) and a.lengths == b.lengths


@LAWS
@given(LENGTHS, CONTEXT, st.integers(0, 3), st.integers(1, 3))
def test_every_token_is_seen_exactly_once_an_epoch(lengths: list[int], context: int, seed: int, epochs: int) -> None:
    """All rows that begin in the first epochs hold each token once an epoch, and the overhang of the last row."""
    data = shard(lengths)
    n_rows = math.ceil(epochs * data.n_tokens / context)
    tokens = Batches(data, context, n_rows, seed).at(0).tokens
    counts, overhang = Counter(tokens.tolist()), n_rows * context - epochs * data.n_tokens
    assert 0 <= overhang < context
    extra = 0
    for token, copies in Counter(data.tokens.tolist()).items():
        # a row longer than the corpus overhangs by several epochs
        assert epochs * copies <= counts[token] <= (epochs + math.ceil(overhang / data.n_tokens)) * copies
        extra += counts[token] - epochs * copies
    assert extra == overhang


@LAWS
@given(LENGTHS, CONTEXT, st.integers(1, 4), st.integers(0, 12))
def test_a_jump_reaches_what_iteration_reaches(lengths: list[int], context: int, rows: int, steps: int) -> None:
    walked = Batches(shard(lengths), context, rows).iterate()
    batch = next(walked)
    for _ in range(steps):
        batch = next(walked)
    assert batch.position == steps * rows
    assert same(batch, Batches(shard(lengths), context, rows).at(steps * rows))


@LAWS
@given(LENGTHS, CONTEXT, st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(0, 9))
def test_ranks_and_smaller_batches_partition_a_batch(
    lengths: list[int], context: int, world: int, per: int, start: int
) -> None:
    data, rows = shard(lengths), world * per
    whole = Batches(data, context, rows).at(start)
    ranks = [Batches(data, context, rows, rank=rank, world=world).at(start) for rank in range(world)]
    singles = [Batches(data, context, 1).at(start + i) for i in range(rows)]
    for parts in (ranks, singles):
        assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
        assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))
        assert whole.lengths == tuple(length for part in parts for length in part.lengths)
        assert whole.n_bytes == sum(part.n_bytes for part in parts)
    assert {part.next_position for part in ranks} == {whole.next_position} == {start + rows}


@LAWS
@given(LENGTHS, CONTEXT, st.integers(0, 20), st.booleans())
def test_targets_lengths_and_bytes(lengths: list[int], context: int, position: int, reset: bool) -> None:
    """Ids are distinct, so a token tells its document, its place and its successor."""
    data = shard(lengths)
    batch = Batches(data, context, 2, reset_at_documents=reset).at(position)
    tokens, targets = batch.tokens.tolist(), batch.targets.tolist()
    assert sum(batch.lengths) == len(tokens) == 2 * context and min(batch.lengths) >= 1
    follow = dict(zip(data.tokens.tolist(), data.tokens.tolist()[1:]))
    for token, target in zip(tokens, targets):
        if token != EOS:
            assert target == follow[token]
        elif reset:
            assert target == -100
        else:
            assert target in {int(data.document(i)[0]) for i in range(data.n_documents)}
    starts = np.cumsum([0, *batch.lengths])[:-1].tolist()
    expected = {0, context} | ({i + 1 for i, token in enumerate(tokens[:-1]) if token == EOS} if reset else set())
    assert set(starts) == expected
    assert batch.n_bytes == sum(int(data.token_bytes[t]) for t in targets if t != -100)


def test_rows_of_a_batch_come_from_different_documents() -> None:
    """Without the second order, a batch of 8 rows would lie in one document of 1,000 tokens."""
    data = shard([1000] * 20)
    documents = {int(token) // 999 for row in Batches(data, 16, 8).at(40).tokens.view(8, 16) for token in row[:1]}
    assert len(documents) >= 5


def test_epochs_and_seeds_differ() -> None:
    data = shard([7] * 50)
    first, again, other = (Batches(data, 7, 50, seed).at(0) for seed in (0, 0, 1))
    second = Batches(data, 7, 50, 0).at(50)
    assert same(first, again) and not same(first, other) and not same(first, second)
    assert sorted(first.tokens.tolist()) == sorted(second.tokens.tolist())
    assert Batches(data, 7, 50).epoch(75) == 1.5


def test_the_order_is_pinned() -> None:
    """A run must continue under another version of numpy or Python: these numbers may never change."""
    assert permutation(8, 0, "rows", 0).tolist() == [0, 4, 7, 3, 5, 2, 1, 6]
    tokens = Batches(shard([3, 5, 4, 6] * 5), 4, 4, seed=7).at(3).tokens.tolist()
    assert tokens == [0, 49, 50, 51, 24, 25, 26, 27, 11, 12, 13, 14, 0, 17, 18, 19]


@given(st.integers(0, 300), st.integers(0, 9))
def test_permutation_is_one(n: int, seed: int) -> None:
    assert sorted(permutation(n, seed).tolist()) == list(range(n))


def test_permutations_are_even() -> None:
    """Each value at each place about equally often: chi-square of 36 cells, 25 degrees, stays below its 1e-6 tail."""
    places = np.zeros((6, 6))
    for seed in range(6000):
        places[np.arange(6), permutation(6, seed)] += 1
    assert ((places - 1000) ** 2 / 1000).sum() < 75


@LAWS
@given(LENGTHS, CONTEXT, st.integers(1, 4), st.booleans())
def test_held_out_windows_cover_the_split_once_in_order(
    lengths: list[int], context: int, rows: int, reset: bool
) -> None:
    data = shard(lengths)
    batches = list(held_out_batches(data, context, rows, reset))
    tokens = torch.cat([batch.tokens for batch in batches]).tolist()
    targets = torch.cat([batch.targets for batch in batches]).tolist()
    assert tokens == data.tokens.tolist()
    ends = set((data.ends - 1).tolist())
    for i, target in enumerate(targets):
        last = i + 1 == len(tokens) or (reset and i in ends)
        assert target == (-100 if last else tokens[i + 1])
    assert all(len(batch.tokens) == rows * context for batch in batches[:-1])
    assert all(sum(batch.lengths) == len(batch.tokens) for batch in batches)
    firsts = sum(int(data.token_bytes[data.document(i)[0]]) for i in range(data.n_documents if reset else 1))
    assert sum(batch.n_bytes for batch in batches) == data.n_bytes - firsts


def test_bits_per_byte_of_a_uniform_guess() -> None:
    """A guess among 256 at each byte costs 8 bits, whatever the tokens."""
    assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8.0)


def test_an_empty_split_and_an_uneven_world_are_named() -> None:
    with pytest.raises(DataError, match="no tokens"):
        Batches(shard([]), 8, 1)
    with pytest.raises(DataError, match="5 rows does not divide among 2 ranks"):
        Batches(shard([3]), 8, 5, world=2)
    assert list(held_out_batches(shard([]), 8, 1)) == []
