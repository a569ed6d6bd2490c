"""The backend without machines: same agent, namespaces instead of a kernel of its own."""

import shutil
import time
from pathlib import Path

import pytest

from perilune.sandbox.errors import Conflict, NotFound, SandboxError
from perilune.sandbox.process import ProcessSandbox


@pytest.fixture
def box(home: Path, root_image: Path) -> ProcessSandbox:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    assert root_image.exists()
    try:
        return ProcessSandbox(home / "tiny", user="user")
    except SandboxError as error:
        pytest.skip(f"no namespaces or overlays on this host: {error}")


def test_commands_files_and_layers(box: ProcessSandbox, home: Path, tmp_path: Path) -> None:
    with box:
        assert box.commands.run("id -un; pwd").stdout == "user\n/home/user\n"
        assert box.commands.run("ls /proc | grep -c '^[0-9]'").stdout.strip() in "12345"
        box.files.write("/home/user/kept", "yes")
        assert not (home / "tiny" / "home" / "user" / "kept").exists()
        box.snapshot(tmp_path / "layer")
    with pytest.raises(NotFound, match="killed"):
        box.commands.run("true")
    with ProcessSandbox(home / "tiny", layer=tmp_path / "layer") as again:
        assert again.files.read_text("/home/user/kept") == "yes"


def test_a_pause_freezes(box: ProcessSandbox) -> None:
    with box:
        box.commands.start("while :; do echo x >> /home/user/ticks; sleep 0.05; done")
        time.sleep(0.3)
        box.pause()
        with pytest.raises(Conflict, match="paused"):
            box.commands.run("true")
        ticks = box._work / "upper" / "home" / "user" / "ticks"
        time.sleep(0.1)
        before = ticks.stat().st_size
        time.sleep(0.4)
        assert ticks.stat().st_size == before
        box.resume()
        time.sleep(0.4)
        assert ticks.stat().st_size > before


def test_it_cannot_reach_the_host(box: ProcessSandbox) -> None:
    with box:
        assert "unreachable" in box.commands.run("exec 3<>/dev/tcp/1.1.1.1/80").stderr
        assert box.commands.run(["mount", "-t", "tmpfs", "none", "/tmp"], "root").exit_code != 0
        assert box.commands.run(["hostname", "other"], "root").exit_code != 0
