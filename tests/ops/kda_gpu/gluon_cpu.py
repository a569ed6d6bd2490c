# ruff: noqa: ARG001, ARG002, ARG005  (the arguments are Gluon's)
"""Runs the Gluon kernels' own source on a CPU: layouts mean nothing, partitions are threads, copies land at once.

Gluon has no interpreter, so this is one, for what our kernels use: `Kernel(module.kernel)[grid](*arguments)`. Numbers
of 16 bits and TF32 are kept in fp32, so that errors of algebra and indexing stand out at 1e-6. What it finds: wrong
equations and offsets, reads of what nothing wrote (NaN) or beyond a tensor, masks, phases of barriers, byte counts,
deadlocks, buffers handed back too early (a copy overwrites at once). What it cannot: layouts, fences, barriers between
warps, registers.
"""

import ctypes
import functools
import inspect
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITFunction

PATIENCE = 60.0  # seconds until a wait is called a deadlock
place = threading.local()  # program ids of this thread
lock = threading.Condition()


def raw(x: Any) -> Any:
    return x.x if isinstance(x, Value) else x


class Value:
    """A tensor of the kernel; never changed in place."""

    def __init__(self, x: Any) -> None:
        self.x = x if isinstance(x, Tensor) else torch.tensor(x)

    shape = property(lambda self: list(self.x.shape))
    dtype = property(lambda self: self.x.dtype)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        return Value(self.x.view(dtype) if bitcast else self.x.to(dtype))

    def __index__(self) -> int:
        return int(self.x)

    def __bool__(self) -> bool:
        return bool(self.x)

    def __neg__(self) -> "Value":
        return Value(-self.x)


def _operators() -> None:
    import operator

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift",
                 "lt", "le", "gt", "ge", "eq", "ne"):  # fmt: skip
        act = getattr(operator, {"and": "and_", "or": "or_"}.get(name, name))

        def forward(self: Value, other: Any, act: Callable = act) -> Any:
            return other.__radd__(self) if isinstance(other, Pointer) else Value(act(self.x, raw(other)))

        def backward(self: Value, other: Any, act: Callable = act) -> Value:
            return Value(act(raw(other), self.x))

        setattr(Value, f"__{name}__", forward)
        setattr(Value, f"__r{name}__", backward)


class Pointer:
    """Addresses in a tensor's memory, in numbers from its start."""

    def __init__(self, memory: Tensor, at: Tensor) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def of(cls, x: Tensor) -> "Pointer":
        size = x.untyped_storage().nbytes() // x.element_size()
        return cls(torch.as_strided(x.detach(), (size,), (1,), 0), torch.tensor(x.storage_offset()))

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + raw(offset))

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at - raw(offset))

    __radd__ = __add__


class Room:
    """Shared memory."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    shape = property(lambda self: list(self.t.shape))
    dtype = property(lambda self: self.t.dtype)

    def index(self, i: Any) -> "Room":
        return Room(self.t[int(raw(i))])

    def slice(self, start: Any, length: int, dim: int = 0) -> "Room":
        return Room(self.t.narrow(dim, int(raw(start)), length))

    def permute(self, order: tuple[int, ...]) -> "Room":
        return Room(self.t.permute(*order))

    def reshape(self, shape: list[int]) -> "Room":
        return Room(self.t.view(*shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> "Room":
        """The same memory; memory of its own where 32 bits become twice as many 16, which here they cannot."""
        return Room(self.t.view(*shape)) if self.t.numel() == math.prod(shape) else allocate(dtype, shape, layout)

    def load(self, layout: object) -> Value:
        return Value(self.t.clone())

    def store(self, x: Value) -> None:
        assert tuple(x.shape) == tuple(self.t.shape), (x.shape, self.t.shape)
        self.t.copy_(x.x)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def turn(self, arrivals: int, size: int) -> None:
        with lock:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "more arrivals at a barrier than it was made for"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase ^ 1, self.count
                lock.notify_all()


class Barriers:
    def __init__(self, all_: list[Barrier]) -> None:
        self.all = all_

    def index(self, i: Any) -> "Barriers":
        return Barriers([self.all[int(raw(i))]])


def init(bar: Barriers, count: int) -> None:
    bar.all[0].count = bar.all[0].pending = count


def expect(bar: Barriers, size: int) -> None:
    bar.all[0].turn(1, int(raw(size)))


def arrive(bar: Barriers, count: int = 1) -> None:
    bar.all[0].turn(count, 0)


def wait(bar: Barriers, phase: Any) -> None:
    want = int(raw(phase)) & 1
    with lock:
        assert lock.wait_for(lambda: bar.all[0].phase != want, PATIENCE), "a barrier's phase never ended: deadlock"


def tile_of(descriptor: Any, coordinates: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
    """A tensor descriptor's memory as a matrix and what of the tile lies inside it."""
    start = [int(raw(c)) for c in coordinates]
    assert min(start) >= 0, start
    (rows, columns), (stride, _) = descriptor.shape, descriptor.strides
    size = ((rows - 1) * stride + columns) * descriptor.base.dtype.itemsize
    memory = (ctypes.c_char * size).from_address(descriptor.base.data_ptr())
    matrix = torch.frombuffer(memory, dtype=descriptor.base.dtype).as_strided((rows, columns), (stride, 1))
    ends = [min(s + n, m) for s, n, m in zip(start, descriptor.block_shape, descriptor.shape)]
    return matrix, tuple(slice(s, max(s, e)) for s, e in zip(start, ends))


def copy_in(descriptor: Any, coordinates: list[Any], bar: Barriers, room: Room) -> None:
    matrix, inside = tile_of(descriptor, coordinates)
    part = matrix[inside]
    assert list(room.shape) == list(descriptor.block_shape), (room.shape, descriptor.block_shape)
    room.t.zero_()
    room.t[tuple(slice(0, n) for n in part.shape)] = part
    bar.all[0].turn(0, -room.t.numel() * descriptor.layout.element_bitwidth // 8)


def copy_out(descriptor: Any, coordinates: list[Any], room: Room) -> None:
    matrix, inside = tile_of(descriptor, coordinates)
    part = matrix[inside]
    part.copy_(room.t[tuple(slice(0, n) for n in part.shape)])


def load(pointer: Pointer, mask: Any = None, other: Any = 0.0) -> Value:
    if mask is None:
        assert int(pointer.at.min()) >= 0
        return Value(pointer.memory[pointer.at])
    at, m = torch.broadcast_tensors(pointer.at, torch.as_tensor(raw(mask)))
    found = pointer.memory[torch.where(m, at, 0)]
    return Value(torch.where(m, found, torch.tensor(raw(other)).to(found.dtype)))


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    mask = torch.tensor(True) if mask is None else torch.as_tensor(raw(mask))
    at, values, m = torch.broadcast_tensors(pointer.at, torch.as_tensor(raw(x)), mask)
    assert at.shape == pointer.at.shape or pointer.at.dim() == 0 or at.numel() == pointer.at.numel(), "store widened"
    pointer.memory[at[m]] = values[m].to(pointer.memory.dtype)


def async_copy(room: Room, pointer: Pointer, mask: Any = None) -> None:
    room.t.copy_(load(pointer, True if mask is None else mask).x)


def product(a: Any, b: Any, acc: Value, use_acc: bool = True, **_: Any) -> Value:
    a, b = (y.t if isinstance(y, Room) else y.x for y in (a, b))
    return Value(a.float() @ b.float() + (acc.x if use_acc else 0.0))


def settle(pending: int = 0, deps: Any = ()) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def scan(x: Value, axis: int, combine: Callable) -> Value:
    parts = [Value(p) for p in x.x.unbind(axis)]
    for i in range(1, len(parts)):
        parts[i] = combine(parts[i - 1], parts[i])
    return Value(torch.stack([p.x for p in parts], axis))


def reduce(xs: tuple[Value, ...], axis: int, combine: Callable) -> tuple[Value, ...]:
    parts = [tuple(Value(p) for p in ps) for ps in zip(*(x.x.unbind(axis) for x in xs))]
    return functools.reduce(lambda a, b: combine(*a, *b), parts)


def assembly(text: str, constraints: str, arguments: list[Value], dtype: Any, **_: Any) -> Value:
    if not arguments:  # control of launches
        return Value(0)
    (x,) = arguments
    for sign, act in {"ex2": torch.exp2, "rcp": torch.reciprocal, "shl": Tensor.float, "cvt.rn": Tensor.float}.items():
        if sign in text:
            return Value(act(x.x))
    raise AssertionError(f"unknown assembly: {text}")


def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
    if layout == "barrier":
        return Barriers([Barrier() for _ in range(shape[0])])
    return Room(torch.full(tuple(shape), float("nan")).to(dtype))


def specialize(parts: list[tuple[Callable, tuple]], *_: Any) -> None:
    """Every partition a thread; the first failure is raised here."""
    failures: list[BaseException] = []
    ids = place.ids

    def run(fn: Callable, arguments: tuple) -> None:
        place.ids = ids
        try:
            fn(*arguments)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        for thread in threads:
            thread.join(0.05)
    if failures:
        raise failures[0]


def elementwise(act: Callable) -> Callable:
    return lambda *xs: Value(act(*(torch.as_tensor(raw(x)) for x in xs)))


def unpack(x: Value) -> tuple[Value, Value]:
    return Value(x.x[..., 0]), Value(x.x[..., 1])


def whole_numbers(*bounds: Any) -> list[Value]:
    return [Value(i) for i in range(*(int(raw(b)) for b in bounds))]


NOTHING = ("SliceLayout", "BlockedLayout", "SwizzledSharedLayout", "NVMMASharedLayout", "DotOperandLayout",
           "NVMMADistributedLayout", "DistributedLinearLayout", "thread_barrier")  # fmt: skip
GL = types.SimpleNamespace(
    constexpr=lambda x: x, bfloat16=torch.float32, float32=torch.float32, int32=torch.int32, int64=torch.int64,
    program_id=lambda axis: Value(place.ids[0][axis]), num_programs=lambda axis: Value(place.ids[1][axis]),
    load=load, store=store, arange=lambda a, b, layout=None: Value(torch.arange(a, b)),
    zeros=lambda shape, dtype, layout=None: Value(torch.zeros(tuple(shape), dtype=dtype)),
    zeros_like=elementwise(torch.zeros_like), allocate_shared_memory=allocate, warp_specialize=specialize,
    expand_dims=lambda x, axis: Value(x.x.unsqueeze(axis)), convert_layout=lambda x, *_, **__: x,
    reshape=lambda x, shape: Value(x.x.reshape(tuple(shape))), permute=lambda x, order: Value(x.x.permute(*order)),
    broadcast=lambda a, b: tuple(map(Value, torch.broadcast_tensors(a.x, b.x))), split=unpack,
    where=elementwise(torch.where), minimum=elementwise(torch.minimum), maximum=elementwise(torch.maximum),
    exp=elementwise(torch.exp), exp2=elementwise(torch.exp2), log2=elementwise(torch.log2),
    rsqrt=elementwise(torch.rsqrt), abs=elementwise(torch.abs),
    sum=lambda x, axis: Value(x.x.sum(axis).to(x.x.dtype)), max=lambda x, axis: Value(x.x.amax(axis)),
    static_range=range, associative_scan=scan, reduce=reduce, inline_asm_elementwise=assembly,
    **{name: lambda *_, **__: None for name in NOTHING},
)  # fmt: skip
STANDS_FOR = {
    id(language): GL,
    id(hopper.mbarrier): types.SimpleNamespace(
        init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=lambda: "barrier"
    ),
    id(hopper.tma): types.SimpleNamespace(
        async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=lambda pending: None
    ),
    id(hopper.async_copy): types.SimpleNamespace(
        async_copy_global_to_shared=async_copy, commit_group=lambda: None, wait_group=lambda pending: None
    ),
    id(hopper.fence_async_shared): lambda: None,
    id(hopper.warpgroup_mma): product,
    id(hopper.mma_v2): product,
    id(hopper.warpgroup_mma_init): lambda x: x,
    id(hopper.warpgroup_mma_wait): settle,
}


@functools.cache
def plain(kernel: JITFunction) -> Callable:
    """The kernel's or helper's own Python, its names standing for the ones here."""
    fn = kernel.fn
    return types.FunctionType(fn.__code__, names(inspect.getmodule(fn)), fn.__name__, fn.__defaults__)


@functools.cache
def names(module: types.ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = {"range": whole_numbers}
    for name, x in vars(module).items():
        if id(x) in STANDS_FOR:
            found[name] = STANDS_FOR[id(x)]
        elif name == "tf32":
            found[name] = lambda x: x
        elif isinstance(x, Kernel):
            found[name] = Later(x.kernel)
        elif isinstance(x, JITFunction):
            found[name] = Later(x)
        elif isinstance(x, language.constexpr):
            found[name] = x.value
        elif type(x).__name__ == "ConstexprFunction":
            found[name] = lambda *_: None
    return found


class Later:
    """A helper, read when it is called: helpers call one another."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel

    def __call__(self, *arguments: Any) -> Any:
        return plain(self.kernel)(*arguments)


class Kernel:
    """`kernel[grid](*arguments, **constants)`, one program after another."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*arguments: Any, **constants: Any) -> None:
            constants = {k: v for k, v in constants.items() if k in self.kernel.arg_names}
            full = (*grid, 1, 1)[:3]
            for number in range(full[0] * full[1] * full[2]):
                place.ids = ((number % full[0], number // full[0] % full[1], number // (full[0] * full[1])), full)
                given = [Pointer.of(x) if isinstance(x, Tensor) else x for x in arguments]
                plain(self.kernel)(*given, **constants)

        return launch


_operators()
