"""Real machines for the tests: one runtime and one small template a session, from the host's own bash and coreutils."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from perilune.sandbox import setup
from perilune.sandbox.errors import SetupMissing
from perilune.sandbox.guard import Guard
from perilune.sandbox.images import ext4
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.template import add_template
from perilune.sandbox.vmm import qemu
from perilune.sandbox.vmm.driver import Shape

PROGRAMS = """
bash ls cat echo sleep true false dd mkdir rm cp mv sync id env stat touch head tail wc date hostname
openssl seq yes mount umount chmod ln grep sed kill busybox ps tr od sha256sum mktemp tee sort find nproc
""".split()  # noqa: SIM905 - a list of 40 lines says no more


def _copy_program(name: str, root: Path) -> None:
    found = shutil.which(name)
    if not found:
        return
    path = Path(found).resolve()
    shutil.copy(path, root / "bin" / name)
    libraries = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
    for word in libraries.split():
        if word.startswith("/"):
            copy = root / word.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                shutil.copy(Path(word).resolve(), copy)


def tiny_root(root: Path) -> Path:
    """A root file system of a few MB."""
    (root / "bin").mkdir(parents=True)
    for name in PROGRAMS:
        _copy_program(name, root)
    (root / "bin" / "sh").symlink_to("bash")
    (root / "usr").mkdir()
    (root / "usr" / "bin").symlink_to("../bin")
    ext4.prepare(root)
    return root


def _guest(home: Path) -> None:
    kernel = os.environ.get("PERILUNE_SANDBOX_KERNEL")
    ready = setup.default_home()
    if kernel:
        setup.build(home, Path(kernel))
    elif (ready / "guest" / "guest.json").exists():
        shutil.copytree(ready / "guest", home / "guest")
        known = setup.load(ready).kernel
        setup.build(home, home / "guest" / known.name if known.parent == ready / "guest" else known)
    else:
        setup.build(ready)
        _guest(home)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a guest kernel; skips, saying what is missing, where no machine can be started."""
    path = tmp_path_factory.mktemp("sandbox")
    if os.geteuid() != 0:
        pytest.skip("sandbox machines need root here (process_vm_writev, images with owners)")
    try:
        qemu.version()
        _guest(path)
    except SetupMissing as error:
        pytest.skip(f"no virtual machines on this host: {error}")
    return path


@pytest.fixture(scope="session")
def root_image(home: Path) -> Path:
    """A raw ext4 image of the tiny root."""
    ext4.pack(tiny_root(home / "tiny"), home / "tiny.raw", 512)
    return home / "tiny.raw"


@pytest.fixture(scope="session")
def runtime(home: Path, root_image: Path) -> Iterator[Runtime]:
    """A runtime with the template `base`."""
    with Runtime(home, Guard(disk_floor_mb=64)) as made:
        add_template(made, root_image, ["base"], Shape(1, 256, 512))
        yield made
