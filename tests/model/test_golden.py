"""The released reference code's own numbers: logits, routes, residual streams, states, latents."""

import pytest
import torch
from golden import golden
from safetensors.torch import load_file

from perilune.model.cache import Dense
from perilune.model.layout import Layout
from perilune.model.taps import Taps
from perilune.model.weights import load_model

FAMILIES = {"tiny-text": 5e-4, "tiny-text-mxfp4": 1e-4, "tiny-kimi-linear": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    path = golden(request.param)
    io = load_file(path / "io.safetensors")
    prompts = sorted({k.split(".")[0] for k in io if k.endswith(".input_ids") and not k.startswith("batch")})
    return load_model(path), io, prompts, FAMILIES[request.param]


@torch.no_grad()
def test_whole_sequences(family) -> None:
    model, io, prompts, atol = family
    for prompt in prompts:
        ids = io[f"{prompt}.input_ids"].long()
        taps = Taps.of({"hidden", "routes"})
        out = model(ids, Layout.packed([len(ids)]), taps=taps)
        torch.testing.assert_close(out.logits, io[f"{prompt}.logits"], atol=atol, rtol=0)
        for layer, (index, weight) in taps.routes.items():
            index, order = index.sort(-1)
            assert torch.equal(index.short(), io[f"{prompt}.route_idx.{layer}"]), (prompt, layer)
            torch.testing.assert_close(weight.gather(1, order), io[f"{prompt}.route_w.{layer}"], atol=1e-4, rtol=0)
        for layer, hidden in taps.hidden.items():
            if f"{prompt}.hidden.{layer}" in io:
                torch.testing.assert_close(hidden, io[f"{prompt}.hidden.{layer}"], atol=atol, rtol=0)


@torch.no_grad()
def test_packed_together_equals_alone(family) -> None:
    model, io, prompts, atol = family
    ids = [io[f"{prompt}.input_ids"].long() for prompt in prompts]
    out = model(torch.cat(ids), Layout.packed([len(i) for i in ids]))
    for prompt, logits in zip(prompts, out.logits.split([len(i) for i in ids])):
        torch.testing.assert_close(logits, io[f"{prompt}.logits"], atol=atol, rtol=0)


@torch.no_grad()
def test_prefill_then_decode_and_its_states(family) -> None:
    model, io, prompts, atol = family
    for prompt in prompts:
        ids = io[f"{prompt}.input_ids"].long()
        n = len(ids) - 5
        cache = Dense(model.config, 1, dtype=torch.float32)
        model(ids[:n], cache.layout([n]), cache)
        _assert_state(cache, io, f"{prompt}.prefill", latents=False)
        steps = [model(ids[i : i + 1], cache.layout([1]), cache).logits for i in range(n, n + 5)]
        torch.testing.assert_close(torch.cat(steps), io[f"{prompt}.decode_logits"], atol=atol, rtol=0)
        _assert_state(cache, io, f"{prompt}.final", latents=True)


def _assert_state(cache: Dense, io: dict, key: str, latents: bool) -> None:
    state = cache.export(0)
    for layer in state.kda:
        if f"{key}.kda_state.{layer}" in io:
            torch.testing.assert_close(state.kda[layer], io[f"{key}.kda_state.{layer}"], atol=2e-4, rtol=0)
            tail = io[f"{key}.conv_state.{layer}"].flatten(0, 1)
            torch.testing.assert_close(state.conv[layer], tail, atol=2e-4, rtol=0)
    for layer in state.mla if latents else ():
        if f"{key}.mla_latent.{layer}" in io:
            torch.testing.assert_close(state.mla[layer], io[f"{key}.mla_latent.{layer}"], atol=2e-4, rtol=0)


@torch.no_grad()
def test_left_padded_batch_is_a_batch_of_sequences(family) -> None:
    """The reference pads on the left; we pack the real tokens and owe the same logits at every one of them."""
    model, io, _, atol = family
    mask = io["batch.attention_mask"].bool()
    lengths = mask.sum(1).tolist()
    out = model(io["batch.input_ids"][mask].long(), Layout.packed(lengths))
    torch.testing.assert_close(out.logits, io["batch.logits"][mask], atol=atol, rtol=0)
