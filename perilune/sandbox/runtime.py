"""The runtime: every sandbox of one home, their lifecycle, timeouts, pools, and what is left when a process was killed.

K3 report, section 5.3.2: pause while the model thinks, fork for a judge, snapshot for recovery.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from perilune.sandbox import setup
from perilune.sandbox.agent.client import Agent
from perilune.sandbox.catalogue import Catalogue, Network, Phase, Record
from perilune.sandbox.errors import (
    Conflict,
    InvalidRequest,
    MachineLost,
    NotFound,
    SandboxError,
    SnapshotCorrupt,
)
from perilune.sandbox.files import remove, sha256, temporary
from perilune.sandbox.guard import Guard
from perilune.sandbox.live import Launcher, Live
from perilune.sandbox.network import check as check_network
from perilune.sandbox.network import namespaces, prefix
from perilune.sandbox.network import remove as remove_namespace
from perilune.sandbox.pool import Pool
from perilune.sandbox.snapshot import Defaults, Snapshot, Store
from perilune.sandbox.vmm import qemu
from perilune.sandbox.vmm.child import Child, started_at
from perilune.sandbox.vmm.driver import Platform, Rates, Shape
from perilune.sandbox.vmm.zygote import Zygote

_FLATTEN_MEMORY = 64 << 20  # bytes of diff from which a base of its own pays
_FLATTEN_DISK = 8  # overlays


@dataclass(frozen=True)
class Request:
    """What a new sandbox should be. `timeout` in seconds; None means for ever."""

    template: str = "base"
    timeout: float | None = 300.0
    on_timeout: str = "pause"
    pause_mode: str = "full"
    auto_resume: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    rates: Rates = field(default_factory=Rates)
    processes: int = 2048
    secure: bool = False


def new_id() -> str:
    """20 lower-case letters and digits, fit for a host name."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    return "i" + "".join(secrets.choice(alphabet) for _ in range(19))


class Runtime:
    """Thread-safe. One process drives a running sandbox at a time; a dead process's sandboxes are adopted."""

    def __init__(self, home: Path | None = None, guard: Guard | None = None, jail: str | None = None) -> None:
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
        self.pool = Pool(self.launcher)
        self.lives: dict[str, Live] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._agents: dict[str, Agent] = {}  # of paused sandboxes: streams that go on after the resume
        self._starting = 0
        self._background = ThreadPoolExecutor(1, "perilune-background")
        self._closed = threading.Event()
        self.recover()
        self._clock = threading.Thread(target=self._tick, daemon=True, name="timeouts")
        self._clock.start()

    # ---- finding ----

    def _lock(self, identity: str) -> threading.RLock:
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
            else:
                return live
        with self._lock(identity):
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
        with self._lock(live.record.id):
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

    def create(self, request: Request) -> Record:
        """One sandbox from a template or snapshot."""
        (made,) = self.create_many(request, 1)
        if isinstance(made, SandboxError):
            raise made
        return made

    def create_many(self, request: Request, count: int) -> list[Record | SandboxError]:
        """Several from the same; each succeeds or fails for itself."""
        snapshot = self.resolve(request.template)
        return self._children(snapshot, count, lambda: self._new_record(request, snapshot))

    def _new_record(self, request: Request, snapshot: Snapshot) -> Record:
        if request.on_timeout not in ("pause", "kill") or request.pause_mode not in ("full", "disk"):
            raise InvalidRequest("on_timeout must be pause or kill, pause_mode full or disk")
        check_network(request.network)
        end = None if request.timeout is None else time.time() + request.timeout
        return Record(
            new_id(), request.template, shape=snapshot.shape, rates=request.rates, processes=request.processes, end=end,
            on_timeout=request.on_timeout, pause_mode=request.pause_mode, auto_resume=request.auto_resume,
            metadata=request.metadata, env={**snapshot.defaults.env, **request.env}, user=snapshot.defaults.user,
            workdir=snapshot.defaults.workdir, network=request.network, secure=request.secure,
        )  # fmt: skip

    def _children(self, snapshot: Snapshot, count: int, record: Callable[[], Record]) -> list[Record | SandboxError]:
        self.guard.admit(self.home, len(self.lives) + self._starting, count)
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

    def _start(self, snapshot: Snapshot, record: Record) -> Live:
        self.catalogue.put(record)
        try:
            live = self._restore(snapshot, record, None)
        except BaseException:
            self.catalogue.drop(record.id)
            raise
        self._running(live)
        return live

    def _restore(self, snapshot: Snapshot, record: Record, agent: Agent | None) -> Live:
        if snapshot.mode == "disk":
            return self.launcher.boot(self.launcher.overlay(self.store.layers / snapshot.top), record)
        return self.launcher.wake(self.pool.take(snapshot), record, agent)

    def _running(self, live: Live) -> None:
        record = live.record
        record.phase, record.started, record.fault = Phase.RUNNING, time.time(), ""
        record.pid, record.pid_started = live.machine.pid, started_at(live.machine.pid) or 0
        record.owner, record.owner_started = os.getpid(), started_at(os.getpid()) or 0
        self.lives[record.id] = live
        self.catalogue.put(record)

    # ---- pausing and going on ----

    def pause(self, identity: str, mode: str | None = None) -> Record:
        """Running to paused: neither CPU nor memory. `full` keeps everything; `disk` only the file system."""
        with self._lock(identity):
            live = self._awake(identity)
            record = live.record
            mode, previous = mode or "full", record.snapshot
            if mode not in ("full", "disk"):
                raise InvalidRequest(f"pause mode {mode!r} is neither full nor disk")
            record.phase = Phase.PAUSING
            try:
                self.guard.room(self.home)
                snapshot = self.launcher.capture(live, mode, f"p{secrets.token_hex(8)}", self._defaults(record), False)
            except SandboxError:
                record.phase = Phase.RUNNING
                if live.agent.lost or live.machine.state == "gone":
                    self._mark_lost(live)
                raise
            record.phase, record.snapshot, record.pid = Phase.PAUSED, snapshot.id, 0
            if mode == "full":
                live.agent.detach()
                self._agents[identity] = live.agent
            self.catalogue.put(record)
            self.lives.pop(identity, None)
            self._put_away(live, mode)
        self._later(lambda: self._settle(snapshot.id, previous))
        return record

    def _put_away(self, live: Live, mode: str) -> None:
        live.machine.kill()
        if mode == "disk":
            live.agent.close(Conflict("the sandbox was paused; its processes are gone"))
        live.unplug()

    def _defaults(self, record: Record) -> Defaults:
        return Defaults(record.user, record.workdir, dict(record.env))

    def resume(self, identity: str, timeout: float | None = 300.0, recover: bool = False, reboot: bool = False) -> Live:
        """Paused (or, with `recover`, lost: from its last pause) to running. `reboot` starts from the disk alone."""
        with self._lock(identity):
            record = self.record(identity)
            allowed = (Phase.PAUSED, Phase.LOST) if recover else (Phase.PAUSED,)
            if record.phase not in allowed:
                raise Conflict(f"sandbox {identity} is {record.phase}, not paused")
            if not record.snapshot:
                raise NotFound(f"sandbox {identity} was never paused: there is nothing to resume")
            self.guard.admit(self.home, len(self.lives) + self._starting)
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
            record.end = None if timeout is None else time.time() + timeout
            self._running(live)
            return live

    def connect(self, identity: str, timeout: float | None = 300.0, reboot: bool = False) -> tuple[Record, bool]:
        """Running with at least `timeout` seconds left; (record, whether it had to be resumed)."""
        with self._lock(identity):
            record = self.record(identity)
            if record.phase is Phase.PAUSED:
                return self.resume(identity, timeout, reboot=reboot).record, True
            live = self.live(identity)
            if timeout is None or (live.record.end is not None and live.record.end < time.time() + timeout):
                self.set_timeout(identity, timeout)
            return live.record, False

    def set_network(self, identity: str, network: Network) -> None:
        """Replace what the sandbox may reach; at once when it runs."""
        with self._lock(identity):
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
        with self._lock(identity):
            record = self._awake(identity).record
            record.end = None if timeout is None else time.time() + timeout
            self.catalogue.put(record)

    def _awake(self, identity: str) -> Live:
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
        with self._lock(identity):
            source = self.record(identity)
            paused = source.phase is Phase.PAUSED
            self.guard.admit(self.home, len(self.lives) + self._starting, count)
            snapshot = self.store.read(source.snapshot) if paused else self._capture(identity, "full", f"f{new_id()}")
        end = None if timeout is None else time.time() + timeout
        try:
            if snapshot.diff and snapshot.diff.size * count > 4 * _FLATTEN_MEMORY:
                snapshot = self.store.flatten_memory(snapshot)  # once, instead of once a child
            child = replace(source, phase=Phase.CREATING, snapshot="", end=end, fault="", pid=0)
            return self._children(snapshot, count, lambda: self._twin(child))
        finally:
            if not paused:
                remove(self.store.path(snapshot.id))

    @staticmethod
    def _twin(source: Record) -> Record:
        return replace(
            source, id=new_id(), created=time.time(), metadata=dict(source.metadata), env=dict(source.env),
            network=replace(source.network),
        )  # fmt: skip

    def _capture(self, identity: str, mode: str, name: str) -> Snapshot:
        """A checkpoint of a running sandbox, which goes on."""
        live = self._awake(identity)
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
        with self._lock(identity):
            record = self.record(identity)
            fresh = f"s{secrets.token_hex(8)}"
            if record.phase is Phase.PAUSED:
                made = self._copy_pause(record, fresh)
            else:
                made = self._capture(identity, mode, fresh)
            self.catalogue.keep(made.id, kind, identity, [name] if name else [])
        self._later(lambda: self._settle(made.id, ""))
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
        self._later(self.collect)

    # ---- ending ----

    def kill(self, identity: str) -> None:
        """End it and forget it; NotFound when there is none."""
        with self._lock(identity):
            record = self.record(identity)
            live = self.lives.pop(identity, None)
            if live is None and record.phase is Phase.RUNNING:
                with contextlib.suppress(SandboxError, OSError):
                    live = self.launcher.adopt(record)
            record.phase = Phase.KILLED
            self.catalogue.drop(identity)
            self._agents.pop(identity, None)
            if live:
                live.end(NotFound(f"sandbox {identity} was killed"))
            top = self.store.layers / record.top
            if record.top and not self._shared(top):
                remove(top)
            if record.snapshot:
                remove(self.store.path(record.snapshot))
        self._locks.pop(identity, None)

    def _shared(self, layer: Path) -> bool:
        """Whether a snapshot still stands on this layer."""
        return any(layer.name in self._layer_names(identity) for identity in self.store.ids())

    def _layer_names(self, identity: str) -> set[str]:
        try:
            return {name for name, _ in self.store.read(identity).layers}
        except (SnapshotCorrupt, NotFound):
            return set()

    # ---- in the background ----

    def _later(self, work: Callable[[], object]) -> None:
        def quietly() -> None:
            with contextlib.suppress(SandboxError, OSError):  # it may be gone by now; nothing depends on this work
                work()

        if not self._closed.is_set():
            self._background.submit(quietly)

    def _settle(self, identity: str, previous: str) -> None:
        """After a checkpoint: to the device; drop the pause before it; flatten what has grown deep or large."""
        snapshot = self.store.read(identity)
        self.store.make_durable(snapshot)
        if previous:
            remove(self.store.path(previous))
        if len(snapshot.layers) > _FLATTEN_DISK:
            snapshot = self._flatten(identity, self.store.flatten_disk)
        if snapshot.diff and snapshot.diff.size > _FLATTEN_MEMORY:
            self._flatten(identity, self.store.flatten_memory)
        self.collect()

    def _flatten(self, identity: str, how: Callable[[Snapshot], Snapshot]) -> Snapshot:
        """Only while nobody resumes from it."""
        owner = next((r.id for r in self.records() if r.snapshot == identity), identity)
        with self._lock(owner):
            return how(self.store.read(identity))

    def settle(self) -> None:
        """Wait for the background work that is queued."""
        self._background.submit(lambda: None).result()

    def collect(self, grace_s: float = 60.0) -> int:
        """Remove layers, bases and snapshots that nothing needs; files younger than the grace are left. Returns how
        many."""
        records = self.records()
        kept = {identity for identity, *_ in self.catalogue.kept()} | {r.snapshot for r in records}
        needed = {path.name for path in self.pool.bases()}
        for record in records:
            needed |= {record.base} | self._chain(record.top)
        old = time.time() - grace_s
        gone = [p for p in self.store.snapshots.iterdir() if p.name not in kept and _older(p, old)]
        for identity in set(self.store.ids()) - {path.name for path in gone}:
            with contextlib.suppress(SnapshotCorrupt, NotFound):
                snapshot = self.store.read(identity)
                needed |= {name for name, _ in snapshot.layers} | {snapshot.base}
        for folder in (self.store.layers, self.store.memory):
            gone += [
                p
                for p in folder.iterdir()
                if p.name not in needed and not p.name.startswith("zero-") and _older(p, old)
            ]
        for path in gone:
            remove(path)
        return len(gone)

    def _chain(self, top: str) -> set[str]:
        if not top:
            return set()
        try:
            return {name for name, _ in self.store.measure(self.store.layers / top)}
        except (SnapshotCorrupt, OSError):
            return {top}

    def _tick(self) -> None:
        while not self._closed.wait(0.25):
            now = time.time()
            for live in list(self.lives.values()):
                if live.record.phase is Phase.RUNNING and live.record.end is not None and live.record.end <= now:
                    with contextlib.suppress(SandboxError, OSError):
                        self._expire(live.record.id)

    def _expire(self, identity: str) -> None:
        with self._lock(identity):
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

    # ---- crashes ----

    def recover(self) -> None:
        """What a killed process left: half-made snapshots go, dead machines are told as lost, machines of nobody
        end."""
        for record in self.records():
            if _alive(record.owner, record.owner_started) and record.owner != os.getpid():
                continue
            if record.phase in (Phase.CREATING, Phase.KILLED):
                self.catalogue.drop(record.id)
            elif record.phase is not Phase.PAUSED and not _alive(record.pid, record.pid_started):
                record.phase, record.fault = Phase.LOST, "its machine ended while no runtime watched it"
                self.catalogue.put(record)
        folders = {r.folder for r in self.records() if r.phase is Phase.RUNNING}
        for folder in self.store.run.iterdir():
            if folder.name not in folders and not _owned(folder) and _older(folder, time.time() - 5):
                _end_machine(folder)
        used = {f"{prefix(str(self.home))}{r.slot}" for r in self.records() if r.phase is Phase.RUNNING}
        for namespace in set(namespaces(prefix(str(self.home)))) - used:
            remove_namespace(namespace)

    def _adopt(self, record: Record) -> Live:
        if _alive(record.owner, record.owner_started) and record.owner != os.getpid():
            raise Conflict(f"sandbox {record.id} is driven by process {record.owner}; ask that one (its HTTP API)")
        if not _alive(record.pid, record.pid_started):
            record.phase, record.fault = Phase.LOST, "its machine ended while no runtime watched it"
            self.catalogue.put(record)
            raise MachineLost(f"sandbox {record.id} is lost: {record.fault}")
        live = self.launcher.adopt(record)
        self._running(live)
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
        self.pool.close()
        self.launcher.threads.shutdown()
        self.zygote.close()
        self._background.shutdown(wait=True)
        self.catalogue.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- templates ----

    def templates(self) -> Iterator[tuple[str, str, list[str], float]]:
        """(snapshot, kind, names, created)."""
        for identity, kind, _, created in self.catalogue.kept():
            yield identity, kind, self.catalogue.names(identity), created

    def boot_image(self, root: Path, name: str, shape: Shape | None = None, defaults: Defaults | None = None) -> Record:
        """A sandbox that boots a raw ext4 image."""
        shape, defaults = shape or Shape(), defaults or Defaults()
        self.guard.admit(self.home, len(self.lives) + self._starting)
        base = self.store.layers / f"{sha256(root)[:32]}.raw"
        if not base.exists():
            with temporary(base) as temp:
                os.link(root, temp)
        shape = replace(shape, disk_mb=base.stat().st_size >> 20)
        record = Record(new_id(), name, shape=shape, env=dict(defaults.env))
        record.user, record.workdir = defaults.user, defaults.workdir
        self.catalogue.put(record)
        try:
            self._running(self.launcher.boot(self.launcher.overlay(base), record))
        except BaseException:
            self.catalogue.drop(record.id)
            raise
        return record

    def publish(self, identity: str, names: list[str], start: str = "") -> Snapshot:
        """End a sandbox and keep it as a template under `names`; its memory becomes a base that all copies share."""
        with self._lock(identity):
            live = self._awake(identity)
            defaults = replace(self._defaults(live.record), start=start)
            made = self.launcher.make_template(live, f"t{secrets.token_hex(8)}", defaults)
            self.store.make_durable(made)
            self.catalogue.keep(made.id, "template", "", names)
            self.kill(identity)
        return made

    def add_template(
        self, root: Path, names: list[str], shape: Shape | None = None, defaults: Defaults | None = None
    ) -> Snapshot:
        """Boot a raw ext4 image once and keep the guest that came up."""
        record = self.boot_image(root, names[0] if names else "", shape, defaults)
        try:
            return self.publish(record.id, names)
        except BaseException:
            self.kill(record.id)
            raise


def _alive(pid: int, started: int) -> bool:
    return bool(pid) and started_at(pid) == started


def _owned(folder: Path) -> bool:
    """Whether the process that started this machine still lives."""
    try:
        pid, started = (folder / "owner").read_text().split()
        return _alive(int(pid), int(started))
    except (OSError, ValueError):
        return False


def _older(path: Path, than: float) -> bool:
    try:
        return path.stat().st_mtime < than
    except OSError:
        return False


def _end_machine(folder: Path) -> None:
    """A machine that no record knows: end it by its id, and remove its folder."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{folder}/qmp".encode() in (process / "cmdline").read_bytes():
                    Child(int(process.name)).kill()
    remove(folder)
