"""What the sandbox claims, measured: `python bench/sandbox.py [ROOT_IMAGE] [--only WORD,...]`; medians in milliseconds.

Needs a guest (`perilune sandbox setup`). Without ROOT_IMAGE (a raw ext4 with bash) one is made of this host's bash and
coreutils. The guest has 512 MB and one CPU. "Answered" means that the first command's exit was reported.
"""

import argparse
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perilune.sandbox import Guard, Runtime, Sandbox, SandboxError, Shape, setup
from perilune.sandbox.http.metrics import usage
from perilune.sandbox.images import ext4
from perilune.sandbox.images.unpack import unpack
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.template import add_template

COMMAND = ["/bin/true"]
Rows = list[tuple[str, float, str]]


def clock(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def median(work: Callable[[], float], times: int) -> float:
    """Of `times` runs."""
    return statistics.median(work() for _ in range(times))


def answer(box: Sandbox) -> None:
    """One command, from start to exit."""
    box.commands.run(COMMAND)


def _tiny(work: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "sandbox"))
    from conftest import tiny_root

    ext4.pack(tiny_root(work / "tree"), work / "root.raw", 1024)
    return work / "root.raw"


@contextmanager
def runtime(image: Path | None) -> Iterator[Runtime]:
    """A fresh home with the template `base`."""
    with tempfile.TemporaryDirectory(prefix="perilune-bench-", dir="/var/tmp") as folder:
        work = Path(folder)
        shutil.copytree(setup.default_home() / "guest", work / "guest")
        kernel = setup.load(setup.default_home()).kernel
        setup.build(work, work / "guest" / kernel.name if (work / "guest" / kernel.name).exists() else kernel)
        with Runtime(work, Guard(disk_floor_mb=256)) as made:
            add_template(made, image or _tiny(work), ["base"], Shape(1, 512, 1024))
            yield made


def keep(rt: Runtime, template: Snapshot, spares: int) -> None:
    """Of this template's memory base: nothing (-1), the stem that machines are forked from, and so many spares."""
    rt.pool.forget()
    rt.pool.drop(template.id)
    rt.pool.unasked = spares >= 0
    if spares >= 0:
        rt.pool.want(template, spares)


def create(rt: Runtime, rows: Rows, times: int) -> None:
    """From the template: in a new machine, and in a spare that holds the template's guest."""
    template = rt.resolve("base")
    for name, spares in (("nothing kept", -1), ("forked", 0), ("spare", 2)):
        keep(rt, template, spares)
        seen: list[float] = []

        def once(seen: list[float] = seen) -> float:
            rt.pool.ready()
            box: list[Sandbox] = []
            took = clock(lambda: box.append(Sandbox.create(runtime=rt)))
            first = clock(lambda: answer(box[0]))
            box[0].kill()
            seen.append(took + first)
            return took

        rows.append((f"create from template, {name}", median(once, times), "150"))
        rows.append((f"create and first command answered, {name}", statistics.median(seen), ""))
    rt.pool.drop(template.id)


def pause_and_resume(rt: Runtime, rows: Rows, times: int) -> None:
    """Checkpoint and resume; a spare holds another guest of the same template; a lingering machine is the box's own."""
    template = rt.resolve("base")
    for name, warm, linger, target in (
        ("nothing kept", -1, 0, ""), ("forked", 0, 0, "60"), ("spare", 2, 0, "30"), ("it lingered", 0, 60, "30"),
    ):  # fmt: skip
        keep(rt, template, warm)
        rt.lingering.seconds = linger
        with Sandbox.create(runtime=rt) as box:
            seen: list[float] = []

            def once(box: Sandbox = box, seen: list[float] = seen) -> float:
                box.pause()
                rt.upkeep.settle()
                rt.pool.ready()
                took = clock(box.resume)
                seen.append(took + clock(lambda: answer(box)))
                return took

            rows.append((f"resume, agent answered, {name}", median(once, times), target))
            rows.append((f"resume, first command answered, {name}", statistics.median(seen), target))
    rt.lingering.seconds = 0
    rt.pool.drop(template.id)


def checkpoint(rt: Runtime, rows: Rows, times: int) -> None:
    """A running guest's checkpoint by how much it wrote since the template."""
    for dirty, target in ((0, "20"), (52, "90"), (104, "170")):
        with Sandbox.create(runtime=rt) as box:
            if dirty:
                box.commands.run(f"head -c {dirty}M /dev/urandom > /dev/shm/fill", timeout=300)
            sizes = []

            def once(box: Sandbox = box, sizes: list[int] = sizes) -> float:
                took = clock(lambda: rt.snapshot(box.id, "mark"))
                snapshot = rt.resolve("mark")
                rt.upkeep.settle()
                sizes.append(snapshot.diff.size if snapshot.diff else 0)
                rt.delete_snapshot("mark")
                return took

            took = median(once, times)
            rows.append((f"checkpoint, about {sizes[0] >> 20} MB dirty", took, target))


def fork(rt: Runtime, rows: Rows, times: int) -> None:
    """Ten children, all answering: of a running sandbox's own machine, and of a paused one's snapshot."""
    keep(rt, rt.resolve("base"), 0)
    with Sandbox.create(runtime=rt) as box:

        def once(box: Sandbox = box) -> float:
            rt.pool.ready()
            made: list[Sandbox | SandboxError] = []
            took = clock(lambda: made.extend(box.fork(10)))
            for child in made:
                if isinstance(child, SandboxError):
                    raise child
                child.kill()
            return took

        rows.append(("fork 10 of a running sandbox, all answering", median(once, max(3, times // 2)), "200"))
        box.pause()
        rt.upkeep.settle()
        rows.append(("fork 10 of a paused sandbox, all answering", median(once, max(3, times // 2)), "200"))
        box.resume()


def memory(rt: Runtime, rows: Rows, _times: int) -> None:
    """PSS of 16 idle forks of one guest."""
    with Sandbox.create(runtime=rt) as box:
        made = [c for c in box.fork(16) if isinstance(c, Sandbox)]
        time.sleep(2)
        sizes = [usage(child.live.machine.pid)["memory"] / 1e6 for child in made]
        rows.append(("memory per idle fork, PSS (MB)", statistics.median(sizes), "25"))
        rows.append(("16 forks of a 512 MB guest together (MB)", sum(sizes), "600"))
        for child in made:
            child.kill()


def cycles(rt: Runtime, rows: Rows, _times: int) -> None:
    """50 pauses and resumes with writes between: nothing lost, time flat."""
    with Sandbox.create(runtime=rt) as box:
        took = []
        for i in range(50):
            box.files.write(f"/root/{i}", f"{i}")
            took.append(clock(box.pause) + clock(box.resume))
        kept = sorted(int(entry.name) for entry in box.files.list("/root") if entry.name.isdigit())
        assert kept == list(range(50)), kept
        rows.append(("pause and resume, first 10 of 50 cycles", statistics.median(took[:10]), ""))
        rows.append(("pause and resume, last 10 of 50 cycles", statistics.median(took[-10:]), "flat"))


def boot(rt: Runtime, rows: Rows, times: int) -> None:
    """The guest's kernel from its first instruction."""
    top = replace(rt.resolve("base"), mode="disk")
    with Sandbox.create(runtime=rt) as box:
        box.pause("disk")

        def once() -> float:
            took = clock(box.resume)
            box.pause("disk")
            return took

        rows.append((f"boot to agent, {top.shape.memory_mb} MB", median(once, max(2, times // 3)), ""))
        box.resume()


def image(rt: Runtime, rows: Rows, _times: int) -> None:
    """The first start of an image whose one gzip layer is this host's /usr/bin."""
    with tempfile.TemporaryDirectory(dir=rt.home) as folder:
        layer, raw = Path(folder) / "layer.tar.gz", Path(folder) / "layer.raw"
        with tarfile.open(layer, "w:gz", compresslevel=1) as tar:
            tar.add("/usr/bin", "usr/bin")
            tar.add("/bin/bash", "bin/bash")
        ext4.make(raw, 4096)
        took = clock(lambda: unpack(layer, raw, last=True))
        rows.append((f"layer of {layer.stat().st_size >> 20} MB into its image", took, ""))
        rows.append(("booted and kept as a template", clock(lambda: add_template(rt, raw, ["bench-layer"])), ""))
        rt.delete_snapshot("bench-layer")


PARTS = (create, pause_and_resume, checkpoint, fork, memory, cycles, boot, image)


def speed() -> float:
    """Milliseconds of CPU for a fixed loop: says how fast this host was while the rest was measured."""
    began = time.thread_time()
    sum(range(5_000_000))
    return (time.thread_time() - began) * 1000


def main() -> None:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path, nargs="?")
    parser.add_argument("--only", help="parts whose names contain one of these words")
    parser.add_argument("--times", type=int, default=9)
    given = parser.parse_args()
    rows: Rows = []
    with runtime(given.image) as rt:
        print(f"{rt.platform}\nsum(range(5_000_000)) takes {min(speed() for _ in range(5)):.0f} ms", flush=True)
        for part in PARTS:
            if not given.only or any(word in part.__name__ for word in given.only.split(",")):
                part(rt, rows, given.times)
                for name, value, target in rows:
                    print(f"| {name} | {value:.1f} | {target} |", flush=True)
                rows.clear()


if __name__ == "__main__":
    main()
