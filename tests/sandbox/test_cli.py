"""Every verb of `perilune sandbox`, one process each as a user has them: a sandbox goes on between two commands."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from perilune.sandbox import Guard, Runtime, Shape
from perilune.sandbox.template import add_template

Cli = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "perilune", "sandbox"]


@pytest.fixture(scope="module")
def cli(home: Path, root_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home of its own: the verbs of a home take turns with nobody here."""
    own = tmp_path_factory.mktemp("cli")
    os.symlink(home / "guest", own / "guest")  # noqa: PTH211
    with Runtime(own, Guard(disk_floor_mb=64)) as runtime:
        add_template(runtime, root_image, ["base"], Shape(1, 256, 512))

    def run(*words: str, code: int = 0, given: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PERILUNE_SANDBOX_HOME": str(own)}
        done = subprocess.run(
            [*COMMAND, *words], input=given, capture_output=True, text=True, env=environment, timeout=60
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done

    run.home = own  # type: ignore[attr-defined]
    return run


@pytest.mark.slow
def test_a_day_at_the_shell(cli: Cli, tmp_path: Path) -> None:
    box = cli("create", "-e", "COLOUR=green").stdout.strip()
    done = cli("exec", box, "sh", "-c", "echo $COLOUR; echo oops >&2; exit 7", code=7)
    assert (done.stdout, done.stderr) == ("green\n", "oops\n")
    assert cli("exec", "-i", box, "sort", given="b\na\n").stdout == "a\nb\n"
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "x").write_text("carried")
    cli("cp", str(tmp_path / "in"), f"{box}:/root/in")
    cli("pause", box)
    assert "paused" in cli("ls").stdout
    assert "is paused" in cli("exec", box, "true", code=2).stderr
    cli("resume", box)
    (child,) = cli("fork", box, "-n", "1").stdout.split()
    cli("cp", f"{child}:/root/in", str(tmp_path / "out"))
    assert (tmp_path / "out" / "deep" / "x").read_text() == "carried"
    assert "No such file" in cli("cp", f"{child}:/root/in/deep/x", str(tmp_path / "absent" / "x"), code=2).stderr
    assert "does not exist" in cli("build", str(tmp_path / "absent"), code=2).stderr
    assert "--port" in cli("serve", "--port", "99999", code=2).stderr
    cli("snapshot", box, "mark")
    assert "mark" in cli("ls", "--templates").stdout
    again = cli("create", "mark").stdout.strip()
    assert cli("exec", again, "cat", "/root/in/deep/x").stdout == "carried"
    cli("rm", box, child, again)
    assert cli("ls").stdout == ""
    cli("rm", "--template", "mark")
    assert "was not found" in cli("create", "mark", code=2).stderr
    assert "guest" in cli("doctor").stdout


@pytest.mark.slow
def test_a_dockerfile_and_a_terminal(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM base\nRUN echo built > /root/mark\nWORKDIR /root\n")
    cli("build", str(tmp_path), "-t", "mine")
    box = cli("create", "mine").stdout.strip()
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PERILUNE_SANDBOX_HOME": str(cli.home)}  # type: ignore[attr-defined]
    shell = subprocess.Popen([*COMMAND, "shell", box], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    os.write(ours, b"cat /root/mark; ls -l /proc/self/fd/0; exit\n")
    seen, until = b"", time.monotonic() + 60
    while shell.poll() is None and time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                seen += os.read(ours, 4096)
            except OSError:
                break
    assert shell.wait(20) == 0 and b"built" in seen and b"-> /dev/pts/" in seen
    os.close(ours)
    cli("rm", box)


@pytest.mark.slow
def test_a_server_says_where_it_is_and_ends_when_told(cli: Cli) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PERILUNE_SANDBOX_HOME": str(cli.home)}  # type: ignore[attr-defined]
    command = [*COMMAND, "serve", "--port", port, "--warm", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            words = dict(word.split("=", 1) for word in server.stdout.readline().split())
            assert ["base"] in _templates(words["E2B_API_URL"], words["E2B_API_KEY"])
            assert "cannot be listened on" in cli("serve", "--port", port, code=2).stderr
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
        finally:
            server.kill()


def _templates(url: str, key: str) -> list[list[str]]:
    request = urllib.request.Request(f"{url}/v2/templates", headers={"X-API-Key": key})
    for _ in range(100):
        try:
            with urllib.request.urlopen(request) as answer:
                return [one["names"] for one in json.load(answer)]
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not come up")
