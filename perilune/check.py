"""`perilune check`: golden vectors against our implementations, one line a family.

Each family is a directory of inputs and outputs of the released reference code. A check returns the largest error as a
share of its tolerance, so that 1.00 is the border; a foreign checkpoint directory with `io.safetensors` is checked
like the text models.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from perilune.chat import ChatError, parse, read_request, render
from perilune.model.cache import Dense
from perilune.model.layout import Layout
from perilune.model.net import K3
from perilune.model.taps import Taps
from perilune.model.weights import load_model
from perilune.ops.attnres import mix
from perilune.ops.kda import kda
from perilune.ops.mx import pack_mxfp4, unpack_mxfp4
from perilune.ops.router import route
from perilune.ops.situ import situ_glu
from perilune.tokenizer import Tokenizer


@dataclass(frozen=True)
class Result:
    """A family's outcome. error: the largest, absolute; share: of its tolerance (> 1 fails); note: what it was on."""

    family: str
    cases: int
    error: float
    share: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.share <= 1


class Tally:
    """Collects comparisons; a NaN or a wrong shape is an infinite error."""

    def __init__(self) -> None:
        self.error = self.share = 0.0
        self.cases = 0
        self.note = ""

    def close(self, ours: Tensor, theirs: Tensor, atol: float, note: str, scale: float = 1.0) -> None:
        """|ours − theirs| <= atol · scale everywhere; NaN equals NaN, infinities by sign."""
        error = _largest(ours, theirs)
        self._add(error, error / (atol * scale), note)

    def relative(self, ours: Tensor, theirs: Tensor, rtol: float, note: str) -> None:
        """‖ours − theirs‖ / ‖theirs‖ <= rtol."""
        norm = theirs.double().norm()
        error = float((ours.double() - theirs.double()).norm() / norm) if norm > 0 else float(ours.double().norm())
        self._add(error, error / rtol, note)

    def equal(self, same: bool, note: str) -> None:
        self._add(0.0 if same else math.inf, 0.0 if same else math.inf, note)

    def _add(self, error: float, share: float, note: str) -> None:
        self.cases += 1
        if not share <= self.share:  # also when share is NaN
            self.error, self.share, self.note = error, share if share == share else math.inf, note

    def result(self, family: str) -> Result:
        return Result(family, self.cases, self.error, self.share, self.note)


def _largest(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    a, b = ours.detach().double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs())
    return float(gap.nan_to_num(nan=math.inf).max()) if gap.numel() else 0.0


# --- families -------------------------------------------------------------------------------------------------------


def check_kda(path: Path, tally: Tally) -> None:
    values, meta = load_file(path / "cases.safetensors"), json.loads((path / "README.json").read_text())
    for name, case in meta.items():
        part = {k.removeprefix(name + "."): v for k, v in values.items() if k.startswith(name + ".")}
        (_kda_gradients if "do" in part else _kda_values)(name, case, part, tally)


def _kda_call(case: dict[str, Any], part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    o, state, _ = kda(
        part["q"],
        part["k"],
        part["v"],
        part["g_raw"],
        part["beta_raw"],
        A_log=part["A_log"],
        dt_bias=part["dt_bias"],
        lower_bound=case["lower_bound"],
        state=part.get("h0"),
        cu_seqlens=part.get("cu_seqlens"),
    )
    return o, state


def _kda_values(name: str, case: dict[str, Any], part: dict[str, Tensor], tally: Tally) -> None:
    part = {k: v.float() if v.is_floating_point() else v for k, v in part.items()}
    o, state = _kda_call(case, part)
    loose = 10 if "repeat" in name else 1
    tally.close(o, part["o"], 1e-6 * loose, f"{name} o")
    tally.close(state, part["ht"], 5e-6 * loose, f"{name} state")


def _kda_gradients(name: str, case: dict[str, Any], part: dict[str, Tensor], tally: Tally) -> None:
    keys = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "h0")
    leaves = {k: part[k].float().requires_grad_() for k in keys if k in part}
    o, state = _kda_call(case, {**part, **leaves})
    outputs, cotangents = [o, state], [part["do"].float(), part["dht"].float()]
    for key, grad in zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), cotangents)):
        tally.relative(grad, part[f"grad.{key}"], 1e-5, f"{name} d{key}")


def check_attnres(path: Path, tally: Tally) -> None:
    values, meta = load_file(path / "cases.safetensors"), json.loads((path / "README.json").read_text())
    for name in meta:
        blocks, partial = values[f"{name}.blocks"], values[f"{name}.partial"]
        weight = values[f"{name}.norm"].float() * values[f"{name}.proj"][0].float()
        out = mix(list(blocks.unbind(1)), partial, weight)
        largest = float(torch.cat([blocks.flatten(), partial.flatten()]).float().abs().max())
        bf16 = partial.dtype == torch.bfloat16
        # One bf16 step of the result, or fp32 rounding of the largest source.
        tally.close(out, values[f"{name}.out"], 2**-8 if bf16 else 1e-6, name, scale=largest)


def check_router(path: Path, tally: Tally) -> None:
    values, meta = load_file(path / "cases.safetensors"), json.loads((path / "README.json").read_text())
    for name, case in meta.items():
        routing = route(
            values[f"{name}.x"],
            values[f"{name}.weight"],
            values[f"{name}.bias"],
            top_k=case["topk"],
            activation=case["activation"],
            groups=case["num_expert_group"],
            top_groups=case["topk_group"],
            renormalize=case["renormalize"],
            scaling=case["routed_scaling_factor"],
        )
        index, order = routing.idx.sort(-1)
        tally.equal(torch.equal(index, values[f"{name}.idx"].long()), f"{name} idx")
        tally.close(routing.weight.gather(1, order), values[f"{name}.w"], 1e-6, f"{name} w")


def check_situ(path: Path, tally: Tally) -> None:
    values, meta = load_file(path / "cases.safetensors"), json.loads((path / "README.json").read_text())
    for name, case in meta.items():
        gate, up, expected = (values[f"{name}.{k}"] for k in ("gate", "up", "out"))
        ours = situ_glu(gate, up, case["beta"], case["linear_beta"])
        rtol = 2**-8 if gate.dtype == torch.bfloat16 else 1e-6
        finite = expected.isfinite()
        tally.equal(torch.equal(finite, ours.isfinite()), f"{name} finiteness")
        gap = (ours.double() - expected.double()).abs() / expected.double().abs().clamp(min=1e-30)
        worst = float(gap[finite].max()) if finite.any() else 0.0
        tally._add(worst, worst / rtol, name)


def check_mxfp4(path: Path, tally: Tally) -> None:
    values = load_file(path / "cases.safetensors")
    for key in sorted(values):
        name, _, kind = key.rpartition(".")
        if kind.startswith("value_") and name.startswith(("unpack", "rand")):
            ours = unpack_mxfp4(values[f"{name}.packed"], values[f"{name}.scale"], values[key].dtype)
            same = (ours == values[key]) | (ours.isnan() & values[key].isnan())
            signs = torch.equal(ours.signbit() & ~ours.isnan(), values[key].signbit() & ~ours.isnan())
            tally.equal(bool(same.all()) and signs, key)
        if kind in ("x", "w") and name.startswith(("round", "quant")):
            scale = values[f"{name}.scale"]
            packed, found = pack_mxfp4(values[key], scale if name.startswith("round") else None)
            tally.equal(torch.equal(packed, values[f"{name}.packed"]) and torch.equal(found, scale), name)


def check_tokenizer(path: Path, tally: Tally) -> None:
    import hashlib

    tokenizer = Tokenizer.load(path)
    cases = json.loads((path / "cases.json").read_text())
    for case in cases["cases"]:
        tally.equal(tokenizer.encode(case["text"]) == case["ids"], repr(case["text"][:30]))
        special = case.get("ids_special", case["ids"])
        tally.equal(tokenizer.encode(case["text"], allow_special=True) == special, f"{case['text'][:30]!r} special")
    for case in cases["big"]:
        ids = tokenizer.encode(case["unit"] * case["count"] + case.get("suffix", ""))
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        tally.equal(len(ids) == case["n_ids"] and digest == case["sha256"], f"big {case['unit']!r}")


@torch.no_grad()
def check_text(path: Path, tally: Tally) -> None:
    """A checkpoint directory with io.safetensors: whole sequences, prefill and decode, routes, states, a batch."""
    model, io = load_model(path), load_file(path / "io.safetensors")
    atol = 5e-4 if model.config.num_hidden_layers > 12 else 1e-4
    for prompt in sorted({k.split(".")[0] for k in io if k.endswith(".input_ids") and not k.startswith("batch")}):
        _check_whole(model, io, prompt, atol, tally)
        _check_pieces(model, io, prompt, atol, tally)
    if "batch.logits" in io:
        mask = io["batch.attention_mask"].bool()
        layout = Layout.packed(mask.sum(1).tolist())
        out = model(io["batch.input_ids"][mask].long(), layout)
        tally.close(_logits(out.logits), io["batch.logits"][mask], atol, "batch logits")


def _check_whole(model: K3, io: dict[str, Tensor], prompt: str, atol: float, tally: Tally) -> None:
    ids = io[f"{prompt}.input_ids"].long()
    taps = Taps.of({"hidden", "routes"})
    out = model(ids, Layout.packed([len(ids)]), taps=taps)
    tally.close(_logits(out.logits), io[f"{prompt}.logits"], atol, f"{prompt} logits")
    for layer, (index, _) in taps.routes.items():
        if f"{prompt}.route_idx.{layer}" in io:
            same = torch.equal(index.sort(-1).values.short(), io[f"{prompt}.route_idx.{layer}"])
            tally.equal(same, f"{prompt} routes of layer {layer}")
    for layer, hidden in taps.hidden.items():
        if f"{prompt}.hidden.{layer}" in io:
            tally.close(hidden, io[f"{prompt}.hidden.{layer}"], atol, f"{prompt} hidden {layer}")


def _check_pieces(model: K3, io: dict[str, Tensor], prompt: str, atol: float, tally: Tally) -> None:
    ids = io[f"{prompt}.input_ids"].long()
    cache, n = Dense(model.config, 1, dtype=torch.float32), len(ids) - 5
    model(ids[:n], cache.layout([n]), cache)
    steps = [_logits(model(ids[i : i + 1], cache.layout([1]), cache).logits) for i in range(n, n + 5)]
    tally.close(torch.cat(steps), io[f"{prompt}.decode_logits"], atol, f"{prompt} decode logits")
    state = cache.export(0)
    for kind, part in (("kda_state", state.kda), ("mla_latent", state.mla)):
        for layer, value in part.items():
            if f"{prompt}.final.{kind}.{layer}" in io:
                tally.close(value, io[f"{prompt}.final.{kind}.{layer}"], 2e-4, f"{prompt} {kind} {layer}")


@torch.no_grad()
def check_checkpoint(path: Path, tally: Tally) -> None:
    """A checkpoint directory without recorded outputs: every tensor fits, and random tokens obey the laws (pieces equal
    the whole, packed equals alone)."""
    model = load_model(path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (48,), generator=generator)
    whole = _logits(model(ids, Layout.packed([48])).logits)
    tally.equal(bool(whole.isfinite().all()), "finite logits")
    scale = float(whole.std())
    cache = Dense(model.config, 1, dtype=torch.float32)
    pieces = [_logits(model(part, cache.layout([len(part)]), cache).logits) for part in ids.split([29, 1, 18])]
    tally.close(torch.cat(pieces), whole, 1e-3, "pieces against the whole", scale)
    packed = _logits(model(torch.cat([ids[:20], ids]), Layout.packed([20, 48])).logits)
    tally.close(packed[20:], whole, 1e-3, "packed against alone", scale)


def _logits(logits: Tensor | None) -> Tensor:
    assert logits is not None
    return logits


def check_xtml(path: Path, tally: Tally) -> None:
    """Requests rendered to text and ids, refusals, completions parsed. Needs a tokenizer in it or beside it."""
    tokenizer = Tokenizer.load(_tokenizer_near(path))
    for name, case in json.loads((path / "render.json").read_text()).items():
        if name.startswith("error_"):
            tally.equal(_refused(case), name)
            continue
        prompt = render(read_request(case["request"]), case.get("image_prompts"))
        ids = prompt.ids(tokenizer)
        tally.equal(prompt.text == case["text"], f"{name} text")
        tally.equal(ids == case["ids"] if "ids" in case else len(ids) == case["n_ids"], f"{name} ids")
    for name, case in json.loads((path / "parse.json").read_text())["cases"].items():
        channel = None if case["start_channel"] == "none" else case["start_channel"]
        reply = parse(tokenizer.encode(case["completion"], allow_special=True), tokenizer, channel)
        calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in reply.tool_calls]
        same = (reply.reasoning, reply.content, calls) == (case["reasoning"], case["content"], case["tool_calls"])
        tally.equal(same, f"parse {name}")


def _tokenizer_near(path: Path) -> Path:
    for place in (path, *sorted(p for p in path.resolve().parent.iterdir() if p.is_dir())):
        if (place / "tiktoken.model").is_file():
            return place
    raise FileNotFoundError(f"no tiktoken.model in {path} or beside it")


def _refused(case: dict[str, Any]) -> bool:
    try:
        render(read_request(case["request"]), case.get("image_prompts"))
    except ChatError:
        return True
    return False


# What the tensors of a cases.safetensors are called (after "CASE.") tells its kind.
KINDS: dict[str, tuple[frozenset[str], Callable[[Path, Tally], None]]] = {
    "KDA": (frozenset({"q", "k", "v", "g_raw", "beta_raw"}), check_kda),
    "AttnRes": (frozenset({"partial", "proj", "norm", "out"}), check_attnres),
    "router": (frozenset({"x", "weight", "idx", "w"}), check_router),
    "SiTU": (frozenset({"gate", "up", "out"}), check_situ),
    "MXFP4": (frozenset({"packed", "scale"}), check_mxfp4),
}


def kind_of(family: Path) -> Callable[[Path, Tally], None] | str:
    """The check for a directory, from what is in it and never from its name; or why there is none."""

    def has(*names: str) -> bool:
        return all((family / name).is_file() for name in names)

    if has("config.json"):
        if not has("io.safetensors"):
            return check_checkpoint
        return "not yet (vision)" if "pixel_values" in _parts(family / "io.safetensors") else check_text
    if has("render.json", "parse.json"):
        return check_xtml
    if has("tiktoken.model", "cases.json"):
        return check_tokenizer
    if has("cases.json") and any(family.glob("*.png")):
        return "not yet (vision)"
    if has("cases.safetensors"):
        parts = _parts(family / "cases.safetensors")
        for tensors, run in KINDS.values():
            if tensors <= parts:
                return run
    return "no check knows this family"


def _parts(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return {name.rpartition(".")[2] for name in file.keys()}  # noqa: SIM118


def check(path: Path) -> Iterator[Result | str]:
    """Check every family under `path`, or `path` itself if it is a family or a checkpoint: a Result each, or a line
    that says why a directory was left out. Raises FileNotFoundError if there is nothing to check."""
    path = Path(path)
    marks = ("config.json", "cases.safetensors", "cases.json", "render.json")
    if any((path / mark).is_file() for mark in marks):
        yield _check_one(path)
        return
    families = sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
    if not families:
        raise FileNotFoundError(f"{path} holds neither golden vectors nor a checkpoint.")
    for family in families:
        yield _check_one(family)


def _check_one(family: Path) -> Result | str:
    name, tally = family.resolve().name, Tally()
    try:
        run = kind_of(family)
        if isinstance(run, str):
            return f"{name}: {run}"
        run(family, tally)
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        return Result(name, tally.cases, math.inf, math.inf, f"{type(error).__name__}: {error}")
    return tally.result(name)
