"""`kda` on NVIDIA GPUs: chunk factors for all chunks at once, then the chain (`triton_prepare`, `triton_forward`).

The workspace holds one panel (1.1 GB at most, see `segments`); longer inputs pass through panel by panel, the state
crossing from one to the next. Head sizes 64 and 128; `accepts` says what else is needed.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.kda.decode_launch import on_hopper
from perilune.ops.kda.launch import launch
from perilune.ops.kda.segments import CHUNK, FINAL, INITIAL, PANEL, ZERO, Panel, Plan, Shape, plan
from perilune.ops.kda.triton_forward import chain_kernel, merge_kernel
from perilune.ops.kda.triton_prepare import prepare_kernel

SIZES = (64, 128)
BOUND = -5.5  # the steepest gate whose 16-token block stays inside fp32 (triton_prepare)


def accepts(q: Tensor, v: Tensor, delta: bool) -> str | None:
    """None, or why these inputs need another implementation."""
    if q.shape[-1] not in SIZES or v.shape[-1] not in SIZES:
        return f"head sizes {q.shape[-1]} and {v.shape[-1]} are not in {SIZES}"
    if not delta:
        return "the delta term is off"
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    if {cast or q.dtype, cast or v.dtype} != {torch.bfloat16}:
        return f"q is {q.dtype} and v is {v.dtype}, not bfloat16"
    return None


@dataclass(frozen=True, eq=False)
class Problem:
    """What the kernels need besides tensors. A key of caches by what it is, not by what it says: see `problem_of`."""

    lengths: tuple[int, ...]
    exports: tuple[tuple[int, int], ...]
    scale: float
    lower_bound: float | None
    tokens: int  # T of [B,T,...]
    heads: int
    key_heads: int
    key: int
    value: int
    segments: int = 0
    limit: int = PANEL

    @functools.cached_property
    def bounded(self) -> bool:
        return self.lower_bound is not None and self.lower_bound >= BOUND

    @functools.lru_cache(maxsize=64)  # noqa: B019  (of as many problems as `problem_of` keeps)
    def plan(self, has_state: bool) -> Plan:
        shape = Shape(self.heads, self.key, self.value, has_state)
        return plan(self.lengths, self.exports, shape, limit=self.limit, segments=self.segments)


def longest_first(panel: Panel, rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Runs or walks (rows that begin with a first and a last piece) by chunks, so that none is left to end alone."""

    def chunks(row: tuple[int, ...]) -> int:
        return sum(-(-panel.pieces[p][1] // CHUNK) for p in range(row[0], row[1]))

    return sorted(rows, key=chunks, reverse=True)


problem_of = functools.lru_cache(maxsize=64)(Problem)
"""The same object for the same values, so that a call hashes a packing's lengths once."""


@functools.lru_cache(maxsize=64)
def tables(problem: Problem, has_state: bool, device: torch.device) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The plan's tables on the device: one copy for all, then views."""
    made = problem.plan(has_state)
    parts: list[list[tuple[int, ...]]] = [made.chunks]  # type: ignore[list-item]
    for j, panel in enumerate(made.panels):
        later = {run[3] for run in made.panels[j + 1].runs if run[2] == FINAL} if j + 1 < len(made.panels) else set()
        ends = [(*w[:2], FINAL if w[2] in later else ZERO, w[2]) for w in panel.walks]
        given = [(*w[:2], FINAL if w[2] in later else INITIAL, w[2]) for w in panel.walks]
        walked = [longest_first(panel, rows) for rows in (panel.runs, ends, given)]
        parts += [panel.pieces, panel.scans, panel.merges, *walked]  # type: ignore[list-item]
    flat = torch.tensor([x for part in parts for row in part for x in row], dtype=torch.int32).to(device)
    sizes = [sum(len(row) for row in part) for part in parts]
    views = flat.split(sizes)
    names = ("pieces", "scans", "merges", "runs", "ends", "given_ends")
    return views[0], [dict(zip(names, views[1 + 6 * j : 7 + 6 * j])) for j in range(len(made.panels))]


@dataclass
class Workspace:
    """Factors of one panel: rows (kd, qd, kr), squares (p, aqk) and decay, each [..., chunks, HV, ...]."""

    rows: Tensor
    squares: Tensor
    decay: Tensor

    @classmethod
    def empty(cls, chunks: int, heads: int, key: int, like: Tensor) -> "Workspace":
        return cls(
            like.new_empty(3, chunks, heads, CHUNK, key),
            like.new_empty(2, chunks, heads, CHUNK, CHUNK),
            like.new_empty(chunks, heads, key, dtype=torch.float32),
        )

    def all(self) -> tuple[Tensor, ...]:
        """kd, qd, kr, p, aqk, decay."""
        return *self.rows, *self.squares, self.decay


def rowwise(x: Tensor) -> Tensor:
    """The kernels want unit stride on the last axis; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def by_hand(inputs: Sequence[Tensor], problem: Problem) -> bool:
    """Whether the kernels laid out by hand take these (q, k, gate, ...)."""
    q, k, gate = inputs[:3]
    return problem.bounded and {x.dtype for x in (q, k, gate)} == {torch.bfloat16} and on_hopper(q.device)


def prepare(inputs: Sequence[Tensor], problem: Problem, chunks: Tensor, first: int, count: int, to: Workspace) -> None:
    """Fills the workspace with the factors of chunks [first, first + count)."""
    q, k, gate, beta, A_log, dt_bias = inputs
    hopper = by_hand(inputs, problem)
    if hopper:
        q, k, gate = aligned(q), aligned(k), aligned(gate)
    tensors = (q, k, gate, beta, A_log, dt_bias, chunks)
    numbers = (
        *q.stride()[:3], *k.stride()[:3], *gate.stride()[:3], *beta.stride(),
        problem.tokens, problem.scale, problem.lower_bound or 0.0, first,
    )  # fmt: skip
    settings = {"HV": problem.heads, "GROUP": problem.heads // problem.key_heads, "K": problem.key}
    if hopper:
        from perilune.ops.kda import gluon_prepare

        kernel = gluon_prepare.prepare_kernel
        launch(
            kernel, (count * problem.heads, 1), (), (*tensors, to.rows, to.squares, to.decay),
            (*numbers, to.decay.shape[0]), settings, num_warps=4, maxnreg=168,
        )  # fmt: skip
        return
    prepare_kernel[(count * problem.heads,)](
        *tensors, *to.all(), *numbers, **settings, KB=32, BOUNDED=problem.bounded,
        FLOORED=problem.lower_bound is not None, PRECISION="tf32", num_warps=4, num_stages=1,
    )  # fmt: skip


def aligned(x: Tensor) -> Tensor:
    """[B,T,H,K] whose rows can be fetched 16 bytes at a time; a copy where they cannot."""
    fits = all(s % 16 == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def copyable(v: Tensor) -> Tensor:
    """[B,T,HV,V] as the copy engine can read it: rows of one matrix, 16-byte aligned; a copy where it is not."""
    b, t, h, _ = v.stride()
    fits = (v.shape[0] == 1 or b == t * v.shape[1]) and v.data_ptr() % 16 == 0 and t > 0 and t % 8 == 0 and h % 8 == 0
    return v if fits else v.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Place:
    """What a descriptor needs of a tensor, without keeping its memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@functools.lru_cache(maxsize=512)
def _tiles(
    pointer: int, dtype: torch.dtype, shape: tuple[int, int], stride: int, block: tuple[int, int], bits: int
) -> object:
    """Kept from call to call: making one takes longer than launching a kernel, and allocations come back."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(128 if bits == 16 else 0, bits, 2)
    return TensorDescriptor(Place(pointer, dtype), list(shape), [stride, 1], list(block), layout)


def tiles(x: Tensor, rows: int, columns: int, bits: int = 16) -> object:
    """[rows,columns] of x, of [B,T,H,D] as B·T rows of all heads, for the copy engine."""
    if x.dim() != 4:
        return _tiles(x.data_ptr(), x.dtype, (x.numel() // columns, columns), columns, (rows, columns), bits)
    B, T, H, D = x.shape
    _, t, h, _ = x.stride()
    return _tiles(x.data_ptr(), x.dtype, (B * T, (H - 1) * h + D), t, (rows, columns), bits)


def descriptors(to: Workspace, v: Tensor, block: int) -> tuple[object, ...]:
    """What the copy engine reads: rows, squares, decays, and `block` columns of values."""
    K = to.rows.shape[-1]
    return (
        tiles(to.rows, CHUNK, K),
        tiles(to.squares, CHUNK, CHUNK),
        tiles(to.decay, 1, K, bits=32),
        tiles(v, CHUNK, block),
    )


def chain(
    to: Workspace, panel: Panel, table: dict[str, Tensor], problem: Problem, chunks: Tensor,
    v: Tensor, o: Tensor, state: Tensor | None, final: Tensor, exports: Tensor | None,
    keep: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Walks every run of the panel; with segments, scan and merge first."""
    HV, K, V = problem.heads, problem.key, problem.value
    initial = final if state is None else state
    transfer = carry = final
    if panel.scans:
        transfer = final.new_empty(len(panel.scans), HV, V + K, K)
        carry = final.new_empty(panel.carries, HV, V, K)
    hopper = panel.count > 0 and on_hopper(v.device)
    if hopper:
        from perilune.ops.kda import gluon_backward, gluon_chain

        v = copyable(v)

    def walk(runs: Tensor, count: int, scan: bool) -> None:
        block = min(128, K, V) if scan else panel.block
        constants = {"HV": HV, "K": K, "V": V, "BV": block}
        # Launched before the factors are done, where no merge comes in between.
        options = {"num_warps": block // 16, "launch_pdl": scan or not panel.scans}
        if hopper and keep is not None and not scan:
            h, u = (tiles(x.flatten(0, 1), block, n) for x, n in zip(keep, (K, CHUNK)))
            launch(
                gluon_backward.states_kernel, (count * HV, V // block), (*descriptors(to, v, block), h, u),
                (runs, table["pieces"], chunks, initial, final, carry),
                (*initial.stride(), *final.stride(), to.decay.shape[0], panel.first, v.stride(2)), constants, **options,
            )  # fmt: skip
            return
        if hopper:
            constants |= {"BV": 64, "SCAN": scan, "WALKERS": block // 64}
            launch(
                gluon_chain.chain_kernel, (count * HV, (V + K if scan else V) // block), descriptors(to, v, 64),
                (o, runs, table["pieces"], chunks, initial, final, carry, transfer,
                 final if exports is None else exports),
                (*o.stride()[:3], *initial.stride(), *final.stride(),
                 problem.tokens, to.decay.shape[0], panel.first, v.stride(2)),
                constants, **options | {"num_warps": 4},
            )  # fmt: skip
            return
        chain_kernel[(count * HV, (V + K if scan else V) // block)](
            *to.all(), v, o, runs, table["pieces"], initial, final, carry, transfer,
            final if exports is None else exports, *(keep or (v, v)),
            *v.stride()[:3], *o.stride()[:3], *initial.stride(), *final.stride(), problem.tokens,
            **constants, SCAN=scan, KEEP=keep is not None and not scan, STAGES=2, num_warps=block // 16,
        )  # fmt: skip

    if panel.scans:
        walk(table["scans"], len(panel.scans), True)
        launch(
            merge_kernel, (len(panel.merges) * HV, V // 32), (), (transfer, table["merges"], initial, final, carry),
            (*initial.stride(), *final.stride()), {"HV": HV, "K": K, "V": V, "BV": 32}, num_warps=8, num_stages=2,
        )  # fmt: skip
    walk(table["runs"], len(panel.runs), False)


def forward(inputs: Sequence[Tensor], v: Tensor, state: Tensor | None, problem: Problem) -> tuple[Tensor, ...]:
    """(o, final, exports [E,HV,K,V], the state entering each panel but the first [panels − 1,HV,K,V])."""
    made = problem.plan(state is not None)
    chunks, panels = tables(problem, state is not None, v.device)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    N, HV, K, V = len(problem.lengths), problem.heads, problem.key, problem.value
    if state is None:
        final = torch.empty(N, HV, K, V, dtype=torch.float32, device=v.device)
    else:
        final = torch.empty_like(state)
    exports = torch.empty(len(problem.exports), HV, K, V, dtype=torch.float32, device=v.device)
    workspace = Workspace.empty(max(p.count for p in made.panels), HV, K, v)
    borders = torch.empty(len(panels) - 1, HV, K, V, dtype=torch.float32, device=v.device)
    for j, (panel, table) in enumerate(zip(made.panels, panels)):
        if panel.runs and panel.runs[0][2] == FINAL:  # at most one sequence crosses a border
            borders[j - 1] = final[panel.runs[0][3]]
        if panel.count:
            prepare(inputs, problem, chunks, panel.first, panel.count, workspace)
        if panel.runs:
            chain(workspace, panel, table, problem, chunks, v, o, state, final, exports)
    return o, final, exports, borders
