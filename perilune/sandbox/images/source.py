"""Where root file systems come from: a directory, a tar, an OCI image layout, a registry, debootstrap.

Each ends as a raw ext4 image named by the digest of what went in, so the same source is built once; an image's lowest
layer is unpacked once and shared by every image on it.
"""

import base64
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.sandbox.errors import InvalidRequest, SetupMissing
from perilune.sandbox.files import remove, temporary
from perilune.sandbox.images import ext4
from perilune.sandbox.images.unpack import unpack
from perilune.sandbox.snapshot import Defaults

_MOST_LAYERS = 128


@dataclass(frozen=True)
class Image:
    """A raw ext4 image and what its configuration says."""

    raw: Path
    defaults: Defaults


@dataclass(frozen=True)
class Builder:
    """Builds images into `cache`; sizes in MiB."""

    cache: Path
    disk_mb: int = 2048

    def _raw(self, key: str) -> Path:
        name = hashlib.sha256(f"{key}:{self.disk_mb}:1".encode()).hexdigest()[:32]
        self.cache.mkdir(parents=True, exist_ok=True)
        return self.cache / f"{name}.raw"

    def _pack(self, tree: Path, raw: Path) -> None:
        ext4.prepare(tree)
        ext4.pack(tree, raw, self.disk_mb)

    def directory(self, tree: Path, defaults: Defaults | None = None) -> Image:
        """A directory, which is not changed."""
        if not tree.is_dir():
            raise InvalidRequest(f"{tree} is not a directory")
        raw = self._raw(f"directory:{tree_digest(tree)}")
        if not raw.exists():
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                copy = Path(work) / "tree"
                subprocess.run(["cp", "-a", "--reflink=auto", str(tree), str(copy)], check=True)
                self._pack(copy, raw)
        return Image(raw, defaults or Defaults())

    def archive(self, tar: Path, defaults: Defaults | None = None) -> Image:
        """A tar of a root file system."""
        with tar.open("rb") as file:
            raw = self._raw(f"tar:{hashlib.file_digest(file, 'sha256').hexdigest()}")
        if not raw.exists():
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                unpack(tar, Path(work) / "tree")
                self._pack(Path(work) / "tree", raw)
        return Image(raw, defaults or Defaults())

    def layout(self, folder: Path, tag: str | None = None) -> Image:
        """An OCI image layout on disk."""
        manifest = _manifest(folder, tag)
        config = _json(folder, manifest["config"]["digest"]).get("config") or {}
        digests = [layer["digest"] for layer in manifest["layers"]]
        if len(digests) > _MOST_LAYERS:
            raise InvalidRequest(f"the image has {len(digests)} layers; at most {_MOST_LAYERS} are supported")
        raw = self._raw(f"oci:{','.join(digests)}")
        if not raw.exists():
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                tree = self._stack(folder, digests, Path(work))
                self._pack(tree, raw)
        return Image(raw, image_defaults(config))

    def _stack(self, folder: Path, digests: list[str], work: Path) -> Path:
        """Unpack layers bottom to top, starting from the longest run of lowest layers that is there already."""
        tree, have = work / "tree", 0
        for count in range(len(digests), 0, -1):
            kept = self._kept(digests[:count])
            if kept.is_dir():
                subprocess.run(["cp", "-a", "--reflink=auto", str(kept), str(tree)], check=True)
                have = count
                break
        for i, digest in enumerate(digests[have:], have):
            blob = _blob(folder, digest)
            with blob.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest.split(":", 1)[1]:
                    raise InvalidRequest(f"layer {digest} is damaged: its content has another digest")
            unpack(blob, tree, whiteouts=True)
            if i == 0 and len(digests) > 1:  # the base that other images will share; the rest is theirs alone
                with temporary(self._kept(digests[:1])) as temp:
                    subprocess.run(["cp", "-a", "--reflink=auto", str(tree), str(temp)], check=True)
        return tree

    def _kept(self, digests: list[str]) -> Path:
        return self.cache / "trees" / hashlib.sha256(",".join(digests).encode()).hexdigest()[:32]

    def registry(self, name: str, username: str | None = None, password: str | None = None) -> Image:
        """`skopeo` fetches it: docker://NAME (or any of skopeo's transports)."""
        if not shutil.which("skopeo"):
            raise SetupMissing("skopeo is not installed: apt-get install skopeo")
        source = name if ":" in name and "//" in name else f"docker://{name}"
        with tempfile.TemporaryDirectory(dir=_made(self.cache)) as work:
            command = ["skopeo", "copy", "--override-os=linux", "--override-arch=amd64"]
            environment = dict(os.environ)
            if username and password:
                secret = Path(work) / "auth.json"
                command += ["--authfile", str(_auth(secret, name, username, password))]
            done = subprocess.run(
                [*command, source, f"oci:{work}/layout:image"], capture_output=True, text=True, env=environment
            )
            if done.returncode:
                raise InvalidRequest(f"image {name} cannot be fetched: {done.stderr.strip()[-300:]}")
            return self.layout(Path(work) / "layout", "image")

    def debootstrap(self, suite: str = "bookworm", packages: tuple[str, ...] = (), mirror: str | None = None) -> Image:
        """A Debian of its own."""
        if not shutil.which("debootstrap"):
            raise SetupMissing("debootstrap is not installed: apt-get install debootstrap")
        raw = self._raw(f"debootstrap:{suite}:{','.join(sorted(packages))}")
        if not raw.exists():
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                tree = Path(work) / "tree"
                include = [f"--include={','.join(packages)}"] if packages else []
                command = [
                    "debootstrap",
                    "--variant=minbase",
                    *include,
                    suite,
                    str(tree),
                    *([mirror] if mirror else []),
                ]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise InvalidRequest(f"debootstrap {suite} failed: {(done.stderr or done.stdout).strip()[-300:]}")
                remove(tree / "var" / "cache" / "apt" / "archives")
                self._pack(tree, raw)
        return Image(raw, Defaults(user="user"))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _auth(path: Path, name: str, username: str, password: str) -> Path:
    host = name.removeprefix("docker://").split("/")[0] if "/" in name and "." in name.split("/")[0] else "docker.io"
    token = base64.b64encode(f"{username}:{password}".encode()).decode()
    path.touch(0o600)
    path.write_text(json.dumps({"auths": {host: {"auth": token}}}))
    return path


def _blob(folder: Path, digest: str) -> Path:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or not all(c in "0123456789abcdef" for c in value):
        raise InvalidRequest(f"{digest!r} is not a digest")
    path = folder / "blobs" / algorithm / value
    if not path.is_file():
        raise InvalidRequest(f"the image layout lacks blob {digest}")
    return path


def _json(folder: Path, digest: str) -> dict[str, Any]:
    try:
        return json.loads(_blob(folder, digest).read_bytes())
    except ValueError:
        raise InvalidRequest(f"blob {digest} is not JSON") from None


def _manifest(folder: Path, tag: str | None) -> dict[str, Any]:
    """The manifest for linux/amd64, through nested indexes."""
    try:
        found = json.loads((folder / "index.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{folder} is not an OCI image layout: {error}") from None
    for _ in range(4):
        if "layers" in found:
            return found
        choices = found.get("manifests") or []
        named = [m for m in choices if (m.get("annotations") or {}).get("org.opencontainers.image.ref.name") == tag]
        if tag and named:
            choices = named
        fitting = [m for m in choices if (m.get("platform") or {}).get("architecture", "amd64") == "amd64"]
        if not fitting:
            raise InvalidRequest(f"{folder} holds no image for linux/amd64{f' named {tag}' if tag else ''}")
        found, tag = _json(folder, fitting[0]["digest"]), None
    raise InvalidRequest(f"{folder} nests its indexes too deeply")


def image_defaults(config: dict[str, Any]) -> Defaults:
    """User, directory, environment and command of an image configuration."""
    env = dict(text.partition("=")[::2] for text in config.get("Env") or [])
    words = [*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])]
    return Defaults(config.get("User") or "root", config.get("WorkingDir") or "", env, shlex.join(words))


def tree_digest(tree: Path) -> str:
    """Of names, kinds, modes, owners and contents."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(tree):
        names.sort()
        for name in sorted(names + files):
            path = Path(folder) / name
            stat = path.lstat()
            digest.update(f"{path.relative_to(tree)}\0{stat.st_mode:o} {stat.st_uid} {stat.st_gid}\0".encode())
            if path.is_symlink():
                digest.update(os.readlink(path).encode())  # noqa: PTH115
            elif path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
