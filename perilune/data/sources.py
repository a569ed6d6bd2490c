"""Documents from files: text, source code, JSON lines, Parquet, or the running Python's standard library.

A document is a whole .txt, .md or .py file, or one row of a .jsonl (field `text`) or .parquet (column `text`) file.
What cannot be read is skipped, counted and named in `Skips`; what the user named and is not there is an error.
"""

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from perilune.data.options import DataError

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
STDLIB = "stdlib"
LICENCES = {STDLIB: "Python Software Foundation licence, version 2"}
# Not prose or code that a person wrote: tests, third parties, and tables printed by a generator.
_STDLIB_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"})
_STDLIB_TABLES = (
    "_sysconfigdata*.py",
    "config-*/*",
    "encodings/*",
    "html/entities.py",
    "lib2to3/pygram.py",
    "msilib/schema.py",
    "msilib/sequence.py",
    "msilib/text.py",
    "stringprep.py",
)


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    text: str


@dataclass(frozen=True)
class File:
    """A file of a source: where it is, its name within the corpus, and what tells that it changed."""

    path: Path
    name: str
    size: int
    changed_ns: int


@dataclass
class Skips:
    """What could not be read: how often for each reason, and the first names."""

    counts: Counter[str] = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)

    def add(self, name: str, reason: str) -> None:
        self.counts[reason] += 1
        if len(self.names) < 100:
            self.names.append(f"{name}: {reason}")


def files(sources: Sequence[str]) -> list[File]:
    """Every file of every source, each source sorted by name; a missing source is an error."""
    found = [file for source in sources for file in _files_of(source)]
    if not found:
        raise DataError(f"no {', '.join(SUFFIXES)} file in {', '.join(sources)}")
    return found


def documents(sources: Sequence[str], skips: Skips) -> Iterator[Document]:
    """Streams the documents of the sources in the order of `files`."""
    for file in files(sources):
        yield from read(file, skips)


def read(file: File, skips: Skips) -> Iterator[Document]:
    """The documents of one file."""
    readers = {".jsonl": _json_lines, ".parquet": _parquet}
    try:
        yield from readers.get(file.path.suffix.lower(), _whole)(file, skips)
    except UnicodeDecodeError:
        skips.add(file.name, "not UTF-8")
    except OSError as error:
        skips.add(file.name, f"unreadable ({error.strerror or type(error).__name__})")


def _whole(file: File, skips: Skips) -> Iterator[Document]:  # noqa: ARG001 (one signature for the three readers)
    yield Document(file.name, file.path.read_bytes().decode("utf-8-sig"))


def _json_lines(file: File, skips: Skips) -> Iterator[Document]:
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = f"{file.name}:{number}"
            text, reason = _text_field(line)
            if text is None:
                skips.add(name, reason)
            else:
                yield Document(name, text)


def _text_field(line: bytes) -> tuple[str | None, str]:
    """The field `text` of a JSON line, or the reason why there is none."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return None, "line is not UTF-8"
    except (ValueError, RecursionError):
        return None, "line is not JSON"
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        return None, "line has no text field"
    # JSON can spell half of a surrogate pair, which no UTF-8 encoder takes.
    return (text, "") if _encodable(text) else (None, "line is not Unicode text")


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _parquet(file: File, skips: Skips) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as table:
            if "text" not in table.schema_arrow.names:
                skips.add(file.name, "no text column")
                return
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=["text"]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    if isinstance(value, str):
                        yield Document(f"{file.name}:{row}", value)
                    else:
                        skips.add(f"{file.name}:{row}", "row has no text")
    except pa.ArrowException as error:
        skips.add(file.name, f"not a readable Parquet file ({type(error).__name__})")


# ---------------------------------------------------------------------- finding files


def _files_of(source: str) -> list[File]:
    if source == STDLIB:
        return _stdlib()
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if not path.exists():
        raise DataError(f"data.sources: there is no {source!r}")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"data.sources: {source!r} is none of {', '.join(SUFFIXES)}")
    return [_file(path, path.name)]


def _folder(root: Path, name: str, left_out: frozenset[str] = frozenset()) -> list[File]:
    """Files with a known suffix below `root`; hidden files and folders, and those in `left_out`, are not entered."""
    found = []
    for folder, below, inside in os.walk(root):
        below[:] = [child for child in below if not child.startswith(".") and child not in left_out]
        paths = (Path(folder, file) for file in inside if not file.startswith("."))
        found += [path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file()]
    return [_file(path, f"{name}/{path.relative_to(root).as_posix()}") for path in sorted(found)]


def _stdlib() -> list[File]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [file for file in _folder(root, STDLIB, _STDLIB_FOLDERS) if _wanted(file.path.relative_to(root))]
    if not found:
        raise DataError(f"this Python has no standard-library sources at {root}: name other data.sources")
    return found


def _wanted(path: Path) -> bool:
    return path.suffix == ".py" and not any(fnmatch(path.as_posix(), table) for table in _STDLIB_TABLES)


def _file(path: Path, name: str) -> File:
    status = path.stat()
    return File(path, name, status.st_size, status.st_mtime_ns)
