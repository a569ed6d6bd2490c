"""Guests and images that mean harm: what they send, claim and hold is bounded, and every refusal is typed."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import socket
import struct
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox.agent import client, wire
from perilune.sandbox.agent.client import Agent
from perilune.sandbox.agent.stream import Inbox
from perilune.sandbox.agent.wire import Command, Frame, Op, Parser, Type
from perilune.sandbox.commands import Commands
from perilune.sandbox.errors import InvalidRequest, MachineLost, OutOfCapacity, SandboxError
from perilune.sandbox.images import unpack as unpacking
from perilune.sandbox.images.source import Builder
from perilune.sandbox.images.unpack import unpack
from perilune.sandbox.sandbox import Sandbox

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a confined process needs root (chroot)")


class Liar:
    """A guest's agent that answers each request by what `says` gives; an endless answer stops when the host leaves."""

    def __init__(self, says: Any) -> None:
        self._ours, theirs = socket.socketpair()
        self.agent = Agent()
        self.agent.use(theirs)
        self.agent.start()
        threading.Thread(target=self._serve, args=(says,), daemon=True).start()
        self.agent.identify(b"")

    def _serve(self, says: Any) -> None:
        parser = Parser()
        with contextlib.suppress(OSError):
            while data := self._ours.recv(1 << 16):
                for frame in parser.feed(data):
                    if frame.type == Type.IDENTITY:
                        self._ours.sendall(Frame(Type.IDENTITY, 0, frame.stream, b"").pack())
                    elif frame.type in (Type.OP, Type.EXEC, Type.CREDIT):
                        for answer in says(frame):
                            self._ours.sendall(answer.pack())

    def close(self) -> None:
        self.agent.close()
        self._ours.close()


@contextlib.contextmanager
def liar(says: Any) -> Iterator[Agent]:
    made = Liar(says)
    try:
        yield made.agent
    finally:
        made.close()


def endless(frame: Frame) -> Iterator[Frame]:
    """Data for ever, whatever was granted."""
    yield Frame(Type.STARTED, 0, frame.stream, struct.pack("<i", 7))
    while True:
        yield Frame(Type.DATA, wire.OUTPUT, frame.stream, bytes(wire.CHUNK))


def patient(frame: Frame) -> Iterator[Frame]:
    """Data for ever, as it is granted."""
    granted = wire.WINDOW
    if frame.type == Type.CREDIT:
        (granted,) = struct.unpack("<I", frame.payload)
    else:
        yield Frame(Type.STARTED, 0, frame.stream, struct.pack("<i", 7))
    yield Frame(Type.DATA, wire.OUTPUT, frame.stream, bytes(granted))


def test_a_guest_that_ignores_its_credits_loses_its_connection() -> None:
    with liar(endless) as agent:
        inbox = Inbox()
        agent.execute(Command(("yes",)), inbox)
        time.sleep(0.3)  # nobody reads
        with pytest.raises(MachineLost, match="more than it was granted"):
            while True:
                inbox.get(5)


def test_signs_without_end_are_a_lie() -> None:
    with liar(lambda f: iter(lambda: Frame(Type.END, 1, f.stream, b""), None)) as agent:
        inbox = Inbox()
        agent.execute(Command(("yes",)), inbox)
        with pytest.raises(MachineLost):
            while True:
                inbox.get(5)


def test_an_answer_kept_in_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LONGEST", 1 << 20)
    with liar(patient) as agent, pytest.raises(OutOfCapacity, match="/dev/zero is longer than 1 MiB"):
        agent.call(Op.READ, "root", "/dev/zero")


def test_output_kept_in_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.sandbox.commands.LONGEST", 1 << 20)
    with liar(patient) as agent:
        box = SimpleNamespace(live=SimpleNamespace(agent=agent), record=SimpleNamespace(user="root", workdir=""))
        with pytest.raises(OutOfCapacity, match="more than 1 MiB"):
            Commands(box).run("yes")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(range(1, 40))), st.binary(max_size=12)), max_size=6))
def test_any_frames_in_any_order_are_an_answer_or_a_typed_error(frames: list[tuple[int, bytes]]) -> None:
    def says(frame: Frame) -> list[Frame]:
        return [Frame(kind, 1, frame.stream, data) for kind, data in frames] + [Frame(99, 0, frame.stream, b"")]

    with liar(says) as agent, contextlib.suppress(SandboxError):
        agent.call(Op.STAT, "root", "/", timeout_s=5)


def _entry(path: str, kind: str) -> bytes:
    texts = wire.strings("root", "root", path, "")
    return struct.pack("<IBBIQq", 26 + len(texts), ord(kind), ord(kind), 0o40755, 0, 0) + texts


@pytest.mark.parametrize("names", [["down"], ["..", "../..", "."]])
def test_a_tree_that_never_ends_or_leaves_is_not_copied(tmp_path: Path, names: list[str]) -> None:
    def says(frame: Frame) -> list[Frame]:
        if frame.type != Type.OP:
            return []
        path = frame.payload[5:].split(b"\0")[1].decode()
        listed = frame.payload[0] == Op.LISTDIR
        data = b"".join(_entry(f"{path}/{n}", "d") for n in names) if listed else _entry(path, "d")
        done = Frame(Type.EXITED, 0, frame.stream, struct.pack("<ii", 0, 0))
        return [Frame(Type.DATA, wire.OUTPUT, frame.stream, data), done]

    with liar(says) as agent:
        record = SimpleNamespace(user="root", workdir="")
        runtime = SimpleNamespace(live=lambda _: SimpleNamespace(agent=agent), record=lambda _: record)
        box = Sandbox(runtime, "box")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="deeper") if names[0] == "down" else contextlib.nullcontext():
            box.copy_out("/x", tmp_path / "here")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


# ---- images ----


@needs_root
def test_a_bomb_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.tar.gz"
    with gzip.open(bomb, "wb", 1) as file:
        info = tarfile.TarInfo("x")
        info.size = 33 << 30
        file.write(info.tobuf())
        file.write(bytes(1 << 20))
    with pytest.raises(InvalidRequest, match="more than 32 GiB"):
        unpack(bomb, tmp_path / "tree")
    assert unpacking._MOST_BYTES == 32 << 30


@needs_root
def test_a_header_of_gigabytes_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    archive = tmp_path / "pax.tar"
    with archive.open("wb") as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT if info.size < 8 << 30 else tarfile.GNU_FORMAT))
        file.truncate(9 << 30)  # sparse: costs nothing here
    with pytest.raises(InvalidRequest):
        unpack(archive, tmp_path / "tree")


shapes = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.just("sha256:" + "0" * 64),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(
            st.sampled_from(["manifests", "layers", "config", "digest", "platform", "annotations", "architecture"]),
            x,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@settings(max_examples=80, deadline=None)
@given(shapes, shapes, shapes)
def test_a_layout_of_any_shape_is_an_image_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, index: Any, manifest: Any, config: Any
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(body: Any) -> dict[str, str]:
        data = json.dumps(body).encode()
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}"}

    if isinstance(manifest, dict):
        manifest = {**manifest, "config": blob({"config": config})}
    (folder / "index.json").write_text(json.dumps(index or {"manifests": [blob(manifest)]}))
    with pytest.raises(InvalidRequest):
        Builder(folder / "cache", 64).layout(folder)


def test_a_description_cannot_point_at_a_file_of_the_host(tmp_path: Path) -> None:
    folder, secret = tmp_path / "layout", tmp_path / "secret.json"
    secret.write_text('{"layers": [], "config": {"digest": "the host\'s secret"}}')
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "blobs" / "sha256" / ("0" * 64)).symlink_to(secret)
    (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": "sha256:" + "0" * 64}]}))
    with pytest.raises(InvalidRequest, match="damaged") as refused:
        Builder(tmp_path / "cache", 64).layout(folder)
    assert "secret" not in str(refused.value)


def test_bytes_of_garbage_are_no_archive(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("a confined process needs root (chroot)")
    for i, data in enumerate((b"", b"\x28\xb5\x2f\xfd" + b"x" * 100, b"\x1f\x8b" + b"x" * 50, io.BytesIO().getvalue())):
        (tmp_path / f"{i}.tar").write_bytes(data)
        with pytest.raises(InvalidRequest):
            unpack(tmp_path / f"{i}.tar", tmp_path / "tree")
