"""What exists and who drives it: records, running machines, locks; machines that died and machines to adopt."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from perilune.sandbox.catalogue import Catalogue, Network, Phase, Record
from perilune.sandbox.checkpoint import Camera
from perilune.sandbox.errors import Conflict, MachineLost, NotFound, SandboxError
from perilune.sandbox.launcher import Launcher
from perilune.sandbox.live import Live
from perilune.sandbox.network import check as check_network
from perilune.sandbox.request import ending
from perilune.sandbox.snapshot import Snapshot, Store
from perilune.sandbox.vmm.child import alive, started_at


class Roster:
    """One process drives a running sandbox at a time; a dead process's sandboxes are adopted."""

    def __init__(self, store: Store, catalogue: Catalogue, launcher: Launcher, camera: Camera) -> None:
        self.store, self.catalogue, self.launcher, self.camera = store, catalogue, launcher, camera
        self.lives: dict[str, Live] = {}
        self._locks: dict[str, threading.RLock] = {}

    def lock(self, identity: str) -> threading.RLock:
        """Held by whoever changes the sandbox."""
        return self._locks.setdefault(identity, threading.RLock())

    def record(self, identity: str) -> Record:
        """The sandbox's record; NotFound."""
        live = self.lives.get(identity)
        return live.record if live else self.catalogue.get(identity)

    def claim(self, record: Record, phase: Phase) -> None:
        """From now on it is ours, in that phase; Conflict when another process was faster."""
        before, owner = record.phase, record.owner
        record.phase, record.owner, record.owner_started = phase, os.getpid(), started_at(os.getpid()) or 0
        if not self.catalogue.claim(record, before, owner):
            raise Conflict(f"sandbox {record.id} was taken by another process just now")

    def records(self) -> list[Record]:
        """All sandboxes, newest first."""
        return self.catalogue.all()

    def resolve(self, template: str) -> Snapshot:
        """The snapshot behind a template's name (with or without `:tag`), a snapshot's name, or an id."""
        for name in (template, f"{template}:default", template.removesuffix(":default")):
            identity = self.catalogue.resolve(name)
            if identity:
                return self.store.read(identity)
        raise NotFound(f"template {template!r} was not found: `perilune sandbox ls --templates` lists what there is")

    def awake(self, identity: str) -> Live:
        """The running sandbox, adopted if need be; Conflict or MachineLost, never a resume."""
        live = self._driven(identity)
        if live:
            return live
        with self.lock(identity):
            live = self._driven(identity)  # another thread may just have resumed it
            if live:
                return live
            record = self.record(identity)
            if record.phase is Phase.RUNNING:
                return self._adopt(record)
            if record.phase is Phase.LOST:
                raise MachineLost(f"sandbox {identity} is lost: {record.fault}")
        raise Conflict(f"sandbox {identity} is {record.phase}, not running")

    def _driven(self, identity: str) -> Live | None:
        """The running sandbox, if this process drives it already."""
        live = self.lives.get(identity)
        if live is None or live.record.phase is not Phase.RUNNING:
            return None
        if live.agent.lost:
            self.mark_lost(live)
        elif live.stalled:
            raise live.still
        return live

    def mark_lost(self, live: Live) -> None:
        """Its machine died under us: say so once, and clean up."""
        with self.lock(live.record.id):
            if self.lives.get(live.record.id) is not live or live.record.phase is not Phase.RUNNING:
                return
            fault = live.machine.verdict() or live.agent.lost or MachineLost("its agent is gone")
            live.record.phase, live.record.fault = Phase.LOST, str(fault)
            self.lives.pop(live.record.id, None)
            live.end(fault)
            self.catalogue.put(live.record)
        raise fault

    @contextlib.contextmanager
    def watched(self, live: Live) -> Iterator[None]:
        """What fails because the machine died says so."""
        try:
            yield
        except SandboxError:
            if live.agent.lost or live.machine.state == "gone":
                self.mark_lost(live)
            raise

    @contextlib.contextmanager
    def starting(self, record: Record) -> Iterator[None]:
        """The record exists from now on, as ours, and not any more when what follows fails."""
        record.owner, record.owner_started = os.getpid(), started_at(os.getpid()) or 0
        self.catalogue.put(record)
        try:
            yield
        except BaseException:
            self.catalogue.drop(record.id)
            raise

    def started(self, live: Live) -> None:
        """From now on it is known as running, and ours."""
        record = live.record
        record.phase, record.started, record.fault = Phase.RUNNING, time.time(), ""
        record.pid, record.pid_started = live.machine.pid, started_at(live.machine.pid) or 0
        record.owner, record.owner_started = os.getpid(), started_at(os.getpid()) or 0
        self.lives[record.id] = live
        self.catalogue.put(record)

    @staticmethod
    def check_owner(record: Record) -> None:
        """Conflict when another process that lives drives the sandbox."""
        busy = record.phase in (Phase.CREATING, Phase.RUNNING, Phase.RESUMING)
        if busy and record.owner != os.getpid() and alive(record.owner, record.owner_started):
            raise Conflict(f"sandbox {record.id} is driven by process {record.owner}; ask that one (its HTTP API)")

    def _adopt(self, record: Record) -> Live:
        self.check_owner(record)
        if not alive(record.pid, record.pid_started):
            record.phase, record.fault = Phase.LOST, "its machine ended while no runtime watched it"
            self.catalogue.put(record)
            raise MachineLost(f"sandbox {record.id} is lost: {record.fault}")
        live = self.launcher.adopt(record)
        self.started(live)
        return live

    def set_network(self, identity: str, network: Network) -> None:
        """Replace what the sandbox may reach; at once when it runs."""
        with self.lock(identity):
            check_network(network)
            record = self.record(identity)
            live = self.lives.get(identity)
            record.network = network
            if live and live.slot:
                live.slot.apply(network)
            elif live:
                live.identify(live.plug(self.store.home))
            self.catalogue.put(record)

    def set_timeout(self, identity: str, timeout: float | None) -> None:
        """Seconds from now; None for ever."""
        with self.lock(identity):
            record = self.awake(identity).record
            record.end = ending(timeout)
            self.catalogue.put(record)

    def let_go(self) -> None:
        """Running sandboxes go on without this process."""
        for live in list(self.lives.values()):
            live.record.owner = 0
            self.catalogue.put(live.record)
            live.agent.detach()
            live.machine.release()
        self.lives.clear()
