"""What the E2B SDK 2.2 sends, byte for byte: no index here has that SDK, so a client of ours speaks its words in CI
(test_e2b.py runs the SDK itself where it is on PYTHONPATH)."""

import base64
import http.client
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.served import certificate, served

from perilune.sandbox.errors import InvalidRequest
from perilune.sandbox.http.app import Server, certified
from perilune.sandbox.http.auth import Keys
from perilune.sandbox.runtime import Runtime

KEY = "e2b_" + "0" * 40
CLIENT = {"User-Agent": "e2b-python-sdk/2.2.0", "lang": "python", "package_version": "2.2.0", "publisher": "e2b"}


class Client:
    """One connection for the API and one for the daemon, as the SDK keeps them."""

    def __init__(self, port: int) -> None:
        self._port, self.box, self.token = port, "", ""

    def api(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {**CLIENT, "X-API-KEY": KEY}
        if body is not None:
            headers["Content-Type"] = "application/json"
        status, data, _ = self._send(method, path, json.dumps(body).encode() if body is not None else None, headers)
        return status, json.loads(data) if data else None

    def daemon(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        known = {"E2b-Sandbox-Id": self.box, "E2b-Sandbox-Port": "49983", "X-Access-Token": self.token}
        status, data, _ = self._send(method, path, body, {**CLIENT, **known, **headers})
        return status, data

    def call(self, method: str, **message: Any) -> tuple[int, Any]:
        """A unary Connect call."""
        body, kind = json.dumps(message).encode(), {"Content-Type": "application/json", "Connect-Protocol-Version": "1"}
        status, data = self.daemon("POST", f"/{method}", body, **kind)
        return status, json.loads(data)

    def stream(self, method: str, more: dict[str, str] | None = None, **message: Any) -> list[dict[str, Any]]:
        """A server-streaming Connect call: its messages, the last one the trailer."""
        raw = json.dumps(message).encode()
        kind = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": "50",
            "Authorization": "Basic " + base64.b64encode(b"user:").decode(),
            **(more or {}),
        }
        status, data = self.daemon("POST", f"/{method}", struct.pack(">BI", 0, len(raw)) + raw, **kind)
        assert status == 200
        found = []
        while data:
            flags, length = struct.unpack_from(">BI", data)
            found.append({**json.loads(data[5 : 5 + length]), "flags": flags})
            data = data[5 + length :]
        assert [m["flags"] for m in found] == [0] * (len(found) - 1) + [2]
        return found

    def run(self, line: str) -> tuple[str, int]:
        process = {"cmd": "/bin/bash", "args": ["-l", "-c", line], "envs": {}}
        out, code = "", -1
        for message in self.stream("process.Process/Start", process=process):
            event = message.get("event", {})
            out += base64.b64decode(event.get("data", {}).get("stdout", "")).decode()
            code = event["end"].get("exitCode", 0) if "end" in event else code
        return out, code

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[Client]:
    with served(Server(runtime, Keys.load(runtime.home, KEY))) as port:
        made = Client(port)
        status, body = made.api(
            "POST", "/sandboxes",
            {"templateID": "base", "metadata": {"who": "old"}, "timeout": 300, "envVars": {"COLOUR": "red"},
             "secure": True, "allow_internet_access": False, "autoPause": False},
        )  # fmt: skip
        assert status == 201 and {"templateID", "sandboxID", "clientID", "envdVersion"} <= set(body)
        made.box, made.token = body["sandboxID"], body["envdAccessToken"]
        yield made
        made.api("DELETE", f"/sandboxes/{made.box}")


def test_commands_and_their_ends(client: Client) -> None:
    assert client.run("echo $COLOUR; id -un; exit 3") == ("red\nuser\n", 3)
    assert client.daemon("GET", "/health")[0] == 204
    status, body = client.call("process.Process/SendSignal", process={"pid": 999999}, signal="SIGNAL_SIGKILL")
    assert (status, body["code"]) == (404, "not_found")
    assert client.call("process.Process/List") == (200, {"processes": []})
    missing = client.stream("process.Process/Start", process={"cmd": "/nowhere", "args": []})
    assert missing[-1]["error"]["code"] in ("not_found", "invalid_argument")


def test_files_by_multipart(client: Client) -> None:
    edge, data = "b0undary", bytes(range(256)) * 500
    head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="/home/user/a.bin"\r\n'
    form = head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data + f"\r\n--{edge}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={edge}"}
    status, answer = client.daemon("POST", "/files?path=%2Fhome%2Fuser%2Fa.bin&username=user", form, **kind)
    assert status == 200 and json.loads(answer) == [{"name": "a.bin", "path": "/home/user/a.bin", "type": "file"}]
    assert client.daemon("GET", "/files?path=%2Fhome%2Fuser%2Fa.bin&username=user") == (200, data)
    assert client.daemon("GET", "/files?path=%2Fnowhere&username=user")[0] == 404
    _, listed = client.call("filesystem.Filesystem/ListDir", path="/home/user", depth=1)
    assert [e["path"] for e in listed["entries"] if e["name"] == "a.bin"] == ["/home/user/a.bin"]
    assert client.call("filesystem.Filesystem/MakeDir", path="/home/user/d")[0] == 200
    assert client.call("filesystem.Filesystem/MakeDir", path="/home/user/d")[1]["code"] == "already_exists"
    assert client.call("filesystem.Filesystem/Stat", path="/home/user/never")[1]["code"] == "not_found"


def test_several_files_and_a_deadline(client: Client) -> None:
    """Each part is named by its whole path; a command that outlives its call's time is killed."""
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="/tmp/several/{0}"\r\n\r\n{0}\r\n'
    form = (part.format("one") + part.format("two") + "--b--\r\n").encode()
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    assert client.daemon("POST", "/files?username=user", form, **kind)[0] == 200
    assert client.run("cat /tmp/several/one /tmp/several/two") == ("onetwo", 0)
    line = {"cmd": "/bin/bash", "args": ["-l", "-c", "echo early; sleep 345"]}
    *heard, end = client.stream("process.Process/Start", {"Connect-Timeout-Ms": "1500.0"}, process=line)
    assert "early" in base64.b64decode(heard[-1]["event"]["data"]["stdout"]).decode()
    assert end["error"]["code"] == "deadline_exceeded" and "1.5 s" in end["error"]["message"]
    until = time.monotonic() + 10
    while client.call("process.Process/List")[1]["processes"] and time.monotonic() < until:
        time.sleep(0.1)
    assert time.monotonic() < until


def test_a_place_for_a_build_in_the_older_words(client: Client) -> None:
    status, made = client.api("POST", "/v2/templates", {"alias": "old-words", "cpuCount": 1, "memoryMB": 256})
    needed = "aliases buildCount buildID cpuCount createdAt createdBy diskSizeMB envdVersion lastSpawnedAt memoryMB"
    assert status == 202 and set(f"{needed} public spawnCount templateID updatedAt".split()) <= set(made)
    build = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    assert client.api("POST", f"/v2{build}", {"fromTemplate": "base", "steps": []})[0] == 202
    until = time.monotonic() + 60
    while (found := client.api("GET", f"{build}/status")[1])["status"] == "building" and time.monotonic() < until:
        time.sleep(0.2)
    assert found["status"] == "ready"
    (view,) = [one for one in client.api("GET", "/templates")[1] if one["aliases"] == ["old-words"]]
    assert client.api("DELETE", f"/templates/{view['templateID']}")[0] == 204


def test_ports_that_are_not_public_need_the_traffic_token(client: Client) -> None:
    wanted = {"templateID": "base", "network": {"allowPublicTraffic": False}}
    status, made = client.api("POST", "/sandboxes", wanted)
    assert status == 201 and len({made["trafficAccessToken"], client.token, KEY}) == 3
    where = {"E2b-Sandbox-Id": made["sandboxID"]}
    page = 'printf "HTTP/1.0 200 OK\\r\\n\\r\\nserved"'
    serve = {"cmd": "/bin/busybox", "args": ["nc", "-ll", "-p", "8000", "-e", "/bin/sh", "-c", page]}
    raw = json.dumps({"process": serve}).encode()
    kind = {"Content-Type": "application/connect+json", "Connect-Timeout-Ms": "15000"}
    body = struct.pack(">BI", 0, len(raw)) + raw
    threading.Thread(
        target=client.daemon, args=("POST", "/process.Process/Start", body), kwargs={**kind, **where}
    ).start()
    until = time.monotonic() + 10
    port = {**where, "E2b-Sandbox-Port": "8000"}
    assert client.daemon("GET", "/", None, **port)[0] == 401
    token = {"E2b-Traffic-Access-Token": made["trafficAccessToken"]}
    while (answer := client.daemon("GET", "/", None, **port, **token)) != (200, b"served"):
        assert answer[0] == 502 and b"port is not open" in answer[1] and time.monotonic() < until, answer
        time.sleep(0.1)
    assert client.api("DELETE", f"/sandboxes/{made['sandboxID']}")[0] == 204


def _access(client: Client, box: str) -> str:
    """The token of a sandbox that runs already, as a connecting SDK gets it."""
    return str(client.api("POST", f"/sandboxes/{box}/connect", {"timeout": 60})[1].get("envdAccessToken", ""))


def test_many_from_one_snapshot_and_one_from_many_requests(client: Client) -> None:
    client.run("echo kept > /dev/shm/seed")
    status, snapshot = client.api("POST", f"/sandboxes/{client.box}/snapshots", {"name": "seed"})
    assert status == 201
    status, made = client.api("POST", f"/snapshots/{snapshot['snapshotID']}/sandboxes", {"count": 3})
    boxes = [one["sandbox"]["sandboxID"] for one in made]
    assert status == 201 and len(set(boxes)) == 3
    once = {**CLIENT, "X-API-KEY": KEY, "Idempotency-Key": "the-same", "Content-Type": "application/json"}
    body = json.dumps({"templateID": "seed"}).encode()
    twice = [json.loads(client._send("POST", "/sandboxes", body, once)[1])["sandboxID"] for _ in range(2)]
    assert twice[0] == twice[1]
    for box in {*boxes, *twice}:
        where = {"E2b-Sandbox-Id": box, "X-Access-Token": _access(client, box)}
        assert client.daemon("GET", "/files?path=/dev/shm/seed", None, **where) == (200, b"kept\n")
        assert client.api("DELETE", f"/sandboxes/{box}")[0] == 204
    assert client.api("DELETE", f"/templates/{snapshot['snapshotID']}")[0] == 204


def test_by_domain_and_over_tls(runtime: Runtime, tmp_path: Path) -> None:
    """An SDK that knows no URLs asks https://api.DOMAIN and https://PORT-SANDBOX.DOMAIN."""
    pem = certificate(tmp_path, "sandbox.test")
    with served(Server(runtime, Keys.load(runtime.home, KEY), "sandbox.test"), 0, certified(pem, pem)) as port:

        def ask(method: str, host: str, path: str) -> tuple[int, bytes]:
            context = ssl.create_default_context(cafile=str(pem))
            with context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname=host) as tls:
                body = b'{"templateID": "base"}' if method == "POST" else b""
                head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nX-API-Key: {KEY}\r\n"
                tls.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = b"".join(iter(lambda: tls.recv(65536), b""))
            return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]

        status, raw = ask("POST", "api.sandbox.test", "/sandboxes")
        made = json.loads(raw)
        assert status == 201 and made["domain"] == "sandbox.test"
        assert ask("GET", f"49983-{made['sandboxID']}.sandbox.test", "/files?path=/etc/hostname")[0] == 200
        assert ask("DELETE", "api.sandbox.test", f"/sandboxes/{made['sandboxID']}")[0] == 204
    with pytest.raises(InvalidRequest, match="no certificate"):
        certified(tmp_path / "tls.conf", pem)


def test_the_life_of_a_sandbox(client: Client) -> None:
    box = f"/sandboxes/{client.box}"
    client.run("echo kept > /dev/shm/mark")
    assert client.api("POST", f"{box}/pause")[0] == 204
    assert client.api("POST", f"{box}/pause")[0] == 409
    assert client.daemon("GET", "/health")[0] == 502
    status, body = client.api("POST", f"{box}/resume", {"timeout": 200, "autoPause": False})
    assert status == 201 and body["sandboxID"] == client.box and body["envdAccessToken"] == client.token
    assert client.run("cat /dev/shm/mark") == ("kept\n", 0)
    assert client.api("POST", f"{box}/connect", {"timeout": 100})[0] == 200
    assert client.api("POST", f"{box}/timeout", {"timeout": 120})[0] == 204
    assert client.api("POST", f"{box}/refreshes", {"duration": 60})[0] == 204
    status, detail = client.api("GET", box)
    needed = (
        "templateID",
        "sandboxID",
        "clientID",
        "startedAt",
        "endAt",
        "envdVersion",
        "cpuCount",
        "memoryMB",
        "state",
    )
    assert status == 200 and all(key in detail for key in needed) and detail["state"] == "running"
    for path in ("/sandboxes?metadata=who%3Dold", "/v2/sandboxes?metadata=who%3Dold&state=running&limit=10"):
        assert [one["sandboxID"] for one in client.api("GET", path)[1]] == [client.box]
    (usage,) = client.api("GET", f"{box}/metrics")[1]
    assert usage["memTotal"] > usage["memUsed"] > 0 and usage["diskTotal"] > 0


def test_the_document_names_every_route(client: Client, runtime: Runtime) -> None:
    status, document = client.api("GET", "/openapi.json")
    assert status == 200 and document["openapi"] == "3.1.0"
    routes = Server(runtime, Keys.load(runtime.home, KEY)).app().router.routes()
    served_by = {(r.resource.canonical, r.method.lower()) for r in routes if r.resource and r.method != "HEAD"}
    assert {(path, method) for path, found in document["paths"].items() for method in found} == served_by
    fork = document["paths"]["/sandboxes/{id}/fork"]["post"]
    assert set(fork["requestBody"]["content"]["application/json"]["schema"]["properties"]) == {"count", "timeout"}
    assert [p["name"] for p in fork["parameters"]] == ["id"]


def test_it_is_gone_in_the_words_the_sdk_looks_for(client: Client) -> None:
    assert client.api("DELETE", f"/sandboxes/{client.box}")[0] == 204
    assert client.api("DELETE", f"/sandboxes/{client.box}")[0] == 404
    assert client.api("GET", f"/sandboxes/{client.box}")[0] == 404
    status, body = client.daemon("GET", "/health")
    assert status == 502 and "was not found" in json.loads(body)["message"]
