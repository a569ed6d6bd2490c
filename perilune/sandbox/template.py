"""Templates: a guest that was booted once and kept, from which sandboxes start without booting."""

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from perilune.sandbox.catalogue import Record
from perilune.sandbox.launcher import exercise
from perilune.sandbox.request import new_id, new_name
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.snapshot import Defaults, Snapshot
from perilune.sandbox.vmm.driver import Shape


def add_template(
    runtime: Runtime, root: Path, names: list[str], shape: Shape | None = None, defaults: Defaults | None = None
) -> Snapshot:
    """Boot a raw ext4 image once and keep the guest that came up."""
    for name in names:
        runtime.catalogue.vet(name, "template")
    record = boot(runtime, root, names[0] if names else "", shape or Shape(), defaults or Defaults())
    try:
        return publish(runtime, record.id, names)
    except BaseException:
        runtime.kill(record.id)
        raise


def boot(runtime: Runtime, root: Path, name: str, shape: Shape, defaults: Defaults) -> Record:
    """A sandbox that boots a raw ext4 image."""
    runtime.admit(1)
    known = (path for path in runtime.store.layers.glob("*.raw") if path.samefile(root))
    base = next(known, runtime.store.layers / f"{secrets.token_hex(16)}.raw")
    if not base.exists():
        os.link(root, base)
    shape = replace(shape, disk_mb=base.stat().st_size >> 20)
    record = Record(new_id(), name, shape=shape, env=dict(defaults.env), user=defaults.user, workdir=defaults.workdir)
    with runtime.starting(record):
        live = runtime.launcher.boot(base, record)
        runtime.started(live)
    exercise(live.agent)  # what every first command needs is in memory then, and all copies share it
    return record


def publish(runtime: Runtime, identity: str, names: list[str], start: str = "") -> Snapshot:
    """End a sandbox and keep it as a template under `names`; its memory becomes a base that all copies share."""
    with runtime.lock(identity):
        made = runtime.camera.capture(runtime.awake(identity), "full", new_name("t"), goes_on=False)
        made = replace(made, defaults=replace(made.defaults, start=start))
        made = runtime.store.flatten_memory(made)
        runtime.store.make_durable(made)
        runtime.catalogue.keep(made.id, "template", "", names)
        runtime.kill(identity)
    return made


def known_templates(runtime: Runtime) -> Iterator[tuple[str, str, list[str], float]]:
    """(snapshot, kind, names, created) of templates, kept snapshots and build steps, newest first."""
    for identity, kind, _, created in runtime.catalogue.kept():
        yield identity, kind, runtime.catalogue.names(identity), created
