"""What can go wrong does: servers and machines are killed, guests misbehave, disks fill. Neighbours must not notice."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from perilune.sandbox import Guard, Network, Runtime, Sandbox, SandboxError, limits
from perilune.sandbox.catalogue import Phase
from perilune.sandbox.errors import Conflict, DiskFull, GuestError, OutOfCapacity
from perilune.sandbox.network import namespaces, prefix
from perilune.sandbox.request import Request

SERVER = """
import sys, time
from pathlib import Path
from perilune.sandbox import Runtime, Sandbox, Guard
rt = Runtime(Path(sys.argv[1]), Guard(disk_floor_mb=64))
box = Sandbox.create(runtime=rt, timeout=None)
box.commands.start("for i in $(seq 100000); do echo $i > /tmp/count; sleep 0.05; done")
print(box.id, flush=True)
for i in range(1000):
    box.files.write(f"/root/{i}", "x")
    print(i, flush=True)
    if sys.argv[2] == "pause":
        box.pause(); box.resume(None)
    else:
        time.sleep(0.1)
"""


def _server(home: Path, what: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-c", SERVER, str(home), what]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout
    return server, server.stdout.readline().strip()


def _count(box: Sandbox) -> int:
    """How far the loop inside is (the file is empty for a moment at each step)."""
    for _ in range(200):
        with contextlib.suppress(GuestError, ValueError):
            return int(box.files.read_text("/tmp/count"))
        time.sleep(0.05)
    raise AssertionError("the loop inside does not run")


def test_a_running_sandbox_outlives_its_server(runtime: Runtime) -> None:
    server, identity = _server(runtime.home, "run")
    with pytest.raises(Conflict, match="driven by process"):
        runtime.live(identity)
    server.kill()
    server.communicate()
    box = Sandbox.connect(identity, None, runtime)
    first = _count(box)
    time.sleep(0.5)
    assert _count(box) > first
    assert any("count" in command.argv[-1] for _, command in box.commands.list())
    box.files.write("/root/mark", "before")
    box.snapshot("of-an-adopted-one", mode="disk")
    box.files.write("/root/mark", "after")
    box.commands.run("sync", "root")
    with Sandbox.create("of-an-adopted-one", runtime=runtime) as copy:
        assert copy.files.read_text("/root/mark") == "before"
    runtime.delete_snapshot("of-an-adopted-one")
    box.kill()


def test_a_machine_of_nobody_is_ended(runtime: Runtime) -> None:
    template = runtime.resolve("base")
    spare = runtime.launcher.spawn(runtime.store.memory / template.base, template.shape)
    folder = spare.machine.agent_socket.parent
    runtime.upkeep.recover()
    assert spare.machine.state == "waiting"
    (folder / "owner").write_text("1 1")  # a process that ended long ago had its id
    runtime.upkeep.recover()
    assert spare.machine.state == "gone" and not folder.exists()
    spare.discard()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_a_server_killed_at_any_instant_loses_nothing(runtime: Runtime, seed: int) -> None:
    ours = {path.name for path in runtime.store.run.iterdir()}
    server, identity = _server(runtime.home, "pause")
    time.sleep(random.Random(seed).uniform(0.5, 3.0))
    server.kill()
    last = int((server.communicate()[0].split() or ["0"])[-1])
    machines = {path.name for path in runtime.store.run.iterdir()} - ours
    runtime.upkeep.recover()
    record = runtime.catalogue.get(identity)
    box = Sandbox(runtime, identity)
    if record.phase is Phase.LOST:
        box.resume(recover=True)
    else:
        box = Sandbox.connect(identity, None, runtime)
    kept = {int(entry.name) for entry in box.files.list("/root") if entry.name.isdigit()}
    assert set(range(last)) <= kept  # everything that was acknowledged before the last step
    box.kill()
    until = time.monotonic() + 10
    while machines & {path.name for path in runtime.store.run.iterdir()} and time.monotonic() < until:
        time.sleep(0.5)
        runtime.upkeep.collect()
    assert not machines & {path.name for path in runtime.store.run.iterdir()}
    assert not machines & {
        path.name for way in ("", "*/") for path in limits.ROOT.glob(f"{way}{limits.NAME}/*")
    }  # no cgroup stays


@pytest.mark.soak
def test_bombs_stay_inside(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime, processes=200) as box, Sandbox.create(runtime=runtime) as neighbour:
        if not box.files.exists("/sys/fs/cgroup/sandbox/pids.max"):
            pytest.skip("this guest kernel has no process controller (perilune sandbox setup --source)")
        box.commands.start("bomb() { bomb | bomb & }; bomb", user="user").disconnect()
        box.commands.start("x=a; while :; do x=$x$x; done", user="user").disconnect()
        box.commands.start("dd if=/dev/zero of=/home/user/fill bs=1M", user="user").disconnect()
        time.sleep(5)
        assert neighbour.commands.run("echo fine").stdout == "fine\n"
        assert box.files.exists("/etc/passwd")  # the agent has room of its own
        box.pause()
        box.resume()
        assert box.files.exists("/etc/passwd")


def test_a_full_host_refuses_instead_of_dying(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        before = runtime.guard
        try:
            runtime.guard = Guard(disk_floor_mb=1 << 40)
            with pytest.raises(DiskFull, match="are free under"):
                box.pause()
            with pytest.raises(DiskFull):
                box.snapshot("no-room")
            runtime.guard = Guard(most_sandboxes=1, disk_floor_mb=64)
            with pytest.raises(OutOfCapacity, match="limit is 1"):
                Sandbox.create(runtime=runtime)
            runtime.guard = Guard(memory_floor_mb=1 << 40)
            with pytest.raises(OutOfCapacity, match="MiB of memory"):
                box.fork(2)
        finally:
            runtime.guard = before
        assert box.commands.run("echo alive").stdout == "alive\n"


def test_the_clock_is_right_after_an_hour(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox.create(runtime=runtime) as box:
        box.pause()
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
        box.resume()
        assert abs(float(box.commands.run("date +%s").stdout) - (real() / 1e9 + 3600)) < 10


def test_killed_sandboxes_fail_typed_while_used(runtime: Runtime) -> None:
    box = Sandbox.create(runtime=runtime)
    process = box.commands.start("sleep 100")
    box.kill()
    with pytest.raises(SandboxError, match="killed"):
        process.wait(10)


def test_networks_come_and_go(runtime: Runtime) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("no /dev/net/tun on this host")
    try:
        box = Sandbox.create(runtime=runtime, network=Network(internet=True))
    except SandboxError as error:
        pytest.skip(f"no network namespaces on this host: {error}")
    ours = prefix(str(runtime.home))
    assert len(namespaces(ours)) == 1
    probe = "exec 3<>/dev/tcp/%s/1 2>/dev/null && echo open || echo closed"
    for address in ("10.213.0.5", "192.168.0.1", "169.254.169.254"):
        process = box.commands.start(probe % address)
        with pytest.raises(SandboxError):  # dropped: neither open nor refused
            process.wait(1.5)
        process.kill()
    box.pause()
    assert namespaces(ours) == []
    box.resume()
    assert len(namespaces(ours)) == 1
    box.kill()
    assert namespaces(ours) == []


@pytest.mark.soak
def test_two_hundred_leave_nothing(runtime: Runtime) -> None:
    def machines() -> int:
        return sum(1 for p in Path("/proc").iterdir() if p.name.isdigit() and _is_ours(p, runtime.home))

    def left() -> tuple[int, ...]:
        mounts, spaces = Path("/proc/mounts").read_text().count("\n"), namespaces(prefix(str(runtime.home)))
        files = [*runtime.store.run.iterdir(), *runtime.store.layers.iterdir(), *runtime.store.snapshots.iterdir()]
        return machines(), len(files), mounts, len(spaces)

    Sandbox.create(runtime=runtime).kill()  # the machine that others are forked from stays
    runtime.pool.ready()
    runtime.upkeep.collect(0)
    before = left()
    tap = Path("/dev/net/tun").exists()
    for i in range(40):
        made = runtime.create_many(Request(network=Network(tap and i % 10 == 0)), 5)
        for one in made:
            assert not isinstance(one, SandboxError)
            runtime.kill(one.id)
    runtime.upkeep.settle()
    runtime.upkeep.collect(0)
    until = time.monotonic() + 10
    while left() != before and time.monotonic() < until:
        time.sleep(0.2)
    assert left() == before


def _is_ours(process: Path, home: Path) -> bool:
    try:
        return (
            str(home).encode() in (process / "cmdline").read_bytes() and b"qemu" in (process / "cmdline").read_bytes()
        )
    except OSError:
        return False


@pytest.mark.soak
def test_fifty_cycles_lose_nothing(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        took = []
        for i in range(50):
            box.files.write(f"/root/{i}", str(i))
            box.files.write(f"/dev/shm/{i}", str(i))
            began = time.perf_counter()
            box.pause()
            box.resume()
            took.append(time.perf_counter() - began)
        for place in ("/root", "/dev/shm"):
            assert sorted(int(e.name) for e in box.files.list(place) if e.name.isdigit()) == list(range(50))
        assert sorted(took[-10:])[5] < 3 * sorted(took[:10])[5]


def test_signals_reach_the_group(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        process = box.commands.start("trap 'echo term; exit 5' TERM; touch /tmp/set; sleep 100 & wait")
        while not box.files.exists("/tmp/set"):
            time.sleep(0.05)
        process.kill(signal.SIGTERM)
        result = process.wait(20)
        assert (result.stdout, result.exit_code) == ("term\n", 5)


KILLER = """
import sys
from pathlib import Path
from perilune.sandbox import Runtime
from perilune.sandbox.errors import Conflict
other = Runtime(Path(sys.argv[1]))
for act in (other.kill, other.pause, other.resume, other.fork):
    try:
        act(sys.argv[2])
    except Conflict as error:
        print(error)
other.upkeep.collect(0)
other.release()
"""


def test_another_live_processs_sandbox_is_not_touched(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        box.files.write("/dev/shm/kept", "yes")
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        command = [sys.executable, "-c", KILLER, str(runtime.home), box.id]
        said = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
        assert (
            said.splitlines()
            == [f"sandbox {box.id} is driven by process {os.getpid()}; ask that one (its HTTP API)"] * 4
        )
        assert box.files.read_text("/dev/shm/kept") == "yes"
        box.pause()
        box.resume()
        assert box.files.read_text("/dev/shm/kept") == "yes"


@pytest.mark.soak  # beside other machines a guest that floods its agent takes up to a minute to answer
def test_output_that_nobody_hears_does_not_hold_up_a_pause(runtime: Runtime) -> None:
    """A fork's commands have no listener here: the thread that must hear the pause's answer grants it."""
    with Sandbox.create(runtime=runtime) as box:
        box.commands.start("while :; do echo chatter chatter chatter; done").disconnect()
        heard: list[str] = []
        box.files.watch("/tmp", lambda change: heard.append(change.name))
        box.commands.start("for i in $(seq 100000); do echo $i > /tmp/$((i % 7)); done").disconnect()
        (child,) = box.fork()
        assert isinstance(child, Sandbox)
        with child:
            for one in (box, child) * 2:
                one.pause()
                one.resume()
        before = len(heard)
        while len(heard) == before:  # what was owed at the pause was given: the watch goes on
            time.sleep(0.05)


def test_of_two_processes_one_resumes(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        box.pause()
        record = box.record
        assert runtime.catalogue.claim(replace(record, owner=1), Phase.PAUSED, record.owner)  # the other was faster
        with pytest.raises(Conflict, match="taken by another process"):
            runtime.claim(record, Phase.RESUMING)
        runtime.catalogue.put(
            replace(record, phase=Phase.RESUMING, owner=1, owner_started=1)
        )  # and was killed half-way
        runtime.upkeep.recover()
        assert box.record.phase is Phase.PAUSED
        runtime.catalogue.put(replace(record, phase=Phase.RESUMING, owner=1, owner_started=1))
        box.resume()
        assert box.commands.run("echo on").stdout == "on\n"


def test_two_threads_that_wait_for_a_resume_get_the_same_machine(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime, auto_resume=True) as box:
        for _ in range(3):
            box.pause()
            with ThreadPoolExecutor(4) as threads:
                lives = list(threads.map(lambda _: runtime.live(box.id), range(4)))
            assert len({id(live) for live in lives}) == 1


def test_the_clock_and_the_pool_go_on_after_what_nobody_foresaw(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks, makes = [], []

    def fail(made: list[int]) -> None:
        made.append(1)
        if len(made) < 3:
            raise ValueError("nobody foresaw this")

    monkeypatch.setattr(runtime._clock, "_more", lambda: fail(ticks))
    make = runtime.pool._make
    monkeypatch.setattr(runtime.pool, "_make", lambda snapshot: (fail(makes), make(snapshot)))
    runtime.pool.want(runtime.resolve("base"), 1)
    assert runtime.pool.ready(20) and len(makes) == 3
    until = time.monotonic() + 10
    while len(ticks) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(ticks) >= 4 and caplog.text.count("nobody foresaw this") >= 4
    runtime.pool.drop(runtime.resolve("base").id)
