"""The synchronous interface as a user meets it."""

import socket
import threading
from pathlib import Path

import pytest

from perilune.sandbox import Runtime, Sandbox, SandboxError
from perilune.sandbox.agent.wire import Change
from perilune.sandbox.errors import GuestError, InvalidRequest, NotFound, TimedOut
from perilune.sandbox.images.recipe import StepFailed, build, parse
from perilune.sandbox.template import known_templates


def test_a_working_day(runtime: Runtime, tmp_path: Path) -> None:
    with Sandbox.create(runtime=runtime, env={"COLOUR": "blue"}) as box:
        result = box.commands.run("echo $COLOUR; echo bad >&2; exit 4", user="user")
        assert (result.stdout, result.stderr, result.exit_code) == ("blue\n", "bad\n", 4)
        assert box.commands.run(["cat"], stdin="fed").stdout == "fed"
        with pytest.raises(TimedOut, match="killed"):
            box.commands.run("sleep 60", timeout=0.5)
        with pytest.raises(GuestError, match="No such file"):
            box.commands.run(["/bin/absent"])
        seen: list[Change] = []
        stop = box.files.watch("/home/user", seen.append)
        box.files.write("/home/user/x", "1")
        stop()
        assert Change("x", "create") in seen
        (tmp_path / "in" / "deep").mkdir(parents=True)
        (tmp_path / "in" / "deep" / "file").write_bytes(b"\0" * 100_000)
        box.copy_in(tmp_path / "in", "/root/in")
        box.copy_out("/root/in", tmp_path / "out")
        assert (tmp_path / "out" / "deep" / "file").read_bytes() == b"\0" * 100_000
        terminal = box.pty(100, 30, "tty >/dev/null; read x; echo got $x")
        terminal.write("word\n")
        assert "got word" in terminal.wait(20).stdout
        (child,) = box.fork()
        assert isinstance(child, Sandbox) and child.files.read_text("/home/user/x") == "1"
        child.kill()
    with pytest.raises(NotFound):
        box.commands.run("true")
    assert issubclass(NotFound, SandboxError)


def test_numbers_and_texts_that_no_guest_takes_are_named(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        terminal = box.pty()
        for wrong in (
            lambda: terminal.resize(-1, 5), lambda: terminal.resize(80, 65536), lambda: box.open_port(1 << 16),
            lambda: box.files.read("/\ud800"), lambda: box.commands.run("\ud800"),
            lambda: box.commands.run("true", timeout=float("nan")), lambda: box.commands.run("true", timeout=1e300),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest):
                wrong()
        assert box.commands.run("cat", stdin="half \ud800").stdout == "half ?"
        with pytest.raises(GuestError, match="/bin/bash in /absent as root: cannot enter"):
            box.commands.run("true", cwd="/absent")
        terminal.kill()


def test_a_port_without_a_network(runtime: Runtime) -> None:
    with Sandbox.create(runtime=runtime) as box:
        with pytest.raises(GuestError, match="refused"):
            box.open_port(8000)
        if not box.files.exists("/bin/busybox"):
            pytest.skip("the tiny image has no program that listens (busybox-static is not installed)")
        server = box.commands.start(["busybox", "nc", "-l", "-p", "8000", "-e", "tr", "a-z", "A-Z"])
        with _retry(box) as client:
            client.sendall(b"hello\n")
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b"HELLO\n"
        server.wait(20)


def _retry(box: Sandbox) -> socket.socket:
    for _ in range(100):
        try:
            return box.open_port(8000)
        except GuestError:
            threading.Event().wait(0.1)
    raise AssertionError("the server never listened")


DOCKERFILE = """
# a comment
FROM base
ENV A=1 B="two words"
WORKDIR /srv
COPY note.txt .
RUN echo "$A $B" > made && \\
    cat note.txt >> made
USER user
CMD ["cat", "/srv/made"]
"""


def test_a_dockerfile_is_built_once(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("note")
    recipe, lines = parse(DOCKERFILE, tmp_path), []
    assert (recipe.origin, [step.kind for step in recipe.steps]) == ("base", ["ENV", "WORKDIR", "COPY", "RUN", "USER"])
    origin = runtime.resolve("base")
    build(runtime, origin, recipe, ["cooked"], log=lines.append)
    build(runtime, origin, recipe, ["cooked"], log=lines.append)
    assert "continues after step 4" in lines
    with Sandbox.create("cooked", runtime=runtime) as box:
        assert box.commands.run("id -un; pwd; cat made").stdout == "user\n/srv\n1 two words\nnote"
    broken = parse("FROM base\nRUN exit 9", tmp_path)
    with pytest.raises(StepFailed, match=r"step 1: .*status 9"):
        build(runtime, origin, broken, ["never"])
    for name in ["cooked", *[n for _, kind, names, _ in known_templates(runtime) if kind == "step" for n in names]]:
        runtime.delete_snapshot(name)
