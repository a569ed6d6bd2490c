"""Private mappings of this very process stand in for guest memory: what is written is found, saved and put back."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox import diff, memory
from perilune.sandbox.errors import SnapshotCorrupt, VmmDied
from perilune.sandbox.memory import PAGE

PAGES = 256


def _guest(base: Path) -> tuple[mmap.mmap, memory.Mapping]:
    with base.open("r+b") as file:
        ram = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    return ram, memory.mapping(os.getpid(), base)


def _base(folder: Path) -> Path:
    base = folder / "ram.base"
    base.write_bytes(np.random.default_rng(0).bytes(PAGES * PAGE))
    return base


@given(st.sets(st.integers(0, PAGES - 1)), st.booleans())
@settings(max_examples=25, deadline=None)
def test_saved_and_restored_memory_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, written: set[int], old_kernel: bool
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    base = _base(folder)
    ram, where = _guest(base)
    for page in written:
        ram[page * PAGE : page * PAGE + 8] = page.to_bytes(8, "little")
    _ = ram[0 : PAGES * PAGE : PAGE]  # reading makes no page the guest's own
    runs = memory._pagemap(where) if old_kernel else memory.diverged(where)
    assert {page for start, count in runs.tolist() for page in range(start, start + count)} == written
    saved = diff.save(where, runs, folder / "diff")
    before = bytes(ram)
    ram.close()
    twin, there = _guest(base)
    stored = diff.read(folder / "diff", saved)
    memory.fill(there, stored.runs, stored.pages)
    assert bytes(twin) == before
    twin.close()
    diff.flatten(base, stored, folder / "flat")
    assert (folder / "flat").read_bytes() == before
    assert base.read_bytes() == np.random.default_rng(0).bytes(PAGES * PAGE)


def test_large_runs_cross_batches(tmp_path: Path) -> None:
    base = tmp_path / "big.base"
    memory.empty(base, 40 << 20)
    ram, where = _guest(base)
    ram[: 30 << 20] = os.urandom(1 << 20) * 30
    saved = diff.save(where, memory.diverged(where), tmp_path / "diff")
    assert diff.read(tmp_path / "diff", saved).raw[-(30 << 20) :].tobytes() == ram[: 30 << 20]
    ram.close()


def test_zero_pages_become_holes_again(tmp_path: Path) -> None:
    base = tmp_path / "hole.base"
    base.write_bytes(b"x" * (64 * PAGE))
    ram, where = _guest(base)
    ram[: 32 * PAGE] = bytes(32 * PAGE)
    saved = diff.save(where, memory.diverged(where), tmp_path / "diff")
    diff.flatten(base, diff.read(tmp_path / "diff", saved), tmp_path / "flat")
    assert (tmp_path / "flat").read_bytes() == bytes(ram)
    assert (tmp_path / "flat").stat().st_blocks * 512 <= 33 * PAGE
    ram.close()


@pytest.mark.parametrize("damage", ["short", "long", "flip", "index"])
def test_any_damage_is_refused(tmp_path: Path, damage: str) -> None:
    base = _base(tmp_path)
    ram, where = _guest(base)
    ram[PAGE : PAGE + 4] = b"okay"
    saved = diff.save(where, memory.diverged(where), tmp_path / "diff")
    ram.close()
    raw = bytearray((tmp_path / "diff").read_bytes())
    if damage == "short":
        raw = raw[:-1]
    elif damage == "long":
        raw += b"\0"
    elif damage == "flip":
        raw[-1] ^= 1
    else:
        raw[16] ^= 1
    (tmp_path / "diff").write_bytes(raw)
    with pytest.raises(SnapshotCorrupt):
        diff.read(tmp_path / "diff", saved)


def test_a_process_that_is_gone_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(VmmDied):
        memory.mapping(2**22 - 1, tmp_path / "nothing")


@given(st.sets(st.integers(0, PAGES - 1)), st.sets(st.integers(0, PAGES - 1)))
@settings(max_examples=25, deadline=None)
def test_a_process_that_held_one_guest_is_made_to_hold_another(
    tmp_path_factory: pytest.TempPathFactory, first: set[int], second: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    base = _base(folder)
    ram, where = _guest(base)
    for page in second:
        ram[page * PAGE : page * PAGE + 6] = b"second"
    saved = diff.save(where, memory.diverged(where), folder / "diff")
    wanted = bytes(ram)
    ram.close()
    ram, where = _guest(base)
    for page in first:
        ram[page * PAGE : page * PAGE + 5] = b"first"
    stored = diff.read(folder / "diff", saved)
    own = memory.Own.of(where)
    assert set(own.numbers.tolist()) == first
    changed = memory.exchange(where, base, own, stored.runs, stored.pages)
    assert bytes(ram) == wanted
    assert set(memory.numbers(changed).tolist()) == first | second
    again = memory.exchange(where, base, memory.Own.of(where), stored.runs, stored.pages)
    assert set(memory.numbers(again).tolist()) == first - second  # what both have alike is not written
    ram.close()
