"""Products over own and borrowed groups: the reference against its equation, the kernels against loops."""

import pytest
import torch

from perilune.parallel.products import product, weight_gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", [[3, 0, 5, 2, 0, 6], [0, 0, 8, 0, 0, 8], [0, 0, 0, 0, 16, 0], [16, 0, 0, 0, 0, 0]])
def test_every_row_meets_the_weight_of_its_group(sizes: list[int], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    x, dy, own, lent = new(16, 8), new(16, 24), new(4, 24, 8).mT, new(2, 24, 8).mT
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    group = torch.repeat_interleave(torch.arange(6), torch.tensor(sizes))
    weights = torch.cat([own, lent])
    want = torch.einsum("nd,ndf->nf", x, weights[group])
    torch.testing.assert_close(product(x, own, lent, ends), want, rtol=1e-5, atol=1e-5)
    slots = torch.full((2, 8, 24), 5.0, dtype=dtype)
    home = weight_gradients(x, dy, slots, ends, 4)
    outer = torch.zeros(6, 8, 24, dtype=dtype).index_add(0, group, x[:, :, None] * dy[:, None, :])
    torch.testing.assert_close(home, outer[:4], rtol=1e-5, atol=1e-5)
    for b in range(2):  # idle slots keep what they hold
        torch.testing.assert_close(slots[b], outer[4 + b] if sizes[4 + b] else torch.full_like(slots[b], 5.0))


def test_kernels_for_borrowed_groups() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from parallel.test_planner_triton import script

    assert script("product_kernel_cases.py", interpret=True) == "ok"


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from parallel.test_planner_triton import script

    assert script("compile_hopper.py", "products", interpret=False).count("products ") == 5
