"""Run by test_products in its own interpreter: the kernels of grouped products and of sums against loops."""

import numpy as np
import torch

from perilune.parallel import products_triton as k
from perilune.parallel.fabric import _sum_in_order
from perilune.parallel.sums_triton import sum_in_order


def case(seed: int, dtype: torch.dtype) -> None:
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    B, D, F = (int(rng.integers(1, n)) for n in (6, 40, 40))
    D, F = (D, F) if seed % 2 else (16 + D // 16 * 16, 16 + F // 16 * 16)  # and whole tiles
    sizes = rng.integers(0, 30, size=B + 1) * (rng.random(B + 1) < 0.7)
    borders = torch.from_numpy(sizes.cumsum()).to(torch.int32)
    N = int(borders[-1])
    new = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    x, dy, weights = new(N, D), new(N, F), new(B, F, D).mT
    out, grad = torch.full((N, F), 7.0, dtype=dtype), torch.full((B, F, D), 7.0, dtype=dtype).mT
    want_out, want_grad = out.clone(), grad.clone()
    for b in range(B):
        rows = slice(int(borders[b]), int(borders[b + 1]))
        if rows.start < rows.stop:
            want_out[rows] = (x[rows].double() @ weights[b].double()).to(dtype)
            want_grad[b] = (x[rows].double().T @ dy[rows].double()).to(dtype)
    if N:
        k.lent_product(out, x, weights, borders, (16, 16, 16, 4, 2))
    k.lent_gradients(grad, x, dy, borders, (16, 16, 16, 4, 2))
    for got, want in ((out, want_out), (grad, want_grad)):
        torch.testing.assert_close(
            got, want, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-2 if dtype == torch.float16 else 1e-5
        )
    first = slice(0, int(borders[0]))
    assert torch.equal(out[first], torch.full_like(out[first], 7.0))  # rows of the home groups are not touched


def all_groups(seed: int, kmajor: bool) -> None:
    """Own and lent groups in one walk, either layout of the weights; no row is left out."""
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    L, B, D, F = int(rng.integers(1, 5)), int(rng.integers(1, 5)), 32, int(rng.integers(1, 6)) * 8
    sizes = rng.integers(0, 40, size=L + B) * (rng.random(L + B) < 0.7)
    ends = torch.from_numpy(sizes.cumsum()).to(torch.int32)
    new = lambda *shape: torch.randn(*shape, generator=g).half()  # noqa: E731
    x = new(max(int(ends[-1]), 1), D)
    own, lent = (new(n, F, D).mT if kmajor else new(n, D, F) for n in (L, B))
    out = k.grouped(x, own, lent, ends, (32, 16, 32, 4, 2))
    group = torch.repeat_interleave(torch.arange(L + B), torch.from_numpy(sizes))
    want = torch.einsum("nd,ndf->nf", x[: len(group)].double(), torch.cat([own, lent])[group].double()).half()
    torch.testing.assert_close(out[: len(group)], want, rtol=2e-3, atol=1e-2)


def sums(seed: int, dtype: torch.dtype) -> None:
    """The kernel that collectives use on a GPU against the loop that they use elsewhere, bit for bit."""
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    N, P, K, H = 9, int(rng.integers(0, 12)), int(rng.integers(0, 5)), int(rng.integers(1, 40))
    x, index = torch.randn(N, H, generator=g).to(dtype), torch.from_numpy(rng.integers(-1, N, size=(P, K)))
    assert torch.equal(sum_in_order(x, index), _sum_in_order(x, index))


for seed in range(4):
    sums(seed, torch.float32 if seed % 2 else torch.float16)
for seed in range(4):
    case(seed, torch.float32 if seed % 3 else torch.float16)
for seed in range(4):
    all_groups(seed, kmajor=seed % 2 == 0)
print("ok")
