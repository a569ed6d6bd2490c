"""How a running guest becomes a snapshot: disk and memory at one instant."""

import contextlib
import hashlib
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from perilune.sandbox import diff as diffs
from perilune.sandbox import memory
from perilune.sandbox.agent.wire import Op
from perilune.sandbox.errors import InvalidRequest, SandboxError
from perilune.sandbox.files import on_host, remove
from perilune.sandbox.live import Live
from perilune.sandbox.snapshot import Defaults, Snapshot, Store
from perilune.sandbox.vmm.driver import Platform


@dataclass(frozen=True)
class Camera:
    """Takes snapshots of machines of one platform."""

    store: Store
    platform: Platform
    threads: ThreadPoolExecutor

    def capture(self, live: Live, mode: str, identity: str, goes_on: bool) -> Snapshot:
        """Freeze `live` into a snapshot. The guest stands still afterwards unless `goes_on`, which gives it a new disk
        layer and lets it run."""
        if mode not in ("full", "disk"):
            raise InvalidRequest(f"mode {mode!r} is neither full nor disk")
        capture = self._disk if mode == "disk" else self._full
        parts = self.store.snapshots / f".{identity}.{secrets.token_hex(4)}.tmp"
        with on_host("the checkpoint"):
            try:
                parts.mkdir()
                return capture(live, identity, parts, goes_on)
            except BaseException:
                remove(parts)
                raise

    def _snapshot(self, live: Live, mode: str, identity: str) -> Snapshot:
        r = live.record
        defaults = Defaults(r.user, r.workdir, dict(r.env))
        return Snapshot(
            identity, mode, self.platform, r.shape, self.store.measure(live.top), defaults, template=r.template
        )

    def _disk(self, live: Live, identity: str, parts: Path, goes_on: bool) -> Snapshot:
        frozen = live.top
        try:
            live.agent.call(Op.FREEZE, "root")
            if goes_on:
                live.seal(self.store)
                live.agent.call(Op.THAW, "root")
            else:
                live.agent.quiesce()
                live.machine.stop()
            snapshot = replace(self._snapshot(live, "disk", identity), layers=self.store.measure(frozen))
            self.store.commit(snapshot, parts)
            return snapshot
        except BaseException:
            _go_on(live)
            with contextlib.suppress(SandboxError):
                live.agent.call(Op.THAW, "root")
            raise

    def _full(self, live: Live, identity: str, parts: Path, goes_on: bool) -> Snapshot:
        live.agent.quiesce()
        sealing: Future[None] | None = None
        try:
            live.machine.stop()
            full = self._snapshot(live, "full", identity)
            device = self._device(live, parts)
            sealing = self.threads.submit(live.seal, self.store) if goes_on else None  # beside the memory
            where = memory.mapping(live.machine.pid, live.base)
            diff = diffs.save(where, memory.diverged(where), parts / "memory")
            if sealing:
                sealing.result()
            snapshot = replace(full, base=live.base.name, diff=diff, state_sha256=device)
            self.store.commit(snapshot, parts)
        except BaseException:
            if sealing:
                sealing.exception()
            _go_on(live)
            raise
        if goes_on:
            live.machine.run()
        return snapshot

    @staticmethod
    def _device(live: Live, parts: Path) -> str:
        """The device state, by way of a file that QEMU may write; its SHA-256."""
        state = live.machine.agent_socket.parent / "state"
        live.machine.save(state)
        data = state.read_bytes()
        (parts / "state").write_bytes(data)
        state.unlink()
        return hashlib.sha256(data).hexdigest()


def _go_on(live: Live) -> None:
    """A checkpoint failed (no room, say): the guest continues as if nobody had asked."""
    with contextlib.suppress(SandboxError):
        live.machine.run()
        live.identify()
