"""Archives from strangers: whiteouts do what they say, and nothing leaves the directory."""

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox.errors import InvalidRequest, SandboxError
from perilune.sandbox.images import ext4
from perilune.sandbox.images.recipe import parse
from perilune.sandbox.images.source import Builder, image_defaults
from perilune.sandbox.images.unpack import Ahead, inside, unpack

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a confined process needs root (chroot)")


def _tar(path: Path, members: list[tuple[str, str, str]]) -> Path:
    """(kind, name, content or link): f, d, l (symbolic), h (hard)."""
    kinds = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE}
    with tarfile.open(path, "w") as tar:
        for kind, name, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kinds[kind], 0o755
            if kind == "f":
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content.encode()))
            else:
                info.linkname = content
                tar.addfile(info)
    return path


def _layout(folder: Path, layers: list[Path], config: dict) -> Path:  # type: ignore[type-arg]
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> dict:  # type: ignore[type-arg]
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "config": blob(json.dumps({"config": config}).encode()),
        "layers": [blob(layer.read_bytes()) for layer in layers],
    }
    platform = {"platform": {"architecture": "amd64", "os": "linux"}}
    (folder / "index.json").write_text(json.dumps({"manifests": [{**blob(json.dumps(manifest).encode()), **platform}]}))
    return folder


def _content(image: Path, folder: Path) -> dict[str, str]:
    """The files of an ext4 image."""
    (folder / "out").mkdir()
    subprocess.run(["debugfs", "-R", f"rdump / {folder / 'out'}", str(image)], check=True, capture_output=True)
    found = {
        str(p.relative_to(folder / "out")): p.read_text()
        for p in sorted((folder / "out").rglob("*"))
        if p.is_file() and not p.is_symlink()
    }
    shutil.rmtree(folder / "out")
    return found


@pytest.fixture(params=["loop", "tree"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How images are written: as file systems that are mounted, or by way of a tree where there are no loop devices."""
    if request.param == "loop" and not ext4.mountable():
        pytest.skip("this host has no loop devices")
    monkeypatch.setattr(ext4, "mountable", lambda: request.param == "loop")
    return str(request.param)


@needs_root
def test_an_oci_layout_becomes_an_image(tmp_path: Path, way: str) -> None:
    lower = _tar(
        tmp_path / "lower.tar",
        [("d", "etc", ""), ("f", "etc/keep", "1"), ("f", "etc/gone", "2"), ("d", "opt", ""), ("f", "opt/old", "3")],
    )
    upper = _tar(
        tmp_path / "upper.tar",
        [
            ("f", "etc/.wh.gone", ""),
            ("f", "opt/.wh..wh..opq", ""),
            ("f", "opt/new", "4"),
            ("h", "etc/2", "etc/keep"),
        ],
    )
    layout = _layout(tmp_path / "layout", [lower, upper], {"User": "1000:1000", "Env": ["A=b=c"], "Cmd": ["run", "it"]})
    builder = Builder(tmp_path / "cache", 64)
    image = builder.layout(layout)
    found = _content(image.raw, tmp_path)
    assert {name: text for name, text in found.items() if name.startswith(("etc/2", "etc/k", "etc/gone", "opt"))} == {
        "etc/2": "1",
        "etc/keep": "1",
        "opt/new": "4",
    }
    assert "user:x:1000" in found["etc/passwd"]
    assert subprocess.run(["e2fsck", "-fn", str(image.raw)], capture_output=True).returncode == 0
    kept = [path for path in (tmp_path / "cache").glob("*.raw") if path != image.raw]
    assert len(kept) == (way == "loop")  # the lowest layer, for the next image on it
    image.raw.unlink()
    assert _content(builder.layout(layout).raw, tmp_path) == found
    assert image.raw.stat().st_size == 64 << 20 and builder.layout(layout).raw == image.raw
    assert f"{tmp_path}" not in Path("/proc/mounts").read_text()
    assert (image.defaults.user, image.defaults.env, image.defaults.start) == ("1000:1000", {"A": "b=c"}, "run it")


def test_a_damaged_layer_is_refused(tmp_path: Path) -> None:
    layer = _tar(tmp_path / "layer.tar", [("f", "x", "1")])
    layout = _layout(tmp_path / "layout", [layer], {})
    blob = layout / "blobs" / "sha256" / hashlib.sha256(layer.read_bytes()).hexdigest()
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(InvalidRequest, match="damaged"):
        Builder(tmp_path / "cache", 64).layout(layout)


names = st.lists(st.sampled_from(["..", ".", "a", "b", "link", "/", ".wh.a", ".wh..wh..opq", ".wh..."]), max_size=4)
member = st.tuples(st.sampled_from("fdlh"), names.map("/".join), names.map("/".join))


@needs_root
@given(st.lists(member, max_size=6), st.booleans())
@settings(deadline=None, max_examples=8)
def test_nothing_leaves_the_directory(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, str, str]], whiteouts: bool
) -> None:
    folder = tmp_path_factory.mktemp("escape")
    (folder / "a").write_text("outside")
    (folder / "b").mkdir()
    archive = _tar(folder / "x.tar", [m for m in members if m[1]])
    before = {path.name for path in folder.iterdir()} | {"root"}
    with contextlib.suppress(SandboxError):
        unpack(archive, folder / "root", whiteouts)
    with contextlib.suppress(SandboxError):
        ext4.prepare(folder / "root")
    assert {path.name for path in folder.iterdir()} <= before
    assert (folder / "a").read_text() == "outside" and not list((folder / "b").iterdir())


@needs_root
def test_an_image_that_is_too_large_or_damaged_leaves_nothing(tmp_path: Path, way: str) -> None:
    large = _tar(tmp_path / "large.tar", [("f", "x", "y" * (70 << 20))])
    with pytest.raises(InvalidRequest, match="does not fit on a disk of 64 MiB"):
        Builder(tmp_path / "cache", 64).archive(large)
    packed = tmp_path / "cut.tar.gz"
    packed.write_bytes(gzip.compress(_tar(tmp_path / "x.tar", [("f", "x", os.urandom(3 << 20).hex())]).read_bytes()))
    for damage in (
        packed.read_bytes()[:-100000],
        packed.read_bytes()[:200000] + b"damage" + packed.read_bytes()[200006:],
    ):
        (tmp_path / "bad.tar.gz").write_bytes(damage)
        with pytest.raises(InvalidRequest, match=r"bad\.tar\.gz cannot be unpacked"):
            Builder(tmp_path / "cache", 64).archive(tmp_path / "bad.tar.gz")
    assert way and list((tmp_path / "cache").iterdir()) == []


@needs_root
@given(st.lists(st.binary(max_size=50_000), min_size=1, max_size=4), st.integers(0, 600))
@settings(deadline=None, max_examples=20)
def test_gzip_is_read_ahead_as_it_is(members: list[bytes], padding: int) -> None:
    """Members may follow each other, and zeros them."""
    ahead = Ahead(io.BytesIO(b"".join(gzip.compress(member) for member in members) + bytes(padding)))
    assert b"".join(iter(lambda: ahead.read(1), b"")) == b"".join(members)


@needs_root
@pytest.mark.parametrize("name", ["etc", "tmp", "home", "etc/passwd", "etc/hostname", "etc/sudoers.d"])
def test_a_root_whose_links_point_to_the_host_changes_nothing_there(tmp_path: Path, name: str) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir(mode=0o700)
    (outside / "hostname").write_text("host")
    (outside / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
    before = {path.name: path.read_text() for path in outside.iterdir()}
    link = tree / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / Path(name).name if name in ("etc/passwd", "etc/hostname") else outside)
    with contextlib.suppress(InvalidRequest):
        ext4.prepare(tree)
    assert {path.name: path.read_text() for path in outside.iterdir()} == before
    assert outside.stat().st_mode & 0o7777 == 0o700 and not (outside / "user").exists()


@needs_root
def test_links_within_the_root_are_followed(tmp_path: Path) -> None:
    (tmp_path / "usr" / "etc").mkdir(parents=True)
    (tmp_path / "etc").symlink_to("/usr/etc")
    ext4.prepare(tmp_path)
    assert "user:x:1000" in (tmp_path / "usr" / "etc" / "passwd").read_text()


@needs_root
def test_a_library_of_the_archive_is_never_imported(tmp_path: Path) -> None:
    """It brings a codec at our interpreter's path and a source file that asks for it, then makes extraction fail."""
    evil = Path(codecs.__file__).parent / "encodings" / "evil.py"
    source = Path(unpack.__code__.co_filename)
    archive = _tar(
        tmp_path / "x.tar",
        [
            ("f", str(evil).lstrip("/"), "open('/escaped', 'w')"),
            ("f", str(source).lstrip("/"), "# coding: evil\n" * 300),
            ("f", "plain", ""),
            ("f", "plain/below", ""),
        ],
    )
    with pytest.raises(InvalidRequest, match=r"x\.tar cannot be unpacked: .*Not a directory|File exists"):
        unpack(archive, tmp_path / "root")
    assert not (tmp_path / "root" / "escaped").exists()


@needs_root
def test_devices_are_left_out_and_zstd_is_read(tmp_path: Path) -> None:
    archive = tmp_path / "x.tar"
    with tarfile.open(archive, "w") as tar:
        disk = tarfile.TarInfo("disk")
        disk.type, disk.devmajor, disk.mode = tarfile.BLKTYPE, 8, 0o666
        tar.addfile(disk)
        tar.addfile(tarfile.TarInfo("after"))
    unpack(archive, tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["after"]
    if shutil.which("zstd"):
        subprocess.run(["zstd", "-q", str(archive)], check=True)
        unpack(tmp_path / "x.tar.zst", tmp_path / "packed")
        assert [path.name for path in (tmp_path / "packed").iterdir()] == ["after"]
        raw = (tmp_path / "x.tar.zst").read_bytes()
        (tmp_path / "x.tar.zst").write_bytes(raw[:-8])
        with pytest.raises(InvalidRequest, match=r"x\.tar\.zst cannot be unpacked"):
            unpack(tmp_path / "x.tar.zst", tmp_path / "damaged")


def test_links_resolve_inside(tmp_path: Path) -> None:
    (tmp_path / "up").symlink_to("../../..")
    (tmp_path / "root").symlink_to("/")
    assert inside(tmp_path, "//etc/x") == tmp_path / "etc" / "x"
    (tmp_path / "double").symlink_to("//etc")
    assert inside(tmp_path, "double/x") == tmp_path / "etc" / "x"
    assert inside(tmp_path, "up/etc/passwd") == tmp_path / "etc" / "passwd"
    assert inside(tmp_path, "root/etc/x") == tmp_path / "etc" / "x"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidRequest, match="symbolic links"):
        inside(tmp_path, "loop/x")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("RUN x", "before FROM"),
        ("FROM a\nVOLUME /x", "line 2: VOLUME is not supported"),
        ("FROM a\nFROM b", "only one FROM"),
        ("FROM a\nCOPY ../etc /x", "not in the build context"),
        ("", "no FROM"),
        ("FROM a\nRUN", "line 2: RUN says nothing"),
        ("FROM a\nCOPY --from=b x /x", "COPY --from=b is not supported"),
        ("FROM a\nCOPY 'x /x", "line 2: No closing quotation"),
        ("FROM a\nCOPY x\0y /x", "not in the build context"),
    ],
)
def test_a_dockerfile_that_is_not_understood_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        parse(text, tmp_path)


def test_a_bracket_is_a_shell_test_where_it_is_no_json(tmp_path: Path) -> None:
    text = 'FROM --platform=linux/amd64 a AS b\nRUN [ -d /x ] || mkdir /x\nRUN ["echo", "a b"]\nRUN last \\'
    recipe = parse(text, tmp_path)
    assert recipe.origin == "a"
    assert [step.args[0] for step in recipe.steps] == ["[ -d /x ] || mkdir /x", "echo 'a b'", "last"]


def test_image_defaults_of_nothing() -> None:
    assert image_defaults({}).user == "root"
