"""KDA and its neighbours over cut sequences against one device: values, states and gradients on a fabric of threads."""

import itertools

import pytest
import torch
from parallel.sequences import DOCUMENTS, PACKED, Sequences, alone, sequences, together
from parallel.threads import run
from torch import Tensor

from perilune.parallel.scan import kda_parallel
from perilune.parallel.shards import by_heads, by_tokens, context, gather_tokens, shard, tail


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert got.keys() == want.keys()
    for name in want:
        error = (got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_equals_one_device(documents: list[int], size: int) -> None:
    case = sequences(len(documents), documents)
    close(together(case, size), alone(case))


@pytest.mark.parametrize(
    "options", [{"lower_bound": None}, {"delta": False}, {"given": False}, {"value_heads": 4}], ids=str
)
def test_equals_one_device_with(options: dict) -> None:
    case = sequences(3, [9, 14, 1], **options)
    close(together(case, 4), alone(case))


def test_fold_in_the_wrong_order_is_noticed() -> None:
    """Negative control: the same fragments, composed as if they commuted."""
    case = sequences(1, [40])
    close(together(case, 4), alone(case))
    with pytest.raises(AssertionError, match="relative error"):
        close(together(case, 4, spoil=True), alone(case))


@pytest.mark.parametrize("documents", [*DOCUMENTS, [0, 3, 0, 0, 2], [1], []], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shards_cover_every_token_once(documents: list[int], size: int) -> None:
    pieces = [shard(documents, r, size) for r in range(size)]
    owner = list(itertools.chain.from_iterable([d] * n for d, n in enumerate(documents)))
    assert [n for p in pieces for n in p.lengths if n] == [
        len(list(run)) for _, run in itertools.groupby(
            (r, d) for r, p in enumerate(pieces) for d in owner[p.borders[r] : p.borders[r + 1]])
    ]  # fmt: skip
    for p in pieces:
        a, b = p.borders[p.rank : p.rank + 2]
        before = [i for i in range(a) if a < len(owner) and owner[i] == owner[a]]
        assert p.carried == len(before)
        assert p.continues == (p.rank + 1 < size and 0 < b < len(owner) and owner[b - 1] == owner[b])
        assert sum(p.lengths) == b - a


def conv_reference(x: Tensor, documents: list[int], width: int) -> Tensor:
    """For every token the `width` inputs before it in its document, zeros before the start: [T, width, C]."""
    pieces = [torch.cat([x.new_zeros(width, x.shape[1]), d]) for d in x.split(documents)]
    return torch.cat([p.unfold(0, width, 1)[: p.shape[0] - width].mT for p in pieces])


@pytest.mark.parametrize(
    "documents, size", [([7, 1, 12], 4), ([20], 8), ([2, 2, 2, 2], 4), ([5, 6], 2), ([3], 3)], ids=str
)
def test_tail_and_context_bring_the_tokens_before(documents: list[int], size: int) -> None:
    total, width = sum(documents), 3
    x = torch.randn(total, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    borders = [0, *itertools.accumulate(documents)]
    want = conv_reference(x, documents, width)

    def program(fabric) -> tuple[Tensor, int]:
        p = shard(documents, fabric.rank, size)
        here = x[p.borders[p.rank] : p.borders[p.rank + 1]].clone().requires_grad_()
        got = tail(here[None], width, fabric, p)
        starts = [p.borders[p.rank], *(b for b in borders if p.borders[p.rank] < b < p.borders[p.rank + 1])]
        for n, t in enumerate(starts[: len(p.lengths)]):
            if t < total and p.tokens:
                assert torch.equal(got[n].T, want[t])
        seen = context(here, fabric, p)
        assert torch.equal(seen, x[p.borders[p.rank] - p.carried : p.borders[p.rank + 1]])
        return torch.autograd.grad(got.sum() * 100 + seen.sum(), here)[0], p.tokens

    grads = torch.cat([g for g, _ in run(size, program)])
    uses = torch.zeros(total, dtype=torch.float64)
    for r in range(size):
        p = shard(documents, r, size)
        a = p.borders[r]
        uses[a - p.carried : p.borders[r + 1]] += 1
        uses[a - min(width, p.carried) : a] += 100
    assert torch.equal(grads, uses[:, None].expand(-1, 5))


def attention(q: Tensor, c: Tensor, lengths: list[int], before: int = 0) -> Tensor:
    """Causal softmax attention of q [T, H, D] over c [before + T, D] as keys and values, one document after another."""
    out, at = [], 0
    for n, length in enumerate(lengths):
        early = before if n == 0 else 0
        keys = c[at + (before if n else 0) : at + before + length]
        scores = torch.einsum("thd,sd->hts", q[at : at + length], keys)
        mask = torch.ones(length, early + length, dtype=torch.bool).tril(early)
        out.append(torch.einsum("hts,sd->thd", scores.masked_fill(~mask, -torch.inf).softmax(-1), keys))
        at += length
    return torch.cat(out)


@pytest.mark.parametrize("way", ["context", "heads"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_over_latents_both_ways(size: int, way: str) -> None:
    documents, H, D = [5, 11, 8], 4, 6
    g = torch.Generator().manual_seed(1)
    q, c, dy = (torch.randn(24, *s, generator=g, dtype=torch.float64) for s in ((H, D), (D,), (H, D)))
    whole = [q.clone().requires_grad_(), c.clone().requires_grad_()]
    want = attention(*whole, documents)
    want_grads = torch.autograd.grad(want, whole, dy)

    def program(fabric) -> tuple[Tensor, ...]:
        p = shard(documents, fabric.rank, size)
        here = slice(*p.borders[p.rank : p.rank + 2])
        mine = [t[here].clone().requires_grad_() for t in (q, c)]
        if way == "context":
            y = attention(mine[0], context(mine[1], fabric, p), list(p.lengths), p.carried)
        else:
            y = by_tokens(
                attention(by_heads(mine[0], fabric, p), gather_tokens(mine[1], fabric, p), documents), fabric, p
            )
        return y.detach(), *torch.autograd.grad(y, mine, dy[here])

    for got, expected in zip(zip(*run(size, program)), (want.detach(), *want_grads)):
        torch.testing.assert_close(torch.cat(got), expected, rtol=1e-11, atol=1e-11)


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="3 heads cannot be divided over 2 ranks"):
        run(2, lambda fabric: by_heads(torch.zeros(2, 3, 1), fabric, shard([4], fabric.rank, 2)))


def test_wrong_number_of_tokens_is_one_sentence() -> None:
    case = sequences(0, [8])
    with pytest.raises(ValueError, match="rank 0 holds 4 tokens"):
        run(2, lambda fabric: case.call(fabric, shard([8], fabric.rank, 2)))


def test_a_piece_of_another_rank_is_one_sentence() -> None:
    case = sequences(0, [8])
    with pytest.raises(ValueError, match=r"the piece is rank 0's of 3, the fabric rank \d of 2"):
        run(2, lambda fabric: case.call(fabric, shard([8], 0, 3)))


def test_autocast_does_not_round_what_crosses_borders() -> None:
    """States travel and are folded in fp32 whatever the caller's products run in."""
    case = sequences(4, [40], dtype=torch.float32, K=16, V=16)

    def program(fabric, on: bool) -> tuple[Tensor, Tensor]:
        piece = shard(case.documents, fabric.rank, 4)
        here = slice(*piece.borders[piece.rank : piece.rank + 2])
        cut = {n: t[:, here] if n in PACKED else t for n, t in case.inputs.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=on):  # a setting of this thread
            return kda_parallel(**cut, fabric=fabric, piece=piece, **case.options)

    plain, cast = (run(4, lambda fabric, on=on: program(fabric, on)) for on in (False, True))
    assert all(torch.equal(a, b) for x, y in zip(plain, cast) for a, b in zip(x, y))


def test_cases_span_every_border() -> None:
    """The cases hold documents over many ranks, borders on a document's start, and ranks inside one document."""
    pieces = [shard(d, r, 8) for d in DOCUMENTS for r in range(8)]
    assert any(p.through[p.rank] and p.continues for p in pieces)
    assert any(p.rank and not p.carried for p in pieces)
    assert any(len(p.lengths) > 2 for p in pieces)
    assert isinstance(sequences(0, [4]), Sequences)
