"""Machines that are forked from one that has run (vmm/stem.c): each is a machine of its own, whatever becomes of the
others."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perilune.sandbox import Runtime, Sandbox
from perilune.sandbox.live import Spare
from perilune.sandbox.vmm.child import started_at
from perilune.sandbox.vmm.qemu import Jail, Qemu

OWNER = """
import sys, time
from pathlib import Path
from perilune.sandbox import Guard, Runtime, Sandbox
rt = Runtime(Path(sys.argv[1]), Guard(disk_floor_mb=64))
rt.pool.want(rt.resolve("base"), 1)
assert rt.pool.ready()
print(rt.pool.stem(rt.resolve("base")).machine.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def stem(runtime: Runtime) -> Spare:
    """What machines of the template are forked from."""
    Sandbox.create(runtime=runtime).kill()
    assert runtime.pool.ready()
    found = runtime.pool.stem(runtime.resolve("base"))
    assert found
    return found


def test_what_is_forked_is_like_its_stem_and_shares_nothing_that_it_writes(runtime: Runtime, stem: Spare) -> None:
    def fds(pid: int) -> set[str]:
        links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH115, PTH208
        return {link for link in links if link.startswith(("/", "socket:")) and not link.startswith("/dev/")}

    with Sandbox.create(runtime=runtime) as one, Sandbox.create(runtime=runtime) as other:
        pids = [stem.machine.pid, one.record.pid, other.record.pid]
        assert len(set(pids)) == 3
        shared = {Path(link).name for link in fds(pids[1]) & fds(pids[2])}
        template = runtime.resolve("base")
        assert shared <= {template.base, stem.top.name if stem.top else "", *(name for name, _ in template.layers)}
        for i, box in enumerate((one, other)):
            box.files.write("/root/own", f"{i}" * 100_000)
            box.files.write("/dev/shm/own", f"{i}" * 100_000)
        for i, box in enumerate((one, other)):
            assert box.files.read_text("/root/own") == box.files.read_text("/dev/shm/own") == f"{i}" * 100_000
        other.kill()
        assert one.commands.run("cat /root/own | wc -c").stdout.strip() == "100000"
    with Sandbox.create(runtime=runtime) as later:
        assert not later.files.exists("/root/own") and not later.files.exists("/dev/shm/own")


@pytest.mark.usefixtures("stem")
def test_many_are_forked_at_once(runtime: Runtime) -> None:
    with ThreadPoolExecutor(8) as threads:
        boxes = list(threads.map(lambda _: Sandbox.create(runtime=runtime), range(12)))
        said = list(threads.map(lambda box: box.commands.run("hostname; echo $((6 * 7))").stdout.split(), boxes))
        assert said == [[box.id[:60], "42"] for box in boxes]
        list(threads.map(Sandbox.kill, boxes))


def test_a_running_guest_is_forked_where_it_stands(runtime: Runtime) -> None:
    box = Sandbox.create(runtime=runtime)
    counting = box.commands.start("for i in $(seq 100000); do echo $i > /dev/shm/n; sleep 0.02; done")
    while not box.files.exists("/dev/shm/n"):
        time.sleep(0.05)
    box.files.write("/root/own", "before")
    snapshots = set(runtime.store.ids())
    made = [child for child in box.fork(3) if isinstance(child, Sandbox)]
    assert len(made) == 3 and set(runtime.store.ids()) == snapshots  # by way of no snapshot
    box.files.write("/root/own", "after")
    for child in made:
        assert counting.pid in [pid for pid, _ in child.commands.list()]
        assert child.files.read_text("/root/own") == "before"
        first = int(child.files.read_text("/dev/shm/n") or 0)
        time.sleep(0.3)
        assert int(child.files.read_text("/dev/shm/n") or first + 1) > first
    made[0].pause()
    box.kill()
    runtime.upkeep.settle()
    runtime.upkeep.collect(0)  # what the source sealed is below its children still
    made[0].resume()
    (grandchild,) = made[0].fork()
    assert isinstance(grandchild, Sandbox) and grandchild.files.read_text("/root/own") == "before"
    for child in (*made, grandchild):
        child.kill()


def test_a_killed_stem_is_replaced_and_its_children_live(runtime: Runtime, stem: Spare) -> None:
    with Sandbox.create(runtime=runtime) as child:
        os.kill(stem.machine.pid, signal.SIGKILL)
        with Sandbox.create(runtime=runtime) as spawned:
            assert spawned.commands.run("true").exit_code == 0
        assert runtime.pool.ready()
        again = runtime.pool.stem(runtime.resolve("base"))
        assert again and again.machine.pid != stem.machine.pid
        child.files.write("/root/kept", "kept")
        child.pause()
        runtime.upkeep.collect(0)  # the dead stem's layer is below the child's
        child.resume()
        assert child.files.read_text("/root/kept") == "kept"


def test_a_stem_ends_with_its_owner(runtime: Runtime) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(runtime.home)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 10
    while started_at(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not started_at(pid)
    runtime.upkeep.collect(0)  # ends its spare and removes the folders of both


def test_only_emulated_machines_outside_a_jail_are_forked() -> None:
    assert Qemu().forks
    assert not Qemu(accelerator="kvm").forks and not Qemu(jail=Jail("nobody", 65534, 65534)).forks
