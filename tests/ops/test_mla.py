"""Paged windows against plain attention over each sequence's latents."""

import pytest
import torch

from perilune.ops.mla import mla_decode


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


def test_bad_input_is_named() -> None:
    q, latents = torch.zeros(2, 1, 3, 10), torch.zeros(5, 4, 10)
    table, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="values"):
        mla_decode(q, latents, table, lengths, values=11, scale=1.0)
    with pytest.raises(ValueError, match="table"):
        mla_decode(q, latents, table[:1], lengths, values=8, scale=1.0)
    with pytest.raises(ValueError, match="latents"):
        mla_decode(q, latents[..., :9], table, lengths, values=8, scale=1.0)
