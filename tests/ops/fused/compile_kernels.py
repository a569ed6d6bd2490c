"""Compile every configuration of the fused siblings for sm_90a without a GPU: `compile_kernels.py [NAME...]`.

Prints registers, stack (spills) and shared memory of each; fails where a program spills much or does not fit.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from perilune.ops import (
    attention_triton,
    attnres_triton,
    conv_triton,
    cross_entropy_triton,
    experts_triton,
    few_triton,
    gate_triton,
    mla_triton,
    norm_triton,
    one_triton,
    packed_triton,
    quantile_triton,
    router_triton,
    situ_triton,
)
from perilune.train import muon_triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = 227 * 1024
FLOATS = dict.fromkeys(["beta", "linear_beta", "eps", "norm_eps", "scaling"], "fp32")
FP32 = ["dw", "dnorm", "scores", "lse", "logits", "bias", "weight", "threshold", "dweight", "dscores", "nll", "w"]
INTS = {"position": "*i32", "sequence": "*i32", "idx": "*i64", "source": "*i64", "place": "*i64", "targets": "*i64"}
BF16 = [
    "gate", "up", "out", "dout", "dgate", "dup", "x", "y", "dy", "dx", "norm", "tail", "y0", "y1", "y2",
    "d0", "d1", "d2", "z", "rows", "h", "a", "da", "dh", "dlogits",
]  # fmt: skip
POINTERS = dict.fromkeys(BF16, "*bf16") | dict.fromkeys(FP32, "*fp32") | INTS | FLOATS
ODD = {"rows", "T", "R", "k", "H", "blocks", "eps", "M", "W", "table_row"}  # counts of rows divide by nothing


def build(name: str, kernel, constants: dict, warps: int = 4, stages: int = 3, **types: object) -> None:
    names = kernel.arg_names
    known = POINTERS | types
    signature = {n: "constexpr" if n in constants else known.get(n, "i32") for n in names}
    attributes = {}
    for i, n in enumerate(names):
        if isinstance(signature[n], tuple):
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(len(signature[n]))}
        elif signature[n][0] == "*" or (signature[n] == "i32" and n not in ODD):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    wide = len(re.findall(r"ld\.global[\w.]*v[24]", made.asm["ptx"]))
    print(f"{name}: registers {found[1]}, stack {found[2]} B, shared {made.metadata.shared} B, wide loads {wide}")
    assert made.metadata.shared <= SHARED, f"{name}: {made.metadata.shared} B of shared memory"
    assert int(found[2]) <= 1024, f"{name}: spills {found[2]} B"


def situ() -> None:
    for cols in (192, 4096):
        tile = situ_triton._tiles(1024, cols)[1]
        for kind in (0, 1, 2):
            build(f"situ {cols} kind {kind}", situ_triton.glu_kernel, tile | {"KIND": kind}, rows="i32")
            build(
                f"situ backward {cols} kind {kind}", situ_triton.glu_backward_kernel, tile | {"KIND": kind}, rows="i32"
            )


def norm() -> None:
    for width, gated in ((128, True), (256, False), (512, False), (2048, False), (7168, False)):
        for name, kernel, held, least in (
            ("norm", norm_triton.norm_kernel, norm_triton.FORWARD, 4),
            ("norm backward", norm_triton.norm_backward_kernel, norm_triton.BACKWARD, 1),
        ):
            shape = norm_triton.tile(width, held, least)
            warps = shape.pop("num_warps")
            build(f"{name} {width} gated {gated}", kernel, shape | {"GATED": gated}, warps, rows="i32", H="i32")
    build("gate", gate_triton.gate_kernel, {"BR": 16, "BC": 128}, rows="i32")
    build("gate backward", gate_triton.gate_backward_kernel, {"BR": 16, "BC": 128}, rows="i32")


def softmax() -> None:
    types = dict.fromkeys(["q", "k", "v", "do", "dq", "dk", "dv", "low"], "*bf16") | {"scale": "fp32", "factor": "fp32"}
    types |= {"lse": "*fp32", "delta": "*fp32", "o": "*fp32", "first": "*i32", "end": "*i32"}
    of = attention_triton
    kernels = (of.forward_kernel, of.FORWARD), (of.query_gradient_kernel, of.QUERIES), (of.key_gradient_kernel, of.KEYS)
    for dk, dv in ((192, 128), (128, 128), (40, 32)):
        widths = of._widths(torch.empty(1, 1, dk), torch.empty(1, 1, dv))
        for kernel, shape in kernels:
            options = {"warps": shape["num_warps"], "stages": shape["num_stages"]}
            constants = widths | {n: x for n, x in shape.items() if n not in ("num_warps", "num_stages")}
            build(f"attention {kernel.__name__} {dk} {dv}", kernel, constants, **options, **types)
    build("attention delta", of.delta_kernel, {"DV": 128, "VA": 128, "BM": 64}, **types | {"do": "*fp32"})


def attnres() -> None:
    weights = {"rows": "i32", "w": "*fp32", "norm": "*fp32"}
    for width, sources in ((512, 2), (512, 5), (2048, 6), (7168, 9)):
        pointers = ("*bf16",) * sources
        for normed in (True, False):
            name = f"{width} of {sources} norm {normed}"
            shape = norm_triton.tile(width, attnres_triton.FORWARD, 4) | {"NORM": normed, "KEEP": True, "QUERIES": 1}
            warps = shape.pop("num_warps")
            build(f"mix {name}", attnres_triton.mix_kernel, shape, warps, sources=pointers, **weights)
            shape = attnres_triton.backward_tile(width) | {"NORM": normed}
            warps = shape.pop("num_warps")
            both = {"sources": pointers, "grads": pointers}
            build(f"mix backward {name}", attnres_triton.mix_backward_kernel, shape, warps, **both, **weights)


def phases() -> None:
    types = {"rows": "i32", "w": "*fp32", "norm": "*fp32"}
    types |= dict.fromkeys(["mixed", "running", "added", "total"], "*bf16")
    for width, blocks in ((512, 4), (7168, 8)):
        shape = norm_triton.tile(width, attnres_triton.FORWARD, 4)
        warps = shape.pop("num_warps")
        rule = shape | {"NORM": False, "KEEP": True, "QUERIES": 24}
        build(
            f"ahead {width} of {blocks}", attnres_triton.mix_kernel, rule, warps, sources=("*bf16",) * blocks, **types
        )
        build(f"merge {width}", attnres_triton.merge_kernel, shape | {"NORM": True, "ADD": True}, warps, **types)


def conv() -> None:
    for tail in (False, True):
        shape = {"W": 4, "TAIL": tail, "SILU": True, "BT": conv_triton._BT, "BC": conv_triton._BC}
        build(f"conv tail {tail}", conv_triton.conv_kernel, shape)
        shape |= {"WP": 4, "BT": conv_triton._BACK}
        build(f"conv backward tail {tail}", conv_triton.conv_backward_kernel, shape, dpre="*bf16")
    shape = {"W": 4, "BT": conv_triton._BT, "BC": conv_triton._BC}
    build("conv input gradient", conv_triton.conv_input_kernel, shape, dpre="*bf16")


def moe() -> None:
    for width, inner in ((256, 192), (1024, 384), (3584, 3072)):
        build(f"gather {width}", experts_triton.gather_kernel, experts_triton._tiles(1024, width)[1])
        build(f"combine {width}", experts_triton.combine_kernel, {"K": 6, "BT": 4, "BC": 256})
        rule = {"KIND": 1, "SORTED": False}
        build(f"activate {inner}", experts_triton.activate_kernel, experts_triton._tiles(1024, inner)[1] | rule)
        tile = {"BR": 16, "BC": 64}
        build(f"activate backward {inner}", experts_triton.activate_backward_kernel, tile | rule)


def few() -> None:
    types = dict.fromkeys(["expert", "ends"], "*i32") | {"w": "*bf16", "rows": "i32"}
    build("order", few_triton.order_kernel, {"BR": 16, "BC": 256}, **types)
    for width, inner, count in ((256, 192, 6), (1024, 384, 6), (2304, 1024, 8), (2304, 1024, 256)):
        for mode in (0, 1, 2):
            for kernel, outputs, more in (
                (few_triton.gate_up_kernel, inner, {"KIND": 1}),
                (few_triton.down_kernel, width, {}),
            ):
                shape = few_triton.tile(outputs, count, 2)
                warps, stages = shape.pop("num_warps"), shape.pop("num_stages")
                rule = shape | {"N": inner, "L": width, "MODE": mode} | more
                build(f"few {kernel.__name__} {width} {inner} mode {mode}", kernel, rule, warps, stages, **types)


def one() -> None:
    types = dict.fromkeys(["gate_up", "shared", "down", "w", "x2", "w2", "y2"], "*bf16")
    for width, inner, k, slices in ((256, 192, 6, 0), (512, 1536, 0, 1), (2304, 1024, 8, 1), (7168, 33792, 0, 1)):
        rule = {"N": inner, "L": width, "K": k, "S": slices, "CHAIN": True}
        for name, kernel, shape, more in (
            ("gate up", one_triton.gate_up_kernel, one_triton.gate_up_shape(), {"KIND": 1}),
            ("down", one_triton.down_kernel, one_triton.down_shape(inner), {}),
        ):
            warps = shape.pop("num_warps")
            build(f"one {name} {width} {inner}", kernel, rule | shape | more, warps, **types)
    for outputs, depth in ((12576, 2304), (2304, 4096), (4096, 128), (256, 2304), (163840, 2304), (1024, 512)):
        shape = one_triton.linear_shape(outputs, depth)
        warps = shape.pop("num_warps")
        rule = shape | {"K": depth, "CHAIN": True}
        build(f"linear {outputs} {depth}", one_triton.linear_kernel, rule, warps, N="i32", N2="i32", **types)


def packed() -> None:
    types = {"packed": "*u8", "scale": "*u8", "expert": "*i64", "ends": "*i32"}
    for width, inner in ((1024, 384), (3584, 3072)):
        shape = {"N": inner, "L": width, "BM": 16, "BN": packed_triton._BN, "BK": packed_triton._BK}
        build(f"packed gate up {width} {inner}", packed_triton.gate_up_kernel, shape | {"KIND": 1}, **types)
        build(f"packed down {width} {inner}", packed_triton.down_kernel, shape, **types)


def mla() -> None:
    types = dict.fromkeys(["q", "latents"], "*bf16") | dict.fromkeys(["part", "stats"], "*fp32")
    types |= {"table": "*i64", "lengths": "*i64", "scale": "fp32"}
    for name, heads, window, width, values in (
        ("mini", 4, 1, 160, 128), ("small", 16, 1, 576, 512), ("kimi", 32, 1, 576, 512), ("kimi", 32, 4, 576, 512),
    ):  # fmt: skip
        shape = mla_triton.tiles(heads * window, width, values, 2)
        warps, stages = shape.pop("num_warps"), shape.pop("num_stages")
        for count in (1, 16):
            rule = shape | {"R": width, "VALUES": values, "SPLITS": count}
            build(f"attend {name} {window} of {count}", mla_triton.attend_kernel, rule, warps, stages, **types)
        shape = (
            {key: shape[key] for key in ("BT", "BV")}
            | {"BV": 128}
            | {"VALUES": values, "SPLITS": 32, "BS": 16, "BA": 32}
        )
        build(f"merge {name}", mla_triton.merge_kernel, shape, **types)


def router() -> None:
    for experts, top in ((128, 6), (896, 16)):
        tile = router_triton._tile(experts)
        more = tile | {"K": top, "RENORM": True}
        up = triton.next_power_of_2(top)
        build(f"select {top} of {experts}", router_triton.select_kernel, more | {"PARTS": 3, "KP": up, "CHAIN": True})
        one = more | {"BT": 1, "PARTS": 1, "KP": up}
        build(f"select {top} of {experts}, a warp a token", router_triton.select_kernel, one, 1)
        build(f"select backward {top} of {experts}", router_triton.select_backward_kernel, more | {"SCORED": False})


def head() -> None:
    for vocabulary in (16384, 163840):
        shape = {"IGNORE": -100, "DIFFERENTIATE": True, "BV": 4096}
        build(f"head {vocabulary}", cross_entropy_triton.softmax_gradient_kernel, shape, 8, logits="*bf16")


def histogram() -> None:
    types = {"mask": "*u8", "low": "*fp32", "high": "*fp32", "counts": "*i32"}
    for masked in (False, True):
        shape = {"MASKED": masked, "BT": 16, "BE": 128}
        build(f"histogram masked {masked}", quantile_triton.histogram_kernel, shape, **types)


def muon() -> None:
    types = {"table": "*i64", "momentum": "*fp32", "X": "*bf16", "squares": "*fp32", "factor": "*fp32"}
    types |= dict.fromkeys(["scale", "keep", "rate"], "fp32")
    for aligned in (True, False):
        rule = {"ALIGNED": aligned, "BLOCK": muon_triton._BLOCK}
        build(f"momentum aligned {aligned}", muon_triton.momentum_kernel, rule | {"MU": 0.95}, 8, **types)
        build(f"update aligned {aligned}", muon_triton.update_kernel, rule, 8, **types)
    build("scale", muon_triton.scale_kernel, {"BLOCK": muon_triton._BLOCK}, 8, **types)


ALL = (
    "situ",
    "norm",
    "softmax",
    "attnres",
    "phases",
    "conv",
    "moe",
    "few",
    "one",
    "packed",
    "mla",
    "router",
    "head",
    "histogram",
    "muon",
)

if __name__ == "__main__":
    for name in sys.argv[1:] or ALL:
        globals()[name]()
