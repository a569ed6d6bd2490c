"""bf16 autocast: the stream is bf16, the fp32 set and the router stay fp32, and the loss stays near fp32's."""

import torch

from perilune.config import preset
from perilune.data import Batch
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.model.taps import Taps
from perilune.model.weights import is_fp32
from perilune.train.loss import batch_loss


def test_bf16_autocast_trains_near_fp32() -> None:
    torch.manual_seed(0)
    model = K3(preset("tiny").replace(vocab_size=64, num_nextn_predict_layers=1))
    model.reset_parameters()
    ids = torch.randint(0, 64, (97,))
    batch = Batch(ids[:-1], ids[1:].clone(), (60, 36), 96, 0, 1)
    losses, grads = [], []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = batch_loss(model, batch, torch.bfloat16 if enabled else torch.float32)
            (loss.next_token + loss.mtp).backward()
        losses.append(float(loss.next_token.detach()))
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        assert all(route.scores.dtype == torch.float32 for route in loss.routes.values())
    assert abs(losses[1] / losses[0] - 1) < 0.01
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        assert grad.dtype == torch.float32, name  # masters, and with them the fp32 set, are never narrowed
        assert grad.isfinite().all(), name
    assert any(is_fp32(name) for name in grads[1])


def test_the_stream_is_bf16_under_autocast() -> None:
    model = K3(preset("tiny").replace(vocab_size=64))
    model.reset_parameters()
    taps = Taps.of({"hidden"})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model(torch.arange(20), Layout.packed([20]), taps=taps)
    assert {h.dtype for h in taps.hidden.values()} == {torch.bfloat16}
    assert out.hidden.dtype == torch.bfloat16
