"""Bytes and JSON of strangers against the whole server, with a runtime that holds one sandbox and no machine: whatever
comes, the answer is a refusal in the protocol's words, never a fault of ours."""

import contextlib
import http.client
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox.served import served

from perilune.sandbox.agent import wire
from perilune.sandbox.catalogue import Phase, Record
from perilune.sandbox.errors import GuestError, InvalidRequest, NotFound
from perilune.sandbox.http import connect, silence
from perilune.sandbox.http.app import Server
from perilune.sandbox.http.auth import Keys

KEY = "e2b_" + "0" * 40
STREAMS = ["/process.Process/Start", "/process.Process/Connect", "/filesystem.Filesystem/WatchDir"]
CALLS = [
    f"/process.Process/{name}" for name in ("List", "SendInput", "SendSignal", "CloseStdin", "Update", "StreamInput")
]
CALLS += [
    f"/filesystem.Filesystem/{name}"
    for name in ("Stat", "ListDir", "MakeDir", "Move", "Remove", "CreateWatcher", "GetWatcherEvents", "RemoveWatcher")
]
CONTROL = [
    "",
    "/box/pause",
    "/box/resume",
    "/box/connect",
    "/box/fork",
    "/box/timeout",
    "/box/refreshes",
    "/box/snapshots",
]


class Agent:
    """A guest that refuses everything, after its messages were packed as they would be sent."""

    commands: tuple[Any, ...] = ()

    def call(self, op: wire.Op, user: str, first: str = "", second: str = "", number: int = 0) -> bytes:
        wire.operation(op, user, first, second, number)
        raise GuestError(2, f"{first}: No such file or directory")

    def execute(self, command: wire.Command, _sink: object) -> None:
        command.pack()
        raise GuestError(2, "No such file or directory")

    def write(self, user: str, path: str, _pieces: object, mode: int = 0) -> None:
        self.call(wire.Op.WRITE, user, path, "", mode)

    def operate(self, _payload: bytes, _sink: object) -> None:
        raise GuestError(2, "No such file or directory")


class Runtime:
    """What the server asks of a runtime."""

    def __init__(self, home: Path) -> None:
        self.home, self.lives = home, {}  # type: ignore[var-annotated]
        self._record = Record("box", "base", phase=Phase.RUNNING)

    def record(self, identity: str) -> Record:
        if identity != "box":
            raise NotFound(f"sandbox {identity!r} was not found")
        return self._record

    def live(self, identity: str) -> Any:
        return SimpleNamespace(agent=Agent(), record=self.record(identity))

    def _refuse(self, *_: object, **__: object) -> Any:
        raise NotFound("nothing here")

    create = create_many = pause = resume = connect = fork = set_timeout = set_network = snapshot = resolve = _refuse


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    home = tmp_path_factory.mktemp("http")
    with served(Server(Runtime(home), Keys.load(home, KEY))) as found:  # type: ignore[arg-type]
        yield found


def _post(port: int, path: str, body: bytes, stream: bool = False) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"X-API-Key": KEY, "Content-Type": "application/connect+json" if stream else "application/json"}
    if not path.startswith(("/sandboxes", "/v")):
        headers |= {"E2b-Sandbox-Id": "box", "E2b-Sandbox-Port": "49983"}
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _envelopes(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    found = []
    while data:
        flags, length = struct.unpack_from(">BI", data)
        found.append((flags, json.loads(data[5 : 5 + length])))
        data = data[5 + length :]
    return found


NAMES = """
process cmd args envs cwd pty size cols rows stdin input event start data signal path depth source destination recursive
watcherId pid tag selector templateID timeout metadata envVars network allowOut denyOut count name memory duration
autoResume autoPause
""".split()  # noqa: SIM905 - a list of 40 lines says no more
keys = st.sampled_from(NAMES)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just("\0/../..")
)
values = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=4), max_leaves=12)
objects = st.dictionaries(keys, values, max_size=5)
several = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@several
@given(st.sampled_from(STREAMS), st.binary(max_size=60) | objects.map(connect.envelope), st.integers(-4, 4))
def test_a_stream_ends_with_an_error_in_its_last_envelope(port: int, path: str, body: bytes, lie: int) -> None:
    if len(body) >= 5 and lie:
        body = body[:1] + ((int.from_bytes(body[1:5], "big") + lie) % 2**32).to_bytes(4, "big") + body[5:]
    status, answer = _post(port, path, body, stream=True)
    assert status == 200
    flags, last = _envelopes(answer)[-1]
    assert flags == connect.END_STREAM and set(last["error"]) == {"code", "message"}
    assert last["error"]["code"] != "internal", last


@several
@given(st.sampled_from(CALLS), st.binary(max_size=40) | objects.map(lambda body: json.dumps(body).encode()))
def test_a_call_is_answered_or_refused(port: int, path: str, body: bytes) -> None:
    status, answer = _post(port, path, body)
    assert status < 500 or json.loads(answer)["code"] == "unknown", (status, answer)
    assert isinstance(json.loads(answer), dict)


@several
@given(st.sampled_from(CONTROL), objects | values)
def test_the_control_plane_refuses_in_its_words(port: int, path: str, body: object) -> None:
    if isinstance(body, dict):
        body["templateID"] = body.get("templateID") or "base"
    status, answer = _post(port, f"/sandboxes{path}", json.dumps(body).encode())
    assert 400 <= status < 500, (status, answer)
    assert set(json.loads(answer)) == {"code", "message"}


@given(st.binary(max_size=100))
def test_envelopes_of_garbage(data: bytes) -> None:
    for read in (connect.parse, connect.messages, connect.message):
        with contextlib.suppress(InvalidRequest):
            read(data)


def test_an_oversized_envelope_is_refused_before_it_is_read(port: int) -> None:
    status, answer = _post(port, STREAMS[0], b"\0" + (2**32 - 1).to_bytes(4, "big") + b"{}", stream=True)
    assert status == 200 and "announces 4294967295 bytes" in _envelopes(answer)[-1][1]["error"]["message"]
    status, _ = _post(port, CALLS[0], b" " * (65 << 20))
    assert status == 413


@pytest.mark.parametrize("path", ["/files?path=../../../etc/passwd", "/files?path=%00", "/files?path=" + "a" * 5000])
def test_paths_are_the_guests_business_and_never_the_hosts(port: int, path: str) -> None:
    status, answer = _post(port, path, b"x")
    assert 400 <= status < 500 and b"root:" not in answer


def test_whoever_connects_and_says_nothing_is_let_go(tmp_path: Path) -> None:
    server = Server(Runtime(tmp_path), Keys.load(tmp_path, KEY), patience_s=0.5)  # type: ignore[arg-type]
    with served(server) as port, contextlib.ExitStack() as stack:
        mute, slow, kept = (stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3))
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 204")
        until = time.monotonic() + 5
        with contextlib.suppress(OSError):  # closed while we drip
            while time.monotonic() < until:
                slow.sendall(b"G")
                time.sleep(0.1)
        assert time.monotonic() < until
        mute.settimeout(5)
        assert _ended(mute)
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(100).startswith(b"HTTP/1.1 204")


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_body_that_never_ends_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "BODY_S", 0.3)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            f"POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        client.settimeout(5)
        assert client.recv(100).startswith(b"HTTP/1.1 504")


@pytest.mark.parametrize("token", ["é", "\udcff", "x" * 8000])
def test_a_token_of_any_bytes_is_only_wrong(port: int, token: str) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = f"GET /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {token}\r\n\r\n"
        client.sendall(head.encode("utf-8", "surrogateescape"))
        assert client.recv(100).startswith(b"HTTP/1.1 401")
