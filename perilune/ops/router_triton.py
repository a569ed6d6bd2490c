# mypy: allow-untyped-defs
"""Routing in one kernel each way: `ops.router` holds the equations.

Forward: sigmoid scores, the k+1 best biased ones (the lowest index first among equals), the mixture's weights.
Logits come from the tensor cores without losing fp32: x is bf16 already, and an fp32 weight is the sum of three bf16
ones to 24 bits, so three products summed in fp32 are the fp32 product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops import one_triton
from perilune.ops.chain_triton import chain, start, wait

_FEW = 256  # tokens up to which each has a warp of its own: k searches in a row wait for nobody


@triton.jit
def select_kernel(
    logits, bias, scores, idx, weight, threshold, T, E, scaling,
    PARTS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RENORM: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
    CHAIN: tl.constexpr = False,
):  # fmt: skip
    start(CHAIN)
    wait(CHAIN)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside = (t < T)[:, None] & (e < E)[None, :]
    raw = tl.zeros((BT, BE), tl.float32)
    for i in tl.static_range(PARTS):
        # The smallest part first: the sum then rounds once where it matters.
        raw += tl.load(logits + t[:, None] * (PARTS * E) + (PARTS - 1 - i) * E + e[None, :], mask=inside, other=0.0)
    s = tl.sigmoid(raw)
    tl.store(scores + t[:, None] * E + e[None, :], s, mask=inside)
    biased = tl.where(inside, s + tl.load(bias + e, mask=e < E, other=0.0)[None, :], float("-inf"))
    k = tl.arange(0, KP)[None, :]
    chosen, found = tl.zeros((BT, KP), tl.float32), tl.zeros((BT, KP), tl.int64)
    for i in tl.static_range(K):
        best = tl.argmax(biased, 1)
        hit = e[None, :] == best[:, None]
        chosen += tl.where(k == i, tl.sum(tl.where(hit, s, 0.0), 1)[:, None], 0.0)
        found += tl.where(k == i, best.to(tl.int64)[:, None], 0)
        biased = tl.where(hit, float("-inf"), biased)
    tl.store(threshold + t, tl.max(biased, 1), mask=t < T)
    if RENORM:
        chosen = chosen / (tl.sum(chosen, 1)[:, None] + 1e-20)
    kept = (t < T)[:, None] & (k < K)
    tl.store(weight + t[:, None] * K + k, chosen * scaling, mask=kept)
    tl.store(idx + t[:, None] * K + k, found, mask=kept)


@triton.jit
def select_backward_kernel(
    dweight, dscores, weight, scores, idx, dlogits, T, E, scaling,
    K: tl.constexpr, RENORM: tl.constexpr, SCORED: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside = (t < T)[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    s = tl.load(scores + at, mask=inside, other=0.0)
    dot = tl.zeros((BT,), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    ds = tl.load(dscores + at, mask=inside, other=0.0).to(tl.float32) if SCORED else tl.zeros((BT, BE), tl.float32)
    for i in tl.static_range(K):
        d = tl.load(dweight + t * K + i, mask=t < T, other=0.0).to(tl.float32)
        dot += d * tl.load(weight + t * K + i, mask=t < T, other=0.0)
        j = tl.load(idx + t * K + i, mask=t < T, other=0)
        total += tl.sum(tl.where(e[None, :] == j[:, None], s, 0.0), 1)
    for i in tl.static_range(K):
        d = tl.load(dweight + t * K + i, mask=t < T, other=0.0).to(tl.float32) * scaling
        d = (d - dot) / (total + 1e-20) if RENORM else d
        j = tl.load(idx + t * K + i, mask=t < T, other=0)
        ds += tl.where(e[None, :] == j[:, None], d[:, None], 0.0)
    tl.store(dlogits + at, (ds * s * (1.0 - s)).to(dlogits.dtype.element_ty), mask=inside)


def logits(x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    """(fp32 products [T, parts·E], parts) of x [T,D] and weight [E,D]; the logits are the sum of the parts."""
    if x.dtype != torch.bfloat16:
        with torch.autocast(x.device.type, enabled=False):
            return x.float() @ weight.float().T, 1
    if weight.dtype == torch.bfloat16 and len(x) == 1 and not torch.is_grad_enabled():
        return one_triton.linear(x, weight, torch.float32)[0], 1
    if weight.dtype == torch.bfloat16 and x.device.type == "cuda":
        return torch.mm(x, weight.T, out_dtype=torch.float32), 1
    high = weight.to(torch.bfloat16)
    middle = (weight - high).to(torch.bfloat16)
    low = (weight - high - middle).to(torch.bfloat16)
    parts = torch.cat([high, middle, low])
    if x.device.type != "cuda":
        return x.float() @ parts.float().T, 3
    return torch.mm(x, parts.T, out_dtype=torch.float32), 3


def select(
    products: Tensor, parts: int, bias: Tensor | None, top_k: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(idx [T,k] int64, weight [T,k], scores [T,E], threshold [T]), the last three fp32."""
    T, E = products.shape[0], products.shape[1] // parts
    scores = torch.empty(T, E, dtype=torch.float32, device=products.device)
    weight = torch.empty(T, top_k, dtype=torch.float32, device=products.device)
    idx = torch.empty(T, top_k, dtype=torch.int64, device=products.device)
    threshold = torch.empty(T, dtype=torch.float32, device=products.device)
    bias = torch.zeros(E, device=products.device) if bias is None else bias.float()
    tile = _tile(E) if T > _FEW else {"BT": 1, "BE": max(16, triton.next_power_of_2(E)), "num_warps": 1}
    select_kernel[(triton.cdiv(T, tile["BT"]),)](
        products, bias, scores, idx, weight, threshold, T, E, scaling,
        PARTS=parts, K=top_k, KP=triton.next_power_of_2(top_k), RENORM=renormalize and top_k > 1, **tile, **chain(),
    )  # fmt: skip
    return idx, weight, scores, threshold


def select_backward(
    dweight: Tensor, dscores: Tensor | None, weight: Tensor, scores: Tensor, idx: Tensor, renormalize: bool,
    scaling: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """d logits [T,E] in `dtype`."""
    T, E = scores.shape
    out = torch.empty(T, E, dtype=dtype, device=scores.device)
    tile, top_k = _tile(E), idx.shape[1]
    select_backward_kernel[(triton.cdiv(T, tile["BT"]),)](
        dweight, scores if dscores is None else dscores, weight, scores, idx, out, T, E, scaling,
        K=top_k, RENORM=renormalize and top_k > 1, SCORED=dscores is not None, **tile,
    )  # fmt: skip
    return out


def _tile(experts: int) -> dict[str, int]:
    be = max(16, triton.next_power_of_2(experts))
    return {"BT": max(1, 2048 // be), "BE": be}
