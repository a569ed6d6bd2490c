"""The fused siblings on a GPU: in bf16 against fp64, the router's fp32, and a training that follows torch's own."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ops.fused import cases

from perilune.config import preset
from perilune.data import Batch
from perilune.model.net import K3
from perilune.ops import dispatch
from perilune.ops.router import route, router_scores
from perilune.train.loss import batch_loss
from perilune.train.optim import Optimizer, plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-3), (torch.bfloat16, 1e-2)])  # fp32: TF32 products
@pytest.mark.parametrize(
    "name", ["situ", "norm", "softmax", "attnres", "phases", "conv", "moe", "few", "one", "packed", "mla", "head"]
)
def test_against_fp64(name: str, dtype: torch.dtype, bound: float) -> None:
    cases.on_gpu(dtype)
    assert getattr(cases, name)() < bound


def test_attention_never_rounds_its_output() -> None:
    """Probabilities are multiplied as two bf16 parts, which leave 2^−18 of each; rounding the output leaves 2e-3."""
    cases.on_gpu(torch.bfloat16)
    assert cases.kept() < 2**-18


def test_histogram_and_optimiser() -> None:
    cases.on_gpu(torch.float32)
    assert cases.histogram() < 1e-3
    assert cases.muon() < 2e-2  # bf16 products from the fourth digit apart


def test_router_products_keep_fp32() -> None:
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(128, 512, device="cuda") * 0.05
    bias = torch.randn(128, device="cuda") * 0.01
    made, exact = route(x, w, bias, top_k=6, impl="fused"), router_scores(x.double(), w.double())
    assert (made.scores - exact).abs().max() < 1e-6
    assert ((exact + bias).gather(1, made.idx).amin(1) - (exact + bias).topk(6).values[:, -1]).abs().max() < 1e-6


def losses(steps: int) -> list[float]:
    """Of `mini` on one batch of repeated tokens, so that there is something to learn."""
    torch.manual_seed(0)
    config = preset("mini").replace(num_nextn_predict_layers=0)
    with torch.device("cuda"):
        model = K3(config)
    model.reset_parameters()
    optimizer = Optimizer(plan(model.named_parameters(), config))
    ids = torch.randint(0, 512, (8193,), generator=torch.Generator().manual_seed(0)) ** 2 % 509
    batch = Batch(ids[:-1], ids[1:].clone(), (5000, 0, 3192), 8192, 0, 1)
    found = []
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = batch_loss(model, batch, torch.bfloat16).next_token / 8192
        loss.backward()
        optimizer.step(1e-3)
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_mini_trains_as_with_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = losses(20)
    monkeypatch.setattr(dispatch, "_unfit", lambda *_: "the test wants torch's own")
    theirs = losses(20)
    assert theirs[-1] < theirs[0] - 1.0, theirs
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.02 * theirs[0], (ours, theirs)
