"""Compile every kernel configuration for sm_90a without a GPU: `compile_kernels.py [NAME...]`.

Prints registers, spills, shared memory and the number of warpgroup products of each, and fails where shared memory
does not fit the chip or a product that should use the tensor cores does not.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

from perilune.ops.kda import (
    gluon_backward,
    gluon_chain,
    gluon_decode,
    gluon_gradient,
    gluon_prepare,
    gluon_token,
    triton_backward,
    triton_decode,
    triton_forward,
    triton_prepare,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = 227 * 1024
BF16, FP32, INT = "*bf16", "*fp32", "*i32"
FLOATS = {"scale": "fp32", "lower_bound": "fp32", "eps": "fp32"}
FACTORS = dict.fromkeys(["kd", "qd", "kr", "p", "aqk", "factors", "squares"], BF16) | {"decay": FP32}
INPUTS = dict.fromkeys(
    ["q", "k", "v", "gate", "beta", "o", "do", "dv", "h", "d", "u", "dq", "dk", "dgate", "dbeta"], BF16
)
INPUTS |= dict.fromkeys(["A_log", "dt_bias", "dA_part", "dbias_part"], FP32)
INPUTS |= dict.fromkeys(["chunks", "runs", "pieces", "walks", "merges"], INT)
STATES = dict.fromkeys(["initial", "final", "carry", "transfer", "exports", "dfinal", "dstate", "dexports"], FP32)
STEP = dict.fromkeys(["x", "gate", "beta", "out_gate", "o", "past_x", "past_gate", "past_beta"], BF16)
STEP |= dict.fromkeys(["conv", "A_log", "dt_bias", "norm", "state", "tail"], FP32) | {
    "slots": INT,
    "accepted": INT,
    "rows": INT,
}
TYPES = FACTORS | INPUTS | STATES | FLOATS


def build(
    name: str, kernel, types: dict[str, str], constants: dict, warps: int, stages: int = 1, registers: int | None = None
) -> None:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    # Pointers and strides of real tensors are multiples of 16; those of beta and the tail are not.
    odd = {"b_h", "first", "c_t", "t_w", "t_c", "slot_r", "row_r"}
    aligned = [n for n in names if signature[n] != "constexpr" and n not in odd and not signature[n].startswith("fp")]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    made = triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    products = made.asm["ptx"].count("wgmma.mma_async")
    print(f"{name}: registers {found[1]}, stack {found[2]} B, shared {made.metadata.shared} B, wgmma {products}")
    assert made.metadata.shared <= SHARED, f"{name}: {made.metadata.shared} B of shared memory"
    assert products or made.asm["ptx"].count("mma.sync") or "decode" in name or name in ("merge", "unit rows"), (
        f"{name}: no tensor-core product"
    )


def prepare() -> None:
    for key in (64, 128):
        for bounded, floored in ((True, True), (False, True), (False, False)):
            build(
                f"prepare K{key} bounded {bounded} floored {floored}", triton_prepare.prepare_kernel, TYPES,
                {"HV": 8, "GROUP": 1, "K": key, "KB": 32, "BOUNDED": bounded, "FLOORED": floored,
                 "PRECISION": "tf32"}, 4,
            )  # fmt: skip
    for key in (128, 64):
        shape = {"HV": 8, "GROUP": 1, "K": key}
        build(f"gluon prepare K{key}", gluon_prepare.prepare_kernel, TYPES, shape, 4, registers=168)


def matrix(rows: int, columns: int) -> str:
    """A tensor descriptor."""
    return f"tensordesc<bf16[{rows}, {columns}],{NVMMASharedLayout(128, 16, 2)!r}>"


def copied(key: int, block: int) -> dict[str, str]:
    """The chain's tensor descriptors."""
    decays = f"tensordesc<fp32[1, {key}],{NVMMASharedLayout(0, 32, 2)!r}>"
    return {"rows": matrix(64, key), "squares": matrix(64, 64), "decays": decays, "values": matrix(64, block)}


def chain() -> None:
    for K, V, BV in ((128, 128, 128), (128, 128, 64), (64, 64, 64), (128, 64, 64), (64, 128, 128)):
        for scan, keep in ((False, False), (True, False), (False, True)):
            shape = {"HV": 8, "K": K, "V": V, "BV": BV, "SCAN": scan, "KEEP": keep, "STAGES": 2, "i_v": 1, "f_v": 1}
            build(
                f"chain K{K} V{V} block {BV} scan {scan} keep {keep}",
                triton_forward.chain_kernel,
                TYPES,
                shape,
                BV // 16,
                2,
            )
            if not keep:
                shape = {"HV": 8, "K": K, "V": V, "BV": 64, "SCAN": scan, "WALKERS": BV // 64, "i_v": 1, "f_v": 1}
                types = TYPES | copied(K, 64)
                name = f"gluon chain K{K} V{V} block {BV} scan {scan}"
                build(name, gluon_chain.chain_kernel, types, shape, 4)
    shape = {"HV": 8, "K": 128, "V": 128, "BV": 32, "i_v": 1, "f_v": 1}
    build("merge", triton_forward.merge_kernel, TYPES, shape, 8, 2)


def backward() -> None:
    for K, V, BV in ((128, 128, 128), (128, 128, 64), (64, 64, 64)):
        shape = {"HV": 8, "K": K, "V": V, "BV": BV, "i_v": 1, "f_v": 1}
        types = TYPES | copied(K, BV) | {"h": matrix(BV, K), "u": matrix(BV, 64)}
        types |= {"d": matrix(BV, K), "outs": matrix(64, BV)}
        build(f"gluon states K{K} V{V} block {BV}", gluon_backward.states_kernel, types, shape, BV // 16)
        build(f"gluon reverse K{K} V{V} block {BV}", gluon_backward.reverse_kernel, types, shape, BV // 16)
        shape["STAGES"] = 2
        build(f"reverse K{K} V{V} block {BV}", triton_backward.reverse_kernel, TYPES, shape, BV // 16, 2)
    build("pairs", triton_backward.pair_kernel, TYPES | {"dA": BF16, "dB": BF16}, {"HV": 8, "V": 128}, 4)
    build(
        "unit rows",
        triton_backward.unit_kernel,
        {"raw": BF16, "d": BF16},
        {"HV": 8, "GROUP": 1, "K": 128, "ROWS": 32},
        4,
    )
    for K, V, bounded in ((128, 128, True), (64, 64, True), (128, 128, False)):
        shape = {"HV": 8, "GROUP": 1, "K": K, "V": V, "KB": 32, "BOUNDED": bounded, "FLOORED": bounded}
        build(
            f"gradient K{K} V{V} bounded {bounded}",
            triton_backward.gradient_kernel,
            TYPES | {"dA": BF16, "dB": BF16},
            shape,
            4,
        )

    for K, V in ((128, 128), (64, 64), (128, 64), (64, 128)):
        types = TYPES | {"raw_gate": BF16, "states": matrix(V, K), "u": matrix(V, 64)}
        types |= dict.fromkeys(["q", "k", "gate"], matrix(64, K)) | dict.fromkeys(["do", "dv"], matrix(64, V))
        shape = {"HV": 8, "GROUP": 1, "K": K, "V": V}
        build(f"gluon gradient K{K} V{V}", gluon_gradient.gradient_kernel, types, shape, K // 16)


def decode() -> None:
    for replay in (False, True):
        for first in ("s_k", "s_v"):
            shape = {
                "W": 4 if replay else 1, "H": 8, "GROUP": 1, "K": 128, "V": 128,
                "FLOORED": True, "REPLAY": replay, first: 1,
            }  # fmt: skip
            build(f"decode replay {replay} unit {first}", triton_decode.decode_kernel, STEP | FLOATS, shape, 4)
            shape["KEY_FIRST"] = first == "s_k"
            build(
                f"gluon decode replay {replay} unit {first}", gluon_decode.decode_kernel, STEP | FLOATS, shape, 8,
                registers=128,
            )  # fmt: skip
    for first in ("s_k", "s_v"):
        for group in (1, 4):
            shape = {"H": 8, "GROUP": group, "K": 128, "V": 128, "FLOORED": True, "KEY_FIRST": first == "s_k", first: 1}
            name = f"gluon decode one token, group {group} unit {first}"
            build(name, gluon_token.decode_kernel, STEP | FLOATS, shape, 4, registers=168)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("prepare", "chain", "backward", "decode"):
        globals()[name]()
