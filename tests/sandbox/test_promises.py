"""What docs/sandbox.md promises of a guest and no other test holds it to: it is a real machine, it reboots, gives
memory back, and reaches nobody that it may not."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sandbox.served import certificate

from perilune.sandbox import Network, Runtime, Sandbox, SandboxError, egress, memory
from perilune.sandbox.errors import GuestPanicked
from perilune.sandbox.http.metrics import usage
from perilune.sandbox.images import ext4
from perilune.sandbox.memory import PAGE
from perilune.sandbox.network import UPLINK

CONTAINER = """
mkdir -p /tmp/c && mount -t tmpfs none /tmp/c && cd /tmp/c && mkdir low up work root disk && echo below > low/file
mount -t overlay none -o lowerdir=low,upperdir=up,workdir=work root && echo above > root/other
cp -a /bin/busybox root/ && mount -o loop /root/image disk && echo disk > disk/x && cat disk/x
busybox unshare -m -u -i -n -p -f busybox chroot root /busybox sh -c \
    'hostname inner; hostname; /busybox cat file other; echo $$'
hostname
"""


def test_inside_root_runs_containers(runtime: Runtime, tmp_path: Path) -> None:
    ext4.make(tmp_path / "image", 2)
    with Sandbox.create(runtime=runtime) as box:
        if not box.files.exists("/bin/busybox"):
            pytest.skip("the tiny image has no busybox (busybox-static is not installed)")
        box.copy_in(tmp_path / "image", "/root/image", "root")
        result = box.commands.run(CONTAINER, "root", timeout=120)
        assert result.stdout.split() == ["disk", "inner", "below", "above", "1", box.id], result.stderr
        box.pause()
        box.resume()
        assert box.commands.run("cat /tmp/c/root/other /tmp/c/disk/x", "root").stdout == "above\ndisk\n"


def test_a_full_pause_can_be_rebooted(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        before = box.commands.run(
            "cat /proc/sys/kernel/random/boot_id; echo disk > /root/x; echo ram > /dev/shm/x", "root"
        )
        sleeper = box.commands.start("sleep 1000")
        box.commands.run("sync", "root")
        box.pause()
        box.resume(reboot=True)
        after = box.commands.run("cat /proc/sys/kernel/random/boot_id /root/x; ls /dev/shm", "root").stdout.split()
        assert after[0] != before.stdout.strip() and after[1:] == ["disk"]
        with pytest.raises(SandboxError, match="rebooted"):
            sleeper.wait(5)


def test_a_timeout_may_keep_only_files(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime, timeout=None, pause_mode="disk") as box:
        box.commands.run("echo disk > /root/x; echo ram > /dev/shm/x; sync", "root")
        box.set_timeout(0.1)
        until = time.monotonic() + 30
        while box.record.phase != "paused" and time.monotonic() < until:
            time.sleep(0.1)
        assert runtime.store.read(box.record.snapshot).mode == "disk"
        box.resume()
        assert box.commands.run("cat /root/x; ls /dev/shm", "root").stdout == "disk\n"


def test_a_deep_chain_becomes_short_and_shows_the_same(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        for i in range(11):
            box.files.write(f"/root/{i}", str(i), "root")
            box.pause()
            runtime.upkeep.settle()
            box.resume()
        box.pause()
        runtime.upkeep.settle()
        assert len(runtime.store.read(box.record.snapshot).layers) <= 9
        box.resume()
        box.commands.run("echo 3 > /proc/sys/vm/drop_caches", "root")
        assert box.commands.run("cat $(seq -f /root/%g 0 10)", "root").stdout == "".join(map(str, range(11)))


def test_an_agent_that_dies_is_a_panic_and_neighbours_go_on(runtime: Runtime) -> None:
    """Process 1 is the agent: whatever ends it ends the guest, in a typed way."""
    overwrite = "at=$((0x$(head -1 /proc/1/maps | cut -d- -f1))); busybox dd if=/dev/zero of=/proc/1/mem bs=4096 \
        seek=$((at / 4096)) count=64 conv=notrunc"
    with Sandbox.create(runtime=runtime) as box, Sandbox.create(runtime=runtime) as neighbour:
        assert box.commands.run("kill -9 1; echo alive", "root").stdout == "alive\n"
        with pytest.raises(GuestPanicked):
            box.commands.run(overwrite.replace("cut -d- -f1", "sed s/-.*//"), "root", timeout=20)
            for _ in range(100):
                box.commands.run("true", timeout=5)
        assert neighbour.commands.run("echo unharmed").stdout == "unharmed\n"


def test_memory_that_is_freed_inside_is_given_back(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        pid = box.live.machine.pid
        box.commands.run("mount -o remount,size=100% /dev/shm; head -c 80M /dev/urandom > /dev/shm/x", "root")
        full = usage(pid)["memory"]
        assert full > 80 << 20
        box.commands.run("rm /dev/shm/x", "root")
        until = time.monotonic() + 60
        while usage(pid)["memory"] > full - (50 << 20) and time.monotonic() < until:
            time.sleep(0.5)
        assert usage(pid)["memory"] <= full - (50 << 20)


def test_swapped_pages_are_the_guests_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """u64 a page: bit 63 present, 62 swapped, 61 of the file."""
    flags = np.array([0, 1 << 63, 1 << 62, (1 << 63) | (1 << 61), (1 << 62) | (1 << 61), 1 << 61], np.uint64)
    (tmp_path / "pagemap").write_bytes(flags.tobytes())
    monkeypatch.setattr(memory, "Path", lambda _: tmp_path / "pagemap")
    runs = memory._pagemap(memory.Mapping(1, 0, len(flags) * PAGE))
    assert [page for start, count in runs.tolist() for page in range(start, start + count)] == [1, 2, 4]


# ---- networks ----


def _networked(runtime: Runtime, network: Network) -> Sandbox:
    if not Path("/dev/net/tun").exists():
        pytest.skip("no /dev/net/tun on this host")
    try:
        return Sandbox.create(runtime=runtime, network=network)
    except SandboxError as error:
        pytest.skip(f"no network namespaces on this host: {error}")


def test_there_is_no_network_unless_asked(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        up = "for i in /sys/class/net/*; do echo ${i##*/} $(cat $i/operstate); done"
        assert "up" not in box.commands.run(up).stdout.split()
        assert "unreachable" in box.commands.run("exec 3<>/dev/tcp/1.1.1.1/80").stderr


def test_guests_do_not_reach_each_other_nor_the_hosts_loopback(runtime: Runtime) -> None:
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(_networked(runtime, Network(True)))
        other = stack.enter_context(_networked(runtime, Network(True)))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        inner = str(UPLINK[4 * other.record.slot + 2])
        gate = str(UPLINK[4 * one.record.slot + 1])
        port = listener.getsockname()[1]
        for address, number in ((inner, 22), (gate, port), ("169.254.77.1", port), ("169.254.77.1", 22)):
            process = one.commands.start(f"exec 3<>/dev/tcp/{address}/{number} && echo reached")
            with contextlib.suppress(SandboxError):  # dropped: neither open nor refused
                assert "reached" not in process.wait(1.5).stdout
            process.kill()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The internet, as far as egress sees it: every name resolves, and one server answers for all, plain and by TLS."""
    asked: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pem = certificate(tmp_path, "good.test")
    context.load_cert_chain(pem, pem)
    with contextlib.ExitStack() as stack:
        plain, secure = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        ports = {80: plain.getsockname()[1], 443: secure.getsockname()[1]}
        connect = socket.create_connection
        for listener, tls in ((plain, None), (secure, context)):
            threading.Thread(target=partial(_answer, listener, tls), daemon=True).start()

        def to_us(where: tuple[str, int], timeout: float) -> socket.socket:
            return connect(("127.0.0.1", ports[where[1]]), timeout)

        monkeypatch.setattr(egress, "resolve", lambda name: asked.append(name) or "192.0.2.7")
        monkeypatch.setattr(egress.socket, "create_connection", to_us)
        yield asked


def _answer(listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            with contextlib.suppress(OSError), tls.wrap_socket(client, server_side=True) if tls else client as peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello from elsewhere\n")


def test_domains_are_let_through_by_the_name_that_is_asked_for(runtime: Runtime, elsewhere: list[str]) -> None:
    with _networked(runtime, Network(False, ["good.test"])) as box:
        ask = "exec 3<>/dev/tcp/203.0.113.9/80; printf 'GET / HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n' >&3; cat <&3"
        assert "hello from elsewhere" in box.commands.run(ask.replace("{}", "good.test"), timeout=20).stdout
        assert box.commands.run(ask.replace("{}", "bad.test"), timeout=20).stdout == ""
        if box.files.exists("/bin/openssl"):
            call = "echo GET | openssl s_client -quiet -connect 203.0.113.9:443 -servername {} 2>/dev/null"
            assert "hello from elsewhere" in box.commands.run(call.replace("{}", "good.test"), timeout=20).stdout
            assert box.commands.run(call.replace("{}", "bad.test"), timeout=20).stdout == ""
        assert set(elsewhere) == {"good.test"}
