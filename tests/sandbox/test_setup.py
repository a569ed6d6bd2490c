"""What a host needs, told and fetched: the doctor's commands, and a package manager played by scripts."""

import gzip
import os
from pathlib import Path

import pytest

from perilune.sandbox import setup
from perilune.sandbox.doctor import examine
from perilune.sandbox.errors import SetupMissing
from perilune.sandbox.images import ext4
from perilune.sandbox.vmm import accel

PROGRAMS = {
    "apt-cache": 'echo "  Depends: linux-image-6.1.0-cloud-amd64"',
    "apt-get": "touch linux-image-6.1.0_amd64.deb",
    "dpkg-deb": """mkdir -p tree/boot tree/lib/modules/6.1.0; head -c 514 /dev/zero > tree/boot/vmlinuz-6.1.0
printf HdrS >> tree/boot/vmlinuz-6.1.0; for m in a b c; do echo $m > tree/lib/modules/6.1.0/$m.ko; done""",
    "depmod": "true",
    "modprobe": """for m in a b c; do echo "insmod $2/lib/modules/6.1.0/$m.ko"; done""",
}


def _play(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name, script in {**PROGRAMS, **changed}.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_package_managers_kernel_is_unpacked_and_its_modules_load_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _play(tmp_path, monkeypatch)
    guest = setup.build(tmp_path / "home", asked="tcg")
    assert guest.machine == "pc" and guest.kernel.name == "vmlinuz"
    modules = [path.name for path in setup._ordered_modules(tmp_path / "home" / "guest" / "modules")]
    assert modules == ["000-a.ko", "001-b.ko", "002-c.ko"]
    archive = gzip.decompress(guest.initrd.read_bytes())
    assert archive.index(b"/modules/000-a.ko\n/modules/001-b.ko\n/modules/002-c.ko\n") and b"TRAILER!!!" in archive
    assert setup.load(tmp_path / "home") == guest


def test_a_package_manager_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(tmp_path, monkeypatch, **{"apt-cache": "true"})
    with pytest.raises(SetupMissing, match="run apt-get update"):
        setup.build(tmp_path / "home")
    _play(tmp_path, monkeypatch, **{"apt-get": "echo E: no network >&2; exit 100"})
    with pytest.raises(SetupMissing, match=r"apt-get download .* failed: E: no network"):
        setup.build(tmp_path / "home")
    monkeypatch.setattr(setup, "Path", lambda _: tmp_path / "nowhere")
    with pytest.raises(SetupMissing, match="apt-get install linux-source"):
        setup.source_kernel(tmp_path / "home", 1)


def test_the_doctor_names_the_command_for_all_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(accel, "probe", lambda: accel.Probe("absent", 0.0, "/dev/kvm: absent"))
    ext4.mountable.cache_clear()
    found = {line.what: line for line in examine(tmp_path / "home")}
    ext4.mountable.cache_clear()
    packages = {
        "QEMU": "qemu-system-x86", "qemu-img": "qemu-utils", "mke2fs": "e2fsprogs", "cc": "gcc libc6-dev",
        "nft": "nftables", "ip": "iproute2", "skopeo": "skopeo", "debootstrap": "debootstrap", "bwrap": "bubblewrap",
    }  # fmt: skip
    assert {name: found[name].fix for name in packages} == {n: f"apt-get install {p}" for n, p in packages.items()}
    assert found["guest"].fix == "perilune sandbox setup" and "host with KVM" in found["KVM"].fix
    assert all(line.good or line.fix for line in found.values())
