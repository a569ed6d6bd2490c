"""A sandbox without a virtual machine: the same agent in namespaces (bubblewrap) over an overlay. For hosts without
QEMU and for quick tests; only ever chosen by name.

It shares the host's kernel: a kernel bug is an escape, and it is no protection against a program that means harm. There
is no memory snapshot: a pause freezes the processes where they are (with their memory), a snapshot holds only files.
"""

import contextlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from perilune.sandbox import setup
from perilune.sandbox.agent import wire
from perilune.sandbox.agent.client import Agent
from perilune.sandbox.commands import Commands
from perilune.sandbox.errors import Conflict, NotFound, SandboxError, SetupMissing, VmmDied
from perilune.sandbox.files import remove
from perilune.sandbox.filesystem import Files
from perilune.sandbox.limits import Group
from perilune.sandbox.vmm.child import Child

_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL")


class ProcessSandbox:
    """`root` is a directory tree that is never written; `layer` holds changes to start from (a snapshot)."""

    def __init__(self, root: Path, layer: Path | None = None, user: str = "root", memory_mb: int = 0) -> None:
        for tool, package in (("bwrap", "bubblewrap"), ("mount", "mount")):
            if not shutil.which(tool):
                raise SetupMissing(f"{tool} is not installed: apt-get install {package}")
        self.id, self.user, self.workdir, self._root = f"p{secrets.token_hex(8)}", user, "", root.absolute()
        self._work = Path(tempfile.mkdtemp(prefix="perilune-process-"))
        self._group = Group(self.id, 0, memory_mb)
        self._frozen = False
        try:
            self._mount(layer)
            self._child, self.agent = self._start()
        except BaseException:
            self._clean()
            raise
        self.commands, self.files = Commands(self), Files(self)

    @property
    def live(self) -> "ProcessSandbox":
        """Itself; Conflict while it is frozen."""
        if self._frozen:
            raise Conflict(f"sandbox {self.id} is paused")
        return self

    @property
    def record(self) -> "ProcessSandbox":
        """Itself: it has a user and a working directory."""
        return self

    def _mount(self, layer: Path | None) -> None:
        for name in ("upper", "scratch", "merged"):
            (self._work / name).mkdir()
        if layer:
            subprocess.run(["cp", "-a", f"{layer}/.", str(self._work / "upper")], check=True)
        options = f"lowerdir={self._root},upperdir={self._work}/upper,workdir={self._work}/scratch"
        done = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, str(self._work / "merged")],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SandboxError(f"the overlay cannot be mounted: {done.stderr.strip()}")

    def _start(self) -> tuple[Child, Agent]:
        program = setup.agent()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                *self._group.entrance(), "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
                "--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv",
                "--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", name)),
                "--bind", str(self._work / "merged"), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run",
                "--ro-bind", str(program), "/run/agent", "/run/agent", f"--fd={theirs.fileno()}",
            ]  # fmt: skip
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        process.returncode = 0  # reaped through the pidfd
        child = Child(process.pid)
        agent = Agent(lambda: VmmDied("the sandbox's processes were killed") if child.wait() else None)
        try:
            agent.use(ours)
            agent.hello(10.0)
            agent.identify(wire.identity(time.time_ns(), secrets.token_bytes(64), 0, self.id, "", {}))
        except BaseException:
            child.kill()
            ours.close()
            raise
        return child, agent

    def pause(self) -> None:
        """Freeze its processes; they keep their memory. Conflict where cgroups cannot freeze."""
        if not self._group.freeze(True):
            raise Conflict("this host has no cgroup freezer")
        self._frozen = True

    def resume(self) -> None:
        """Go on."""
        self._group.freeze(False)
        self._frozen = False

    def snapshot(self, target: Path) -> Path:
        """Copy what was changed to `target` (files only); start from it with `layer=target`."""
        subprocess.run(["cp", "-a", str(self._work / "upper"), str(target)], check=True)
        return target

    def kill(self) -> None:
        """End it and remove its files."""
        if self._frozen:
            self.resume()
        self._child.kill()
        self.agent.close(NotFound(f"sandbox {self.id} was killed"))
        self._clean()

    def _clean(self) -> None:
        for pid in self._group.pids():  # what the namespace's end has not taken yet
            with contextlib.suppress(OSError):
                Child(pid).wait(2.0)
        subprocess.run(["umount", "-l", str(self._work / "merged")], capture_output=True)
        self._group.remove()
        remove(self._work)

    def __enter__(self) -> "ProcessSandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
