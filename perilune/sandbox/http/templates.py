"""E2B's template routes: build from an image or a template with steps, upload files, poll, tag, list, delete."""

import hashlib
import hmac
import re
import secrets
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from perilune.sandbox.errors import InvalidRequest, NotFound, Unauthorized
from perilune.sandbox.files import temporary
from perilune.sandbox.http import connect, silence
from perilune.sandbox.http.auth import same
from perilune.sandbox.http.bridge import _threads, blocking
from perilune.sandbox.http.views import stamp
from perilune.sandbox.images.recipe import Recipe, Step, StepFailed, build
from perilune.sandbox.images.source import Builder
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.template import add_template, known_templates
from perilune.sandbox.vmm.driver import Shape

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
_HASH = re.compile(r"^[0-9a-f]{8,128}$")
_NAMESPACE = uuid.UUID("6f9c2d0e-5d0b-4b5a-9d55-2b6f2c1a7e10")


@dataclass
class Build:
    """One build, from its request to its end."""

    template: str
    id: str
    names: list[str]
    tags: list[str]
    shape: Shape
    status: str = "waiting"
    log: list[dict[str, str]] = field(default_factory=list)
    reason: dict[str, Any] | None = None


def build_id(snapshot: str) -> str:
    """E2B names builds by UUID; ours derives from the snapshot."""
    return str(uuid.uuid5(_NAMESPACE, snapshot))


class Templates:
    """The routes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._builds: dict[str, Build] = {}
        self._secret = secrets.token_bytes(32)
        self._files = runtime.home / "uploads"

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.post("/v3/templates", self.request), web.post("/v2/templates", self.request),
            web.post("/v2/templates/{id}/builds/{build}", self.start),
            web.get("/templates/{id}/builds/{build}/status", self.status),
            web.get("/templates/{id}/files/{hash}", self.file), web.put("/uploads/{hash}", self.upload),
            web.get("/templates/aliases/{alias:.+}", self.alias), web.post("/templates/tags", self.tag),
            web.delete("/templates/tags", self.untag), web.get("/templates/{id}/tags", self.tags),
            web.get("/templates", self.list), web.get("/v2/templates", self.list),
            web.get("/templates/{id}", self.one), web.delete("/templates/{id:.+}", self.delete),
        ]  # fmt: skip

    # ---- building ----

    async def request(self, request: web.Request) -> web.Response:
        """POST /v3/templates {name, tags?, cpuCount?, memoryMB?} (v2: alias for name): a place for a build."""
        body = connect.message(await silence.body(request))
        name, _, tag = str(body.get("name") or body.get("alias") or "").partition(":")
        if not _NAME.match(name):
            raise InvalidRequest(f"{name!r} is not a template name")
        tags = [tag] if tag else [str(t) for t in body.get("tags") or []] or ["default"]
        cpus, memory = int(body.get("cpuCount") or 1), int(body.get("memoryMB") or 512)
        if not (1 <= cpus <= 16 and 128 <= memory <= 65536):
            raise InvalidRequest("cpuCount must be 1 to 16 and memoryMB 128 to 65536")
        made = Build(name.replace("/", "-"), str(uuid.uuid4()), [name], tags, Shape(cpus, memory))
        self._builds[made.id] = made
        view = self._view(made.template, made.id, [name], made.shape, time.time())
        return web.json_response({**view, "tags": tags, "buildStatus": "waiting", "buildCount": 0}, status=202)

    def _build(self, request: web.Request) -> Build:
        found = self._builds.get(request.match_info["build"])
        if not found:
            raise NotFound(f"build {request.match_info['build']} was not found")
        return found

    async def start(self, request: web.Request) -> web.Response:
        """POST builds/{build} {fromImage | fromTemplate, steps, startCmd, readyCmd}: begins; poll its status."""
        job, body = self._build(request), connect.message(await silence.body(request))
        if job.status != "waiting":
            raise InvalidRequest(f"build {job.id} is {job.status} already")
        steps = tuple(self._step(step) for step in body.get("steps") or [])
        job.status = "building"
        _threads.submit(self._run, job, body, steps)
        return web.Response(status=202)

    def _step(self, step: dict[str, Any]) -> Step:
        digest = str(step.get("filesHash") or "")
        files = self._path(digest) if digest else None
        if files and not files.exists():
            raise InvalidRequest(f"the files {digest} were not uploaded")
        return Step(str(step.get("type", "")).upper(), tuple(str(a) for a in step.get("args") or ()), files, digest)

    def _run(self, job: Build, body: dict[str, Any], steps: tuple[Step, ...]) -> None:
        def log(text: str) -> None:
            job.log.append({"timestamp": stamp(time.time()), "level": "info", "message": text})

        try:
            origin = self._origin(job, body, log)
            command, ready = str(body.get("startCmd") or ""), str(body.get("readyCmd") or "")
            names = [f"{job.names[0]}:{tag}" for tag in job.tags]
            recipe = Recipe("", steps, command)
            build(
                self._runtime, origin, recipe, names, ready or ("true" if command else ""), log, bool(body.get("force"))
            )
            job.status = "ready"
        except Exception as error:  # whatever it was, the client that polls must hear of it
            step = {"step": str(error.step)} if isinstance(error, StepFailed) else {}
            job.log.append({"timestamp": stamp(time.time()), "level": "error", "message": str(error)})
            job.reason = {"message": str(error), **step, "logEntries": []}
            job.status = "error"

    def _origin(self, job: Build, body: dict[str, Any], log: Any) -> Snapshot:
        if body.get("fromTemplate"):
            return self._runtime.resolve(str(body["fromTemplate"]))
        registry = body.get("fromImageRegistry") or {}
        name = str(body.get("fromImage") or "base")
        key = f"image:{name}:{job.shape.vcpus}:{job.shape.memory_mb}"
        known = self._runtime.catalogue.resolve(key)
        if known and not body.get("force"):
            return self._runtime.store.read(known)
        try:
            return self._runtime.resolve(name)  # a template of that name stands in for the image
        except NotFound:
            log(f"fetches {name}")
        image = Builder(self._runtime.home / "images").registry(
            name, registry.get("username"), registry.get("password")
        )
        return add_template(self._runtime, image.raw, [key], job.shape, replace(image.defaults, start=""))

    async def status(self, request: web.Request) -> web.Response:
        """GET status?logsOffset=: building, ready or error, with the log from there on (100 entries at most)."""
        job = self._build(request)
        offset = int(request.query.get("logsOffset", "0"))
        found = {"templateID": job.template, "buildID": job.id, "status": job.status, "logs": [],
                 "logEntries": job.log[offset : offset + 100]}  # fmt: skip
        return web.json_response({**found, "reason": job.reason} if job.reason else found)

    # ---- files ----

    def _path(self, digest: str) -> Path:
        if not _HASH.match(digest):
            raise InvalidRequest(f"{digest!r} is not a files hash")
        return self._files / f"{digest}.tar"

    def _ticket(self, digest: str) -> str:
        return hmac.new(self._secret, digest.encode(), hashlib.sha256).hexdigest()

    async def file(self, request: web.Request) -> web.Response:
        """GET files/{hash}: present, or where to PUT the tar."""
        digest = request.match_info["hash"]
        if self._path(digest).exists():
            return web.json_response({"present": True}, status=201)
        url = f"{request.scheme}://{request.host}/uploads/{digest}?ticket={self._ticket(digest)}"
        return web.json_response({"present": False, "url": url}, status=201)

    def is_upload(self, request: web.Request) -> bool:
        """Uploads carry a ticket instead of the API key."""
        return request.method == "PUT" and request.path.startswith("/uploads/")

    async def upload(self, request: web.Request) -> web.Response:
        """PUT /uploads/{hash}?ticket="""
        digest = request.match_info["hash"]
        if not same(request.query.get("ticket", ""), self._ticket(digest)):
            raise Unauthorized("the upload's ticket is wrong")
        with temporary(self._path(digest)) as temp, temp.open("wb") as file:
            async for piece in request.content.iter_chunked(1 << 20):
                self._runtime.guard.room(self._runtime.home)
                file.write(piece)
        return web.Response(status=200)

    # ---- names ----

    async def alias(self, request: web.Request) -> web.Response:
        """GET aliases/{alias}"""
        snapshot = await blocking(self._runtime.resolve, request.match_info["alias"])
        return web.json_response({"templateID": snapshot.id, "public": False})

    async def tag(self, request: web.Request) -> web.Response:
        """POST /templates/tags {target, tags}"""
        body = connect.message(await silence.body(request))
        target, tags = str(body.get("target", "")), [str(tag) for tag in body.get("tags") or []]
        snapshot = await blocking(self._runtime.resolve, target)
        names = [f"{target.split(':')[0]}:{tag}" for tag in tags]
        await blocking(self._runtime.catalogue.keep, snapshot.id, "template", "", names)
        return web.json_response({"tags": tags, "buildID": build_id(snapshot.id)}, status=201)

    async def untag(self, request: web.Request) -> web.Response:
        """DELETE /templates/tags {name, tags}"""
        body = connect.message(await silence.body(request))
        for tag in body.get("tags") or []:
            await blocking(self._runtime.catalogue.unname, f"{body.get('name')}:{tag}")
        return web.Response(status=204)

    async def tags(self, request: web.Request) -> web.Response:
        """GET /templates/{id}/tags"""
        name, found = request.match_info["id"].split(":")[0], []
        for snapshot, _, names, created in await blocking(lambda: list(known_templates(self._runtime))):
            for known in names:
                if known.partition(":")[0] == name:
                    tag = known.partition(":")[2] or "default"
                    found.append({"tag": tag, "buildID": build_id(snapshot), "createdAt": stamp(created)})
        if not found:
            raise NotFound(f"template {name!r} was not found")
        return web.json_response(found)

    @staticmethod
    def _view(identity: str, build: str, names: list[str], shape: Shape, created: float) -> dict[str, Any]:
        when, aliases = stamp(created), sorted({name.partition(":")[0] for name in names})
        return {
            "templateID": identity, "buildID": build, "public": False, "aliases": aliases, "names": names,
            "cpuCount": shape.vcpus, "memoryMB": shape.memory_mb, "diskSizeMB": shape.disk_mb, "createdAt": when,
            "updatedAt": when, "createdBy": None, "lastSpawnedAt": None, "spawnCount": 0, "buildCount": 1,
            "envdVersion": "", "buildStatus": "ready",
        }  # fmt: skip

    def _kept(self, identity: str, names: list[str], created: float) -> dict[str, Any]:
        return self._view(identity, build_id(identity), names, self._runtime.store.read(identity).shape, created)

    async def list(self, _request: web.Request) -> web.Response:
        """GET /templates, /v2/templates"""

        def collect() -> list[dict[str, Any]]:
            return [self._kept(i, n, c) for i, kind, n, c in known_templates(self._runtime) if kind == "template"]

        return web.json_response(await blocking(collect))

    async def one(self, request: web.Request) -> web.Response:
        """GET /templates/{id}"""
        snapshot = await blocking(self._runtime.resolve, request.match_info["id"])
        names = self._runtime.catalogue.names(snapshot.id)
        return web.json_response({**self._kept(snapshot.id, names, snapshot.created), "builds": []})

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /templates/{id}: a template or a snapshot."""
        name = request.match_info["id"]
        try:
            await blocking(self._runtime.delete_snapshot, name)
        except NotFound:
            snapshot = await blocking(self._runtime.resolve, name)
            await blocking(self._runtime.delete_snapshot, snapshot.id)
        return web.Response(status=204)
