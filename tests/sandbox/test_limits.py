"""Rates of the disk: the kernel's cgroups where they can be had, version 1 as it is here, version 2 by its files."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.sandbox import Rates, Runtime, Sandbox, limits
from perilune.sandbox.doctor import examine
from perilune.sandbox.limits import Group

SIZE, RATE = 4 << 20, 4 << 20


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like cgroup version 2 with all controllers."""
    (tmp_path / "perilune").mkdir()
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids")
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    limits.version.cache_clear()
    assert limits.version() == 2
    (tmp_path / "perilune" / "cgroup.subtree_control").write_text("cpu io memory pids")  # as the kernel answers "+io"
    yield tmp_path
    limits.version.cache_clear()


def test_version_2_is_asked_in_its_words(unified: Path) -> None:
    disk = limits.device(Path.home())
    if not disk:
        pytest.skip("the home lies on no block device")
    assert limits.io(Path.home()) == "io.max"
    group = Group("one", vcpus=2, memory_mb=100)
    group.limit_io(Path.home(), 0, 1 << 20, 0)
    folder = unified / "perilune" / "one"
    assert (folder / "io.max").read_text() == f"{disk} rbps=1048576 wbps=1048576 riops=max wiops=max"
    assert (folder / "memory.max").read_text() == str(100 << 20)
    assert (folder / "cpu.max").read_text() == "225000 100000"


def test_where_io_is_not_delegated_it_is_qemus_alone(unified: Path) -> None:
    (unified / "perilune" / "cgroup.subtree_control").write_text("cpu memory pids")
    assert limits.io(Path.home()) == ""
    Group("one").limit_io(Path.home(), 0, 1 << 20, 0)
    assert not (unified / "perilune" / "one" / "io.max").exists()


def test_the_kernel_holds_a_process_to_its_rate(tmp_path: Path) -> None:
    if not limits.io(tmp_path):
        pytest.skip("this host's cgroups limit no disk here")
    (tmp_path / "data").write_bytes(os.urandom(SIZE))
    group = Group("rate-test")
    command = ["dd", f"if={tmp_path / 'data'}", "of=/dev/null", "bs=256k", "iflag=direct"]
    try:
        reading = subprocess.Popen(["sh", "-c", 'read x; exec "$@"', "sh", *command], stdin=subprocess.PIPE, stderr=-3)
        group.limit_io(tmp_path, reading.pid, RATE, 0)
        began = time.monotonic()
        reading.communicate(b"\n")
        assert reading.returncode == 0 and time.monotonic() - began > 0.6 * SIZE / RATE
    finally:
        group.remove()
    assert not any((limits.ROOT / part / limits.NAME / "rate-test").exists() for part in ("blkio", "memory", ""))


def test_a_sandboxs_rates_are_the_kernels_and_qemus(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime, rates=Rates(8 << 20, 2000)) as box:
        live = box.live
        asked = live.machine.qmp("qom-get", path="/objects/io", property="limits")
        assert (asked["bps-total"], asked["iops-total"]) == (8 << 20, 2000)
        if limits.io(runtime.home) == "blkio.throttle":
            folder = live.group.folders["blkio"]
            assert (folder / "blkio.throttle.write_bps_device").read_text().split()[1] == str(8 << 20)
            assert str(live.machine.pid) in (folder / "cgroup.procs").read_text().split()
        elif limits.io(runtime.home) == "io.max":
            assert f"wbps={8 << 20}" in (live.group.folders["memory"] / "io.max").read_text()
        began = time.monotonic()
        box.commands.run("dd if=/dev/zero of=/root/x bs=1M count=24 conv=fsync", "root")
        assert time.monotonic() - began > 1.5


def test_a_machines_folder_goes_when_its_cgroup_has_gone(unified: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "one").mkdir(parents=True)
    (tmp_path / "run" / "one" / "owner").write_text("1 1")
    group = Group("one")
    group.make()
    (unified / "perilune" / "one" / "busy").touch()  # the kernel is not done with it
    group.dissolve(tmp_path / "run" / "one")
    assert (tmp_path / "run" / "one").is_dir() and not (tmp_path / "run" / "one" / "owner").exists()
    (unified / "perilune" / "one" / "busy").unlink()
    group.dissolve(tmp_path / "run" / "one")
    assert not (tmp_path / "run" / "one").exists() and not (unified / "perilune" / "one").exists()


def test_the_doctor_says_who_limits_the_disk(home: Path) -> None:
    (line,) = [found.detail for found in examine(home) if found.what == "disk rates"]
    assert line == (f"the kernel's {limits.io(home)}, and QEMU's own" if limits.io(home) else "QEMU's own")
