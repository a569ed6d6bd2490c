"""Decay-weighted products inside a chunk, exact in fp32 for any gate.

    A_ij = Σ_d x_id k_jd exp(G_id − G_jd),  i ≥ j,        G the running sum of the log-decay g ≤ 0

A dense product wants exp(G_i) and exp(−G_j) apart, and the second overflows. So the chunk is cut into tiles so small
that |G − anchor| stays below 40 nats in each (anchor: the tile's middle token): e^±40 and their products are ordinary
fp32 numbers, so the masked half is finite too and may be multiplied by zero. Between tiles the products are anchored
at the border of two halves, where both exponents are ≤ 0, by recursive halving. Mild gates make the whole chunk one
tile; a tile of one token holds for any gate. One exp a token and channel: exp(−x) is 1/exp(x) in this range.
Shapes: m chunk·head, C tokens a chunk, n tiles of c tokens (n·c = C), K key channels, G = K or 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT = 40.0  # nats on either side of an anchor: exp(2·40)·K stays below fp32's 3e38


@dataclass(frozen=True)
class Decay:
    """What the products need of g.

    grow [m,C,G] = exp(G − anchor of its tile), shrink its inverse; head [m,n,1,G] = exp(anchor − chunk start) and
    rest [m,n,1,G] = exp(chunk end − anchor), both ≤ 1; total [m,G,1] = exp(Σg). levels: for each halving, row and
    column factors [m,h,s/c,1,G] that move a tile's anchor to the border of its two halves.
    """

    c: int
    grow: Tensor
    shrink: Tensor
    head: Tensor
    rest: Tensor
    total: Tensor
    levels: tuple[tuple[Tensor, Tensor], ...]


def decay_of(g_mCG: Tensor, lower_bound: float | None) -> Decay:
    """Chooses the tile and takes the exponentials. g is ≤ 0 and at least `floor`, see `clamped`."""
    m, C, G = g_mCG.shape
    c, centred = _tile(g_mCG, lower_bound)
    n = C // c
    centred = centred.view(m, n, c, G)
    first = g_mCG.view(m, n, c, G)[:, :, 0] - centred[:, :, 0]  # anchor − tile start
    last = centred[:, :, -1]  # tile end − anchor
    grow = centred.exp()
    if n == 1:
        head, rest = first.unsqueeze(2).exp(), last.unsqueeze(2).exp()
        total = (first + last).transpose(1, 2).exp()
        return Decay(c, grow.view(m, C, G), grow.reciprocal().view(m, C, G), head, rest, total, ())
    # Sums over tiles in fp64: a fast stretch before a slow one must not cost the slow one its digits.
    first, last = first.double(), last.double()
    ends = (first + last).cumsum(1)
    anchors = ends - last

    def exp(x: Tensor) -> Tensor:
        return x.exp().to(g_mCG.dtype)

    levels, s = [], 1
    while s < n:
        halves = anchors.view(m, n // (2 * s), 2, s, G)
        border = ends.view(m, n // (2 * s), 2 * s, G)[:, :, s - 1 : s]
        levels.append((exp(halves[:, :, 1] - border).unsqueeze(3), exp(border - halves[:, :, 0]).unsqueeze(3)))
        s *= 2
    return Decay(
        c,
        grow.view(m, C, G),
        grow.reciprocal().view(m, C, G),
        exp(anchors).unsqueeze(2),
        exp(ends[:, -1:] - anchors).unsqueeze(2),
        exp(ends[:, -1]).unsqueeze(-1),
        tuple(levels),
    )


def clamped(g: Tensor) -> Tensor:
    """g no lower than where exp is zero: keeps differences of sums exact and finite."""
    return g.clamp_(min=floor(g.dtype))


def floor(dtype: torch.dtype) -> float:
    return -750.0 if dtype == torch.float64 else -110.0


def products(decay: Decay, rows_m2CK: Tensor, cols_mCK: Tensor) -> Tensor:
    """A [m,2,C,C] of two sets of rows (each x·grow) with the columns k·shrink; the masked half is finite garbage."""
    m, _, C, K = rows_m2CK.shape
    c = decay.c
    if c == C:
        return torch.bmm(rows_m2CK.view(m, 2 * C, K), cols_mCK.transpose(1, 2)).view(m, 2, C, C)
    out = rows_m2CK.new_zeros(m, 2, C, C)
    tile_rows = rows_m2CK.view(m, 2, C // c, c, K).transpose(1, 2).reshape(-1, 2 * c, K)
    _diagonal(out, c)[:] = _blocks(torch.bmm(tile_rows, cols_mCK.view(-1, c, K).transpose(1, 2)), m, c)
    for level, (rows, cols) in enumerate(_halves(decay, rows_m2CK, cols_mCK)):
        s = c << level
        _below(out, s)[:] = _blocks(torch.bmm(rows, cols.transpose(1, 2)), m, s)
    return out


def products_backward(decay: Decay, dA_m2CC: Tensor, rows_m2CK: Tensor, cols_mCK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and columns; dA is zero wherever A is masked."""
    m, _, C, K = rows_m2CK.shape
    c = decay.c
    if c == C:
        dA = dA_m2CC.view(m, 2 * C, C)
        rows = rows_m2CK.view(m, 2 * C, K)
        return torch.bmm(dA, cols_mCK).view(m, 2, C, K), torch.bmm(dA.transpose(1, 2), rows)
    dA = _unblocks(_diagonal(dA_m2CC, c))
    rows = rows_m2CK.view(m, 2, C // c, c, K).transpose(1, 2).reshape(-1, 2 * c, K)
    cols = cols_mCK.view(-1, c, K)
    drows = torch.bmm(dA, cols).view(m, C // c, 2, c, K).transpose(1, 2).reshape(m, 2, C, K)
    dcols = torch.bmm(dA.transpose(1, 2), rows).view(m, C, K)
    for level, (rows, cols) in enumerate(_halves(decay, rows_m2CK, cols_mCK)):
        s = c << level
        h, (row_factor, col_factor) = C // (2 * s), decay.levels[level]
        dA = _unblocks(_below(dA_m2CC, s))
        late = torch.bmm(dA, cols).view(m, h, 2, s // c, c, K).transpose(1, 2) * row_factor.unsqueeze(1)
        drows.view(m, 2, h, 2, s, K)[:, :, :, 1] += late.view(m, 2, h, s, K)
        early = torch.bmm(dA.transpose(1, 2), rows).view(m, h, s // c, c, K) * col_factor
        dcols.view(m, h, 2, s, K)[:, :, 0] += early.view(m, h, s, K)
    return drows, dcols


def scaled(x_mCK: Tensor, factor_mn1G: Tensor) -> Tensor:
    """x with each tile's factor, a new tensor."""
    m, C, K = x_mCK.shape
    n = factor_mn1G.shape[1]
    return (x_mCK.view(m, n, C // n, K) * factor_mn1G).view(m, C, K)


def _tile(g_mCG: Tensor, lower_bound: float | None) -> tuple[int, Tensor]:
    """The largest tile whose centred sums stay within LIMIT, and those sums [m,C,G].

    On an accelerator the bound of one token decides, so that nothing is read back: without a gate's own that is one
    token a tile.
    """
    C, G = g_mCG.shape[1:]
    c, lowest = C, floor(g_mCG.dtype) if lower_bound is None else lower_bound
    while True:
        bounded = -lowest * (c // 2) <= LIMIT
        if not bounded and g_mCG.device.type != "cpu":
            c //= 2
            continue
        centred = torch.matmul(_centring(c, g_mCG.dtype, g_mCG.device), g_mCG.view(-1, c, G))
        if bounded or max(-centred.min().item(), centred.max().item()) <= LIMIT:
            return c, centred
        c //= 2


def _centring(c: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The matrix [c,c] that sums g from the middle token: +1 where middle < j ≤ i, −1 where i < j ≤ middle."""
    i = torch.arange(c, device=device)
    j, middle = i, (c - 1) // 2
    forth = (j > middle) & (j <= i.unsqueeze(1))
    back = (j <= middle) & (j > i.unsqueeze(1))
    return forth.to(dtype) - back.to(dtype)


def _halves(decay: Decay, rows_m2CK: Tensor, cols_mCK: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each halving, second-half rows [m·h,2s,K] and first-half columns [m·h,s,K], both anchored at the border."""
    m, _, C, K = rows_m2CK.shape
    c, found = decay.c, []
    for level, (row_factor, col_factor) in enumerate(decay.levels):
        s = c << level
        h = C // (2 * s)
        late = rows_m2CK.view(m, 2, h, 2, s // c, c, K)[:, :, :, 1] * row_factor.unsqueeze(1)
        early = cols_mCK.view(m, h, 2, s // c, c, K)[:, :, 0] * col_factor
        found.append((late.transpose(1, 2).reshape(m * h, 2 * s, K), early.reshape(m * h, s, K)))
    return found


def _diagonal(A_m2CC: Tensor, c: int) -> Tensor:
    """View of the diagonal c×c blocks: [m,2,c,c,n]."""
    m, _, C, _ = A_m2CC.shape
    return A_m2CC.view(m, 2, C // c, c, C // c, c).diagonal(dim1=2, dim2=4)


def _below(A_m2CC: Tensor, s: int) -> Tensor:
    """View of the s×s blocks left of the diagonal at one halving (late rows, early columns): [m,2,s,s,h]."""
    m, _, C, _ = A_m2CC.shape
    h = C // (2 * s)
    return A_m2CC.view(m, 2, h, 2, s, h, 2, s)[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)


def _blocks(x: Tensor, m: int, s: int) -> Tensor:
    """[m·h,2s,s] as [m,2,s,s,h], the layout of the block views."""
    return x.view(m, -1, 2, s, s).permute(0, 2, 3, 4, 1)


def _unblocks(blocks: Tensor) -> Tensor:
    """[m,2,s,s,h] as [m·h,2s,s]."""
    s = blocks.shape[2]
    return blocks.permute(0, 4, 1, 2, 3).reshape(-1, 2 * s, s)
