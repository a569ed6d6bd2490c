"""What a machine is asked for beyond the usual day: more CPUs, a jail, ready-made spares, a host whose disk fills."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from perilune.sandbox import Guard, Network, Runtime, Sandbox, SandboxError, Shape, diff, memory
from perilune.sandbox.catalogue import Phase
from perilune.sandbox.errors import DiskFull
from perilune.sandbox.launcher import Launcher
from perilune.sandbox.live import Live, Spare
from perilune.sandbox.template import add_template
from perilune.sandbox.vmm.machine import QemuMachine


def test_two_cpus_survive_a_pause(runtime: Runtime, root_image: Path) -> None:
    add_template(runtime, root_image, ["pair"], Shape(2, 256, 512))
    with Sandbox.create("pair", runtime=runtime) as box:
        spin = "for i in 1 2; do (while :; do :; done) & done; sleep 0.5; nproc; kill $(jobs -p)"
        assert box.commands.run(spin).stdout == "2\n"
        box.pause()
        box.resume()
        assert box.commands.run(spin).stdout == "2\n"
        (child,) = box.fork()
        assert isinstance(child, Sandbox) and child.commands.run("nproc").stdout == "2\n"
        child.kill()
    runtime.delete_snapshot("pair")


def test_traffic_wakes_a_paused_sandbox_that_wants_it(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime, auto_resume=True) as box:
        box.files.write("/dev/shm/kept", "in memory")
        box.pause()
        assert box.record.phase is Phase.PAUSED
        assert box.files.read_text("/dev/shm/kept") == "in memory"
        assert box.record.phase is Phase.RUNNING


def test_spares_are_used_and_made_again(runtime: Runtime) -> None:
    template, before = runtime.resolve("base"), _machines(runtime)
    runtime.pool.want(template, 2)
    assert runtime.pool.ready()
    spares = _machines(runtime) - before
    assert len(spares) == 2
    with Sandbox.create(runtime=runtime) as one, Sandbox.create(runtime=runtime) as other:
        assert {one.record.folder, other.record.folder} == spares
        ids = [box.commands.run("hostname; od -An -N8 -tx1 /dev/urandom").stdout for box in (one, other)]
        assert ids[0].startswith(one.id) and len({i.split("\n")[1] for i in ids}) == 2
    runtime.pool.drop(template.id)
    assert _soon(lambda: _machines(runtime) == before)
    runtime.pool.follow = 1
    try:
        Sandbox.create(runtime=runtime).kill()
        assert runtime.pool.ready()
        (spare,) = _machines(runtime) - before
        with Sandbox.create(runtime=runtime) as box:
            assert box.record.folder == spare
    finally:
        runtime.pool.follow = 0
        runtime.pool.forget()
    assert _soon(lambda: _machines(runtime) == before)


def test_a_spare_keeps_its_disk_while_it_is_taken(runtime: Runtime) -> None:
    """Between the pool and a record only the machine's folder names its layer, which may be old."""
    template = runtime.resolve("base")
    runtime.pool.want(template, 1)
    assert runtime.pool.ready()
    runtime.upkeep.settle()  # who collects already does not know of it
    for layer in runtime.store.layers.glob("*.qcow2"):
        os.utime(layer, (0, 0))
    spare = runtime.pool.take(template)
    try:
        runtime.upkeep.collect()
        assert spare.top is not None and spare.top.exists()
    finally:
        spare.discard()
        runtime.pool.drop(template.id)


def test_a_fork_that_takes_long_keeps_its_disk(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record names the layer on which children still wait to branch."""
    branch = runtime.launcher.branch

    def beside(_launcher: Launcher, spare: Spare, below: Path) -> Spare:
        os.utime(below, (0, 0))
        runtime.kill(box.id)
        runtime.upkeep.collect()
        return branch(spare, below)

    def full(*_: object) -> Spare:
        raise OSError(28, "No space left on device")

    before = _machines(runtime)
    with Sandbox.create(runtime=runtime) as source:
        monkeypatch.setattr(Launcher, "branch", full)
        (failed,) = source.fork()
        assert isinstance(failed, DiskFull)  # a child's own, not its siblings'
    box = Sandbox.create(runtime=runtime)
    box.files.write("/root/kept", "kept")
    monkeypatch.setattr(Launcher, "branch", beside)
    (child,) = box.fork()
    assert isinstance(child, Sandbox), child
    assert child.files.read_text("/root/kept") == "kept"
    child.kill()
    assert _machines(runtime) == before


def test_what_cannot_be_forked_is_copied_by_way_of_a_snapshot(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _machines(runtime)
    with Sandbox.create(runtime=runtime) as box:
        box.files.write("/dev/shm/own", "kept")
        monkeypatch.setattr(QemuMachine, "forkable", False)
        made = box.fork(3)
        assert [c.files.read_text("/dev/shm/own") for c in made if isinstance(c, Sandbox)] == ["kept"] * 3
        for child in made:
            assert isinstance(child, Sandbox)
            child.kill()
    assert _machines(runtime) == before


def test_a_machine_that_held_a_sibling_takes_a_paused_sandbox(runtime: Runtime, tmp_path: Path) -> None:
    template, before = runtime.resolve("base"), _machines(runtime)
    with Sandbox.create(runtime=runtime) as box:
        counting = box.commands.start("for i in $(seq 100000); do echo $i > /dev/shm/n; sleep 0.02; done")
        box.files.write("/dev/shm/own", os.urandom(3 << 20))
        digest = box.commands.run("sha256sum < /dev/shm/own").stdout
        assert _soon(lambda: box.files.exists("/dev/shm/n"))
        box.pause()
        runtime.pool.want(template, 2)
        assert runtime.pool.ready()
        spares = _machines(runtime) - before
        paused = runtime.store.read(box.record.snapshot)
        spare = runtime.pool.take(paused)
        assert spare.machine.agent_socket.parent.name in spares and spare.snapshot == paused.id
        diff.flatten(runtime.store.memory / paused.base, runtime.store.open_memory(paused), tmp_path / "expected")
        assert _ram(memory.mapping(spare.machine.pid, spare.base)) == (tmp_path / "expected").read_bytes()
        spare.discard()
        box.resume()
        assert box.record.folder in spares
        assert box.commands.run("sha256sum < /dev/shm/own").stdout == digest
        first = int(box.files.read_text("/dev/shm/n") or 0)
        time.sleep(0.5)
        assert int(box.files.read_text("/dev/shm/n") or first + 1) > first
        assert counting.pid in [pid for pid, _ in box.commands.list()]
        for round in range(3):
            box.files.write(f"/root/{round}", "kept")
            box.pause()
            assert runtime.pool.ready()
            box.resume()
        assert box.commands.run("ls /root").stdout.split() == ["0", "1", "2"]
    runtime.pool.drop(template.id)
    assert _soon(lambda: _machines(runtime) == before)


def test_a_machine_that_cannot_take_a_second_guest_is_replaced(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, before = runtime.resolve("base"), _machines(runtime)
    with Sandbox.create(runtime=runtime) as box:
        box.pause()
        runtime.pool.want(template, 1)
        assert runtime.pool.ready()
        (folder,) = _machines(runtime) - before
        monkeypatch.setattr(
            QemuMachine, "_load_again", lambda self, *_: self.qmp("xen-load-devices-state", filename="/dev/null")
        )
        box.resume()
        assert box.record.folder != folder and box.commands.run("true").exit_code == 0
        assert "could not take another" in caplog.text
    runtime.pool.drop(template.id)
    assert _soon(lambda: _machines(runtime) == before)


def _soon(holds: Callable[[], bool]) -> bool:
    """A spare that is being made is ended when it is done."""
    until = time.monotonic() + 20
    while not holds() and time.monotonic() < until:
        time.sleep(0.1)
    return holds()


def _ram(where: memory.Mapping) -> bytes:
    ram = np.zeros(where.size, np.uint8)
    for at in range(0, where.size // memory.PAGE, 1024):
        memory.fetch(where, np.array([[at, 1024]]), int(ram.ctypes.data) + at * memory.PAGE)
    return ram.tobytes()


def test_a_machine_that_lingers_goes_on_and_the_pause_is_whole_without_it(runtime: Runtime) -> None:
    before, runtime.lingering.seconds = _machines(runtime), 60.0
    try:
        with Sandbox.create(runtime=runtime) as box:
            counting = box.commands.start("for i in $(seq 100000); do echo $i > /dev/shm/n; sleep 0.02; done")
            while not box.files.exists("/dev/shm/n"):
                time.sleep(0.05)
            folder = box.record.folder
            for i in range(3):
                box.files.write(f"/root/{i}", "kept")
                box.pause()
                box.resume()
            assert box.record.folder == folder and counting.pid in [pid for pid, _ in box.commands.list()]
            box.pause()
            os.kill(int(_lingering(runtime, box.id).machine.pid), signal.SIGKILL)
            box.resume()  # from the pause, although its machine ended
            assert box.record.folder != folder
            first = int(box.files.read_text("/dev/shm/n") or 0)
            time.sleep(0.5)
            assert int(box.files.read_text("/dev/shm/n") or first + 1) > first
            assert [box.files.read_text(f"/root/{i}") for i in range(3)] == ["kept"] * 3
            box.pause()
            assert runtime.lingering.expire(everything=True) == 1
            assert _machines(runtime) == before
            box.resume()
            assert box.commands.run("ls /root").stdout.split() == ["0", "1", "2"]
            box.pause()
        assert _machines(runtime) == before  # killed while it lingered
    finally:
        runtime.lingering.seconds = 0.0


def _lingering(runtime: Runtime, identity: str) -> Live:
    return runtime.lingering._kept[identity][1]


def _machines(runtime: Runtime) -> set[str]:
    """All but those that others are forked from, and what waits without an owner to be collected."""
    assert runtime.pool.ready()
    stems = {stem.machine.agent_socket.parent.name for stem in runtime.pool._stems.values()}
    return {path.name for path in runtime.store.run.iterdir() if (path / "owner").exists()} - stems


def _certificate(folder: Path) -> None:
    """Of "box", valid from half an hour from now for two hours."""
    when = [time.strftime("%y%m%d%H%M%SZ", time.gmtime(time.time() + seconds)) for seconds in (1800, 9000)]
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=d\n[d]\ndatabase=index\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=p\n"
        "[p]\ncommonName=supplied\n"
    )
    (folder / "index").touch()
    (folder / "serial").write_text("01")
    (folder / "req.cnf").write_text("[req]\ndistinguished_name=d\n[d]\n")
    request = [
        "req",
        "-config",
        "req.cnf",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "key",
        "-out",
        "csr",
        "-subj",
        "/CN=box",
    ]
    sign = ["ca", "-batch", "-config", "ca.cnf", "-selfsign", "-keyfile", "key", "-in", "csr", "-out", "cert"]
    for command in (request, [*sign, "-startdate", when[0], "-enddate", when[1]]):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


def test_a_certificate_is_judged_by_the_right_time_after_a_pause(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed on this host")
    _certificate(tmp_path)
    with Sandbox.create(runtime=runtime) as box:
        if not box.files.exists("/bin/openssl"):
            pytest.skip("the tiny image has no openssl")
        for name in ("key", "cert"):
            box.copy_in(tmp_path / name, f"/root/{name}")
        serve = ["openssl", "s_server", "-quiet", "-accept", "4433", "-key", "/root/key", "-cert", "/root/cert"]
        box.commands.start(serve)
        call = "for i in 1 2 3 4 5; do echo | openssl s_client -connect 127.0.0.1:4433 -CAfile /root/cert \
            -verify_return_error 2>&1 | grep -m1 'Verify return code\\|verify error' && break; sleep 0.5; done"
        assert "not yet valid" in box.commands.run(call).stdout
        box.pause()
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
        box.resume()
        assert "Verify return code: 0 (ok)" in box.commands.run(call).stdout


@pytest.fixture
def small_home(runtime: Runtime) -> Iterator[Path]:
    """A home on a file system of 300 MB, away from where pytest removes folders."""
    folder = Path(tempfile.mkdtemp(prefix="perilune-", dir="/var/tmp"))
    disk, place = folder / "disk", folder / "home"
    with disk.open("wb") as file:
        file.truncate(300 << 20)
    subprocess.run(["mke2fs", "-q", "-F", "-m", "0", "-t", "ext4", str(disk)], check=True, capture_output=True)
    place.mkdir()
    if subprocess.run(["mount", "-o", "loop", str(disk), str(place)], capture_output=True).returncode:
        pytest.skip("this host has no loop devices")
    shutil.copytree(runtime.home / "guest", place / "guest")
    yield place
    subprocess.run(["umount", str(place)], check=True)
    shutil.rmtree(folder)


@pytest.mark.soak
def test_a_full_disk_stops_the_guest_until_there_is_room(small_home: Path, root_image: Path) -> None:
    from perilune.sandbox import setup

    setup.build(small_home, small_home / "guest" / setup.load(small_home).kernel.name)
    with Runtime(small_home, Guard(disk_floor_mb=8)) as runtime:
        subprocess.run(["cp", "--sparse=always", str(root_image), str(small_home / "root.raw")], check=True)
        add_template(runtime, small_home / "root.raw", ["base"], Shape(1, 256, 512))
        with Sandbox.create(runtime=runtime) as box, Sandbox.create(runtime=runtime) as neighbour:
            room = os.statvfs(small_home)
            ballast = small_home / "ballast"
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - (12 << 20))
            writer = box.commands.start("dd if=/dev/zero of=/root/fill bs=1M count=60; sync; echo written")
            with pytest.raises(DiskFull, match="stands still"):
                for _ in range(200):
                    box.files.exists("/root/fill")
                    time.sleep(0.1)
            with pytest.raises(DiskFull):
                neighbour.pause()
            assert neighbour.commands.run("echo unharmed").stdout == "unharmed\n"
            ballast.unlink()
            assert writer.wait(60).stdout == "written\n"
            assert box.files.stat("/root/fill").size == 60 << 20
            box.pause()
            box.resume()
            assert box.files.stat("/root/fill").size == 60 << 20


def test_the_host_is_reached_only_at_an_address_that_is_allowed(runtime: Runtime) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("no /dev/net/tun on this host")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port, address = listener.getsockname()[1], _own_address()
        threading.Thread(target=_greet, args=(listener,), daemon=True).start()
        ask = f"exec 3<>/dev/tcp/{address}/{port} && cat <&3"
        try:
            box = stack.enter_context(Sandbox.create(runtime=runtime, network=Network(True, [f"{address}/24"])))
        except SandboxError as error:
            pytest.skip(f"no network namespaces on this host: {error}")
        process = box.commands.start(ask)
        with pytest.raises(SandboxError):  # a range does not open the host itself
            process.wait(1)
        process.kill()
        runtime.set_network(box.id, Network(True, [address]))
        assert box.commands.run(ask, timeout=20).stdout == "hello"
        runtime.set_network(box.id, Network(True))
        process = box.commands.start(ask)
        with pytest.raises(SandboxError):
            process.wait(1)
        other = stack.enter_context(Sandbox.create(runtime=runtime, network=Network(True)))
        process = other.commands.start(ask)
        with pytest.raises(SandboxError):
            process.wait(1)


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address of its own")
        return str(probe.getsockname()[0])


def _greet(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client:
                client.sendall(b"hello")


def test_a_jailed_machine_lives_and_owns_little(home: Path, runtime: Runtime) -> None:
    assert runtime.home == home
    with Runtime(home, Guard(disk_floor_mb=64), jail="nobody") as jailed, Sandbox.create(runtime=jailed) as box:
        status = Path(f"/proc/{box.live.machine.pid}/status").read_text()
        assert "Uid:\t65534" in status and "Seccomp:\t2" in status and "CapEff:\t0000000000000000" in status
        ours, its = (os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", box.live.machine.pid))  # noqa: PTH115
        assert ours != its
        box.files.write("/root/x", "kept")
        box.pause()
        box.resume()
        (child,) = box.fork()
        assert isinstance(child, Sandbox) and child.files.read_text("/root/x") == "kept"
        child.kill()


def test_what_a_guest_holds_is_bounded(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.sandbox.vmm.machine._MOST_LOG", 4096)
    with Sandbox.create(runtime=runtime, processes=40) as box:
        forks = "for i in $(seq 100); do sleep 100 & done"
        assert "fork" in box.commands.run(forks).stderr and box.files.exists("/etc/passwd")
        damon = "/sys/module/damon_reclaim/parameters/enabled"
        if box.files.exists(damon, "root"):  # the guest kernel has it
            assert box.files.read_text(damon, "root").strip() == "Y"
    with Sandbox.create(runtime=runtime) as box:
        serial = runtime.store.run / box.record.folder / "serial.log"
        box.commands.run("seq 5000 > /dev/ttyS0", "root")
        assert _soon(lambda: serial.stat().st_size < 4096)


@pytest.mark.slow
def test_a_memory_that_grew_large_becomes_a_base(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        box.commands.run("head -c 80M /dev/urandom > /dev/shm/large; sha256sum < /dev/shm/large > /root/sum", "root")
        box.pause()
        runtime.upkeep.settle()
        paused = runtime.store.read(box.record.snapshot)
        assert paused.diff is None and paused.base == f"{paused.id}.base"  # it is not carried along every time
        box.resume()
        same = box.commands.run('test "$(sha256sum < /dev/shm/large)" = "$(cat /root/sum)"', "root")
        assert same.exit_code == 0 and box.files.read("/root/sum", "root")
