"""QEMU as the virtual machine monitor: its command line, its jail, its processes."""

import pwd
import subprocess
from dataclasses import dataclass

from perilune.sandbox.errors import SetupMissing
from perilune.sandbox.vmm.child import Child
from perilune.sandbox.vmm.driver import Plan, State
from perilune.sandbox.vmm.machine import QemuMachine
from perilune.sandbox.vmm.zygote import Door, Zygote

PROGRAM = "qemu-system-x86_64"
CPUS = {"tcg": "max", "kvm": "host,-arch-capabilities"}  # QEMU 7.2 dies where KVM shows that register but refuses it


@dataclass(frozen=True)
class Jail:
    """Confinement of the QEMU process: a user of its own (once it has mapped its memory), empty namespaces, QEMU's
    seccomp filter. It opens no file: it is handed descriptors."""

    user: str
    uid: int
    gid: int


def version() -> str:
    """QEMU's version line; SetupMissing when there is no QEMU."""
    try:
        text = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise SetupMissing(f"{PROGRAM} is not installed: apt-get install qemu-system-x86") from None
    return text.splitlines()[0].strip()


def jail(user: str) -> Jail:
    """The jail of a system user; SetupMissing when there is no such user."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise SetupMissing(f"no user {user} for the jail: adduser --system {user}") from None
    return Jail(user, entry.pw_uid, entry.pw_gid)


@dataclass(frozen=True)
class Qemu:
    """How this host runs QEMU. `machine` is microvm (kernels with virtio-mmio on the command line) or pc."""

    machine: str = "microvm"
    accelerator: str = "tcg"
    cpu: str = "max"
    zygote: Zygote | None = None  # forks the processes; only a command line is needed without
    jail: Jail | None = None

    @property
    def forks(self) -> bool:
        """Whether its machines can be forked: KVM's guest belongs to the process that made it."""
        return self.jail is None and self.accelerator == "tcg"

    def command(self, plan: Plan) -> list[str]:
        """The command line that starts `plan`."""
        memory = plan.shape.memory_mb
        bus = "device" if self.machine == "microvm" else "pci"
        machine = "microvm,pit=on,pic=on,rtc=on,acpi=off,auto-kernel-cmdline=on" if bus == "device" else "pc,hpet=off"
        accel = "tcg,thread=multi,tb-size=32" if self.accelerator == "tcg" else self.accelerator
        limits = f"x-bps-total={plan.rates.bytes_per_second},x-iops-total={plan.rates.operations_per_second}"
        words = [
            f"{PROGRAM} -M {machine},memory-backend=m0,suppress-vmdesc=on -accel {accel} -cpu {self.cpu}",
            f"-m {memory} -smp {plan.shape.vcpus} -nodefaults -no-user-config -display none -no-reboot",
            "-global migration.send-configuration=off",
            f"-object memory-backend-file,id=m0,size={memory}M,mem-path={plan.memory},share=off",
            f"-chardev file,id=console,path={plan.folder}/serial.log,append=on -serial chardev:console",
            f"-qmp unix:{plan.folder}/qmp,server=on,wait=off",
            f"-object throttle-group,id=io,{limits}",
            f"-blockdev null-co,node-name=empty,size={plan.shape.disk_mb << 20}",
            f"-blockdev throttle,node-name=disk,throttle-group=io,file=empty -device virtio-blk-{bus},drive=disk",
            f"-chardev socket,id=agent,path={plan.folder}/agent,server=on,wait=off -device virtio-serial-{bus}",
            "-device virtserialport,chardev=agent,name=agent",
            f"-netdev hubport,id=card,hubid=0 -device virtio-net-{bus},netdev=card,mac=52:54:00:70:65:72",
            f"-device virtio-balloon-{bus},free-page-reporting=on",
        ]
        if self.jail:
            words += [f"-runas {self.jail.user}", "-sandbox on,obsolete=deny,spawn=deny,resourcecontrol=deny"]
        command = " ".join(words).split()
        if plan.kernel:
            boot = ["-kernel", str(plan.kernel), "-append", plan.append]
            return command + boot + (["-initrd", str(plan.initrd)] if plan.initrd else [])
        return [*command, "-incoming", "defer", "-S"]

    def spawn(self, plan: Plan, stem: bool = False) -> "QemuMachine":
        """Start a QEMU for `plan`: WAITING for a state, or (with a kernel) STOPPED before its first instruction. A
        `stem` ends with this process."""
        plan.folder.mkdir(parents=True, exist_ok=True)
        command = self.command(plan) + (["-S"] if plan.kernel else [])
        assert self.zygote is not None
        door = None if self.jail else Door()
        child = Child(self.zygote.spawn(command, plan.folder / "qemu.log", door, stem))
        if door and not self.forks:
            door.close()
            door = None
        return QemuMachine(child, plan.folder, State.STOPPED if plan.kernel else State.WAITING, door, bool(self.jail))
