"""A running guest: its machine, its agent, and the record that says so. How one starts, and how one becomes a
snapshot."""

import contextlib
import hashlib
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from perilune.sandbox import disk, memory, setup
from perilune.sandbox.agent import wire
from perilune.sandbox.agent.client import Agent
from perilune.sandbox.agent.stream import Inbox
from perilune.sandbox.agent.wire import Command, Op, Type
from perilune.sandbox.catalogue import Record
from perilune.sandbox.errors import GuestError, SandboxError, SnapshotCorrupt
from perilune.sandbox.files import on_host, remove
from perilune.sandbox.limits import Group
from perilune.sandbox.network import PLAN, Slot, acquire, wanted
from perilune.sandbox.snapshot import Defaults, Snapshot, Store
from perilune.sandbox.vmm.child import started_at
from perilune.sandbox.vmm.driver import Plan, Platform, Shape
from perilune.sandbox.vmm.qemu import Qemu, QemuMachine


@dataclass
class Live:
    """What a running sandbox is made of."""

    record: Record
    machine: QemuMachine
    agent: Agent
    base: Path
    top: Path
    group: Group
    slot: Slot | None = None
    stalled: bool = False  # by a full host disk

    def plug(self, home: Path) -> str:
        """Give the guest the network that its record asks for; returns its address plan, empty for none."""
        if not wanted(self.record.network):
            return ""
        slot = acquire(str(home), self.record.network)
        self.slot, self.record.slot = slot, slot.index
        tap = slot.open()
        try:
            self.machine.attach_network(tap)
        finally:
            os.close(tap)
        return PLAN

    def identify(self, network: str = "") -> None:
        """Tell the guest who and when it is; a fork gets entropy and a name that its siblings do not have."""
        r = self.record
        env = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": r.id, "E2B_TEMPLATE_ID": r.template, **r.env}
        self.agent.identify(wire.identity(time.time_ns(), os.urandom(64), r.processes, r.id[:60], network, env))

    def end(self, error: SandboxError | None = None) -> None:
        """Kill the machine and remove what only it used; waiting callers hear `error`."""
        self.machine.kill()
        self.agent.close(error)
        self.unplug()

    def unplug(self) -> None:
        """Network, cgroup and the machine's folder."""
        if self.slot:
            self.slot.close()
            self.slot, self.record.slot = None, -1
        self.group.remove()
        remove(self.machine.agent_socket.parent)


@dataclass
class Spare:
    """A machine spawned ahead: waiting (warm), or with a template's guest loaded and stopped (hot)."""

    machine: QemuMachine
    base: Path
    shape: Shape
    group: Group
    top: Path | None = None
    snapshot: str = ""
    agent: Agent | None = None  # of a rehearsed guest

    def discard(self) -> None:
        """Not needed after all."""
        self.machine.kill()
        if self.agent:
            self.agent.close()
        self.group.remove()
        remove(self.machine.agent_socket.parent)
        if self.top:
            remove(self.top)


@dataclass(frozen=True)
class Launcher:
    """Starts machines from snapshots and turns machines into snapshots."""

    store: Store
    guest: setup.Guest
    qemu: Qemu
    platform: Platform
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16, "perilune-load"))

    # ---- starting ----

    def spawn(self, base: Path, shape: Shape, boot: bool = False, overhead_mb: int = 160) -> Spare:
        """A QEMU on `base`; with `boot`, one that will start the guest kernel."""
        if not base.exists():  # QEMU would make an empty one
            raise SnapshotCorrupt(f"memory base {base.name} is missing")
        folder = self.store.run / secrets.token_hex(8)
        kernel = (self.guest.kernel, self.guest.initrd, self.guest.append) if boot else (None, None, "")
        machine = self.qemu.spawn(Plan(shape, base, folder, *kernel))
        (folder / "owner").write_text(f"{os.getpid()} {started_at(os.getpid())}")
        group = Group(folder.name, shape.vcpus, shape.memory_mb + overhead_mb)
        group.add_soon(machine.pid)
        return Spare(machine, base, shape, group)

    def overlay(self, below: Path) -> Path:
        """A new empty layer on `below`."""
        path = self.store.layers / f"{secrets.token_hex(8)}.qcow2"
        with on_host("a new disk layer"):
            disk.overlay(path, below, disk.size_of(below))
        return path

    def load(self, spare: Spare, snapshot: Snapshot) -> Spare:
        """Disk, memory, devices: afterwards the spare holds the snapshot's guest, stopped."""
        try:
            spare.top = self.overlay(self.store.layers / snapshot.top)
            stored = self.store.open_memory(snapshot)  # checked while QEMU starts
            _ = spare.machine.qmp  # it has started, and so mapped its memory
            filling = self.threads.submit(self._fill, spare, stored)
            spare.machine.attach_disk(spare.top)
            filling.result()
            spare.machine.load(self.store.path(snapshot.id) / "state")
            spare.snapshot = snapshot.id
            spare.group.added()
            return spare
        except BaseException:
            spare.discard()
            raise

    @staticmethod
    def _fill(spare: Spare, stored: memory.Stored | None) -> None:
        if stored is not None:
            memory.restore(memory.mapping(spare.machine.pid, spare.base), stored)

    def rehearse(self, spare: Spare) -> None:
        """Let a loaded guest run one command and stop it again. TCG has then translated what every resume and every
        command runs; under KVM the pages are there."""
        spare.agent = agent = Agent(spare.machine.verdict)
        try:
            agent.attach(spare.machine.agent_socket, spare.machine.pid)
            agent.start()
            spare.machine.run()
            agent.identify(wire.identity(time.time_ns(), os.urandom(64), 0, "spare", "", {}))
            inbox = Inbox()
            agent.execute(Command(("/bin/true",)), inbox)
            with contextlib.suppress(GuestError):  # an image without it
                while inbox.get(30.0).type is not Type.EXITED:
                    pass
            agent.quiesce()
            spare.machine.stop()
        except BaseException:
            spare.discard()
            raise

    def wake(self, spare: Spare, record: Record, agent: Agent | None) -> Live:
        """Let a loaded guest run as `record`; streams of a kept `agent` go on."""
        live = self._live(spare, record, agent or spare.agent)
        try:
            network = live.plug(self.store.home)
            if not spare.agent:
                live.agent.attach(spare.machine.agent_socket, spare.machine.pid)
                live.agent.start()
            spare.machine.run()
            live.identify(network)
            if agent is None:
                live.agent.inventory()
            return live
        except BaseException:
            live.end()
            remove(live.top)
            raise

    def go_on(self, live: Live) -> None:
        """A machine that was stopped by a pause runs again, on a new disk layer: the pause keeps the one it had."""
        self._seal(live)
        live.agent.unhold()
        live.machine.run()
        live.identify()

    def boot(self, top: Path, record: Record) -> Live:
        """Start the guest's kernel on a disk; `top` is this sandbox's own layer."""
        base = self.store.memory / f"zero-{record.shape.memory_mb}.base"
        memory.empty(base, record.shape.memory_mb << 20)
        spare = self.spawn(base, record.shape, boot=True)
        spare.top = top
        live = self._live(spare, record, None)
        try:
            spare.machine.attach_disk(top)
            network = live.plug(self.store.home)
            live.agent.attach(spare.machine.agent_socket, spare.machine.pid)
            spare.group.added()
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
        if record.rates.bytes_per_second or record.rates.operations_per_second:
            spare.machine.set_rates(record.rates.bytes_per_second, record.rates.operations_per_second)
        return Live(record, spare.machine, agent, spare.base, spare.top, spare.group)

    # ---- checkpoints ----

    def capture(self, live: Live, mode: str, identity: str, defaults: Defaults, goes_on: bool) -> Snapshot:
        """Freeze `live` into a snapshot: disk and memory at one instant. The guest stands still afterwards unless
        `goes_on`, which gives it a new disk layer and lets it run."""
        capture = self._capture_disk if mode == "disk" else self._capture_full
        with on_host("the checkpoint"):
            return capture(live, identity, defaults, goes_on)

    def _snapshot(self, live: Live, mode: str, identity: str, defaults: Defaults) -> Snapshot:
        record = live.record
        layers = self.store.measure(live.top)
        return Snapshot(identity, mode, self.platform, record.shape, layers, defaults, template=record.template)

    def _capture_disk(self, live: Live, identity: str, defaults: Defaults, goes_on: bool) -> Snapshot:
        frozen, parts = live.top, self._parts(identity)
        try:
            live.agent.call(Op.FREEZE, "root")
            if goes_on:
                self._seal(live)
                live.agent.call(Op.THAW, "root")
            else:
                live.agent.quiesce()
                live.machine.stop()
            snapshot = replace(self._snapshot(live, "disk", identity, defaults), layers=self.store.measure(frozen))
            self.store.commit(snapshot, parts)
            return snapshot
        except BaseException:
            remove(parts)
            self._go_on(live)
            with contextlib.suppress(SandboxError):
                live.agent.call(Op.THAW, "root")
            raise

    def _capture_full(self, live: Live, identity: str, defaults: Defaults, goes_on: bool) -> Snapshot:
        parts = self._parts(identity)
        live.agent.quiesce()
        try:
            live.machine.stop()
            state = live.machine.agent_socket.parent / "state"
            live.machine.save(state)
            device = state.read_bytes()
            (parts / "state").write_bytes(device)
            state.unlink()
            where = memory.mapping(live.machine.pid, live.base)
            diff = memory.save(where, memory.diverged(where), parts / "memory")
            full = self._snapshot(live, "full", identity, defaults)
            sha = hashlib.sha256(device).hexdigest()
            snapshot = replace(full, base=live.base.name, diff=diff, state_sha256=sha)
            if goes_on:
                self._seal(live)
            self.store.commit(snapshot, parts)
        except BaseException:
            remove(parts)
            self._go_on(live)
            raise
        if goes_on:
            live.machine.run()
        return snapshot

    def _go_on(self, live: Live) -> None:
        """A checkpoint failed (no room, say): the guest continues as if nobody had asked."""
        with contextlib.suppress(SandboxError):
            live.machine.run()
            live.identify()

    def _seal(self, live: Live) -> None:
        top = self.overlay(live.top)
        try:
            live.machine.seal_disk(top)
        except SandboxError:
            remove(top)
            raise
        live.top, live.record.top = top, top.name

    def _parts(self, identity: str) -> Path:
        parts = self.store.snapshots / f".{identity}.{secrets.token_hex(4)}.tmp"
        parts.mkdir()
        return parts

    def make_template(self, live: Live, identity: str, defaults: Defaults) -> Snapshot:
        """A snapshot whose memory is a base of its own, so that everything made from it shares its pages."""
        snapshot = self.capture(live, "full", identity, defaults, goes_on=False)
        return self.store.flatten_memory(snapshot)

    def adopt(self, record: Record) -> Live:
        """Take over the running machine of a process that is gone."""
        folder = self.store.run / record.folder
        machine = QemuMachine.adopt(record.pid, folder)
        agent = Agent(machine.verdict)
        top, base = self.store.layers / record.top, self.store.memory / record.base
        if not top.exists():
            raise SnapshotCorrupt(f"sandbox {record.id}: disk layer {record.top} is missing")
        live = Live(record, machine, agent, base, top, Group(folder.name))
        agent.attach(machine.agent_socket, machine.pid)
        if machine.state == "stopped":
            machine.run()
        if record.slot >= 0:
            live.slot = Slot(record.slot, str(self.store.home), record.network)
            live.slot.serve()
        agent.hello(10.0)
        live.identify()
        with contextlib.suppress(GuestError):  # it refuses unless a checkpoint of the disk was cut short
            agent.call(Op.THAW, "root")
        agent.inventory()
        return live
