"""Processes that others are forked from: a QEMU that was linked and stopped before its first instruction (preload.c),
and one that has run a guest (stem.c)."""

import array
import os
import socket
import struct
import subprocess
import threading
from pathlib import Path

from perilune.sandbox.errors import OutOfCapacity, SetupMissing

_FORKED = struct.Struct("<i")


class Door:
    """Our end of the socket by which a process is asked to fork."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()

    def ask(self, message: bytes, *descriptors: int) -> int:
        """The id of a child of this process that nobody has waited for; an errno below zero; 0: nobody is there."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        try:
            with self._lock:
                self._ours.sendmsg([message], [rights] if descriptors else [])
                reply = self._ours.recv(_FORKED.size)
        except OSError:
            return 0
        return int(_FORKED.unpack(reply)[0]) if reply else 0

    def close(self) -> None:
        """Who waits behind it sees that and ends."""
        self._ours.close()
        self.theirs.close()


class Zygote:
    """Thread-safe; starts with the first machine, and again when somebody killed it. Its children are ours."""

    def __init__(self, program: str, preload: Path) -> None:
        self._program, self._preload = program, preload
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._door: Door | None = None

    def spawn(self, command: list[str], log: Path, door: Door | None, stem: bool = False) -> int:
        """Run `command` with its output in `log`; by its `door` it can be forked later, and a `stem` ends when that is
        closed. Without one, in empty network, IPC and UTS namespaces. Returns the id of a child of this process that
        nobody has waited for."""
        message = (b"s" if stem else b"-" if door else b"i") + b"".join(word.encode() + b"\0" for word in command)
        with self._lock, log.open("ab") as file:
            for _ in range(2):
                fds = (file.fileno(), *([door.theirs.fileno()] if door else []))
                pid = (self._door or self._start()).ask(message, *fds)
                if not pid or not door:  # a machine in a jail has an address space that no other one shares the plan of
                    self._end()
                if pid:
                    break
        if door:
            door.theirs.close()
        if pid <= 0:
            raise OutOfCapacity(f"{self._program} cannot be forked: {os.strerror(-pid) if pid else 'it ended'}")
        return pid

    def _start(self) -> Door:
        door = Door()
        environment = {
            "PATH": os.environ.get("PATH", os.defpath), "HOME": "/", "LD_PRELOAD": str(self._preload),
            "PERILUNE_DOOR": str(door.theirs.fileno()),
        }  # fmt: skip
        with door.theirs:
            try:
                self._process = subprocess.Popen(
                    [self._program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    env=environment, pass_fds=[door.theirs.fileno()], start_new_session=True,
                )  # fmt: skip
            except FileNotFoundError:
                door.close()
                raise SetupMissing(f"{self._program} is not installed: apt-get install qemu-system-x86") from None
        self._door = door
        return door

    def _end(self) -> None:
        if self._door:
            self._door.close()
        if self._process:
            self._process.kill()
            self._process.wait()
        self._door = self._process = None

    def close(self) -> None:
        """End it; machines go on."""
        with self._lock:
            self._end()
