"""How a guest starts: from a snapshot in a new machine, from a snapshot in a machine that was forked from one that has
run a sibling, or by its kernel's first instruction."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from perilune.sandbox import memory, setup
from perilune.sandbox.agent import wire
from perilune.sandbox.agent.client import Agent
from perilune.sandbox.agent.stream import Inbox
from perilune.sandbox.agent.wire import Command, Op, Type
from perilune.sandbox.catalogue import Record
from perilune.sandbox.diff import Stored
from perilune.sandbox.errors import GuestError, SandboxError, SnapshotCorrupt, TimedOut
from perilune.sandbox.files import remove
from perilune.sandbox.limits import Group
from perilune.sandbox.live import Live, Spare, new_layer
from perilune.sandbox.network import Slot
from perilune.sandbox.snapshot import Snapshot, Store
from perilune.sandbox.vmm.child import started_at
from perilune.sandbox.vmm.driver import Plan, Shape
from perilune.sandbox.vmm.machine import QemuMachine
from perilune.sandbox.vmm.qemu import Qemu

_OVERHEAD_MB = 160  # of QEMU itself
_CHILD_MB = 32  # what a fork touches before it is in a group of its own, and more


@dataclass(frozen=True)
class Launcher:
    """Starts machines. Thread-safe."""

    store: Store
    guest: setup.Guest
    qemu: Qemu
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16, "perilune-load"))

    def spawn(self, base: Path, shape: Shape, boot: bool = False, stem: bool = False) -> Spare:
        """A QEMU on `base`; with `boot`, one that will start the guest kernel."""
        if not base.exists():  # QEMU would make an empty one
            raise SnapshotCorrupt(f"memory base {base.name} is missing")
        kernel = (self.guest.kernel, self.guest.initrd, self.guest.append) if boot else (None, None, "")
        spare = self._spare(base, shape, lambda folder: self.qemu.spawn(Plan(shape, base, folder, *kernel), stem))
        spare.stem = stem
        return spare

    def _spare(self, base: Path, shape: Shape, start: Callable[[Path], QemuMachine]) -> Spare:
        folder = self.store.run / secrets.token_hex(8)
        folder.mkdir()
        (folder / "owner").write_text(f"{os.getpid()} {started_at(os.getpid())}")
        try:
            machine = start(folder)
        except BaseException:
            remove(folder)
            raise
        return Spare(machine, base, shape, Group(folder.name, shape.vcpus, shape.memory_mb + _OVERHEAD_MB))

    # ---- from a machine that stands still ----

    def fork(self, stem: Spare, snapshot: Snapshot) -> Spare:
        """A machine that holds `snapshot`'s guest, forked from one that has run a guest on the same memory base."""
        assert stem.top is not None and stem.ram is not None
        opening = None
        if stem.snapshot != snapshot.id:
            opening = self.threads.submit(self.store.open_memory, snapshot)  # checked while QEMU starts
        spare = self._spare(stem.base, stem.shape, stem.machine.fork)
        spare.snapshot, spare.own, spare.ram = stem.snapshot, stem.own, replace(stem.ram, pid=spare.machine.pid)
        if opening is None:
            return self.branch(spare, stem.top)
        with spare.at_risk():
            return self.load(spare, snapshot, opening.result())

    def twins(
        self, machine: QemuMachine, base: Path, shape: Shape, below: Path, count: int
    ) -> list[Spare | SandboxError]:
        """Forks of a machine, whose disk layer is `below`; each has still to `branch` above it."""
        made: list[Spare | SandboxError] = []
        for _ in range(count):
            try:
                spare = self._spare(base, shape, machine.fork)
                spare.claim(below)
                made.append(spare)
            except SandboxError as error:
                made.append(error)
        return made

    def branch(self, spare: Spare | SandboxError, below: Path) -> Spare:
        """Give a fork a disk layer of its own above the one on which it was forked."""
        if isinstance(spare, SandboxError):
            raise spare
        with spare.at_risk():
            spare.top = new_layer(self.store, below)
            spare.claim(spare.top)
            spare.machine.seal_disk(spare.top)
            return spare

    def split(self, live: Live, count: int) -> tuple[list[Spare | SandboxError], Path]:
        """Forks of a running guest, which goes on, and the disk layer above which each branches."""
        live.agent.quiesce()
        below, made = live.top, []
        try:
            live.machine.stop()
            live.group.share(count * _CHILD_MB)
            made = self.twins(live.machine, live.base, live.record.shape, below, count)
            live.seal(self.store)
        except BaseException:
            for spare in made:
                if isinstance(spare, Spare):
                    spare.discard()
            raise
        finally:
            live.machine.run()
            live.identify()
        return made, below

    # ---- from a snapshot ----

    def load(self, spare: Spare, snapshot: Snapshot, stored: Stored | None = None) -> Spare:
        """Disk, memory, devices: afterwards the spare holds the snapshot's guest, stopped."""
        with spare.at_risk():
            before, spare.top = spare.top, new_layer(self.store, self.store.layers / snapshot.top)
            spare.claim(spare.top)
            stored = stored or self.store.open_memory(snapshot)  # checked while QEMU starts
            _ = spare.machine.qmp  # it has started, and so mapped its memory
            changed = self._fill(spare, stored)
            spare.machine.attach_disk(spare.top)
            spare.machine.load(self.store.path(snapshot.id) / "state", changed)
            spare.snapshot = snapshot.id
            if before:
                remove(before)
            return spare

    @staticmethod
    def _fill(spare: Spare, stored: Stored) -> bytes | None:
        """The snapshot's memory; which pages it changed, when the machine held another guest."""
        if spare.ram is None or spare.own is None:
            memory.fill(memory.mapping(spare.machine.pid, spare.base), stored.runs, stored.pages)
            return None
        own, spare.own = spare.own, None
        return memory.exchange(spare.ram, spare.base, own, stored.runs, stored.pages).tobytes()

    def rehearse(self, stem: Spare) -> None:
        """Let a loaded guest run one command and stop it again. TCG has then translated what every resume and every
        command runs, for this guest and all that share its base; under KVM the pages are there."""
        agent = Agent(stem.machine.verdict)
        try:
            with stem.at_risk():
                agent.attach(stem.machine.agent_socket, stem.machine.pid)
                agent.start()
                stem.machine.run()
                agent.identify(wire.identity(time.time_ns(), os.urandom(64), 0, "spare", "", {}))
                exercise(agent)
                agent.quiesce()
                stem.machine.stop()
                stem.ram = memory.mapping(stem.machine.pid, stem.base)
                stem.own = memory.Own.of(stem.ram)
        finally:
            agent.close()

    def wake(self, spare: Spare, record: Record, agent: Agent | None) -> Live:
        """Let a loaded guest run as `record`; streams of a kept `agent` go on."""
        live = self._live(spare, record, agent)
        try:
            live.limit()
            network = live.plug(self.store.home)
            live.agent.attach(spare.machine.agent_socket, spare.machine.pid)
            live.agent.start()
            spare.machine.run()
            live.identify(network)
            live.group.add_soon(spare.machine.pid)
            if agent is None:
                live.agent.inventory()
            return live
        except BaseException:
            live.end()
            remove(live.top)
            raise

    def go_on(self, live: Live) -> None:
        """A machine that was stopped by a pause runs again, on a new disk layer: the pause keeps the one it had."""
        live.seal(self.store)
        live.agent.unhold()
        live.machine.run()
        live.identify()

    # ---- otherwise ----

    def boot(self, below: Path, record: Record) -> Live:
        """Start the guest's kernel on a disk layer of its own above `below`."""
        base = self.store.memory / f"zero-{record.shape.memory_mb}.base"
        memory.empty(base, record.shape.memory_mb << 20)
        top = new_layer(self.store, below)
        spare = self.spawn(base, record.shape, boot=True)
        spare.top = top
        live = self._live(spare, record, None)
        try:
            spare.machine.attach_disk(top)
            live.limit()
            network = live.plug(self.store.home)
            live.agent.attach(spare.machine.agent_socket, spare.machine.pid)
            spare.group.add(spare.machine.pid)
            spare.machine.run()
            live.agent.hello()
            live.identify(network)
            return live
        except BaseException:
            live.end()
            raise

    def _live(self, spare: Spare, record: Record, agent: Agent | None) -> Live:
        assert spare.top is not None
        agent = agent or Agent()
        agent.verdict = spare.machine.verdict
        record.folder, record.base, record.top = spare.machine.agent_socket.parent.name, spare.base.name, spare.top.name
        return Live(record, spare.machine, agent, spare.base, spare.top, spare.group)

    @staticmethod
    def _reach(live: Live) -> None:
        """Connect to an agent whose host died. What the guest said into the closed connection may have stalled its port
        in QEMU: closing a second one lets it go on."""
        for patience_s in (2.0, 5.0, 20.0):
            live.agent.attach(live.machine.agent_socket, live.machine.pid)
            try:
                live.agent.hello(patience_s)
                return
            except TimedOut as error:
                live.agent.detach()
                late = error
        raise late

    def adopt(self, record: Record) -> Live:
        """Take over the running machine of a process that is gone."""
        folder = self.store.run / record.folder
        machine = QemuMachine.adopt(record.pid, folder)
        agent = Agent(machine.verdict)
        top, base = self.store.layers / record.top, self.store.memory / record.base
        if not top.exists():
            raise SnapshotCorrupt(f"sandbox {record.id}: disk layer {record.top} is missing")
        live = Live(record, machine, agent, base, top, Group(folder.name))
        if machine.state == "stopped":
            machine.run()
        if record.slot >= 0:
            live.slot = Slot(record.slot, str(self.store.home), record.network)
            live.slot.serve()
        self._reach(live)
        live.identify()
        with contextlib.suppress(GuestError):  # it refuses unless a checkpoint of the disk was cut short
            agent.call(Op.THAW, "root")
        agent.inventory()
        return live


def exercise(agent: Agent) -> None:
    """One command, whatever comes of it (an image may lack it)."""
    inbox = Inbox()
    agent.execute(Command(("/bin/true",)), inbox)
    with contextlib.suppress(GuestError):
        while inbox.get(30.0).type is not Type.EXITED:
            pass
