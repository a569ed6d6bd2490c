"""The runtime: every sandbox of one home, and their lifecycle. Templates are made in template.py; what is done beside
the calls, and after a crash, in upkeep.py.

K3 report, section 5.3.2: pause while the model thinks, fork for a judge, snapshot for recovery.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from perilune.sandbox import linger, setup
from perilune.sandbox.agent.client import Agent
from perilune.sandbox.catalogue import Catalogue, Network, Phase, Record
from perilune.sandbox.errors import (
    Conflict,
    DiskFull,
    InvalidRequest,
    MachineLost,
    NotFound,
    OutOfCapacity,
    SandboxError,
)
from perilune.sandbox.files import remove
from perilune.sandbox.guard import Guard, free_mb
from perilune.sandbox.live import Launcher, Live
from perilune.sandbox.network import check as check_network
from perilune.sandbox.pool import Pool
from perilune.sandbox.request import Request, ending, new_name, twin
from perilune.sandbox.snapshot import Defaults, Snapshot, Store
from perilune.sandbox.upkeep import FLATTEN_MEMORY, Upkeep
from perilune.sandbox.vmm import qemu
from perilune.sandbox.vmm.child import alive, started_at
from perilune.sandbox.vmm.driver import Platform
from perilune.sandbox.vmm.zygote import Zygote


class Runtime:
    """Thread-safe. One process drives a running sandbox at a time; a dead process's sandboxes are adopted."""

    def __init__(
        self,
        home: Path | None = None,
        guard: Guard | None = None,
        jail: str | None = None,
        warm: int = 0,
        linger_s: float = 0.0,
    ) -> None:
        self.home = (home or setup.default_home()).absolute()
        self.guest = setup.load(self.home)
        cage = qemu.jail(jail) if jail else None
        self.zygote = Zygote(qemu.PROGRAM, self.guest.preload)
        driver = qemu.Qemu(self.guest.machine, self.guest.accelerator, "max", self.zygote, cage)
        driver = replace(driver, cpu="host") if driver.accelerator == "kvm" else driver
        self.store = Store(self.home).make()
        self.platform = Platform(
            qemu.version(), driver.machine, driver.cpu, driver.accelerator, self.guest.kernel_sha256
        )
        self.launcher = Launcher(self.store, self.guest, driver, self.platform)
        self.catalogue = Catalogue(self.home / "catalogue.db")
        self.guard = guard or Guard()
        self.pool = Pool(self.launcher, warm)
        self.lingering = linger.Lingering(linger_s)
        self.lives: dict[str, Live] = {}
        self.upkeep = Upkeep(self.store, self.catalogue, self.pool, self.lock)
        self._locks: dict[str, threading.RLock] = {}
        self._agents: dict[str, Agent] = {}  # of paused sandboxes: streams that go on after the resume
        self._starting = 0
        self._closed = threading.Event()
        self.upkeep.recover()
        self._clock = threading.Thread(target=self._tick, daemon=True, name="timeouts")
        self._clock.start()

    # ---- finding ----

    def lock(self, identity: str) -> threading.RLock:
        """Held by whoever changes the sandbox."""
        return self._locks.setdefault(identity, threading.RLock())

    def record(self, identity: str) -> Record:
        """The sandbox's record; NotFound."""
        live = self.lives.get(identity)
        return live.record if live else self.catalogue.get(identity)

    def records(self) -> list[Record]:
        """All sandboxes, newest first."""
        return self.catalogue.all()

    def live(self, identity: str) -> Live:
        """The running sandbox; resumed first when it is paused and wakes on traffic. Conflict or MachineLost
        otherwise."""
        live = self.lives.get(identity)
        if live and live.record.phase is Phase.RUNNING:
            if live.agent.lost:
                self._mark_lost(live)
            elif live.stalled:
                raise _still(identity)
            else:
                return live
        with self.lock(identity):
            record = self.record(identity)
            if record.phase is Phase.RUNNING:
                return self._adopt(record)
            if record.phase is Phase.PAUSED and record.auto_resume:
                return self.resume(identity, 300.0)
            if record.phase is Phase.LOST:
                raise MachineLost(f"sandbox {identity} is lost: {record.fault}")
        raise Conflict(f"sandbox {identity} is {record.phase}")

    def _mark_lost(self, live: Live) -> None:
        """Its machine died under us: say so once, and clean up."""
        with self.lock(live.record.id):
            if self.lives.get(live.record.id) is not live or live.record.phase is not Phase.RUNNING:
                return
            fault = live.machine.verdict() or live.agent.lost or MachineLost("its agent is gone")
            live.record.phase, live.record.fault = Phase.LOST, str(fault)
            self.lives.pop(live.record.id, None)
            live.end(fault if isinstance(fault, SandboxError) else None)
            self.catalogue.put(live.record)
        raise fault

    def resolve(self, template: str) -> Snapshot:
        """The snapshot behind a template's name (with or without `:tag`), a snapshot's name, or an id."""
        for name in (template, f"{template}:default", template.removesuffix(":default")):
            identity = self.catalogue.resolve(name)
            if identity:
                return self.store.read(identity)
        raise NotFound(f"template {template!r} was not found: `perilune sandbox ls --templates` lists what there is")

    # ---- making ----

    def admit(self, count: int) -> None:
        """OutOfCapacity or DiskFull when `count` more would not fit."""
        try:
            self.guard.admit(self.home, len(self.lives) + self._starting, count)
        except OutOfCapacity:
            if not self.lingering.expire(everything=True):
                raise
            self.guard.admit(self.home, len(self.lives) + self._starting, count)

    def create(self, request: Request) -> Record:
        """One sandbox from a template or snapshot."""
        (made,) = self.create_many(request, 1)
        if isinstance(made, SandboxError):
            raise made
        return made

    def create_many(self, request: Request, count: int) -> list[Record | SandboxError]:
        """Several from the same; each succeeds or fails for itself."""
        snapshot = self.resolve(request.template)
        return self._children(snapshot, count, lambda: request.record(snapshot))

    def _children(self, snapshot: Snapshot, count: int, record: Callable[[], Record]) -> list[Record | SandboxError]:
        self.admit(count)
        self.store.check(snapshot, self.platform)

        def one() -> Record | SandboxError:
            try:
                return self._start(snapshot, record()).record
            except SandboxError as error:
                return error

        self._starting += count
        try:
            if count == 1:
                return [one()]
            with ThreadPoolExecutor(min(count, 16)) as threads:
                return list(threads.map(lambda _: one(), range(count)))
        finally:
            self._starting -= count

    @contextlib.contextmanager
    def starting(self, record: Record) -> Iterator[None]:
        """The record exists from now on, and not any more when what follows fails."""
        self.catalogue.put(record)
        try:
            yield
        except BaseException:
            self.catalogue.drop(record.id)
            raise

    def _start(self, snapshot: Snapshot, record: Record) -> Live:
        with self.starting(record):
            live = self._restore(snapshot, record, None)
        self.started(live)
        return live

    def _restore(self, snapshot: Snapshot, record: Record, agent: Agent | None) -> Live:
        if snapshot.mode == "disk":
            return self.launcher.boot(self.launcher.overlay(self.store.layers / snapshot.top), record)
        return self.launcher.wake(self.pool.take(snapshot), record, agent)

    def started(self, live: Live) -> None:
        """From now on it is known as running, and ours."""
        record = live.record
        record.phase, record.started, record.fault = Phase.RUNNING, time.time(), ""
        record.pid, record.pid_started = live.machine.pid, started_at(live.machine.pid) or 0
        record.owner, record.owner_started = os.getpid(), started_at(os.getpid()) or 0
        self.lives[record.id] = live
        self.catalogue.put(record)

    # ---- pausing and going on ----

    def pause(self, identity: str, mode: str | None = None) -> Record:
        """Running to paused: neither CPU nor memory. `full` keeps everything; `disk` only the file system."""
        with self.lock(identity):
            live = self.awake(identity)
            record = live.record
            mode, previous = mode or "full", record.snapshot
            if mode not in ("full", "disk"):
                raise InvalidRequest(f"pause mode {mode!r} is neither full nor disk")
            record.phase = Phase.PAUSING
            try:
                self.guard.room(self.home)
                snapshot = self.launcher.capture(live, mode, new_name("p"), self._defaults(record), False)
            except SandboxError:
                record.phase = Phase.RUNNING
                if live.agent.lost or live.machine.state == "gone":
                    self._mark_lost(live)
                raise
            record.phase, record.snapshot, record.pid = Phase.PAUSED, snapshot.id, 0
            self.catalogue.put(record)
            self.lives.pop(identity, None)
            if mode == "disk":
                live.end(Conflict("the sandbox was paused; its processes are gone"))
            else:
                self._agents[identity] = live.agent
                if not self.lingering.keep(live):
                    linger.end(live)
        self.upkeep.later(lambda: self.upkeep.keep(snapshot.id, previous))
        return record

    def _defaults(self, record: Record) -> Defaults:
        return Defaults(record.user, record.workdir, dict(record.env))

    def resume(self, identity: str, timeout: float | None = 300.0, recover: bool = False, reboot: bool = False) -> Live:
        """Paused (or, with `recover`, lost: from its last pause) to running. `reboot` starts from the disk alone."""
        with self.lock(identity):
            record = self.record(identity)
            allowed = (Phase.PAUSED, Phase.LOST) if recover else (Phase.PAUSED,)
            if record.phase not in allowed:
                raise Conflict(f"sandbox {identity} is {record.phase}, not paused")
            if not record.snapshot:
                raise NotFound(f"sandbox {identity} was never paused: there is nothing to resume")
            kept = self.lingering.take(identity)
            if kept and (reboot or not self._go_on(kept, record)):
                linger.end(kept)
            elif kept:
                return self._resumed(kept, timeout)
            self.admit(1)
            snapshot = self.store.read(record.snapshot)
            self.store.check(snapshot, self.platform)
            before, record.phase = record.phase, Phase.RESUMING
            agent = self._agents.pop(identity, None) if before is Phase.PAUSED else None
            if reboot:
                snapshot = replace(snapshot, mode="disk")
                if agent:
                    agent.close(Conflict("the sandbox was rebooted; its processes are gone"))
            try:
                live = self._restore(snapshot, record, agent)
            except BaseException:
                record.phase = before
                raise
            return self._resumed(live, timeout)

    def _resumed(self, live: Live, timeout: float | None) -> Live:
        live.record.end = ending(timeout)
        self.started(live)
        return live

    def _go_on(self, kept: Live, record: Record) -> bool:
        """Whether a machine that lingered runs again; what it held is in the pause as well."""
        kept.record = record
        try:
            self.launcher.go_on(kept)
        except SandboxError:
            return False
        self._agents.pop(record.id, None)
        return True

    def connect(self, identity: str, timeout: float | None = 300.0, reboot: bool = False) -> tuple[Record, bool]:
        """Running with at least `timeout` seconds left; (record, whether it had to be resumed)."""
        with self.lock(identity):
            record = self.record(identity)
            if record.phase is Phase.PAUSED:
                return self.resume(identity, timeout, reboot=reboot).record, True
            live = self.live(identity)
            if timeout is None or (live.record.end is not None and live.record.end < time.time() + timeout):
                self.set_timeout(identity, timeout)
            return live.record, False

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
                live.identify(live.plug(self.home))
            self.catalogue.put(record)

    def set_timeout(self, identity: str, timeout: float | None) -> None:
        """Seconds from now; None for ever."""
        with self.lock(identity):
            record = self.awake(identity).record
            record.end = ending(timeout)
            self.catalogue.put(record)

    def awake(self, identity: str) -> Live:
        """The running sandbox; Conflict or MachineLost, never a resume."""
        record = self.record(identity)
        if record.phase is not Phase.RUNNING:
            if record.phase is Phase.LOST:
                raise MachineLost(f"sandbox {identity} is lost: {record.fault}")
            raise Conflict(f"sandbox {identity} is {record.phase}, not running")
        return self.live(identity)

    # ---- copies ----

    def fork(self, identity: str, count: int = 1, timeout: float | None = 300.0) -> list[Record | SandboxError]:
        """`count` independent copies of a running or paused sandbox, which stays as it was."""
        if not 1 <= count <= 100:
            raise InvalidRequest(f"a fork makes between 1 and 100 children, not {count}")
        with self.lock(identity):
            source = self.record(identity)
            paused = source.phase is Phase.PAUSED
            self.admit(count)
            snapshot = self.store.read(source.snapshot) if paused else self._capture(identity, "full", new_name("f"))
        end = ending(timeout)
        try:
            if snapshot.diff and snapshot.diff.size * count > 4 * FLATTEN_MEMORY:
                snapshot = self.store.flatten_memory(snapshot)  # once, instead of once a child
            return self._children(snapshot, count, lambda: twin(source, end))
        finally:
            if not paused:
                remove(self.store.path(snapshot.id))

    def _capture(self, identity: str, mode: str, name: str) -> Snapshot:
        """A checkpoint of a running sandbox, which goes on."""
        live = self.awake(identity)
        try:
            snapshot = self.launcher.capture(live, mode, name, self._defaults(live.record), True)
            if mode == "full":
                live.identify()
        except SandboxError:
            if live.agent.lost or live.machine.state == "gone":
                self._mark_lost(live)
            raise
        self.catalogue.put(live.record)
        return snapshot

    def snapshot(self, identity: str, name: str | None = None, mode: str = "full", kind: str = "snapshot") -> Snapshot:
        """A snapshot that stays until it is deleted; from running (which goes on) or paused."""
        if mode not in ("full", "disk"):
            raise InvalidRequest(f"snapshot mode {mode!r} is neither full nor disk")
        self.guard.room(self.home)
        with self.lock(identity):
            record = self.record(identity)
            fresh = new_name("s")
            if record.phase is Phase.PAUSED:
                made = self._copy_pause(record, fresh)
            else:
                made = self._capture(identity, mode, fresh)
            self.catalogue.keep(made.id, kind, identity, [name] if name else [])
        self.upkeep.later(lambda: self.upkeep.keep(made.id))
        return made

    def _copy_pause(self, record: Record, identity: str) -> Snapshot:
        """A second name for what a pause kept: its files are immutable, so they are linked."""
        paused = self.store.read(record.snapshot)
        source, parts = self.store.path(paused.id), self.store.snapshots / f".{identity}.tmp"
        parts.mkdir()
        for file in source.iterdir():
            if file.name != "manifest.json":
                os.link(file, parts / file.name)
        copy = replace(paused, id=identity)
        self.store.commit(copy, parts)
        return copy

    def delete_snapshot(self, name: str) -> None:
        """A snapshot or template, by id or name; what was made from it stays."""
        identity = self.catalogue.resolve(name)
        if not identity or not self.catalogue.unkeep(identity):
            raise NotFound(f"snapshot {name!r} was not found")
        self.pool.drop(identity)
        remove(self.store.path(identity))
        self.upkeep.later(self.upkeep.collect)

    # ---- ending ----

    def kill(self, identity: str) -> None:
        """End it and forget it; NotFound when there is none."""
        with self.lock(identity):
            record = self.record(identity)
            live = self.lives.pop(identity, None) or self.lingering.take(identity)
            if live is None and record.phase is Phase.RUNNING:
                with contextlib.suppress(SandboxError, OSError):
                    live = self.launcher.adopt(record)
            self._agents.pop(identity, None)
            if live:
                live.end(NotFound(f"sandbox {identity} was killed"))
            top = self.store.layers / record.top
            if record.top and not self.upkeep.shared(top):
                remove(top)
            if record.snapshot:
                remove(self.store.path(record.snapshot))
            self.catalogue.drop(identity)  # last: on a full disk it needs the room that became free
            record.phase = Phase.KILLED
        self._locks.pop(identity, None)

    # ---- timeouts ----

    def _tick(self) -> None:
        while not self._closed.wait(0.25):
            now = time.time()
            self._watch_disk()
            self.lingering.expire()
            for live in list(self.lives.values()):
                if live.record.phase is Phase.RUNNING and live.record.end is not None and live.record.end <= now:
                    with contextlib.suppress(SandboxError, OSError):
                        self._expire(live.record.id)

    def _watch_disk(self) -> None:
        """A guest that writes to a full host disk is stopped by QEMU, in the middle of what it does. It goes on when
        there is room."""
        full = free_mb(self.home) < self.guard.disk_floor_mb
        for live in list(self.lives.values()):
            if full or live.stalled:
                with contextlib.suppress(SandboxError):
                    before, live.stalled = live.stalled, live.machine.stalled()
                    if live.stalled and not full:
                        live.machine.run()
                    elif live.stalled and not before:
                        live.agent.interrupt(_still(live.record.id))

    def _expire(self, identity: str) -> None:
        with self.lock(identity):
            record = self.record(identity)
            if record.phase is not Phase.RUNNING or record.end is None or record.end > time.time():
                return
            if record.on_timeout == "kill":
                self.kill(identity)
                return
            try:
                self.pause(identity, record.pause_mode)
            except MachineLost:
                raise
            except SandboxError:  # no room to keep it: try again in a while rather than lose it
                record.end = time.time() + 30
                raise

    # ---- processes that end ----

    def _adopt(self, record: Record) -> Live:
        if alive(record.owner, record.owner_started) and record.owner != os.getpid():
            raise Conflict(f"sandbox {record.id} is driven by process {record.owner}; ask that one (its HTTP API)")
        if not alive(record.pid, record.pid_started):
            record.phase, record.fault = Phase.LOST, "its machine ended while no runtime watched it"
            self.catalogue.put(record)
            raise MachineLost(f"sandbox {record.id} is lost: {record.fault}")
        live = self.launcher.adopt(record)
        self.started(live)
        return live

    def release(self) -> None:
        """Let running sandboxes go on without this process; whoever opens the home next may adopt them."""
        for live in list(self.lives.values()):
            live.record.owner = 0
            self.catalogue.put(live.record)
            live.agent.detach()
            live.machine.release()
        self.lives.clear()
        self._shut()

    def close(self) -> None:
        """Kill what runs; paused sandboxes and snapshots stay."""
        for identity in list(self.lives):
            with contextlib.suppress(NotFound):
                self.kill(identity)
        self._shut()

    def _shut(self) -> None:
        self._closed.set()
        self._clock.join()
        self.lingering.expire(everything=True)
        self.pool.close()
        self.launcher.threads.shutdown()
        self.zygote.close()
        self.upkeep.close()
        self.catalogue.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _still(identity: str) -> DiskFull:
    return DiskFull(f"sandbox {identity} stands still: this host's disk is full; it goes on when there is room")
