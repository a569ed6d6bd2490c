"""Work on a tree that strangers made, done by a process that has entered the tree and cannot leave it.

An image may hold `etc -> /etc` as well as `..` and `//etc` in its names. Reading paths carefully is not enough, so the
kernel does it: chroot before the first name is read, four capabilities kept (none that opens a way out of a chroot),
and no import afterwards, for a tree may bring a Python library of its own at the very path ours has.
"""

import contextlib
import ctypes
import errno
import importlib
import os
import resource
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from perilune.sandbox.errors import InvalidRequest

_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID = 0, 1, 3, 4
_NO_NEW_PRIVILEGES, _VERSION_3 = 38, 0x20080522
_MOST_MEMORY = 2 << 30  # bytes
# In a mount namespace of its own: whatever ends this, no mount stays. What the loop could not write down, `sync` tells.
_MOUNTED = """
mount -o loop,nodev,nosuid,noexec,nobarrier,noinit_itable,discard "$1" "$2" || exit
where=$2; shift 2; "$@" && sync -f "$where"; code=$?; umount "$where" && exit $code
"""
_MODULES = {"unpack": "perilune.sandbox.images.unpack", "prepare": "perilune.sandbox.images.ext4"}


def run(root: Path, verb: str, option: str = "", data: IO[bytes] | None = None) -> None:
    """Do `verb` ("unpack" or "prepare") in `root`, a directory or an ext4 image of ours, with `data` as standard input;
    InvalidRequest with the reason. Needs root."""
    with contextlib.ExitStack() as stack:
        place, entrance = root.absolute(), []
        if root.is_file():
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perilune-")))
            entrance = ["unshare", "-m", "sh", "-c", _MOUNTED, "sh", str(root.absolute()), str(place)]
        command = [*entrance, sys.executable, "-P", "-m", __name__, str(place), verb, option]  # -P: the caller may
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }  # stand in a folder of the stranger's
        data = data or subprocess.DEVNULL  # type: ignore[assignment]
        done = subprocess.run(command, stdin=data, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it ended without a reason"])[-1]
        if root.is_file() and os.strerror(errno.ENOSPC) in reason:
            reason = f"the image does not fit on a disk of {root.stat().st_size >> 20} MiB"
        raise InvalidRequest(reason)


def _enter(root: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    os.chroot(root)
    os.chdir("/")
    keep = sum(1 << number for number in (_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID))
    header = struct.pack("<Ii", _VERSION_3, 0)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.capset(header, struct.pack("<6I", keep, keep, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")
    sys.path.clear()
    sys.meta_path.clear()


def main(root: str, verb: str, option: str) -> None:
    """In the child."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))  # a header may claim any length
    module = importlib.import_module(_MODULES[verb])
    begun = module.begin(option)  # opens standard input, loads codecs
    _enter(root)
    module.confined(begun)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException as error:  # a traceback would read source files, by now the stranger's
        os.write(2, f"{type(error).__name__ if not str(error) else error}\n".encode(errors="replace"))
        os._exit(1)
