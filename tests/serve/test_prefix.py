"""Lookup against the report's worked example and against the definition of a hit."""

import torch

from perilune.config import preset
from perilune.serve.pool import Geometry, Pool
from perilune.serve.prefix import Chain, Prefix

# K3's sizes with one layer of each kind: the pool's arithmetic depends on nothing else.
ONE = preset("k3").replace(num_hidden_layers=2, mla_layers=(1,))


def chain(tokens: list[int], salt: bytes = b"") -> Chain:
    made = Chain(512, salt)
    made.extend(tokens, len(tokens))
    return made


def cached(ends: list[int], tokens: list[int], written: int) -> tuple[Prefix, Chain]:
    """A pool that knows the first `written` tokens, with checkpoints at `ends`."""
    pool = Pool(Geometry(ONE, 512, torch.bfloat16), 8, "cpu")
    prefix, known = Prefix(pool), chain(tokens)
    pages = [pool.take("mla") for _ in range(-(-written // 6144))]
    prefix.publish(known, pages, 0, written)
    for end in ends:
        block = pool.take("kda")
        pool.publish(block, known.at(end))
        pool.drop(block)
    for page in pages:
        pool.drop(page)
    return prefix, known


def test_the_reports_example() -> None:
    """2,800 tokens match; the hit is at 2,560, deep inside a page of 6,144."""
    first = list(range(5000))
    prefix, _ = cached([1024, 2560, 4608], first, 5000)
    assert prefix.geometry.page_tokens == 6144
    second = first[:2800] + [-1] * 700
    hit = prefix.match(chain(second), len(second) - 1)
    assert (hit.tokens, hit.reach) == (2560, 2560)
    assert len(hit.pages) == 1 and hit.pages[0].block.refs == 1 and hit.state.block.refs == 1
    hit.release()
    prefix.pool.audit()


def test_without_a_checkpoint_there_latents_alone_are_no_hit() -> None:
    tokens = list(range(5000))
    prefix, known = cached([1024], tokens, 5000)
    hit = prefix.match(known, 4999)
    assert (hit.tokens, hit.reach) == (1024, 4608)  # 4608 is the branch point worth a checkpoint


def test_the_last_token_is_left_to_compute() -> None:
    for n in (5 * 512 - 1, 5 * 512, 5 * 512 + 1):
        tokens = list(range(n))
        prefix, known = cached([1024, 2048, *([2560] if n >= 2560 else [])], tokens, n)
        assert prefix.match(known, n - 1).tokens == (2560 if n > 2560 else 2048)


def test_whole_pages_then_the_endpoints_of_the_next() -> None:
    tokens = list(range(14000))
    prefix, known = cached([6144, 12288, 13824], tokens, 14000)
    hit = prefix.match(known, 13999)
    assert hit.tokens == 13824 and len(hit.pages) == 3
    assert len({f.block for f in hit.pages}) == 3
    hit.release()
    shorter = prefix.match(known, 13000)
    assert shorter.tokens == 12288 and len(shorter.pages) == 2


def test_salt_isolates() -> None:
    tokens = list(range(3000))
    prefix, _ = cached([2560], tokens, 3000)
    assert prefix.match(chain(tokens, b"tenant"), 2999).tokens == 0


def test_a_hash_covers_all_before_it() -> None:
    a, b = chain([0] * 512 + [7] * 512), chain([1] * 512 + [7] * 512)
    assert a.hashes[1] != b.hashes[1]
    assert a.common(b) == 0 and a.common(a) == 1024
    assert a.common(chain([0] * 512 + [8] * 1024)) == 512 and a.common(Chain(512)) == 0
    parts = Chain(512)
    for upto in (3, 600, 601, 1024):
        parts.extend([0] * 512 + [7] * 512, upto)
    assert parts.hashes == a.hashes
