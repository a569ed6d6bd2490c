"""Compile kernels for sm_90 without a GPU: `compile_hopper.py NAME...`; prints each with its shared memory."""

import sys

import triton.language as tl
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

    names = ["counts", "copied", "assigned", "quotas", "replicas", "total_R", "starts", "ends", "used"]
    ints = dict.fromkeys(names, "*i64") | {"offsets": "*i32"}
    ints |= dict.fromkeys(["tolerance", "align", "mine", "buffer_rows"], "i32")
    up = lambda n: 1 << (n - 1).bit_length()  # noqa: E731
    for R, L, B in [(2, 192, 192), (8, 112, 112), (128, 7, 7), (8, 112, 3)]:
        shape = {"R": R, "L": L, "B": B, "RP": up(R), "LP": up(L), "EP": up(R * L), "GP": up(L + B)}
        shape |= {"CP": up(R + L), "RB": max(min(up(R), 2048 // (up(R) * up(L))), 1), "TOLERATE": B < L}
        print("planner", R, L, B, build(k.plan_kernel, ints, shape))


def symmetric() -> None:
    """Every kernel of the symmetric fabric at the sizes of the benchmark: K=8, H=7168, E=384 on two GPUs."""
    from perilune.parallel import symmetric_triton as k

    R, K, L = 2, 8, 192
    i32 = lambda *names: dict.fromkeys(names, "*i32")  # noqa: E731
    i64 = lambda *names: dict.fromkeys(names, "*i64")  # noqa: E731
    n = lambda *names: dict.fromkeys(names, "i32")  # noqa: E731
    tile = {"K": K, "TB": 16, "KP": 8}
    rows = {"x": "*bf16", "rows": "*bf16", "scalars": "*fp32", "row_scalars": "*fp32"}
    links = i32("host_SK", "slot_SK", "parent_SK", "next_SK")
    borrow = {"L": L, "R": R, "B": L, "BP": 256, "BW": 1024}
    for name, signature, constants in [
        ("barrier", i64("pads") | i32("mine", "epoch", "status") | n("rank", "phase"),
         {"R": R, "RP": 2, "LIMIT": 1 << 24}),
        ("count", i64("experts") | i32("histogram") | n("tokens", "E"), tile | {"EP": 512}),
        ("announce", i32("histogram") | i64("peers", "like") | n("blocks", "rank", "E"), {"R": R, "EB": 32, "BB": 64}),
        ("route", i64("experts", "counts", "assigned", "starts") | i32("histogram") | links | n("tokens", "rank", "E"),
         tile | {"R": R}),
        ("unused", i32("ends", "parent_N") | i64("used"), {"PB": 128}),
        ("push", rows | links | i64("inboxes", "scalar_inboxes", "parents", "nexts") | n("rank", "H"),
         {"K": K, "BH": 1024, "SCALARS": True, "LINKS": True}),
        ("expand", {"inbox": "*bf16", "scalar_inbox": "*fp32", "rows": "*bf16", "scalars": "*fp32"} | i32("parent_N")
         | n("N", "H"), {"BN": 4, "BH": 1024, "SCALARS": True}),
        ("fold", {"rows": "*bf16", "outbox": "*bf16"} | i32("parent_N", "next_N") | n("H"),
         {"BH": 1024, "WIDE": tl.float32}),
        ("pull", {"y": "*bf16"} | rows | links | i64("outboxes", "scalar_outboxes") | n("rank", "H"),
         {"K": K, "BH": 1024, "WIDE": tl.float32, "SCALARS": True}),
        ("lend", i64("own", "replicas", "pools") | n("rank", "W"), borrow),
        ("stage", {"grad": "*bf16", "shared": "*bf16"} | i64("replicas") | n("rank", "W"), {"B": L, "BW": 1024}),
        ("give_back", {"home": "*bf16"} | i64("replicas", "shared") | n("rank", "W"),
         borrow | {"BW": 4096, "WIDE": tl.float32}),
    ]:  # fmt: skip
        made = getattr(k, f"{name}_kernel")
        used = {a: signature[a] for a in made.arg_names if a in signature}
        print("symmetric", name, build(made, used, constants))


def products() -> None:
    """Borrowed groups at H=7168, H'=2048: gate-up, down and their gradients."""
    from perilune.parallel import products_triton as k

    strides = ["D", "F", "out_row", "x_row", "w_group", "w_row", "w_col", "g_group", "g_row", "g_col", "dy_row"]
    full = (
        dict.fromkeys(["out", "x", "weights", "grad", "dy"], "*bf16")
        | {"borders": "*i32"}
        | dict.fromkeys(strides, "i32")
    )
    tiles = {"B": 192, "BP": 256, "BM": 128, "BN": 256, "BK": 64, "EVEN": True, "WIDE": tl.float32}
    for kernel, ones in [
        (k.product_kernel, {"w_row": 1}),  # weights.mT: gate-up and down forward
        (k.product_kernel, {"w_col": 1}),  # and backward
        (k.gradient_kernel, {"g_col": 1}),
    ]:
        signature = {a: full[a] for a in kernel.arg_names if a in full and a not in ones}
        print("products", kernel.__name__, build(kernel, signature, tiles | ones, warps=8))
    rows = {"x": "tensordesc<bf16[128,64]>", "out": "*bf16", "ends": "*i32", "D": "i32", "F": "i32", "out_row": "i32"}
    for kmajor, block in [(True, "256,64"), (False, "64,256")]:
        weights = dict.fromkeys(["own", "lent"], f"tensordesc<bf16[{block}]>")
        shape = {"L": 192, "B": 192, "BM": 128, "BN": 256, "BK": 64, "KMAJOR": kmajor}
        print("products grouped_kernel", build(k.grouped_kernel, rows | weights, shape, warps=8))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
