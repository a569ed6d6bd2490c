"""Paged windows against plain attention over each sequence's latents."""

import pytest
import torch

from perilune.ops.mla import merge_parts, mla_decode, mla_part


@pytest.mark.parametrize("window", [1, 3])
def test_windows_attend_to_their_past_and_themselves(window: int) -> None:
    torch.manual_seed(0)
    heads, width, values, size, lengths = 3, 10, 8, 4, [3, 9, 16]
    latents = torch.randn(20, size, width, dtype=torch.float64)
    table = torch.tensor([[7, 0, 0, 0], [2, 11, 5, 0], [1, 3, 19, 4]])
    q = torch.randn(3, window, heads, width, dtype=torch.float64)
    o = mla_decode(q, latents, table, torch.tensor(lengths), values=values, scale=0.3)
    for n, length in enumerate(lengths):
        context = latents[table[n]].flatten(0, 1)[:length]
        for w in range(window):
            seen = context[: length - window + w + 1]
            weight = (0.3 * q[n, w] @ seen.T).softmax(-1)
            torch.testing.assert_close(o[n, w], weight @ seen[:, :values])


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_a_context_merge_into_the_whole(ranks: int) -> None:
    """Token t lies with rank t mod R; a context shorter than R leaves some of them nothing."""
    torch.manual_seed(0)
    heads, width, values, size, lengths = 3, 10, 8, 4, torch.tensor([1, 9, 16])
    whole = torch.randn(3, 4 * size, width, dtype=torch.float64)
    q = torch.randn(3, heads, width, dtype=torch.float64)
    table = torch.arange(12).view(3, 4)
    want = mla_decode(q.unsqueeze(1), whole.view(12, size, width), table, lengths, values=values, scale=0.3)
    parts = []
    for rank in range(ranks):
        mine = torch.nn.functional.pad(whole[:, rank::ranks], (0, 0, 0, 16 - len(whole[0, rank::ranks])))
        seen = (lengths - 1 - rank + ranks) // ranks
        parts.append(mla_part(q, mine.reshape(12, size, width), table, seen, values=values, scale=0.3))
    o, lse = (torch.stack(x) for x in zip(*parts))
    assert not o[-1, 0].any() and bool((lse[-1, 0] == -torch.inf).all())
    torch.testing.assert_close(merge_parts(o, lse), want.squeeze(1))


def test_bad_input_is_named() -> None:
    q, latents = torch.zeros(2, 1, 3, 10), torch.zeros(5, 4, 10)
    table, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="values"):
        mla_decode(q, latents, table, lengths, values=11, scale=1.0)
    with pytest.raises(ValueError, match="table"):
        mla_decode(q, latents, table[:1], lengths, values=8, scale=1.0)
    with pytest.raises(ValueError, match="latents"):
        mla_decode(q, latents[..., :9], table, lengths, values=8, scale=1.0)
