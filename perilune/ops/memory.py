"""glibc's habit of handing freed memory back to the kernel, and how to stop it."""

import ctypes
import functools
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed for the next allocation; True where that worked (Linux with glibc).

    Otherwise the tensors of a step are mapped and unmapped, or the heap trimmed and grown, every time, and each fresh
    page costs a fault: up to a third of a KDA layer's time on a CPU. A setting of the whole process, so a program's to
    make, not a library's; the process then holds on to its peak.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
