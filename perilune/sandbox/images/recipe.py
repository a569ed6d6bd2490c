"""Steps that make a template: a Dockerfile subset (FROM, RUN, COPY, ENV, ARG, WORKDIR, USER, CMD), run in a sandbox.

Every step that changes the disk is kept as a snapshot named by the digest of all steps so far. A build that stopped, or
one that shares its beginning with another, continues from there.
"""

import hashlib
import json
import re
import shlex
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perilune.sandbox.errors import InvalidRequest, SandboxError
from perilune.sandbox.images.source import tree_digest
from perilune.sandbox.images.unpack import unpack
from perilune.sandbox.request import Request
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.sandbox import Sandbox
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.template import publish

Log = Callable[[str], None]
KINDS = ("RUN", "COPY", "ENV", "ARG", "WORKDIR", "USER", "CMD")


class StepFailed(SandboxError):  # noqa: N818 - named for what happened, as in errors.py
    """A step of a build failed; `step` counts from 1."""

    status, code = 400, "failed_precondition"

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step = step


@dataclass(frozen=True)
class Step:
    """`args` as E2B has them: RUN [command, user?], COPY [source, target, user?, mode?], ENV [k, v, ...], USER [u]."""

    kind: str
    args: tuple[str, ...]
    files: Path | None = None  # COPY: the context directory, or a tar of it
    digest: str = ""  # of the files


@dataclass(frozen=True)
class Recipe:
    """A Dockerfile read: the origin's name and what follows."""

    origin: str
    steps: tuple[Step, ...]
    command: str = ""


def parse(text: str, context: Path) -> Recipe:
    """Read a Dockerfile; InvalidRequest names the line that is not understood."""
    origin, steps, command = "", [], ""
    for number, line in _lines(text):
        word, _, rest = line.partition(" ")
        kind, rest = word.upper(), rest.strip()
        if kind == "FROM":
            if origin:
                raise InvalidRequest(f"line {number}: only one FROM is supported")
            origin = next((part for part in rest.split() if not part.startswith("--")), "")
        elif not origin:
            raise InvalidRequest(f"line {number}: {kind} before FROM")
        elif kind in ("CMD", "ENTRYPOINT"):
            command = _shell(rest)
        elif kind in KINDS:
            steps.append(_step(kind, rest, context, number))
        else:
            raise InvalidRequest(f"line {number}: {word} is not supported (FROM, {', '.join(KINDS)})")
    if not origin:
        raise InvalidRequest("the Dockerfile has no FROM")
    return Recipe(origin, tuple(steps), command)


def _lines(text: str) -> list[tuple[int, str]]:
    found, begun, start = [], "", 0
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if not begun and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start or number
        if line.rstrip().endswith("\\"):
            begun += line.rstrip()[:-1] + " "
            continue
        found.append((start, (begun + line).strip()))
        begun, start = "", 0
    if begun:  # the last line ends in a backslash
        found.append((start, begun.strip()))
    return found


def _within(source: Path, context: Path) -> bool:
    try:
        return source.resolve().is_relative_to(context.resolve()) and source.exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _listed(text: str) -> list[str]:
    """The words of a JSON form; none where it is no JSON: `[ -d /x ] || mkdir /x` is a shell line, as in Docker."""
    try:
        words = json.loads(text) if text.startswith("[") else []
    except ValueError:
        return []
    return words if all(isinstance(word, str) for word in words) else []


def _shell(text: str) -> str:
    words = _listed(text)
    return shlex.join(words) if words else text


def _split(text: str, number: int) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidRequest(f"line {number}: {error}") from None


def _step(kind: str, rest: str, context: Path, number: int) -> Step:
    if not rest:
        raise InvalidRequest(f"line {number}: {kind} says nothing")
    if kind == "RUN":
        return Step(kind, (_shell(rest),))
    if kind in ("ENV", "ARG"):
        pairs = re.findall(r'([A-Za-z_]\w*)(?:=("(?:[^"\\]|\\.)*"|\'[^\']*\'|\S*))?', rest) if "=" in rest else []
        if not pairs:
            key, _, value = rest.partition(" ")
            return Step("ENV", (key, value))
        return Step("ENV", tuple(word for key, value in pairs for word in (key, "".join(_split(value, number)))))
    words = _listed(rest) or _split(rest, number)
    if kind == "COPY":
        owner = next((w.partition("=")[2] for w in words if w.startswith("--chown=")), "")
        flags = [w for w in words if w.startswith("--") and not w.startswith("--chown=")]
        if flags:
            raise InvalidRequest(f"line {number}: COPY {flags[0]} is not supported")
        words = [w for w in words if not w.startswith("--")]
        if len(words) != 2:
            raise InvalidRequest(f"line {number}: COPY takes one source and one target")
        source = context / words[0].lstrip("/")
        if not _within(source, context):
            raise InvalidRequest(f"line {number}: {words[0][:200]!r} is not in the build context")
        digest = tree_digest(source) if source.is_dir() else hashlib.sha256(source.read_bytes()).hexdigest()
        return Step(kind, (words[0], words[1], owner), context, digest)
    if len(words) != 1:
        raise InvalidRequest(f"line {number}: {kind} takes one value")
    return Step(kind, (words[0],))


def keys(origin: str, steps: tuple[Step, ...]) -> list[str]:
    """The digest of the origin and all steps up to each."""
    found, at = [], hashlib.sha256(origin.encode()).hexdigest()
    for step in steps:
        at = hashlib.sha256(json.dumps([at, step.kind, step.args, step.digest]).encode()).hexdigest()
        found.append(at)
    return found


def build(
    runtime: Runtime, origin: Snapshot, recipe: Recipe, names: list[str], ready: str = "", log: Log = lambda _: None,
    force: bool = False,
) -> Snapshot:  # fmt: skip
    """Run the recipe's steps on a copy of `origin` and keep the result under `names`; StepFailed says which failed."""
    marks = keys(origin.id, recipe.steps)
    done = 0
    if not force:
        done = next((i for i in range(len(marks), 0, -1) if runtime.catalogue.resolve(f"step:{marks[i - 1]}")), 0)
    start = f"step:{marks[done - 1]}" if done else origin.id
    log(f"continues after step {done}" if done else "starts")
    box = Sandbox(runtime, runtime.create(Request(start, timeout=None)).id)
    try:
        for number, step in enumerate(recipe.steps[done:], done + 1):
            log(f"step {number}/{len(recipe.steps)}: {step.kind} {' '.join(step.args)}")
            _apply(box, step, number, log)
            if step.kind in ("RUN", "COPY"):
                runtime.snapshot(box.id, f"step:{marks[number - 1]}", kind="step")
        _start(box, recipe.command, ready, len(recipe.steps) + 1, log)
        return publish(runtime, box.id, names, recipe.command)
    finally:
        if any(record.id == box.id for record in runtime.records()):
            box.kill()


def _apply(box: Sandbox, step: Step, number: int, log: Log) -> None:
    record, args = box.record, step.args
    if step.kind == "RUN":
        user = args[1] if len(args) > 1 and args[1] else record.user
        result = box.commands.run(
            args[0], user, timeout=3600, on_output=lambda _, data: log(data.decode(errors="replace").rstrip())
        )
        if result.exit_code:
            raise StepFailed(
                number, f"{args[0]!r} ended with status {result.exit_code}: {result.stderr.strip()[-300:]}"
            )
    elif step.kind == "COPY":
        _copy(box, step, number)
    elif step.kind in ("ENV", "ARG"):
        record.env |= dict(zip(args[::2], args[1::2], strict=True))
        box.live.identify()
    elif step.kind == "WORKDIR":
        record.workdir = str(PurePosixPath("/") / (record.workdir or "/") / args[0])
        box.files.make_dir(record.workdir, "root")
    elif step.kind == "USER":
        record.user = args[0]
    else:
        raise StepFailed(number, f"{step.kind} is not supported")


def _copy(box: Sandbox, step: Step, number: int) -> None:
    """As Docker does: a directory's content goes into the target, a file into it when the target ends with /."""
    source, target, owner, mode, *_ = (*step.args, "", "")
    if step.files is None:
        raise StepFailed(number, f"the files of COPY {source} were not uploaded")
    where = str(PurePosixPath("/") / (box.record.workdir or "/") / target) + ("/" if target.endswith("/") else "")
    with tempfile.TemporaryDirectory() as work:
        context = step.files
        if context.is_file():
            try:
                unpack(context, Path(work))
            except (InvalidRequest, tarfile.TarError) as error:
                raise StepFailed(number, str(error)) from None
            context = Path(work)
        if ".." in PurePosixPath(source).parts:
            raise StepFailed(number, f"{source} leaves the build context")
        paths = sorted(context.glob(source.strip("/"))) if source.strip("/. ") else [context]
        home = context.resolve()
        if not paths or any(not path.parent.resolve().is_relative_to(home) and path != context for path in paths):
            raise StepFailed(number, f"{source} is not in the build context")
        for path in paths:
            directory = where.endswith("/") or len(paths) > 1 or _is_dir(box, where)
            box.copy_in(
                path, where if path.is_dir() else f"{where.rstrip('/')}/{path.name}" if directory else where, "root"
            )
    user = owner or box.record.user
    if user not in ("", "root"):
        box.commands.run(["chown", "-R", user if ":" in user else f"{user}:", where.rstrip("/")], "root")
    if mode:
        box.commands.run(["chmod", "-R", mode, where.rstrip("/")], "root")


def _is_dir(box: Sandbox, path: str) -> bool:
    return box.files.exists(path, "root") and "d" in (
        box.files.stat(path, "root").kind,
        box.files.stat(path, "root").target_kind,
    )


def _start(box: Sandbox, command: str, ready: str, number: int, log: Log) -> None:
    """Start what the template shall find running, and wait until it says so (20 minutes at most)."""
    if command and ready:
        log(f"starts {command}")
        box.commands.start(command).disconnect()
    until = time.monotonic() + 1200
    while ready and box.commands.run(ready, timeout=120).exit_code:
        if time.monotonic() > until:
            raise StepFailed(number, f"{ready!r} did not succeed within 20 minutes")
        time.sleep(0.5)
