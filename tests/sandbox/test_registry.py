"""`skopeo` against a registry on loopback, written here from the distribution API: pulls, credentials, a pull that
broke off; and debootstrap, played by a script."""

import base64
import gzip
import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sandbox.test_images import _tar

from perilune.sandbox.errors import InvalidRequest
from perilune.sandbox.images.source import Builder

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a confined process needs root (chroot)"),
    pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo is not installed"),
]
LOGIN = "Basic " + base64.b64encode(b"ann:secret").decode()


class Registry:
    """Blobs by digest, manifests by tag. `broken` blobs are cut short; `login` is asked for when set."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tags: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.broken: set[str] = set()
        self.login = ""
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.login and request.headers.get("Authorization") != self.login:
            request.send_response(401)
            request.send_header("WWW-Authenticate", 'Basic realm="here"')
            request.end_headers()
            return
        kind, name = request.path.rstrip("/").split("/")[-2:]
        data = self.tags.get(name, self.blobs.get(name)) if kind == "manifests" else self.blobs.get(name)
        if request.path == "/v2/":
            data = b"{}"
        request.send_response(200 if data is not None else 404)
        if kind == "manifests":
            request.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        self.asked[name] += 1
        request.send_header("Content-Length", str(len(data or b"")))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write((data or b"")[: 10 if name in self.broken else None])

    def add(self, data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"digest": digest, "size": len(data)}

    def image(self, tag: str, *layers: bytes) -> None:
        made = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.add(json.dumps({"architecture": "amd64", "os": "linux", "config": {"User": "ann"}}).encode())
            | {"mediaType": "application/vnd.oci.image.config.v1+json"},
            "layers": [
                self.add(gzip.compress(layer, mtime=0)) | {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}
                for layer in layers
            ],
        }
        self.tags[tag] = json.dumps(made).encode()


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.server.shutdown()
    made.server.server_close()


def _layer(folder: Path, name: str, content: str) -> bytes:
    return _tar(folder / f"{name}.tar", [("d", "etc", ""), ("f", f"etc/{name}", content)]).read_bytes()


def test_an_image_is_pulled_and_blobs_are_fetched_once(tmp_path: Path, registry: Registry) -> None:
    base, one, two = (_layer(tmp_path, name, name * 1000) for name in ("base", "one", "two"))
    registry.image("first", base, one)
    registry.image("second", base, two)
    builder = Builder(tmp_path / "cache", 64)
    image = builder.registry(f"{registry.host}/team/app:first")
    assert image.defaults.user == "ann" and image.raw.stat().st_size == 64 << 20
    lowest = next(d for d in registry.blobs if registry.blobs[d] == gzip.compress(base, mtime=0))
    assert builder.registry(f"{registry.host}/team/app:second").raw != image.raw
    assert registry.asked[lowest] == 1
    assert builder.registry(f"docker://{registry.host}/team/app:first").raw == image.raw
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        builder.registry(f"{registry.host}/team/app:third")


def test_a_pull_that_broke_off_goes_on(tmp_path: Path, registry: Registry) -> None:
    base, top = _layer(tmp_path, "base", "b" * 5000), _layer(tmp_path, "top", "t" * 5000)
    registry.image("app", base, top)
    lowest, upper = list(registry.blobs)[1:3]
    registry.broken = {upper}
    builder = Builder(tmp_path / "cache", 64)
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        builder.registry(f"{registry.host}/app:app")
    registry.broken = set()
    builder.registry(f"{registry.host}/app:app")
    assert registry.asked[lowest] == 1 and registry.asked[upper] > 1


def test_credentials_reach_the_registry_and_no_command_line(tmp_path: Path, registry: Registry) -> None:
    registry.image("app", _layer(tmp_path, "base", "x"))
    registry.login = LOGIN
    builder = Builder(tmp_path / "cache", 64)
    with pytest.raises(InvalidRequest, match=r"unauthorized|authentication required"):
        builder.registry(f"{registry.host}/app:app", "ann", "wrong")
    assert builder.registry(f"{registry.host}/app:app", "ann", "secret").raw.exists()


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, registry: Registry) -> None:
    builder, raws = Builder(tmp_path / "cache", 64), []
    for i in range(3):
        registry.image(f"v{i}", _layer(tmp_path, f"f{i}", os.urandom(1 << 20).hex()))
        raws.append(builder.registry(f"{registry.host}/app:v{i}").raw)
        os.utime(raws[i], (i, i))
    builder.registry(f"{registry.host}/app:v0")  # used again
    for blob in (tmp_path / "cache" / "blobs" / "sha256").iterdir():
        os.utime(blob, (0, 0))
    assert builder.trim(most_bytes=raws[0].stat().st_blocks * 512 + (4 << 20)) >= 2
    assert raws[0].exists() and not raws[1].exists()


def test_debootstrap_makes_the_default_template_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "debootstrap"
    script.write_text(
        '#!/bin/sh\necho "$@" >> "$0.log"\nfor tree; do :; done\nmkdir -p "$4/etc" && echo deb > "$4/etc/id"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    builder = Builder(tmp_path / "cache", 64)
    image = builder.debootstrap("bookworm", ("bash", "git"))
    assert builder.debootstrap("bookworm", ("git", "bash")).raw == image.raw and image.defaults.user == "user"
    (call,) = (tmp_path / "debootstrap.log").read_text().splitlines()
    assert call.startswith("--variant=minbase --include=bash,git bookworm /")
    script.write_text("#!/bin/sh\necho E: no such suite >&2; exit 1\n")
    with pytest.raises(InvalidRequest, match="no such suite"):
        builder.debootstrap("never")
