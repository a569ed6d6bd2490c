"""What a host needs before its first sandbox: a guest kernel, the agent, an initramfs, and QEMU's preload. Built into
one folder."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from perilune.sandbox.errors import SetupMissing
from perilune.sandbox.files import sha256, temporary, write_atomically
from perilune.sandbox.vmm import accel

SOURCES = Path(__file__).parent / "guest"
PRELOAD = Path(__file__).parent / "vmm"
MODULES = ("virtio_pci", "virtio_mmio", "virtio_console", "virtio_blk", "virtio_net", "virtio_balloon", "ext4")
CONTAINER_MODULES = ("overlay", "fuse", "loop", "veth", "bridge", "nf_tables", "nft_masq", "nft_ct", "nft_chain_nat")
APPEND = (
    "console=ttyS0 quiet loglevel=3 reboot=t panic=-1 mitigations=off nokaslr random.trust_cpu=on no_timer_check "
    "tsc=reliable damon_reclaim.enabled=Y damon_reclaim.min_age=60000000 damon_reclaim.skip_anon=Y"
)
# TCG translates code by its virtual address: with a new layout for every program each command is translated anew, which
# is two thirds of what /bin/true takes. The guest may turn it on again (kernel.randomize_va_space).
TRANSLATED = " norandmaps"


@dataclass(frozen=True)
class Guest:
    """The built guest parts. `machine` is what the kernel boots on; `kernel_sha256` goes into every snapshot."""

    kernel: Path
    initrd: Path
    preload: Path
    machine: str
    kernel_sha256: str
    accelerator: str
    paravirtual: bool = False
    asked: str = ""  # the accelerator that the user wants, whatever is measured

    @property
    def append(self) -> str:
        """The kernel's command line."""
        return APPEND + (TRANSLATED if self.accelerator == "tcg" else "")


def default_home() -> Path:
    """PERILUNE_SANDBOX_HOME, or ~/.cache/perilune/sandbox."""
    named = os.environ.get("PERILUNE_SANDBOX_HOME")
    return Path(named) if named else Path.home() / ".cache" / "perilune" / "sandbox"


def load(home: Path) -> Guest:
    """The guest parts of a home, rebuilt when the agent's sources changed; SetupMissing when setup never ran."""
    folder = home / "guest"
    try:
        known = json.loads((folder / "guest.json").read_text())
    except (OSError, ValueError):
        raise SetupMissing(f"no guest kernel in {folder}: run `perilune sandbox setup`") from None
    if known.pop("sources") != _sources_digest():
        return build(home, Path(known["kernel"]), known["paravirtual"], known.get("asked", ""))
    paths = {key: Path(known[key]) for key in ("kernel", "initrd", "preload")}
    return Guest(**{**known, **paths})


def build(home: Path, kernel: Path | None = None, paravirtual: bool = False, asked: str = "") -> Guest:
    """Everything for `kernel`: a path to a vmlinux or bzImage; None takes Debian's cloud kernel from the package
    manager."""
    folder = home / "guest"
    folder.mkdir(parents=True, exist_ok=True)
    modules: list[Path] = []
    if kernel is None:
        kernel, modules = debian_kernel(folder)
    elif (folder / "modules").is_dir() and kernel.parent == folder:
        modules = _ordered_modules(folder / "modules")
    shutil.copyfile(agent(), folder / "agent")
    _compile(folder / "preload.so", ["-shared", "-fPIC", "-Os", "-s"], sorted(PRELOAD.glob("*.c")))
    initrd(folder / "initrd.gz", folder / "agent", modules)
    machine = kernel_machine(kernel)
    choice = asked or accel.choose(accel.probe(), paravirtual)
    parts = (kernel, folder / "initrd.gz", folder / "preload.so")
    guest = Guest(*parts, machine, sha256(kernel), choice, paravirtual, asked)
    known = {**asdict(guest), "sources": _sources_digest()}
    write_atomically(folder / "guest.json", json.dumps(known, indent=1, default=str).encode())
    return guest


def kernel_machine(kernel: Path) -> str:
    """An ELF vmlinux boots by PVH on microvm; a bzImage on pc. SetupMissing for anything else."""
    try:
        with kernel.open("rb") as file:
            head = file.read(0x206)
    except OSError as error:
        raise SetupMissing(f"the guest kernel {kernel} cannot be read: {error.strerror}") from None
    if head[:4] == b"\x7fELF":
        return "microvm"
    if head[0x202:0x206] == b"HdrS":
        return "pc"
    raise SetupMissing(f"{kernel} is neither a vmlinux (ELF) nor a bzImage")


def _sources_digest() -> str:
    files = sorted(file for folder in (SOURCES, PRELOAD) for file in folder.glob("*.[ch]"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def agent() -> Path:
    """The static guest agent, compiled once for these sources."""
    target = default_home() / "agents" / _sources_digest()[:32]
    if not target.exists():
        _compile(target, ["-static", "-Os", "-s"], sorted(SOURCES.glob("*.c")))
    return target


def _compile(target: Path, options: list[str], sources: list[Path]) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise SetupMissing("the guest agent needs a C compiler: apt-get install gcc libc6-dev")
    with temporary(target) as temp:
        command = [compiler, "-Wall", "-Wextra", "-Werror", *options, "-o", str(temp), *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SetupMissing(f"the guest agent does not compile: {done.stderr.strip()[-400:]}")


# ---- kernels ----


def _apt(*command: str, cwd: Path) -> str:
    if not shutil.which(command[0]):
        raise SetupMissing(f"{command[0]} is not here; give a kernel with `perilune sandbox setup --kernel PATH`")
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise SetupMissing(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


def debian_kernel(folder: Path) -> tuple[Path, list[Path]]:
    """Fetch Debian's cloud kernel (nothing is installed) and unpack its image and the modules we need, in load
    order."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        place = Path(work)
        depends = _apt("apt-cache", "depends", "linux-image-cloud-amd64", cwd=place)
        package = next((line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line), None)
        if not package:
            raise SetupMissing("the package manager knows no linux-image-cloud-amd64: run apt-get update")
        _apt("apt-get", "download", package, cwd=place)
        _apt("dpkg-deb", "-x", str(next(place.glob("*.deb"))), "tree", cwd=place)
        release = next((place / "tree" / "lib" / "modules").iterdir()).name
        _apt("depmod", "-b", "tree", release, cwd=place)
        shutil.rmtree(folder / "modules", ignore_errors=True)
        _take_modules(place / "tree", release, folder / "modules")
        kernel = folder / "vmlinuz"
        shutil.copyfile(place / "tree" / "boot" / f"vmlinuz-{release}", kernel)
    return kernel, _ordered_modules(folder / "modules")


def _take_modules(tree: Path, release: str, target: Path) -> None:
    """Copy the modules, numbered in the order in which they load."""
    target.mkdir()
    taken: list[Path] = []
    for name in MODULES + CONTAINER_MODULES:
        done = subprocess.run(
            ["modprobe", "-d", str(tree), "-S", release, "--show-depends", name], capture_output=True, text=True
        )
        for line in done.stdout.splitlines():
            if line.startswith("insmod"):
                path = Path(line.split()[1])
                if path not in taken:
                    taken.append(path)
    for number, path in enumerate(taken):
        copy = target / f"{number:03d}-{path.name}"
        shutil.copyfile(path, copy)
        if path.suffix == ".xz":
            subprocess.run(["unxz", "-f", str(copy)], check=True)


def _ordered_modules(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ko"))


def source_kernel(folder: Path, jobs: int) -> Path:
    """Build the small kernel from Debian's linux-source with `guest/kernel.config` (minutes); returns its vmlinux."""
    archives = sorted(Path("/usr/src").glob("linux-source-*.tar.*"))
    if not archives:
        raise SetupMissing("no kernel source: apt-get install linux-source bc flex bison libelf-dev make gcc")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        _apt("tar", "xf", str(archives[-1]), "--strip-components=1", cwd=Path(work))
        _apt("make", "-s", "tinyconfig", cwd=Path(work))
        _apt("scripts/kconfig/merge_config.sh", "-m", ".config", str(SOURCES / "kernel.config"), cwd=Path(work))
        _apt("make", "-s", "olddefconfig", cwd=Path(work))
        _apt("make", "-s", f"-j{jobs}", "vmlinux", cwd=Path(work))
        _apt("strip", "-s", "-o", str(folder / "vmlinux"), "vmlinux", cwd=Path(work))
    return folder / "vmlinux"


# ---- initramfs ----


def initrd(target: Path, agent: Path, modules: list[Path]) -> None:
    """A newc cpio with the agent as /init, the modules, and their order."""
    members = [
        ("dev", 0o40755, b""),
        ("proc", 0o40755, b""),
        ("sys", 0o40755, b""),
        ("init", 0o100755, agent.read_bytes()),
    ]
    if modules:
        members.append(("modules", 0o40755, b""))
        members += [(f"modules/{m.name}", 0o100644, m.read_bytes()) for m in modules]
        members.append(("modules/order", 0o100644, "".join(f"/modules/{m.name}\n" for m in modules).encode()))
    archive = b"".join(_member(*member, number=i + 1) for i, member in enumerate(members))
    archive += _member("dev/console", 0o20600, b"", len(members) + 1, device=(5, 1)) + _member("TRAILER!!!", 0, b"", 0)
    write_atomically(target, gzip.compress(archive, 6, mtime=0))


def _member(name: str, mode: int, data: bytes, number: int, device: tuple[int, int] = (0, 0)) -> bytes:
    path = name.encode() + b"\0"
    fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0]
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
