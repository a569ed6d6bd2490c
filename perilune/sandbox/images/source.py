"""Where root file systems come from: a directory, a tar, an OCI image layout, a registry, debootstrap.

Each ends as a raw ext4 image named by the digest of what went in, so the same source is built once; an image's lowest
layer is unpacked once, and every image on it starts as a copy. Layers are unpacked into the image itself.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.sandbox.errors import InvalidRequest, SetupMissing
from perilune.sandbox.files import remove, sha256, temporary
from perilune.sandbox.images import ext4
from perilune.sandbox.images.unpack import unpack
from perilune.sandbox.snapshot import Defaults

_MOST_LAYERS, _LONGEST_JSON = 128, 16 << 20


@dataclass(frozen=True)
class Image:
    """A raw ext4 image and what its configuration says."""

    raw: Path
    defaults: Defaults


@dataclass(frozen=True)
class Layout:
    """An OCI image layout from strangers: every blob is what its digest says, every description has any shape."""

    folder: Path
    blobs: Path

    def blob(self, digest: str) -> Path:
        """A blob's file, verified."""
        found = re.fullmatch(r"sha256:([0-9a-f]{64})", digest)
        if not found:
            raise InvalidRequest(f"{digest!r} is not a digest")
        path = self.blobs / "sha256" / found[1]
        if not path.is_file():
            raise InvalidRequest(f"the image layout lacks blob {digest}")
        if sha256(path) != found[1]:
            raise InvalidRequest(f"blob {digest} is damaged: its content has another digest")
        return path

    def json(self, digest: str) -> dict[str, Any]:
        """A blob that describes something."""
        return _object(self.blob(digest), f"blob {digest}")

    def manifest(self, tag: str | None) -> dict[str, Any]:
        """The manifest for linux/amd64, through nested indexes."""
        found = _object(self.folder / "index.json", f"{self.folder}: index.json")
        for _ in range(4):
            if "layers" in found:
                return found
            choices = found.get("manifests") or []
            named = [m for m in choices if (m.get("annotations") or {}).get("org.opencontainers.image.ref.name") == tag]
            if tag and named:
                choices = named
            fitting = [m for m in choices if (m.get("platform") or {}).get("architecture", "amd64") == "amd64"]
            if not fitting:
                raise InvalidRequest(f"{self.folder} holds no image for linux/amd64{f' named {tag}' if tag else ''}")
            found, tag = self.json(fitting[0]["digest"]), None
        raise InvalidRequest(f"{self.folder} nests its indexes too deeply")


def _object(path: Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= _LONGEST_JSON else None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{what} is not a JSON object")
    return found


@dataclass(frozen=True)
class Builder:
    """Builds images into `cache`; sizes in MiB."""

    cache: Path
    disk_mb: int = 2048

    def _raw(self, key: str) -> Path:
        name = hashlib.sha256(f"{key}:{self.disk_mb}:1".encode()).hexdigest()[:32]
        raw = _made(self.cache) / f"{name}.raw"
        if raw.exists():
            raw.touch()
        return raw

    def _pack(self, tree: Path, raw: Path) -> None:
        ext4.prepare(tree)
        ext4.pack(tree, raw, self.disk_mb)

    @contextlib.contextmanager
    def _growing(self, raw: Path, start: Path | None = None) -> Iterator[Path]:
        """What to unpack into so that it becomes `raw`: the image, a copy of `start` at first; on a host without loop
        devices a tree that is packed, twice the time."""
        if ext4.mountable():
            with temporary(raw) as image:
                if start:
                    subprocess.run(["cp", "--sparse=always", "--reflink=auto", str(start), str(image)], check=True)
                else:
                    ext4.make(image, self.disk_mb)
                yield image
        else:
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                yield Path(work)
                ext4.pack(Path(work), raw, self.disk_mb)

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
        raw = self._raw(f"tar:{sha256(tar)}")
        if not raw.exists():
            with self._growing(raw) as root:
                unpack(tar, root, last=True)
        return Image(raw, defaults or Defaults())

    def layout(self, folder: Path, tag: str | None = None, blobs: Path | None = None) -> Image:
        """An OCI image layout on disk; its blobs may lie in a folder that layouts share."""
        layout = Layout(folder, blobs or folder / "blobs")
        try:
            manifest = layout.manifest(tag)
            defaults = image_defaults(layout.json(manifest["config"]["digest"]).get("config") or {})
            digests = [str(layer["digest"]) for layer in manifest["layers"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"{folder} describes no image: {error}") from None
        if not 0 < len(digests) <= _MOST_LAYERS:
            raise InvalidRequest(f"the image has {len(digests)} layers; between 1 and {_MOST_LAYERS} are supported")
        raw = self._raw(f"oci:{','.join(digests)}")
        if not raw.exists():
            lowest = self._lowest(layout, digests)
            with self._growing(raw, lowest) as root:
                for digest in digests[lowest is not None :]:
                    unpack(layout.blob(digest), root, whiteouts=True, last=digest == digests[-1])
        return Image(raw, defaults)

    def _lowest(self, layout: Layout, digests: list[str]) -> Path | None:
        """The lowest of several layers as an image of its own, kept, for other images will stand on it."""
        if len(digests) == 1 or not ext4.mountable():
            return None
        kept = self._raw(f"layer:{digests[0]}")
        if not kept.exists():
            with self._growing(kept) as root:
                unpack(layout.blob(digests[0]), root, whiteouts=True)
        return kept

    def registry(self, name: str, username: str | None = None, password: str | None = None) -> Image:
        """`skopeo` fetches it: docker://NAME (or any of skopeo's transports). Blobs that are here are not fetched
        again: neither after a pull that broke off nor for another image. Loopback registries may speak plain HTTP."""
        if not shutil.which("skopeo"):
            raise SetupMissing("skopeo is not installed: apt-get install skopeo")
        source, blobs = name if "//" in name else f"docker://{name}", self.cache / "blobs"
        policies = (Path("/etc/containers/policy.json"), Path.home() / ".config" / "containers" / "policy.json")
        trust = [] if any(path.exists() for path in policies) else ["--insecure-policy"]  # nobody asks for signatures
        command = ["skopeo", *trust, "copy", "--override-os=linux", "--override-arch=amd64"]
        command += ["--dest-shared-blob-dir", str(blobs)]
        if re.match(r"docker://(localhost|127\.[\d.]+)(:\d+)?/", source):
            command.append("--src-tls-verify=false")
        with tempfile.TemporaryDirectory(dir=_made(self.cache)) as work:
            if username and password:
                command += ["--authfile", str(_auth(Path(work) / "auth.json", source, username, password))]
            done = subprocess.run([*command, "--", source, f"oci:{work}/layout:image"], capture_output=True, text=True)
            if done.returncode:
                raise InvalidRequest(f"image {name} cannot be fetched: {done.stderr.strip()[-300:]}")
            return self.layout(Path(work) / "layout", "image", blobs)

    def trim(self, most_bytes: int = 20 << 30) -> int:
        """Forget what was used longest ago until the cache is no larger; returns how many went. Templates do not need
        it: they hold their disks by links."""
        folders = (self.cache, self.cache / "blobs" / "sha256")
        kept = [p for f in folders if f.is_dir() for p in f.iterdir() if p.name != "blobs"]
        sized = sorted(((path.stat().st_mtime, _disk_use(path), path) for path in kept), reverse=True)
        total, gone = 0, 0
        for _, size, path in sized:
            total += size
            if total > most_bytes:
                remove(path)
                gone += 1
        return gone

    def debootstrap(self, suite: str = "bookworm", packages: tuple[str, ...] = (), mirror: str | None = None) -> Image:
        """A Debian of its own."""
        if not shutil.which("debootstrap"):
            raise SetupMissing("debootstrap is not installed: apt-get install debootstrap")
        raw = self._raw(f"debootstrap:{suite}:{','.join(sorted(packages))}")
        if not raw.exists():
            with tempfile.TemporaryDirectory(dir=self.cache) as work:
                tree = Path(work) / "tree"
                include = [f"--include={','.join(packages)}"] if packages else []
                command = ["debootstrap", "--variant=minbase", *include, suite, str(tree), *filter(None, [mirror])]
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
    host = name.removeprefix("docker://").split("/")[0]
    host = host if re.search(r"[.:]|^localhost$", host) else "docker.io"
    token = base64.b64encode(f"{username}:{password}".encode()).decode()
    path.touch(0o600)
    path.write_text(json.dumps({"auths": {host: {"auth": token}}}))
    return path


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
                digest.update(sha256(path).encode())
    return digest.hexdigest()


def _disk_use(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if not p.is_symlink()]
    return sum(file.lstat().st_blocks * 512 for file in files)
