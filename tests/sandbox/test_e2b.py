"""The unmodified `e2b` SDK against our server: create, run, files, pty, pause, fork, snapshot, build, metrics.

The installed one, or an older one on PYTHONPATH (2.2 has run): one without E2B_API_URL is served by domain and TLS.
"""

import inspect
import io
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.served import certificate, served

from perilune.sandbox.http.app import Server, certified
from perilune.sandbox.http.auth import Keys
from perilune.sandbox.runtime import Runtime

e2b = pytest.importorskip("e2b", reason="the e2b SDK is not installed (pip install e2b)")
pytestmark = pytest.mark.filterwarnings("ignore")  # the SDK's own deprecations

KEY = "e2b_" + "0" * 40
BY_URL = "E2B_API_URL" in inspect.getsource(e2b.connection_config)
NO_FILE = getattr(e2b, "FileNotFoundException", e2b.NotFoundException)
later = pytest.mark.skipif(not hasattr(e2b.Sandbox, "fork"), reason="this SDK is older than forks and snapshots")


@pytest.fixture(scope="module")
def url(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("E2B_API_KEY", KEY)
        if BY_URL:
            with served(Server(runtime, Keys.load(runtime.home, KEY))) as port:
                found = f"http://127.0.0.1:{port}"
                patch.setenv("E2B_API_URL", found)
                patch.setenv("E2B_SANDBOX_URL", found)
                yield found
        else:
            yield from _by_domain(runtime, certificate(tmp_path_factory.mktemp("tls"), "sandbox.test"), patch)


def _by_domain(runtime: Runtime, pem: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """At https://api.DOMAIN and https://PORT-SANDBOX.DOMAIN; every name below sandbox.test is this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        domain = f"sandbox.test:{free.getsockname()[1]}"
    resolve = socket.getaddrinfo

    def local(host: str, *rest: object) -> object:
        return resolve("127.0.0.1" if str(host).endswith(".sandbox.test") else host, *rest)  # type: ignore[arg-type]

    patch.setattr(socket, "getaddrinfo", local)
    patch.setenv("E2B_DOMAIN", domain)
    patch.setenv("SSL_CERT_FILE", str(pem))
    server = Server(runtime, Keys.load(runtime.home, KEY), domain)
    with served(server, int(domain.split(":")[1]), certified(pem, pem)):
        yield f"https://api.{domain}"


@pytest.fixture(scope="module")
def box(url: str) -> Iterator["e2b.Sandbox"]:
    assert url
    made = e2b.Sandbox.create("base", timeout=600, metadata={"who": "test"}, envs={"COLOUR": "blue"})
    yield made
    made.kill()


def test_commands(box: "e2b.Sandbox") -> None:
    assert box.is_running()
    result = box.commands.run("echo $COLOUR; echo oops >&2", envs={"X": "y"})
    assert (result.stdout, result.stderr, result.exit_code) == ("blue\n", "oops\n", 0)
    with pytest.raises(e2b.CommandExitException) as failed:
        box.commands.run("exit 7")
    assert failed.value.exit_code == 7
    handle = box.commands.run("head -1; echo done", background=True, stdin=True)
    assert handle.pid in [process.pid for process in box.commands.list()]
    box.commands.send_stdin(handle.pid, "hello\n")
    assert handle.wait().stdout == "hello\ndone\n"
    if hasattr(box.commands, "close_stdin"):
        handle = box.commands.run("cat; echo done", background=True, stdin=True)
        box.commands.send_stdin(handle.pid, "hello\n")
        box.commands.close_stdin(handle.pid)
        assert handle.wait().stdout == "hello\ndone\n"
    sleeper = box.commands.run("sleep 100", background=True)
    assert box.commands.connect(sleeper.pid).pid == sleeper.pid
    assert box.commands.kill(sleeper.pid)
    assert not box.commands.kill(999999)
    with pytest.raises(e2b.TimeoutException):
        box.commands.run("sleep 30", timeout=1)


def test_files(box: "e2b.Sandbox") -> None:
    box.files.write("/home/user/a/b.txt", "text")
    assert box.files.read("/home/user/a/b.txt") == "text"
    box.files.write("/tmp/raw", b"\0\1" * 300_000)
    assert bytes(box.files.read("/tmp/raw", format="bytes")) == b"\0\1" * 300_000
    box.files.write_files([{"path": "/tmp/m/1", "data": "one"}, {"path": "/tmp/m/2", "data": io.BytesIO(b"two")}])
    assert sorted(entry.name for entry in box.files.list("/tmp/m")) == ["1", "2"]
    assert box.files.exists("/tmp/m/1") and not box.files.exists("/tmp/m/3")
    info = box.files.get_info("/tmp/m/1")
    assert (info.size, info.type.value, info.path) == (3, "file", "/tmp/m/1")
    assert box.files.make_dir("/tmp/new/dir") and not box.files.make_dir("/tmp/new/dir")
    box.files.rename("/tmp/m/1", "/tmp/m/one")
    box.files.remove("/tmp/m")
    with pytest.raises(NO_FILE):
        box.files.read("/tmp/m/one")
    watch = box.files.watch_dir("/tmp/new")
    box.files.write("/tmp/new/fresh", "x")
    seen: set[str] = set()
    until = time.time() + 10
    while time.time() < until and "fresh" not in seen:
        seen |= {event.name for event in watch.get_new_events()}
    assert "fresh" in seen
    watch.stop()


def test_signed_urls(box: "e2b.Sandbox") -> None:
    box.files.write("/home/user/signed", "by link")
    link = box.download_url("/home/user/signed", user="user")
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}
    assert urllib.request.urlopen(urllib.request.Request(link, headers=headers)).read() == b"by link"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(urllib.request.Request(link + "x", headers=headers))


def test_terminal(box: "e2b.Sandbox") -> None:
    out: list[bytes] = []
    terminal = box.pty.create(e2b.PtySize(rows=30, cols=100), timeout=60)
    box.pty.send_stdin(terminal.pid, b"echo $((40+2)); exit\n")
    terminal.wait(on_pty=out.append)
    assert b"42" in b"".join(out)


def test_pause_connect_list(box: "e2b.Sandbox") -> None:
    box.files.write("/dev/shm/kept", "in memory")
    (box.pause if hasattr(box, "pause") else box.beta_pause)()
    info = box.get_info()
    assert info.state.value == "paused"
    paused = e2b.Sandbox.list(query=e2b.SandboxQuery(state=[e2b.SandboxState.PAUSED])).next_items()
    assert box.sandbox_id in [item.sandbox_id for item in paused]
    again = e2b.Sandbox.connect(box.sandbox_id, timeout=600)
    assert again.files.read("/dev/shm/kept") == "in memory"
    found = e2b.Sandbox.list(query=e2b.SandboxQuery(metadata={"who": "test"})).next_items()
    assert [item.sandbox_id for item in found] == [box.sandbox_id]
    box.set_timeout(500)


@later
def test_fork_and_snapshot(box: "e2b.Sandbox") -> None:
    box.files.write("/dev/shm/state", "parent")
    children = box.fork(count=2)
    assert [child.files.read("/dev/shm/state") for child in children] == ["parent", "parent"]
    for child in children:
        child.kill()
    snapshot = box.create_snapshot(name="instant")
    twin = e2b.Sandbox.create(snapshot.snapshot_id, timeout=60)
    assert twin.files.read("/dev/shm/state") == "parent"
    assert twin.kill() and not twin.kill()
    assert "instant" in [name for item in box.list_snapshots().next_items() for name in item.names]
    assert e2b.Sandbox.delete_snapshot(snapshot.snapshot_id)


@later
def test_what_a_pause_keeps(url: str) -> None:
    assert url
    lifecycle = {"on_timeout": {"action": "pause", "mode": "filesystem"}}
    with e2b.Sandbox.create("base", timeout=300, lifecycle=lifecycle) as made:
        assert made.get_info().lifecycle["on_timeout"] == "pause"
        for pause, connect in (({"mode": "filesystem"}, {}), ({}, {"on_resume": "reboot"})):
            made.files.write("/home/user/x", "disk")
            made.files.write("/dev/shm/x", "ram")
            made.commands.run("sync", user="root")
            assert made.pause(**pause) and not made.pause(**pause)
            made = e2b.Sandbox.connect(made.sandbox_id, timeout=300, **connect)
            assert made.files.read("/home/user/x") == "disk" and not made.files.exists("/dev/shm/x")


def test_metrics_and_gone(box: "e2b.Sandbox", url: str) -> None:
    (metrics,) = box.get_metrics()
    assert 0 < metrics.mem_used < metrics.mem_total and metrics.disk_total > metrics.disk_used > 0
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert 'perilune_sandboxes{phase="running"}' in text and box.sandbox_id in text
    paths = json.loads(urllib.request.urlopen(f"{url}/openapi.json").read())["paths"]
    assert {"/v2/sandboxes", "/sandboxes/{id}/fork", "/v3/templates"} <= paths.keys()
    other = e2b.Sandbox.create("base", timeout=60)
    other.kill()
    assert not other.is_running()
    with pytest.raises(e2b.NotFoundException):
        e2b.Sandbox.connect(other.sandbox_id)
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create("base", api_key="e2b_" + "1" * 40)
    with pytest.raises(e2b.SandboxException, match="404: template 'no-such-template'"):
        e2b.Sandbox.create("no-such-template")


def test_template_build(url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert url
    context = tmp_path_factory.mktemp("context")
    (context / "hello.txt").write_text("copied")
    template = (
        e2b.Template(file_context_path=context)
        .from_template("base")
        .copy("hello.txt", "/opt/")
        .set_envs({"BUILT": "yes"})
        .run_cmd("echo made > /opt/made", user="root")
        .set_workdir("/opt")
    )
    lines: list[str] = []
    e2b.Template.build(template, "built", on_build_logs=lambda entry: lines.append(entry.message))
    assert any("RUN" in line for line in lines)
    with e2b.Sandbox.create("built", timeout=60) as made:
        assert made.commands.run("cat hello.txt made; echo $BUILT; pwd").stdout == "copiedmade\nyes\n/opt\n"
    assert not hasattr(e2b.Template, "exists") or e2b.Template.exists("built")
    broken = e2b.Template().from_template("base").run_cmd("exit 3")
    with pytest.raises(e2b.BuildException, match="status 3"):
        e2b.Template.build(broken, "broken")
