"""`perilune sandbox ...`: everything the library does, one command each. Works without a server: a sandbox goes on
between commands, and the next one adopts it."""

import contextlib
import os
import select
import shutil
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from perilune.sandbox import setup as parts
from perilune.sandbox.catalogue import Network
from perilune.sandbox.commands import Process
from perilune.sandbox.doctor import examine
from perilune.sandbox.errors import InvalidRequest, SandboxError
from perilune.sandbox.images.recipe import build as run_recipe
from perilune.sandbox.images.recipe import parse
from perilune.sandbox.images.source import Builder, Image
from perilune.sandbox.runtime import Runtime
from perilune.sandbox.sandbox import Sandbox
from perilune.sandbox.template import add_template, known_templates
from perilune.sandbox.vmm import accel
from perilune.sandbox.vmm.driver import Shape

app = typer.Typer(no_args_is_help=True, add_completion=False, help="MicroVMs that pause, resume, fork and snapshot.")
Id = Annotated[str, typer.Argument(help="the sandbox")]
Home = Annotated[Path | None, typer.Option(help="where sandboxes live", envvar="PERILUNE_SANDBOX_HOME")]


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """One sentence and exit code 2."""
    try:
        yield
    except SandboxError as error:
        sentence = str(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or not error.strerror:
            raise
        sentence = f"{error.filename or 'this host'}: {error.strerror}"
    else:
        return
    typer.echo(f"perilune sandbox: {sentence}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def _runtime(home: Path | None) -> Iterator[Runtime]:
    """A runtime that lets sandboxes run on when the command ends."""
    with _failures():
        runtime = Runtime(home, warm=None)
        try:
            yield runtime
        finally:
            runtime.upkeep.settle()
            runtime.release()


@app.command()
def doctor(home: Home = None) -> None:
    """What this host has, what it lacks, and the command that fixes it."""
    findings = examine(home or parts.default_home())
    for found in findings:
        mark = "ok " if found.good else "NO " if found.needed else "-  "
        typer.echo(f"{mark} {found.what:12} {found.detail}" + (f"\n    fix: {found.fix}" if found.fix else ""))
    if any(f.needed and not f.good for f in findings):
        raise typer.Exit(2)


@app.command()
def setup(
    kernel: Annotated[Path | None, typer.Option(help="a vmlinux or bzImage of yours")] = None,
    source: Annotated[bool, typer.Option(help="build the small kernel from linux-source (minutes)")] = False,
    pvm: Annotated[bool, typer.Option(help="the kernel is built for PVM: use KVM although it emulates")] = False,
    accelerator: Annotated[str, typer.Option(help="kvm or tcg, whatever is measured")] = "",
    home: Home = None,
) -> None:
    """Get a guest kernel (default: Debian's cloud kernel) and build the agent."""
    with _failures():
        where = home or parts.default_home()
        if source:
            kernel = parts.source_kernel(where / "guest", os.cpu_count() or 1)
        accel.require(accelerator or "tcg")
        guest = parts.build(where, kernel.absolute() if kernel else None, pvm, accelerator)
        typer.echo(f"{guest.kernel} on {guest.machine}, {guest.accelerator}")


@app.command()
def create(
    template: Annotated[str, typer.Argument(help="a template or snapshot")] = "base",
    timeout: Annotated[float, typer.Option(help="seconds; 0 for none")] = 0.0,
    internet: Annotated[bool, typer.Option(help="give it a network")] = False,
    env: Annotated[list[str] | None, typer.Option("-e", help="KEY=VALUE")] = None,
    home: Home = None,
) -> None:
    """Start a sandbox and print its id."""
    with _runtime(home) as runtime:
        pairs = dict(text.partition("=")[::2] for text in env or [])
        box = Sandbox.create(
            template, runtime=runtime, timeout=timeout or None, env=pairs, network=Network(internet=internet)
        )
        typer.echo(box.id)


@app.command("exec", context_settings={"allow_interspersed_args": False})
def execute(
    box: Id,
    command: list[str],
    user: Annotated[str, typer.Option("-u")] = "",
    interactive: Annotated[bool, typer.Option("-i", help="it reads our standard input")] = False,
    home: Home = None,
) -> None:
    """Run a command in it; its exit code becomes ours."""
    with _runtime(home) as runtime:
        line: str | list[str] = command[0] if len(command) == 1 else command
        process = Sandbox(runtime, box).commands.start(line, user or None, stdin=interactive)
        if interactive:
            threading.Thread(target=_feed, args=(process,), daemon=True).start()
        for name, data in process.events():
            stream = sys.stderr if name == "stderr" else sys.stdout
            stream.buffer.write(data)
            stream.flush()
        result = process.wait()
    raise typer.Exit(result.exit_code if not result.signal else 128 + result.signal)


@app.command()
def shell(box: Id, user: Annotated[str, typer.Option("-u")] = "", home: Home = None) -> None:
    """A terminal in it."""
    with _runtime(home) as runtime:
        size = shutil.get_terminal_size()
        _interact(Sandbox(runtime, box).pty(size.columns, size.lines, user=user or None))


def _feed(process: Process) -> None:
    """Our standard input, and its end."""
    with contextlib.suppress(SandboxError):
        while select.select([0], [], [])[0] and (data := os.read(0, 4096)):
            process.write(data)
        process.close_stdin()


def _interact(process: Process) -> None:
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead stays
    try:
        threading.Thread(target=_feed, args=(process,), daemon=True).start()
        for _, data in process.events():
            os.write(1, data)
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@app.command()
def cp(source: str, target: str, home: Home = None) -> None:
    """Copy a file or directory; ID:PATH names one inside."""
    with _runtime(home) as runtime:
        if ":" in target:
            box, _, path = target.partition(":")
            Sandbox(runtime, box).copy_in(Path(source), path, "root")
        elif ":" in source:
            box, _, path = source.partition(":")
            Sandbox(runtime, box).copy_out(path, Path(target), "root")
        else:
            typer.echo("perilune sandbox: one of the two must be ID:PATH", err=True)
            raise typer.Exit(2)


@app.command()
def pause(box: Id, disk: Annotated[bool, typer.Option(help="keep only files")] = False, home: Home = None) -> None:
    """To disk: no CPU, no memory."""
    with _runtime(home) as runtime:
        runtime.pause(box, "disk" if disk else "full")


@app.command()
def resume(
    box: Id,
    recover: Annotated[bool, typer.Option(help="a lost one, from its last pause")] = False,
    reboot: Annotated[bool, typer.Option(help="from its disk alone")] = False,
    home: Home = None,
) -> None:
    """Go on."""
    with _runtime(home) as runtime:
        runtime.resume(box, None, recover, reboot)


@app.command()
def fork(box: Id, count: Annotated[int, typer.Option("-n")] = 1, home: Home = None) -> None:
    """Independent copies; prints their ids."""
    with _runtime(home) as runtime:
        made = Sandbox(runtime, box).fork(count, None)
        for one in made:
            typer.echo(f"error: {one}" if isinstance(one, SandboxError) else one.id)
        if any(isinstance(one, SandboxError) for one in made):
            raise typer.Exit(1)


@app.command()
def snapshot(box: Id, name: str, disk: Annotated[bool, typer.Option()] = False, home: Home = None) -> None:
    """Keep an instant under a name."""
    with _runtime(home) as runtime:
        typer.echo(runtime.snapshot(box, name, "disk" if disk else "full").id)


@app.command()
def ls(templates: Annotated[bool, typer.Option(help="templates and snapshots")] = False, home: Home = None) -> None:
    """What exists."""
    with _runtime(home) as runtime:
        if templates:
            for identity, kind, names, _ in known_templates(runtime):
                if kind != "step":
                    typer.echo(f"{identity}  {kind:9} {' '.join(names)}")
            return
        for record in runtime.records():
            shape = f"{record.shape.vcpus} cpu, {record.shape.memory_mb} MB"
            typer.echo(f"{record.id}  {record.phase:8} {shape:14} {record.template} {record.fault}".rstrip())


@app.command()
def rm(
    boxes: list[str],
    template: Annotated[bool, typer.Option(help="templates or snapshots")] = False,
    home: Home = None,
) -> None:
    """End sandboxes, or delete templates."""
    with _runtime(home) as runtime:
        for one in boxes:
            runtime.delete_snapshot(one) if template else runtime.kill(one)


@app.command()
def build(
    source: Annotated[str, typer.Argument(help="a folder with a Dockerfile, a root folder, a .tar, an OCI layout, "
                                               "docker://IMAGE, or debian[:SUITE]")],
    name: Annotated[str, typer.Option("-t", help="the template's name")] = "base",
    cpus: int = 1,
    memory: Annotated[int, typer.Option(help="MiB")] = 512,
    disk: Annotated[int, typer.Option(help="MiB")] = 2048,
    home: Home = None,
) -> None:  # fmt: skip
    """Make a template."""
    with _runtime(home) as runtime:
        builder, shape, path = Builder(runtime.home / "images", disk), Shape(cpus, memory), Path(source)
        if (path / "Dockerfile").is_file():
            recipe = parse((path / "Dockerfile").read_text(), path)
            try:
                origin = runtime.resolve(recipe.origin)
            except SandboxError:
                image = builder.registry(recipe.origin)
                origin = add_template(runtime, image.raw, [f"image:{recipe.origin}"], shape, image.defaults)
            made = run_recipe(runtime, origin, recipe, [name], log=typer.echo)
        else:
            image = _image(builder, source, path)
            made = add_template(runtime, image.raw, [name], shape, image.defaults)
        typer.echo(made.id)


def _image(builder: Builder, source: str, path: Path) -> Image:
    if (path / "index.json").is_file():
        return builder.layout(path)
    if path.is_dir():
        return builder.directory(path)
    if path.is_file():
        return builder.archive(path)
    if source.split(":")[0] == "debian":
        packages = ("bash", "ca-certificates", "curl", "git", "python3", "sudo", "procps", "iproute2")
        return builder.debootstrap(source.partition(":")[2] or "bookworm", packages)
    if source.startswith(("/", ".")):
        raise InvalidRequest(f"{source} does not exist")
    return builder.registry(source)


@app.command()
def serve(
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    domain: Annotated[str, typer.Option(help="what get_host() builds names from")] = "localhost",
    internet: Annotated[bool, typer.Option(help="sandboxes get a network unless they decline")] = False,
    warm: Annotated[int, typer.Option(help="machines to keep ready for what was used last")] = 2,
    linger: Annotated[float, typer.Option(help="seconds a paused machine stays, stopped, for a quick resume")] = 0.0,
    hot: Annotated[int, typer.Option(help="machines to keep that hold template `base`")] = 0,
    certificate: Annotated[Path | None, typer.Option(help="PEM of *.DOMAIN: serve TLS, as E2B_DOMAIN needs")] = None,
    key: Annotated[Path | None, typer.Option(help="the certificate's key; default: in the same file")] = None,
    home: Home = None,
) -> None:
    """E2B's HTTP API. Prints what the SDK wants in its environment: URLs, or with a certificate the domain."""
    try:
        from perilune.sandbox.http.app import certified
        from perilune.sandbox.http.app import serve as run
        from perilune.sandbox.http.auth import Keys
    except ModuleNotFoundError as error:
        typer.echo(f"perilune sandbox serve: {error.name} is missing: pip install 'perilune[sandbox]'", err=True)
        raise typer.Exit(2) from None
    with _failures():
        tls = certified(certificate, key or certificate) if certificate else None
        if tls and ":" not in domain and port != 443:
            domain = f"{domain}:{port}"
        runtime = Runtime(home, warm=warm, linger_s=linger)
        keys = Keys.load(runtime.home)
        if hot:
            runtime.pool.want(runtime.resolve("base"), hot)
        url = f"http://{host}:{port}"
        where = f"E2B_DOMAIN={domain}" if tls else f"E2B_API_URL={url} E2B_SANDBOX_URL={url}"
        typer.echo(f"{where} E2B_API_KEY={keys.api_key}")
        run(runtime, host, port, keys, domain, internet, tls)
