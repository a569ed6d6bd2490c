"""Compile kernels for sm_90 without a GPU: `compile_hopper.py NAME...`; prints each with its shared memory."""

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile


def build(kernel, signature: dict[str, str], constants: dict, warps: int = 4, stages: int = 3) -> str:
    names = kernel.arg_names
    full = {n: signature.get(n, "constexpr") for n in names}
    source = ASTSource(kernel, full, {(names.index(n),): v for n, v in constants.items()})
    made = triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    assert made.asm["cubin"][:4] == b"\x7fELF"
    return f"shared {made.metadata.shared}"


def planner() -> None:
    from perilune.parallel import planner_triton as k

    ints = dict.fromkeys(["counts", "assigned", "quotas"], "*i64") | {"tolerance": "i32"}
    for R, L in [(2, 192), (8, 112), (128, 7)]:
        up = lambda n: 1 << (n - 1).bit_length()  # noqa: E731
        shape = {"R": R, "L": L, "B": L, "RP": up(R), "LP": up(L), "CP": up(R - 1 + R * L)}
        print("planner", R, L, build(k._plan_kernel, ints, shape | {"TOLERATE": False}))
        names = ["assigned", "replicas", "total_R", "starts", "ends", "used"]
        print(
            "segments", R, L,
            build(k._segments_kernel, dict.fromkeys(names, "*i64") | {"align": "i32"},
                  {"R": R, "L": L, "B": L, "EP": up(R * L), "GP": up(2 * L)}),
        )  # fmt: skip


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
