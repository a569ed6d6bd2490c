"""The fused siblings against their equations in fp64: `cases.py NAME...` in Triton's interpreter, fp32, or on a GPU.

Each returns the worst relative error over values and every gradient.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from perilune.ops import conv_triton, few_triton, mla_triton, norm_triton, one_triton
from perilune.ops.attention import attention, attention_reference
from perilune.ops.attnres import merge, mix, mix_ahead, mix_reference
from perilune.ops.conv import short_conv_reference, short_convs
from perilune.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from perilune.ops.experts import FEW, Activation, experts, experts_reference, grouped_mlp, order_rows
from perilune.ops.experts import _few as experts_few
from perilune.ops.linear import linear
from perilune.ops.linear import pair as pair_product
from perilune.ops.mla import mla_decode, mla_part
from perilune.ops.mx import pack_mxfp4
from perilune.ops.norm import (
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
    sigmoid_gate,
    sigmoid_gate_reference,
)
from perilune.ops.packed import Packed, packed_experts, packed_experts_reference
from perilune.ops.quantile import margin_histogram
from perilune.ops.router import mixture, route, router_scores, select
from perilune.ops.situ import packed_glu, situ_glu, situ_glu_reference, swiglu

DEVICE, LOW = "cpu", torch.float32  # where and in what the kernels run; `on_gpu` changes both


norm_triton._WARPS, conv_triton._WALKERS = 3, 2  # few programs, so that each walks several blocks
one_triton._NARROW, one_triton._ROWS = 10, 50  # all three shapes of a product, without a thousand rows


def on_gpu(dtype: torch.dtype) -> None:
    global DEVICE, LOW
    DEVICE, LOW = "cuda", dtype


def low(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(DEVICE, LOW)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def worst(fast: Callable, slow: Callable, leaves: Sequence[Tensor], strided: bool = False) -> float:
    """Both on the same leaves (rounded to LOW, which fast computes in), their outputs under the same cotangents.

    `strided` gives the fast one every leaf as columns of a wider tensor, as projections hand them out.
    """
    found = []
    for op, dtype in ((fast, LOW), (slow, torch.float64)):
        given = [x.detach().to(LOW).to(DEVICE, dtype, copy=True).requires_grad_() for x in leaves]
        wide = op is fast and strided
        used = [torch.cat([x, x], -1)[..., : x.shape[-1]] if wide and x.dim() > 1 else x for x in given]
        out = op(*used)
        out = out if isinstance(out, tuple) else (out,)
        sum((y * draw(*y.shape, seed=7).to(LOW).to(DEVICE, y.dtype)).sum() for y in out).backward()
        found.append([*out, *(x.grad for x in given)])
    return max(error(a, b) for a, b in zip(*found, strict=True))


def situ() -> float:
    cases = []
    for cols in (24, 200):
        pair = [draw(3, 5, cols) * 4, draw(3, 5, cols, seed=1) * 30]
        joint = torch.cat(pair, -1)
        for betas in ((4.0, 25.0), (0.5, None)):
            cases.append(
                worst(lambda g, u, b=betas: situ_glu(g, u, *b, impl="fused"),
                      lambda g, u, b=betas: situ_glu_reference(g, u, *b), pair, strided=True)
            )  # fmt: skip
            cases.append(
                worst(lambda x, b=betas: packed_glu(x, "situ", *b, impl="fused"),
                      lambda x, b=betas: situ_glu_reference(*x.chunk(2, -1), *b), [joint])
            )  # fmt: skip
        cases.append(worst(lambda x: packed_glu(x, "swiglu", impl="fused"), lambda x: swiglu(*x.chunk(2, -1)), [joint]))
    return max(cases)


def norm() -> float:
    eps = 1e-5
    plain = max(
        worst(lambda x, w: rms_norm(x, w, eps, impl="fused"), lambda x, w: rms_norm_reference(x, w, eps),
              [draw(rows, width), draw(width, seed=1)], strided)
        for rows, width, strided in ((70, 48, True), (3, 300, False), (300, 16, False))
    )  # fmt: skip
    leaves = [draw(21, 2, 32), draw(21, 2, 32, seed=1), draw(32, seed=2)]
    gated = worst(
        lambda x, z, w: gated_rms_norm(x, z, w, eps, impl="fused"),
        lambda x, z, w: gated_rms_norm_reference(x, z, w, eps),
        leaves,
        strided=False,
    )
    flat = [draw(21, 64, seed=5), draw(21, 64, seed=6)]
    gate = worst(lambda x, z: sigmoid_gate(x, z, impl="fused"), sigmoid_gate_reference, flat, strided=True)
    # The gate as a slice of a projection, seen as heads.
    sliced = worst(
        lambda x, z, w: gated_rms_norm(x, z.unflatten(-1, (2, 32)), w, eps, impl="fused"),
        lambda x, z, w: gated_rms_norm_reference(x, z.unflatten(-1, (2, 32)), w, eps),
        [draw(21, 2, 32), draw(21, 64, seed=1), draw(32, seed=2)],
        strided=True,
    )
    x, added, w = low(draw(9, 300)), low(draw(9, 300, seed=3)), low(draw(300, seed=1))
    y, total = add_rms_norm(x, added, w, eps, impl="fused")
    assert torch.equal(total, x + added)
    summed = error(y, rms_norm_reference(total.double(), w.double(), eps))
    return max(plain, gated, gate, sliced, summed)


def attnres() -> float:
    found = []
    for sources, width in ((2, 40), (5, 24), (2, 130), (1, 24)):
        leaves = [draw(width, seed=9), draw(width, seed=8)]
        leaves += [draw(37, width, seed=i) * (i + 1) for i in range(sources)]
        for normed in (False, True):

            def run(op: Callable, w: Tensor, n: Tensor, *v: Tensor, on: bool = normed, **options: str) -> Tensor:
                y = op(v[:-1], v[-1], w, norm=n if on else None, **options)
                return y + 0 * (w.sum() + n.sum())  # every leaf takes part

            def fast(*leaves: Tensor) -> Tensor:
                return run(mix, *leaves, impl="fused")

            def slow(*leaves: Tensor) -> Tensor:
                return run(mix_reference, *leaves)

            found.append(worst(fast, slow, leaves))
    return max(found)


def softmax() -> float:
    """Attention whose tiles meet one document, borders inside and at their edges, documents of several tiles; widths
    with and without a rest; values as columns of a wider tensor."""
    found = []
    for lengths, dk, dv in (([150], 24, 16), ([40, 0, 1, 87, 64, 60], 40, 20), ([64, 128, 7], 16, 32)):
        T = sum(lengths)
        leaves = [draw(T, 2, dk), draw(T, 2, dk, seed=1), draw(T, 2, dv, seed=2)]
        found.append(
            worst(lambda q, k, v, n=lengths: attention(q, k, v, n, 0.3, impl="fused"),
                  lambda q, k, v, n=lengths: attention_reference(q, k, v, n, 0.3), leaves, strided=True)
        )  # fmt: skip
    return max(found)


def kept() -> float:
    """Attention's output from 16-bit inputs (the interpreter multiplies fp16), which a rounding would leave 2e-4 apart
    or more."""
    lengths, dtype = [70, 1, 57], torch.bfloat16 if DEVICE == "cuda" else torch.float16
    leaves = [draw(128, 2, n, seed=i).to(DEVICE, dtype).requires_grad_() for i, n in enumerate((24, 24, 16))]
    o = attention(*leaves, lengths, 0.3, impl="fused")
    assert o.dtype == torch.float32
    return error(o, attention_reference(*(x.double() for x in leaves), lengths, 0.3))


def phases() -> float:
    """Both phases of a block's reads, kernels and torch, against the equation over all sources."""
    found = []
    for blocks, width in ((1, 24), (4, 130)):
        v = [low(draw(37, width, seed=i) * (i + 1)) for i in range(blocks + 2)]
        queries, norm = low(draw(3, width, seed=8)), low(draw(width, seed=9))
        total = (v[-2].double() + v[-1].double()).to(LOW)
        for impl in ("fused", "eager"):
            made = mix_ahead(v[:-2], queries, impl=impl)
            for read in range(3):
                for gain in (None, norm):
                    x, running = merge(made, read, v[-2], queries[read], added=v[-1], norm=gain, impl=impl)
                    wide = [y.double() for y in (*v[:-2], total)]
                    want = mix_reference(wide[:-1], wide[-1], queries[read].double(), norm=gain)
                    again, _ = merge(made, read, total, queries[read], norm=gain, impl=impl)
                    found += [error(x, want), error(again, want), error(running, total.double())]
    return max(found)


def conv() -> float:
    found = []
    for batch, lengths, parts, taps in ((2, None, 1, 4), (1, [5, 0, 1, 2, 0, 40], 3, 4), (1, [48], 3, 3)):
        T = 48 if lengths else 37
        leaves = [draw(batch, T, 24), draw(24, taps, seed=1)]
        for activation in (True, False):
            for tailed in (False, True):
                tail = draw(batch if lengths is None else len(lengths), 24, taps - 1, seed=2) if tailed else None
                options = {"lengths": lengths, "activation": activation}

                def fast(x: Tensor, w: Tensor, p: int = parts, tail: Tensor | None = tail, o: dict = options):
                    ys, new = short_convs(x, w, p, tail=low(tail), impl="fused", **o)
                    return torch.cat(ys, -1), new

                def slow(x: Tensor, w: Tensor, tail: Tensor | None = tail, o: dict = options):
                    return short_conv_reference(x, w, tail=None if tail is None else low(tail).double(), **o)

                found.append(worst(fast, slow, leaves, strided=True))
    return max(found)


def moe() -> float:
    E, L, inner, T = 5, 16, 24, 30
    found = []
    for k, act in ((3, Activation()), (1, Activation("situ", 1.0, None)), (2, Activation("swiglu"))):
        idx = torch.stack([torch.randperm(E - 1, generator=torch.Generator().manual_seed(t))[:k] for t in range(T)]).to(
            DEVICE
        )
        leaves = [draw(T, L), draw(T, k).abs(), draw(E, 2 * inner, L), draw(E, L, inner)]
        found.append(
            worst(lambda z, p, a, b, i=idx, act=act: experts(z, i, p, a, b, act, impl="fused"),
                  lambda z, p, a, b, i=idx, act=act: experts_reference(z, i, p, a, b, act), leaves)
        )  # fmt: skip
        order = order_rows(idx, E)
        leaves = [draw(T * k, L), draw(T * k).abs(), draw(E, 2 * inner, L), draw(E, L, inner)]
        found.append(
            worst(lambda z, p, a, b, n=order.ends, act=act: grouped_mlp(z, n, p, a, b, act, impl="fused"),
                  lambda z, p, a, b, n=order.ends, act=act: grouped_mlp(z, n, p, a, b, act, impl="eager"), leaves)
        )  # fmt: skip
    return max(found)


def one() -> float:
    """One token and several: experts with and without shared ones, of one width and two; an MLP; single products."""
    E, L, inner, found = 4, 40, 24, []
    gate_up, down = low(draw(E, 2 * inner, L)), low(draw(E, L, inner))
    wide = [x.double() for x in (gate_up, down)]
    for T, k, slices, act in ((1, 2, 1, Activation()), (3, 1, 2, Activation("swiglu"))):
        idx = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:k] for t in range(T)])
        z, p = low(torch.cat([draw(T, L)] * 2, -1))[:, :L], draw(T, k).abs().to(DEVICE, torch.float32)
        pair = low(draw(2 * slices * inner, L, seed=1)), low(draw(L, slices * inner, seed=1))
        odd = low(draw(2 * 50, L, seed=2)), low(draw(L, 50, seed=2))  # of another width: a launch of its own
        for shared in [pair] * (slices > 0) + [None, odd]:
            with torch.no_grad():
                got = experts(z, idx.to(DEVICE), p, gate_up, down, act, shared=shared, impl="fused")
            want = experts_reference(z.double(), idx.to(DEVICE), p.double(), *wide, act)
            if shared is not None:
                both = act.forward(*(z.double() @ shared[0].double().T).chunk(2, -1)) @ shared[1].double().T
                want = want + both
            found.append(error(got, want))
        got = one_triton.mlp(z, gate_up[1], down[1], *act.rules)
        found.append(error(got, act.forward(*(z.double() @ wide[0][1].T).chunk(2, -1)) @ wide[1][1].T))
    for outputs, depth in ((7, 520), (5, 24), (20, 264), (70, 40)):
        x, w = (low(draw(2 * depth)[::2].clone().view(1, -1)), low(draw(outputs, depth)))
        with torch.no_grad():
            found.append(error(linear(x, w, impl="fused"), x.double() @ w.double().T))
            y, other = pair_product((x, -x), (w, w[: outputs // 2]), impl="fused")
        found += [error(y, x.double() @ w.double().T), error(other, -x.double() @ w[: outputs // 2].double().T)]
    return max(found)


def few() -> float:
    """Rows fewer and more than experts and than a tile; experts that nobody chose; a dense MLP of few rows."""
    E, L, inner, found = 6, 40, 72, []
    gate_up, down = low(draw(E, 2 * inner, L)), low(draw(E, L, inner))
    for T, k, act in ((1, 2, Activation()), (3, 1, Activation("situ", 1.0, None)), (22, 2, Activation("swiglu"))):
        chosen = [torch.randperm(E - 1, generator=torch.Generator().manual_seed(t))[:k] for t in range(T)]
        idx, z = torch.stack(chosen).to(DEVICE), low(torch.cat([draw(T, L)] * 2, -1))[:, :L]
        p = draw(T, k).abs().to(DEVICE, torch.float32)
        with torch.no_grad():
            assert idx.numel() <= FEW * E
            got = experts(z, idx, p, gate_up, down, act, impl="fused")  # up to ONE tokens: `one_triton`
            rows = experts_few(z, idx, p, gate_up, down, act, False)
        found.append(error(rows, got.double()))
        found.append(error(got, experts_reference(z.double(), idx, p.double(), gate_up.double(), down.double(), act)))
        some = torch.where(idx > 1, idx - 2, E - 2)  # the first two experts are somebody else's
        with torch.no_grad():
            got = experts(z, some, p, gate_up[2:], down[2:], act, impl="fused", partial=True)
            plain = experts(z.double(), some, p.double(), gate_up[2:].double(), down[2:].double(), act, partial=True)
        kept = p.double() * (idx > 1)
        want = experts_reference(z.double(), idx, kept, gate_up.double(), down.double(), act)
        assert error(plain, want) < 1e-6 or not want.any()
        found.append(error(got, want) if want.any() else float(got.abs().max()))
        made, want = few_triton.order(idx, E), order_rows(idx, E)
        assert all(torch.equal(a, b) for a, b in zip(made, want)) and torch.equal(made[3], idx.flatten()[want.source])
        wide = low(draw(L + 8, inner))
        got = few_triton.mlp(z, gate_up[1], wide, *act.rules)
        hidden = act.forward(*(z.double() @ gate_up[1].double().T).chunk(2, -1))
        found.append(error(got, hidden.to(LOW).double() @ wide.double().T))
    return max(found)


def packed() -> float:
    """Few rows and more than a tile of one expert, widths no tile divides; a NaN scale stays in its rows."""
    E, L, inner, found = 5, 96, 160, []
    gate_up, down = (
        Packed(*(x.to(DEVICE) for x in pack_mxfp4(draw(E, *shape, seed=i) * 2.0**power)))
        for i, (shape, power) in enumerate((((2 * inner, L), -3), ((L, inner), 5)))
    )
    for T, k, act in ((1, 2, Activation()), (24, 3, Activation("swiglu"))):
        shuffled = [torch.randperm(E - 1, generator=torch.Generator().manual_seed(t)) for t in range(T)]
        idx, z = torch.stack(shuffled)[:, :k].to(DEVICE), low(draw(T, L))
        p = draw(T, k).abs().to(DEVICE, torch.float32)
        for impl in ("fused", "eager"):
            got = packed_experts(z, idx, p, gate_up, down, act, impl=impl)
            rounded = [packed_experts(z, idx, p, gate_up, down, act, mxfp8=True, impl=i) for i in (impl, "eager")]
            assert error(*rounded) < torch.finfo(LOW).eps ** 0.5 / 3  # by a tie it may round either way
            want = packed_experts_reference(z.double(), idx, p.double(), gate_up, down, act)
            found.append(error(got, want))
            part = Packed(*(x[1:] for x in gate_up)), Packed(*(x[1:] for x in down))
            rest = packed_experts(z, torch.where(idx > 0, idx - 1, E - 1), p, *part, act, impl=impl, partial=True)
            first = packed_experts_reference(z.double(), idx, p.double() * (idx == 0), gate_up, down, act)
            found.append(error(rest.double() + first, want))
    broken = gate_up.scales.clone()
    broken[int(idx[0, 0]), 0, 0] = 255
    nan = packed_experts(z, idx, p, Packed(gate_up.codes, broken), down, impl="fused").isnan().any(1)
    assert torch.equal(nan, (idx == idx[0, 0]).any(1))
    return max(found)


def mla() -> float:
    """Windows whose lengths end within, at and after tiles, on pages of any stride; one split and several, in which
    some find no token; widths that no tile divides; no shared key; a page that nobody owns is NaN."""
    found = []
    for heads, width, values, size, window in ((3, 40, 24, 48, 1), (20, 20, 16, 16, 4), (2, 32, 32, 512, 2)):
        lengths = torch.tensor([window, 65, 16, 513, 140])
        most = -(-int(lengths.max()) // size)
        order = torch.randperm(len(lengths) * most, generator=torch.Generator().manual_seed(0))
        table = order.view(len(lengths), most).to(DEVICE)
        memory = low(draw(table.numel(), 2 * size, width))
        latents = memory[:, size:]
        q = low(draw(len(lengths), window, heads, width, seed=2))
        want = mla_decode(q.double(), latents.double(), table, lengths.to(DEVICE), values=values, scale=0.3)
        for n, length in enumerate(lengths.tolist()):
            for j in range(most):  # what lies beyond a length, in its page or another, must not matter
                latents[table[n, j], min(size, max(0, length - j * size)) :] = float("nan")
        for programs in (1, 264 if DEVICE == "cuda" else 30):
            mla_triton._PROGRAMS = programs
            got = mla_decode(q, latents, table, lengths.to(DEVICE), values=values, scale=0.3, impl="fused")
            found.append(error(got, want))
            if window == 1:
                found += _parts(q.squeeze(1), latents, table, lengths.to(DEVICE), values)
    return max(found)


def _parts(q: Tensor, latents: Tensor, table: Tensor, seen: Tensor, values: int) -> list[float]:
    clean = latents.nan_to_num(0.0).double()
    o, lse = mla_part(q, latents, table, seen, values=values, scale=0.3, impl="fused")
    want, mass = mla_part(q.double(), clean, table, seen, values=values, scale=0.3)
    return [error(o, want), error(lse, mass)]


def router() -> float:
    found = []
    bias = torch.linspace(-0.2, 0.2, 40, dtype=torch.float64, device=DEVICE)
    for k, renormalize in ((6, True), (1, True), (3, False)):
        chosen = []

        def fast(x: Tensor, w: Tensor, k: int = k, renormalize: bool = renormalize, chosen: list = chosen):
            made = route(x, w, bias.float(), top_k=k, renormalize=renormalize, scaling=2.5, impl="fused")
            chosen.append(made.idx)
            return made.weight, made.scores, made.threshold.detach()

        def slow(x: Tensor, w: Tensor, k: int = k, renormalize: bool = renormalize, chosen: list = chosen):
            scores = router_scores(x, w)
            idx, threshold = select(scores, bias, k)
            assert torch.equal(idx, chosen[0])
            return mixture(scores, idx, renormalize, 2.5), scores, threshold

        found.append(worst(fast, slow, [draw(50, 24), draw(40, 24, seed=1)]))
    return max(found)


def histogram() -> float:
    """Share of counts that fall elsewhere than torch's (none in the interpreter; borders of bins on a GPU)."""
    scores = torch.sigmoid(draw(400, 24)).float().to(DEVICE)
    bias, mask = torch.linspace(-0.1, 0.1, 24, device=DEVICE), torch.arange(400, device=DEVICE) % 5 > 0
    _, threshold = select(scores, bias, 4)
    moved = 0.0
    for given in (None, mask):
        got, want = (margin_histogram(scores, threshold, bias, 100, given, impl=impl) for impl in ("fused", "eager"))
        assert got.dtype == want.dtype and torch.equal(got.sum(1), want.sum(1))
        moved = max(moved, float((got - want).abs().sum() / want.sum()))
    return moved


def muon() -> float:
    """Three clipped steps by the kernels and by torch: tall, wide and odd blocks, several a stack, one without a
    gradient for a while. The products are torch's in both."""
    from perilune.train import optim

    shapes = {"a": (24, 8, 3), "b": (8, 24, 1), "c": (16, 24, 2), "d": (9, 5, 3), "e": (16, 8, 2)}
    start = {
        n: draw(rows, cols, seed=i).to(DEVICE, torch.float32) for i, (n, (rows, cols, _)) in enumerate(shapes.items())
    }
    plain, found = optim.fused, []
    for kernels in (True, False):
        optim.fused = lambda *_, kernels=kernels: kernels
        params = {n: torch.nn.Parameter(w.clone()) for n, w in start.items()}
        plans = [optim.ParamPlan(n, p, "muon", shapes[n][2], 1.0, 0.1) for n, p in params.items()]
        optimizer = optim.Optimizer(plans)
        for step in range(3):
            for i, (n, p) in enumerate(params.items()):
                p.grad = None if step < 2 and n == "c" else draw(*p.shape, seed=10 * step + i).to(p)
            optimizer.step(0.1, 1.0)
        found.append([*params.values(), *(optimizer.state_dict()[f"muon.{n}"] for n in params)])
    optim.fused = plain
    return max(error(a, b.double()) for a, b in zip(*found, strict=True))


def model() -> float:
    """A K3 of four layers trained two steps in fp32, with kernels everywhere against torch everywhere: losses, first
    gradients and the weights in the end."""
    from perilune.config import preset
    from perilune.data import Batch
    from perilune.model.net import K3
    from perilune.ops import dispatch
    from perilune.train.loss import batch_loss
    from perilune.train.optim import Optimizer, plan

    config = preset("tiny").replace(vocab_size=64, num_nextn_predict_layers=0, num_experts=6)
    ids = torch.randint(0, 64, (25,), generator=torch.Generator().manual_seed(0))
    batch, found = Batch(ids[:-1], ids[1:].clone(), (15, 0, 9), 24, 0, 1), []
    for device in ("cpu", "cuda"):
        dispatch.AUTO = device  # kernels in the interpreter, or none
        torch.manual_seed(0)
        net = K3(config)
        net.reset_parameters()
        optimizer, seen = Optimizer(plan(net.named_parameters(), config)), []
        for step in range(2):
            loss = batch_loss(net, batch, torch.float32).next_token / 24
            loss.backward()
            seen.append(loss.detach())
            if step == 0:
                seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step(1e-2)
            optimizer.zero_grad()
        found.append([*seen, *net.parameters()])
    dispatch.AUTO = "cuda"
    return max(error(a, b.double()) for a, b in zip(*found, strict=True) if b.norm() > 1e-6)


def head() -> float:
    targets = torch.randint(0, 90, (30,), generator=torch.Generator().manual_seed(0))
    targets[[3, 17]] = -100
    targets = targets.to(DEVICE)
    return worst(
        lambda h, w: linear_cross_entropy(h, w, targets, impl="fused"),
        lambda h, w: linear_cross_entropy_reference(h, w, targets),
        [draw(30, 20) * 3, draw(90, 20, seed=1)],
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, f"{globals()[name]():.1e}")
