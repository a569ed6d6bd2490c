"""Overlays against qemu-img, the reference for the format."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox import disk
from perilune.sandbox.errors import SnapshotCorrupt

needs_qemu = pytest.mark.skipif(not shutil.which("qemu-img"), reason="qemu-img is not installed (qemu-utils)")


def _base(folder: Path, size: int = 4 << 20) -> Path:
    base = folder / "base.raw"
    base.write_bytes(bytes(range(256)) * (size // 256))
    return base


@needs_qemu
@given(st.integers(1, 1 << 42).map(lambda n: n // 512 * 512 + 512))
@settings(max_examples=8, deadline=None)
def test_qemu_finds_our_overlays_sound(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    folder = tmp_path_factory.mktemp("overlay")
    disk.overlay(folder / "top.qcow2", _base(folder), size)
    done = subprocess.run(["qemu-img", "check", "--output=json", str(folder / "top.qcow2")], capture_output=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and not report.get("corruptions") and not report.get("leaks")
    assert disk.header(folder / "top.qcow2") == disk.Header(size, folder / "base.raw")


@needs_qemu
def test_a_flattened_chain_shows_the_same_bytes(tmp_path: Path) -> None:
    below = _base(tmp_path)
    for level in range(4):
        top = tmp_path / f"{level}.qcow2"
        disk.overlay(top, below, 4 << 20)
        subprocess.run(
            ["qemu-io", "-f", "qcow2", "-c", f"write -P {level + 1} {level * 300000 // 512 * 512} 400k", str(top)],
            check=True,
            capture_output=True,
            cwd=tmp_path,
        )
        below = top
    assert [file.name for file in disk.chain(below)] == ["3.qcow2", "2.qcow2", "1.qcow2", "0.qcow2", "base.raw"]
    disk.flatten(below, tmp_path / "flat.qcow2")
    assert [file.name for file in disk.chain(tmp_path / "flat.qcow2")] == ["flat.qcow2", "base.raw"]
    subprocess.run(["qemu-img", "compare", str(below), str(tmp_path / "flat.qcow2")], check=True, capture_output=True)


@needs_qemu
def test_a_layer_is_moved_onto_what_its_chain_shows(tmp_path: Path) -> None:
    below = _base(tmp_path)
    for level in range(3):
        disk.overlay(tmp_path / f"{level}.qcow2", below, 4 << 20)
        below = tmp_path / f"{level}.qcow2"
        write = f"write -P {level + 1} {level * 64}k 100k"
        subprocess.run(
            ["qemu-io", "-f", "qcow2", "-c", write, str(below)], check=True, capture_output=True, cwd=tmp_path
        )
    shown = tmp_path / "shown.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(below), str(shown)], check=True)
    disk.flatten(tmp_path / "1.qcow2", tmp_path / "a-rather-long-name-flat.qcow2")
    disk.rebase(below, tmp_path / "a-rather-long-name-flat.qcow2")
    names = ["2.qcow2", "a-rather-long-name-flat.qcow2", "base.raw"]
    assert [file.name for file in disk.chain(below)] == names
    compare = ["qemu-img", "compare", "-f", "qcow2", "-F", "raw", str(below), str(shown)]
    subprocess.run(compare, check=True, capture_output=True)


def test_a_file_that_is_no_layer_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.qcow2").write_bytes(b"hello" * 100)
    with pytest.raises(SnapshotCorrupt, match=r"x\.qcow2 is not a qcow2"):
        disk.chain(tmp_path / "x.qcow2")
    with pytest.raises(SnapshotCorrupt, match=r"gone\.qcow2"):
        disk.chain(tmp_path / "gone.qcow2")
