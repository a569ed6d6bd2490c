"""The hardware path as far as this host goes: which accelerator, what is said where there is none, and a machine under
KVM that is spawned, saved and loaded (a guest runs only where KVM does not emulate)."""

from pathlib import Path

import pytest

from perilune.sandbox import memory, setup
from perilune.sandbox.errors import SetupMissing
from perilune.sandbox.vmm import accel, qemu
from perilune.sandbox.vmm.accel import Probe
from perilune.sandbox.vmm.driver import Plan, Shape, State
from perilune.sandbox.vmm.zygote import Zygote


def test_the_accelerator_is_chosen_by_speed() -> None:
    hardware, emulated, absent = (
        Probe(kind, mips, "") for kind, mips in (("hardware", 4e3), ("emulated", 2), ("absent", 0))
    )
    assert [accel.choose(found) for found in (hardware, emulated, absent)] == ["kvm", "tcg", "tcg"]
    assert accel.choose(emulated, paravirtual_kernel=True) == "kvm"
    assert accel.probe("/dev/null").kind == "broken" and accel.probe("/nowhere").kind == "absent"


def test_a_kernel_that_the_user_gives_is_used_with_kvm_when_it_is_built_for_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel, "probe", lambda: Probe("emulated", 2, ""))
    kernel = setup.load(home).kernel
    guests = [setup.build(tmp_path / str(pvm), kernel, pvm) for pvm in (False, True)]
    assert [guest.accelerator for guest in guests] == ["tcg", "kvm"]
    assert guests[1].kernel == kernel and setup.load(tmp_path / "True").paravirtual
    assert "norandmaps" in guests[0].append and "norandmaps" not in guests[1].append
    (tmp_path / "text").write_text("no kernel")
    with pytest.raises(SetupMissing, match="neither a vmlinux"):
        setup.build(tmp_path / "other", tmp_path / "text")


def test_without_kvm_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupMissing, match=r"No such file.*--accelerator tcg"):
        accel.require("kvm", str(tmp_path / "kvm"))
    with pytest.raises(SetupMissing, match="not 'xen'"):
        accel.require("xen")


def test_a_machine_under_kvm_is_spawned_saved_and_loaded(home: Path, tmp_path: Path) -> None:
    found = accel.probe()
    if found.kind not in ("hardware", "emulated"):
        pytest.skip(f"no KVM on this host: {found.detail}")
    guest, shape = setup.load(home), Shape(1, 128, 64)
    base = tmp_path / "zero.base"
    memory.empty(base, shape.memory_mb << 20)
    zygote = Zygote(qemu.PROGRAM, guest.preload)
    driver = qemu.Qemu(guest.machine, "kvm", qemu.CPUS["kvm"], zygote)
    try:
        booting = driver.spawn(Plan(shape, base, tmp_path / "a", guest.kernel, guest.initrd, guest.append))
        assert booting.state is State.STOPPED and booting.qmp("query-kvm") == {"enabled": True, "present": True}
        booting.save(tmp_path / "state")
        assert (tmp_path / "state").stat().st_size > 1000
        waiting = driver.spawn(Plan(shape, base, tmp_path / "b"))
        waiting.load(tmp_path / "state")
        assert waiting.state is State.STOPPED
        booting.kill()
        waiting.kill()
        assert waiting.state is State.GONE
    finally:
        zygote.close()
