"""Work on a tree that strangers made, done by a process that has entered the tree and cannot leave it.

An image may hold `etc -> /etc` as well as `..` and `//etc` in its names. Reading paths carefully is not enough, so the
kernel does it: chroot before the first name is read, four capabilities kept (none that opens a way out of a chroot),
and no import afterwards, for a tree may bring a Python library of its own at the very path ours has.
"""

import ctypes
import importlib
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO

from perilune.sandbox.errors import InvalidRequest

_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID = 0, 1, 3, 4
_NO_NEW_PRIVILEGES, _VERSION_3 = 38, 0x20080522
_MOST_MEMORY = 2 << 30  # bytes
_MODULES = {"unpack": "perilune.sandbox.images.unpack", "prepare": "perilune.sandbox.images.ext4"}


def run(root: Path, verb: str, option: str = "", data: IO[bytes] | None = None) -> None:
    """Do `verb` ("unpack" or "prepare") in `root`, with `data` as standard input; InvalidRequest with the reason.
    Needs root."""
    command = [sys.executable, "-P", "-m", __name__, str(root.absolute()), verb, option]  # -P: the caller may stand in
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}  # a folder of the stranger's
    done = subprocess.run(command, stdin=data or subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise InvalidRequest((done.stderr.strip().splitlines() or ["it ended without a reason"])[-1])


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
