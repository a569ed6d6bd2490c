"""Which accelerator to use, by measurement: /dev/kvm may open and still emulate the guest's kernel instruction by
instruction.

A loop of N iterations of `dec ecx; jnz` runs at privilege level 0 in real mode and is timed. Hardware virtualisation
does 2000 of them in microseconds; a software KVM needs milliseconds. Under 100 million instructions a second the
kernel would crawl, and TCG, which translates whole blocks, is faster.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass

from perilune.sandbox.errors import SetupMissing

_GET_API, _CREATE_VM, _VCPU_SIZE = 0xAE00, 0xAE01, 0xAE04
_SET_MEMORY, _CREATE_VCPU, _SET_TSS = 0x4020AE46, 0xAE41, 0xAE47
_RUN, _GET_REGS, _SET_REGS, _GET_SREGS, _SET_SREGS = 0xAE80, 0x8090AE81, 0x4090AE82, 0x8138AE83, 0x4138AE84
_EXIT_HLT = 5
ENOUGH_MIPS = 100.0


@dataclass(frozen=True)
class Probe:
    """What was found: `kind` is hardware, emulated, absent or broken; `mips` is the measured ring-0 speed."""

    kind: str
    mips: float
    detail: str


def _loop(iterations: int) -> bytes:
    """Real-mode code: mov ecx, N; dec ecx; jnz -3; hlt."""
    return b"\x66\xb9" + struct.pack("<I", iterations) + b"\x66\x49" + b"\x75\xfc" + b"\xf4"


def _run_loop(kvm: int, iterations: int) -> float:
    """Seconds that `iterations` of the loop take at privilege level 0."""
    vm = fcntl.ioctl(kvm, _CREATE_VM, 0)
    memory = mmap.mmap(-1, 0x4000)
    memory[0x1000 : 0x1000 + 16] = _loop(iterations).ljust(16, b"\xf4")
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    cpu = -1
    try:
        fcntl.ioctl(vm, _SET_TSS, 0x7FFBD000)
        fcntl.ioctl(vm, _SET_MEMORY, struct.pack("<IIQQQ", 0, 0, 0, 0x4000, ctypes.addressof(view)))
        cpu = fcntl.ioctl(vm, _CREATE_VCPU, 0)
        with mmap.mmap(cpu, fcntl.ioctl(kvm, _VCPU_SIZE, 0)) as run:
            _set_registers(cpu)
            began = time.perf_counter()
            fcntl.ioctl(cpu, _RUN, 0)
            took = time.perf_counter() - began
            (reason,) = struct.unpack_from("<I", run, 8)
        if reason != _EXIT_HLT:
            raise OSError(f"the probe guest left with exit reason {reason}")
        return took
    finally:
        del view
        if cpu >= 0:
            os.close(cpu)
        os.close(vm)


def _set_registers(cpu: int) -> None:
    special = bytearray(fcntl.ioctl(cpu, _GET_SREGS, bytes(312)))
    struct.pack_into("<QIH", special, 0, 0, 0xFFFF, 0)  # cs: base, limit, selector
    fcntl.ioctl(cpu, _SET_SREGS, bytes(special))
    general = bytearray(144)
    struct.pack_into("<QQ", general, 128, 0x1000, 2)  # rip, rflags
    fcntl.ioctl(cpu, _SET_REGS, bytes(general))


def probe(path: str = "/dev/kvm", iterations: int = 20_000) -> Probe:
    """Measure `path`. Never raises: what went wrong is the `detail`."""
    try:
        kvm = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return Probe("absent", 0.0, f"{path}: {error.strerror}")
    try:
        _run_loop(kvm, 1)
        took = _run_loop(kvm, iterations)
    except OSError as error:
        return Probe("broken", 0.0, f"{path}: {error}")
    finally:
        os.close(kvm)
    mips = 2 * iterations / took / 1e6
    kind = "hardware" if mips >= ENOUGH_MIPS else "emulated"
    return Probe(kind, mips, f"{path}: {mips:.1f} million ring-0 instructions a second")


def require(accelerator: str, path: str = "/dev/kvm") -> None:
    """SetupMissing when this host cannot have it."""
    if accelerator not in ("kvm", "tcg"):
        raise SetupMissing(f"the accelerator is kvm or tcg, not {accelerator!r}")
    if accelerator == "kvm":
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            fix = (
                "enable virtualisation and load kvm_intel or kvm_amd, or run `perilune sandbox setup --accelerator tcg`"
            )
            raise SetupMissing(f"{path}: {error.strerror}: {fix}") from None


def choose(found: Probe, paravirtual_kernel: bool = False) -> str:
    """`kvm` for hardware, or for an emulating KVM when the user's kernel is built for it (PVM); else `tcg`."""
    if found.kind == "hardware" or (found.kind == "emulated" and paravirtual_kernel):
        return "kvm"
    return "tcg"
