"""The control plane: E2B's sandbox routes, v1 and v2, plus forks and copies from paused sandboxes and snapshots."""

import time
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from perilune.sandbox.catalogue import Phase, Record
from perilune.sandbox.errors import InvalidRequest, NotFound, SandboxError
from perilune.sandbox.http import connect, envd, silence
from perilune.sandbox.http.auth import Keys
from perilune.sandbox.http.bridge import blocking
from perilune.sandbox.http.views import STATES, Views, network, number, stamp, strings, words
from perilune.sandbox.runtime import Request, Runtime


class Control:
    """The routes. `internet` is what a sandbox gets that does not say."""

    def __init__(self, runtime: Runtime, keys: Keys, domain: str, internet: bool = False) -> None:
        self._runtime, self.views, self._internet = runtime, Views(runtime, keys, domain), internet
        self._once: dict[str, tuple[float, Record]] = {}

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        box = "/sandboxes/{id}"
        return [
            web.post("/sandboxes", self.create), web.post("/v2/sandboxes", self.create),
            web.get("/sandboxes", self.list), web.get("/v2/sandboxes", self.list),
            web.get("/sandboxes/metrics", self.all_metrics),
            web.get(box, self.detail), web.delete(box, self.kill),
            web.post(f"{box}/pause", self.pause), web.post(f"{box}/resume", self.resume),
            web.post(f"{box}/connect", self.connect), web.post(f"/v2{box}/connect", self.connect),
            web.post(f"{box}/fork", self.fork), web.post(f"{box}/timeout", self.timeout),
            web.post(f"{box}/refreshes", self.refresh), web.put(f"{box}/network", self.set_network),
            web.post(f"{box}/snapshots", self.snapshot), web.get(f"{box}/metrics", self.metrics),
            web.get(f"{box}/logs", self.logs), web.get(f"/v2{box}/logs", self.logs),
            web.get("/snapshots", self.snapshots), web.get("/snapshots/{id}", self.one_snapshot),
            web.post("/snapshots/{id}/sandboxes", self.create_many),
        ]  # fmt: skip

    @staticmethod
    async def body(request: web.Request) -> dict[str, Any]:
        """The request's JSON object, {} when empty."""
        return connect.message(await silence.body(request))

    # ---- sandboxes ----

    def _request(self, body: dict[str, Any], v2: bool) -> Request:
        template = body.get("templateID")
        if not isinstance(template, str) or not template:
            raise InvalidRequest("`templateID` is missing")
        resume = body.get("autoResume")
        auto = bool(resume.get("enabled", False) if isinstance(resume, dict) else resume)
        pause = bool(body.get("autoPause", False))
        return Request(
            template, number(body, "timeout", 0, 86400 * 30, 15.0), "pause" if pause else "kill",
            "disk" if body.get("autoPauseMemory") is False else "full", auto, strings(body, "metadata"),
            strings(body, "envVars"), network(body, self._internet), secure=v2 or bool(body.get("secure", False)),
        )  # fmt: skip

    async def create(self, request: web.Request) -> web.Response:
        """POST /sandboxes, /v2/sandboxes; a repeated Idempotency-Key answers with the first sandbox."""
        body, key = await self.body(request), request.headers.get("Idempotency-Key", "")
        for old in [k for k, (when, _) in self._once.items() if when < time.monotonic() - 3600]:
            del self._once[old]
        if key in self._once:
            return web.json_response(self.views.brief(self._once[key][1]), status=201)
        wanted = self._request(body, request.path.startswith("/v2"))
        record = await blocking(self._runtime.create, wanted)
        if key:
            self._once[key] = (time.monotonic(), record)
        return web.json_response(self.views.brief(record), status=201, headers={"x-agentenv-sandbox-id": record.id})

    async def create_many(self, request: web.Request) -> web.Response:
        """POST /snapshots/{id}/sandboxes {count, ...}: many copies of one snapshot, each a success or an error."""
        body = await self.body(request)
        count = int(number(body, "count", 1, 100, 1) or 1)
        wanted = self._request({**body, "templateID": request.match_info["id"]}, True)
        return self._results(await blocking(self._runtime.create_many, wanted, count))

    def _results(self, made: "list[Record | SandboxError]") -> web.Response:
        found = [
            {"error": {"code": one.status, "message": str(one)}} if isinstance(one, SandboxError)
            else {"sandbox": self.views.brief(one)} for one in made
        ]  # fmt: skip
        return web.json_response(found, status=201)

    async def list(self, request: web.Request) -> web.Response:
        """GET /sandboxes (running), /v2/sandboxes (all; pages of `limit`)."""
        query = request.query
        states = query.get("state", "running" if request.path == "/sandboxes" else "running,paused").split(",")
        states = [state for value in query.getall("state", states) for state in value.split(",")]
        wanted = dict(parse_qsl(query.get("metadata", ""), keep_blank_values=True))
        limit = int(number({"limit": _integer(query.get("limit", "100"))}, "limit", 1, 1000, 100) or 100)
        records = [
            r for r in await blocking(self._runtime.records)
            if STATES.get(r.phase, "running") in states and r.phase is not Phase.LOST
            and wanted.items() <= r.metadata.items()
        ]  # fmt: skip
        if query.get("order") == "asc":
            records.reverse()
        start = next((i + 1 for i, r in enumerate(records) if r.id == query.get("nextToken")), 0)
        page = records[start : start + limit]
        headers = {"x-next-token": page[-1].id} if start + limit < len(records) else {}
        return web.json_response([self.views.listed(record) for record in page], headers=headers)

    async def detail(self, request: web.Request) -> web.Response:
        """GET /sandboxes/{id}"""
        record = await blocking(self._runtime.record, request.match_info["id"])
        if record.phase is Phase.LOST:
            raise NotFound(f"sandbox {record.id} is lost: {record.fault}")
        return web.json_response(await blocking(self.views.full, record))

    async def kill(self, request: web.Request) -> web.Response:
        """DELETE /sandboxes/{id}"""
        await blocking(self._runtime.kill, request.match_info["id"])
        return web.Response(status=204)

    async def pause(self, request: web.Request) -> web.Response:
        """POST pause {memory?}: with memory false, only the file system stays."""
        body = await self.body(request)
        mode = "disk" if body.get("memory") is False else "full"
        await blocking(self._runtime.pause, request.match_info["id"], mode)
        return web.Response(status=204)

    async def resume(self, request: web.Request) -> web.Response:
        """POST resume (older SDKs)."""
        body, identity = await self.body(request), request.match_info["id"]
        live = await blocking(self._runtime.resume, identity, number(body, "timeout", 0, 86400 * 30, 15.0))
        if "autoPause" in body:
            live.record.on_timeout = "pause" if body["autoPause"] else "kill"
            await blocking(self._runtime.catalogue.put, live.record)
        return web.json_response(self.views.brief(live.record), status=201)

    async def connect(self, request: web.Request) -> web.Response:
        """POST connect {timeout?, memory?}: 200 when it ran already, 201 when it was resumed (memory false:
        rebooted)."""
        body, identity = await self.body(request), request.match_info["id"]
        timeout = number(body, "timeout", 0, 86400 * 30, 300.0)
        reboot = body.get("memory") is False
        record, resumed = await blocking(self._runtime.connect, identity, timeout, reboot)
        return web.json_response(self.views.brief(record), status=201 if resumed else 200)

    async def fork(self, request: web.Request) -> web.Response:
        """POST fork {count?, timeout?}, from running and paused."""
        body = await self.body(request)
        count = int(number(body, "count", 1, 100, 1) or 1)
        timeout = number(body, "timeout", 0, 86400 * 30, 300.0)
        return self._results(await blocking(self._runtime.fork, request.match_info["id"], count, timeout))

    async def timeout(self, request: web.Request) -> web.Response:
        """POST timeout {timeout}: seconds from now."""
        seconds = number(await self.body(request), "timeout", 0, 86400 * 30)
        if seconds is None:
            raise InvalidRequest("`timeout` is missing")
        await blocking(self._runtime.set_timeout, request.match_info["id"], seconds)
        return web.Response(status=204)

    async def refresh(self, request: web.Request) -> web.Response:
        """POST refreshes {duration}: at least so long from now."""
        seconds = number(await self.body(request), "duration", 0, 3600, 60.0)
        await blocking(self._runtime.connect, request.match_info["id"], seconds)
        return web.Response(status=204)

    async def set_network(self, request: web.Request) -> web.Response:
        """PUT network {allowOut, denyOut, allow_internet_access}: replaces what was allowed."""
        body, identity = await self.body(request), request.match_info["id"]
        record = await blocking(self._runtime.record, identity)
        access = body.get("allow_internet_access", record.network.internet)
        wanted = replace(
            record.network, allow=words(body, "allowOut"), deny=words(body, "denyOut"), internet=bool(access)
        )
        await blocking(self._runtime.set_network, identity, wanted)
        return web.Response(status=204)

    async def metrics(self, request: web.Request) -> web.Response:
        """GET metrics: what the guest uses now."""
        identity = request.match_info["id"]
        record = await blocking(self._runtime.record, identity)
        if record.phase is not Phase.RUNNING:
            return web.json_response([])
        return web.json_response([await blocking(envd.usage, await blocking(self._runtime.live, identity))])

    async def all_metrics(self, request: web.Request) -> web.Response:
        """GET /sandboxes/metrics?sandbox_ids=a,b"""
        found = {}
        for identity in filter(None, request.query.get("sandbox_ids", "").split(",")):
            live = self._runtime.lives.get(identity)
            if live:
                found[identity] = await blocking(envd.usage, live)
        return web.json_response({"sandboxes": found})

    async def logs(self, request: web.Request) -> web.Response:
        """GET logs: the guest's kernel console."""
        record = await blocking(self._runtime.record, request.match_info["id"])
        live = self._runtime.lives.get(record.id)
        lines = live.machine.serial().splitlines()[-1000:] if live else []
        entries = [
            {"timestamp": stamp(record.started), "message": line, "level": "info", "fields": {}} for line in lines
        ]
        return web.json_response({"logs": [{"timestamp": e["timestamp"], "line": e["message"]} for e in entries],
                                  "logEntries": entries})  # fmt: skip

    # ---- snapshots ----

    async def snapshot(self, request: web.Request) -> web.Response:
        """POST snapshots {name?, memory?}"""
        body = await self.body(request)
        name, mode = body.get("name"), "disk" if body.get("memory") is False else "full"
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 128):
            raise InvalidRequest("`name` must be a text of at most 128 characters")
        identity = request.match_info["id"]
        made = await blocking(self._runtime.snapshot, identity, name, mode)
        return web.json_response(await blocking(self.views.snapshot, made, identity), status=201)

    async def snapshots(self, request: web.Request) -> web.Response:
        """GET /snapshots?sandboxID=&name=&limit=&nextToken="""
        query, found = request.query, []
        for identity, kind, sandbox, _ in await blocking(lambda: list(self._runtime.catalogue.kept())):
            names = self._runtime.catalogue.names(identity)
            if kind != "snapshot" or query.get("sandboxID", sandbox) != sandbox:
                continue
            if "name" not in query or query["name"] in names:
                found.append((identity, sandbox))
        start = next((i + 1 for i, (identity, _) in enumerate(found) if identity == query.get("nextToken")), 0)
        limit = int(number({"limit": _integer(query.get("limit", "100"))}, "limit", 1, 1000, 100) or 100)
        page = found[start : start + limit]
        headers = {"x-next-token": page[-1][0]} if start + limit < len(found) else {}
        views = [self.views.snapshot(self._runtime.store.read(identity), sandbox) for identity, sandbox in page]
        return web.json_response(views, headers=headers)

    async def one_snapshot(self, request: web.Request) -> web.Response:
        """GET /snapshots/{id}"""
        return web.json_response(self.views.snapshot(await blocking(self._runtime.resolve, request.match_info["id"])))


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"`limit` must be a number, not {text!r}") from None
