"""A running guest: its machine, its agent, and the record that says so; and a machine that waits for a guest."""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perilune.sandbox import disk
from perilune.sandbox.agent import wire
from perilune.sandbox.agent.client import Agent
from perilune.sandbox.catalogue import Record
from perilune.sandbox.errors import DiskFull, SandboxError
from perilune.sandbox.files import on_host, remove
from perilune.sandbox.limits import Group
from perilune.sandbox.memory import Mapping, Own
from perilune.sandbox.network import PLAN, Slot, acquire, wanted
from perilune.sandbox.snapshot import Store
from perilune.sandbox.vmm.driver import Shape
from perilune.sandbox.vmm.machine import QemuMachine


def new_layer(store: Store, below: Path) -> Path:
    """An empty disk layer on `below`."""
    path = store.layers / f"{secrets.token_hex(8)}.qcow2"
    with on_host("a new disk layer"):
        disk.overlay(path, below, disk.size_of(below))
    return path


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

    @property
    def still(self) -> DiskFull:
        """What its callers hear while it is stalled."""
        return DiskFull(
            f"sandbox {self.record.id} stands still: this host's disk is full; it goes on when there is room"
        )

    @property
    def forkable(self) -> bool:
        """Whether its machine can be forked: a tap is no use to two."""
        return self.machine.forkable and self.slot is None

    def limit(self) -> None:
        """Give the disk the rates that the record asks for."""
        asked = self.record.rates.bytes_per_second, self.record.rates.operations_per_second
        if any(asked):
            self.machine.set_rates(*asked)
            self.group.limit_io(self.top, self.machine.pid, *asked)

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

    def seal(self, store: Store) -> None:
        """The disk so far never changes again; a new layer takes the writes."""
        top = new_layer(store, self.top)
        try:
            self.machine.seal_disk(top)
        except SandboxError:
            remove(top)
            raise
        self.top, self.record.top = top, top.name

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
        self.group.dissolve(self.machine.agent_socket.parent)


@dataclass(eq=False)
class Spare:
    """A machine without a sandbox: waiting for a guest, or holding the stopped guest of `snapshot`. From a `stem`
    others are forked; their disk layers stand on its."""

    machine: QemuMachine
    base: Path
    shape: Shape
    group: Group
    top: Path | None = None
    snapshot: str = ""
    stem: bool = False
    ram: Mapping | None = None  # of a stem and its forks: where guest memory is,
    own: Own | None = None  # and in which pages it differs from the base

    @contextlib.contextmanager
    def at_risk(self) -> Iterator[None]:
        """Discarded when what is done to it fails."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def claim(self, layer: Path) -> None:
        """What `Upkeep.collect` of any process leaves alone, until a record names it or the machine's folder goes."""
        (self.machine.agent_socket.parent / "holds").write_text(f"{self.base.name} {layer.name}")

    def discard(self) -> None:
        """Not needed after all."""
        self.machine.kill()
        self.group.dissolve(self.machine.agent_socket.parent)
        if self.top and not self.stem:
            remove(self.top)
