"""One QEMU process, driven over QMP.

Two quirks carry the design. `xen-save-devices-state` writes the device state without the memory (about 1 ms; no Xen
needed), and `migrate-incoming` reads it back, provided that guest memory is in place first: virtio checks its rings.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from perilune.sandbox.disk import chain
from perilune.sandbox.errors import (
    GuestPanicked,
    GuestStopped,
    OutOfCapacity,
    SandboxError,
    SnapshotIncompatible,
    TimedOut,
    VmmDied,
)
from perilune.sandbox.vmm.child import Child
from perilune.sandbox.vmm.driver import State
from perilune.sandbox.vmm.qmp import Qmp
from perilune.sandbox.vmm.zygote import Door

_MOST_LOG = 1 << 20


class QemuMachine:
    """One QEMU process. All methods raise typed errors and leave the process dead or in a named state."""

    def __init__(
        self, child: Child, folder: Path, state: State, door: Door | None = None, jailed: bool = False
    ) -> None:
        self._child, self._folder, self._state, self._jailed, self._door = child, folder, state, jailed, door
        self._qmp: Qmp | None = None
        self._node = "empty"  # the disk's uppermost image
        self.pid = child.pid
        self.agent_socket = folder / "agent"

    @classmethod
    def adopt(cls, pid: int, folder: Path) -> "QemuMachine":
        """Take over a QEMU that another process started and no longer watches."""
        machine = cls(Child(pid), folder, State.STOPPED, None, Path(f"/proc/{pid}").stat().st_uid != os.geteuid())
        with machine._failures():
            running = machine.qmp("query-status")["running"]
            machine._node = _top(machine.qmp("query-named-block-nodes"))
        machine._state = State.RUNNING if running else State.STOPPED
        return machine

    def fork(self, folder: Path) -> "QemuMachine":
        """Another process that stands where this one does, STOPPED, with sockets and logs in its own `folder`."""
        if self._door is None:
            raise OutOfCapacity("QEMU cannot be forked by this process")
        door = Door()
        pid = self._door.ask(os.fsencode(folder), door.theirs.fileno())
        door.theirs.close()
        if pid <= 0:
            door.close()
            raise OutOfCapacity(f"QEMU cannot be forked: {os.strerror(-pid) if pid else 'it ended'}")
        machine = QemuMachine(Child(pid), folder, State.STOPPED, door)
        machine._node = self._node
        return machine

    @property
    def forkable(self) -> bool:
        """Whether this process can fork it."""
        return self._door is not None

    @property
    def qmp(self) -> Qmp:
        """The control connection, made on first use so that many machines can start at once."""
        if self._qmp is None:
            self._qmp = Qmp(self._folder / "qmp", pid=self.pid)
        return self._qmp

    @property
    def state(self) -> State:
        """Where the process stands."""
        if self._state is not State.GONE and self._child.wait():
            self._state = State.GONE
        return self._state

    @contextlib.contextmanager
    def _failures(self):  # type: ignore[no-untyped-def]
        """A lost control socket becomes the reason the machine went away."""
        try:
            yield
        except VmmDied as error:
            self._child.wait(2.0)
            raise self.verdict() or error from None

    def attach_disk(self, path: Path) -> None:
        """Open a qcow2 image (and what it stands on) behind the guest's disk."""
        node, before = f"top{time.monotonic_ns()}", self._node
        with self._failures():
            self.qmp.send("blockdev-add", {**self._qcow2(node, path), **self._below(path)})
            disk = {"driver": "throttle", "node-name": "disk", "throttle-group": "io", "file": node}
            self.qmp("blockdev-reopen", options=[disk])
            if before != "empty":
                self.qmp.send("blockdev-del", {"node-name": before})
        self._node = node

    def _name(self, path: Path, *modes: int) -> str:
        """A name by which QEMU can open `path` in these modes."""
        if not self._jailed:
            return str(path)
        group: dict[str, Any] = {}
        for mode in modes:
            fd = os.open(path, mode)
            try:
                group = {"fdset-id": self.qmp.send("add-fd", group, fd)["fdset-id"]}
            finally:
                os.close(fd)
        return f"/dev/fdset/{group['fdset-id']}"

    def _qcow2(self, node: str, path: Path) -> dict[str, Any]:
        # no-flush: a guest's fsync reaches the host's page cache, which a killed QEMU survives; sealed layers are
        # synced to the device by the store. Waiting for the device on every fsync would buy nothing: a running guest's
        # memory dies with the host anyway.
        cache = {"no-flush": True, "direct": False}
        name = self._name(path, os.O_RDWR, os.O_RDONLY)
        file = {"driver": "file", "filename": name, "locking": "off"}
        return {"driver": "qcow2", "node-name": node, "cache": cache, "discard": "unmap", "file": file}

    def _below(self, path: Path) -> dict[str, Any]:
        """What `path` stands on. Elsewhere than in a jail QEMU finds it by the image's header."""
        if not self._jailed:
            return {}
        node: dict[str, Any] = {}
        for layer in reversed(chain(path)[1:]):
            file = {"driver": "file", "filename": self._name(layer, os.O_RDONLY), "locking": "off"}
            driver = "raw" if layer.suffix == ".raw" else "qcow2"
            node = {"backing": {"driver": driver, "read-only": True, "file": file, **node}}
        return node

    def attach_network(self, tap: int) -> None:
        """Join the guest's card and a tap device through QEMU's hub."""
        with self._failures():
            self.qmp.send("getfd", {"fdname": "tap"}, tap)
            self.qmp("netdev_add", type="tap", id="tap", fd="tap")
            self.qmp("netdev_add", type="hubport", id="wire", hubid=0, netdev="tap")

    def load(self, state: Path, changed: bytes | None = None) -> None:
        """Device state in; afterwards STOPPED. SnapshotIncompatible when QEMU rejects it."""
        with self._failures(), state.open("rb") as file:
            if changed is not None:
                self._load_again(state, changed)
                return
            self.qmp.send("getfd", {"fdname": "state"}, file.fileno())
            self.qmp("migrate-incoming", uri="fd:state")
            self._await_load()
        self._state = State.STOPPED

    def _load_again(self, state: Path, changed: bytes) -> None:
        """`migrate-incoming` works once. This one works again; what it is read as tells preload.c to keep the
        translations of all pages but the changed ones."""
        (self._folder / "changed").write_bytes(changed)
        again = self._folder / "again"
        again.unlink(missing_ok=True)
        again.symlink_to(state)
        self.qmp("xen-load-devices-state", filename=str(again))

    def _await_load(self) -> None:
        until = time.monotonic() + 60
        while self.qmp("query-status")["status"] == "inmigrate":
            if self._child.wait():
                raise SnapshotIncompatible(f"QEMU refused the device state: {self.log()[-300:]}")
            if time.monotonic() > until:
                raise TimedOut("QEMU did not finish loading the device state within 60 s")
            time.sleep(0.0003)

    def save(self, state: Path) -> None:
        """Device state out (a few tens of KB)."""
        with self._failures():
            state.touch()
            self.qmp("xen-save-devices-state", filename=self._name(state, os.O_WRONLY), live=False)

    def run(self) -> None:
        """STOPPED to RUNNING."""
        with self._failures():
            self.qmp("cont")
        self._state = State.RUNNING

    def stop(self) -> None:
        """RUNNING to STOPPED, caches written to the image."""
        with self._failures():
            self.qmp("stop")
        self._state = State.STOPPED

    def seal_disk(self, overlay: Path) -> None:
        """The image so far never changes again; `overlay` (an empty qcow2 on it) takes the writes."""
        node = f"top{time.monotonic_ns()}"
        with self._failures():
            self.qmp.send("blockdev-add", {**self._qcow2(node, overlay), "backing": None})
            self.qmp("blockdev-snapshot", node=self._node, overlay=node)
        self._node = node

    def stalled(self) -> bool:
        """Whether QEMU stopped the guest because its disk image could not grow."""
        with self._failures():
            return bool(self.qmp("query-status")["status"] == "io-error")

    def set_rates(self, bytes_per_second: int, operations_per_second: int) -> None:
        """Change the disk's limits of a machine that was spawned ahead; 0 means none."""
        limits = {"bps-total": bytes_per_second, "iops-total": operations_per_second}
        with self._failures():
            self.qmp("qom-set", path="/objects/io", property="limits", value=limits)

    def kill(self) -> None:
        """SIGKILL and reap. Every disk write that a `stop` preceded is in the image file."""
        self._child.kill()
        self._close()
        self._state = State.GONE

    def release(self) -> None:
        """Leave the process running for another owner."""
        self._close()
        self._child.release()

    def _close(self) -> None:
        if self._door:
            self._door.close()
            self._door = None
        if self._qmp:
            self._qmp.close()
            self._qmp = None

    def trim(self) -> None:
        """What the guest makes this host write down does not grow for ever."""
        for name in ("serial.log", "qemu.log"):
            with contextlib.suppress(OSError):
                if (self._folder / name).stat().st_size > _MOST_LOG:
                    os.truncate(self._folder / name, 0)

    def log(self) -> str:
        """What QEMU itself printed."""
        path = self._folder / "qemu.log"
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def serial(self) -> str:
        """What the guest's kernel printed."""
        path = self._folder / "serial.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def verdict(self) -> SandboxError | None:
        """The guest's last words decide: a panic, a reboot of its own, or a QEMU that was killed."""
        if self.state is not State.GONE:
            return None
        serial = self.serial()
        if "Kernel panic" in serial:
            line = next(line for line in serial.splitlines() if "Kernel panic" in line)
            return GuestPanicked(f"the guest's kernel panicked: {line.split('Kernel panic')[-1].strip(' -')}")
        if self._child.code == 0:
            return GuestStopped("the guest stopped or rebooted itself")
        code = self._child.code
        how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"failed with status {code}"
        return VmmDied(f"QEMU {how}. {self.log()[-300:]}".strip())


def _top(nodes: list[dict[str, Any]]) -> str:
    """The image right below the guest's disk."""
    below = next(n for n in nodes if n["node-name"] == "disk")["image"].get("backing-image", {}).get("filename")
    tops = (n["node-name"] for n in nodes if n["node-name"].startswith("top") and n["image"]["filename"] == below)
    return next(tops, "empty")
