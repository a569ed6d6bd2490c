"""Stories with real machines: boot, run, pause, resume, fork, snapshot, lose and recover."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.sandbox.agent.stream import Inbox
from perilune.sandbox.agent.wire import Command, Op, Type
from perilune.sandbox.catalogue import Phase
from perilune.sandbox.errors import (
    AlreadyExists,
    Conflict,
    GuestError,
    GuestPanicked,
    InvalidRequest,
    MachineLost,
    NotFound,
    SnapshotCorrupt,
    SnapshotIncompatible,
    VmmDied,
)
from perilune.sandbox.request import Request
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.template import known_templates


def run(runtime: Runtime, identity: str, script: str, user: str = "user") -> str:
    inbox, out = Inbox(), b""
    runtime.live(identity).agent.execute(Command(("/bin/bash", "-c", script), user=user), inbox)
    while (event := inbox.get(60)).type is not Type.EXITED:
        event.done()
        out += event.data if event.type is Type.DATA else b""
    return out.decode().strip()


def test_commands_and_files(runtime: Runtime) -> None:
    box = runtime.create(Request())
    assert run(runtime, box.id, "id -un; pwd; hostname; cat /etc/hostname").split() == [
        "user",
        "/home/user",
        box.id,
        box.id,
    ]
    agent = runtime.live(box.id).agent
    data = os.urandom(700_000)
    agent.write("user", "deep/er/file", iter([data]))
    assert agent.call(Op.READ, "user", "/home/user/deep/er/file") == data
    run(runtime, box.id, "umask 077; echo s > /root/secret", "root")
    with pytest.raises(GuestError, match="Permission denied"):
        agent.call(Op.READ, "user", "/root/secret")
    with pytest.raises(GuestError, match="No such file"):
        agent.call(Op.READ, "root", "/nowhere")
    assert abs(float(run(runtime, box.id, "date +%s.%N")) - time.time()) < 5
    runtime.kill(box.id)
    with pytest.raises(NotFound):
        runtime.record(box.id)


def test_what_runs_goes_on_after_a_pause(runtime: Runtime) -> None:
    box = runtime.create(Request())
    agent = runtime.live(box.id).agent
    inbox = Inbox()
    script = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done"
    agent.execute(Command(("/bin/bash", "-c", script), user="user"), inbox)
    agent.write("user", "/home/user/kept", iter([b"on disk"]))
    agent.write("user", "/dev/shm/kept", iter([b"in memory"]))
    machine = runtime.lives[box.id].machine
    runtime.pause(box.id)
    assert machine.state == "gone" and runtime.record(box.id).phase is Phase.PAUSED
    with pytest.raises(Conflict, match="paused"):
        runtime.live(box.id)
    with pytest.raises(Conflict):
        runtime.pause(box.id)
    runtime.resume(box.id)
    text = b""
    while (event := inbox.get(30)).type is not Type.EXITED:
        event.done()
        text += event.data if event.type is Type.DATA else b""
    assert text.split() == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert run(runtime, box.id, "cat kept /dev/shm/kept") == "on diskin memory"
    runtime.kill(box.id)


def test_forks_are_independent(runtime: Runtime) -> None:
    box = runtime.create(Request())
    run(runtime, box.id, "echo parent > state")
    children = runtime.fork(box.id, 2)
    runtime.pause(box.id)
    children += runtime.fork(box.id, 1)  # a paused one has children too
    ids = [child.id for child in children]
    assert len({run(runtime, i, "od -An -N16 -tx1 /dev/urandom") for i in ids}) == 3
    for i in ids:
        assert run(runtime, i, f"cat state; echo {i} > state; hostname") == f"parent\n{i}"
    assert [run(runtime, i, "cat state") for i in ids] == ids
    runtime.resume(box.id)
    assert run(runtime, box.id, "cat state") == "parent"
    for i in [box.id, *ids]:
        runtime.kill(i)


def test_snapshots_name_an_instant(runtime: Runtime) -> None:
    box = runtime.create(Request())
    run(runtime, box.id, "echo one > state; echo m > /dev/shm/m")
    runtime.snapshot(box.id, "before")
    run(runtime, box.id, "echo two > state")
    twin = runtime.create(Request("before"))
    assert run(runtime, twin.id, "cat state /dev/shm/m") == "one\nm"
    assert run(runtime, box.id, "cat state") == "two"
    runtime.delete_snapshot("before")
    with pytest.raises(NotFound, match="before"):
        runtime.create(Request("before"))
    assert run(runtime, twin.id, "cat state; sync; echo still") == "one\nstill"
    runtime.kill(box.id)
    runtime.kill(twin.id)


@pytest.mark.parametrize(
    "wrong",
    [{"timeout": float("nan")}, {"timeout": -1.0}, {"processes": -1}, {"processes": 1 << 40}, {"env": {"A=B": "x"}},
     {"env": {"": "x"}}, {"env": {"A": "\0"}}, {"env": {"A": "\ud800"}}, {"template": "\ud800"}],
)  # fmt: skip
def test_what_makes_no_sandbox_is_refused_before_one_is_begun(runtime: Runtime, wrong: dict) -> None:
    before = len(runtime.records())
    with pytest.raises(InvalidRequest):
        runtime.create(Request(**wrong))
    assert len(runtime.records()) == before


def test_a_snapshot_takes_no_template_s_name(runtime: Runtime) -> None:
    """Whoever asked for the template would have got the snapshot, and nothing once that was deleted."""
    box, base = runtime.create(Request()), runtime.resolve("base").id
    for name in ("base", base):
        with pytest.raises(AlreadyExists, match="is a template"):
            runtime.snapshot(box.id, name)
    for name in (" ", "a\nb", "-rf", "\ud800", "x" * 256, "step:0"):
        with pytest.raises(InvalidRequest):
            runtime.snapshot(box.id, name)
    assert runtime.resolve("base").id == base
    runtime.kill(box.id)


def test_a_disk_pause_keeps_files_only(runtime: Runtime) -> None:
    box = runtime.create(Request())
    run(runtime, box.id, "echo kept > state; echo lost > /dev/shm/m")
    runtime.pause(box.id, "disk")
    assert not (runtime.store.path(runtime.record(box.id).snapshot) / "memory").exists()
    runtime.resume(box.id)
    assert run(runtime, box.id, "cat state; ls /dev/shm") == "kept"
    runtime.kill(box.id)


def test_a_killed_machine_is_a_typed_error_and_can_be_recovered(runtime: Runtime) -> None:
    box, neighbour = runtime.create(Request()), runtime.create(Request())
    run(runtime, box.id, "echo checkpoint > state")
    runtime.pause(box.id)
    live = runtime.resume(box.id)
    os.kill(live.machine.pid, signal.SIGKILL)
    with pytest.raises(VmmDied, match="signal 9"):
        run(runtime, box.id, "sleep 5")
    with pytest.raises(MachineLost):
        run(runtime, box.id, "true")
    assert runtime.record(box.id).phase is Phase.LOST
    with pytest.raises(Conflict):
        runtime.resume(box.id)
    runtime.resume(box.id, recover=True)
    assert run(runtime, box.id, "cat state") == "checkpoint"
    assert run(runtime, neighbour.id, "echo unharmed") == "unharmed"
    runtime.kill(box.id)
    runtime.kill(neighbour.id)


def test_a_panic_is_told_as_such(runtime: Runtime) -> None:
    box = runtime.create(Request())
    bomb = (
        "echo 2 > /proc/sys/vm/panic_on_oom; mount -o remount,size=100% /dev/shm; dd if=/dev/zero of=/dev/shm/x bs=1M"
    )
    with pytest.raises(GuestPanicked, match="panic_on_oom"):
        run(runtime, box.id, bomb, "root")
    runtime.kill(box.id)


@pytest.mark.parametrize("part", ["memory", "state", "manifest.json", "layer"])
def test_one_byte_less_is_refused(runtime: Runtime, part: str) -> None:
    box = runtime.create(Request())
    runtime.pause(box.id)
    runtime.upkeep.settle()
    snapshot = runtime.store.read(runtime.record(box.id).snapshot)
    path = runtime.store.layers / snapshot.top if part == "layer" else runtime.store.path(snapshot.id) / part
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotCorrupt):
        runtime.resume(box.id)
    assert runtime.record(box.id).phase is Phase.PAUSED
    runtime.kill(box.id)


def test_another_host_is_refused_in_one_sentence(runtime: Runtime) -> None:
    box = runtime.create(Request())
    runtime.pause(box.id)
    runtime.upkeep.settle()
    there = replace(runtime.platform, accelerator="kvm")
    snapshot = runtime.store.read(runtime.record(box.id).snapshot)
    with pytest.raises(SnapshotIncompatible, match=r"accelerator 'tcg' \(this host has 'kvm'\)"):
        runtime.store.check(snapshot, there)
    runtime.kill(box.id)


def test_a_timeout_pauses_and_another_kills(runtime: Runtime) -> None:
    paused = runtime.create(Request(timeout=1.0))
    killed = runtime.create(Request(timeout=1.0, on_timeout="kill"))
    until = time.time() + 30
    while time.time() < until and (paused.phase is not Phase.PAUSED or killed.phase is not Phase.KILLED):
        time.sleep(0.1)
    assert runtime.record(paused.id).phase is Phase.PAUSED
    with pytest.raises(NotFound):
        runtime.record(killed.id)
    runtime.kill(paused.id)


def test_nothing_is_left(runtime: Runtime) -> None:
    assert runtime.records() == []
    base = runtime.resolve("base").id
    for identity in [identity for identity, *_ in known_templates(runtime) if identity != base]:
        runtime.delete_snapshot(identity)
    assert runtime.pool.ready()
    runtime.pool.forget()
    runtime.upkeep.settle()
    runtime.upkeep.collect(0)
    assert list(runtime.store.run.iterdir()) == []
    template = runtime.resolve("base")
    assert {path.name for path in runtime.store.layers.iterdir()} == {name for name, _ in template.layers}
    assert [path.name for path in runtime.store.snapshots.iterdir()] == [template.id]
    groups = [Path("/sys/fs/cgroup/memory/perilune"), Path("/sys/fs/cgroup/perilune")]
    began = (runtime.home / "tiny.raw").stat().st_mtime  # what others left before is not ours to judge
    made = [path for group in groups if group.exists() for path in group.iterdir() if path.is_dir()]
    assert [path for path in made if path.stat().st_ctime > began and not (path / "cgroup.procs").read_text()] == []
