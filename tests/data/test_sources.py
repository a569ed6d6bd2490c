"""Documents from files of every kind, and what happens to those that cannot be read."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perilune.data.options import DataConfig, DataError
from perilune.data.sources import Skips, documents, files


def read(*sources: object) -> tuple[dict[str, str], Skips]:
    skips = Skips()
    return {document.name: document.text for document in documents([str(s) for s in sources], skips)}, skips


def test_a_folder_gives_its_files_sorted_and_no_hidden_ones(tmp_path: Path) -> None:
    root = tmp_path / "notes"
    for name in ("b.md", "a.txt", "deep/c.PY", ".git/d.py", "deep/.e.py", "f.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    found, skips = read(root)
    assert list(found.items()) == [("notes/a.txt", "a.txt"), ("notes/b.md", "b.md"), ("notes/deep/c.PY", "deep/c.PY")]
    assert not skips.counts


def test_text_is_kept_to_the_byte_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffligne\r\nété\r".encode())
    assert read(tmp_path / "a.txt")[0] == {"a.txt": "ligne\r\nété\r"}


def test_bad_json_lines_are_skipped_counted_and_named(tmp_path: Path) -> None:
    good = json.dumps({"text": "one\n月", "id": 3})
    lines = [
        good.encode(),
        b"{oops",
        b"",
        b'{"body": "x"}',
        b"[1]",
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"text": 5}',
    ]
    (tmp_path / "n.jsonl").write_bytes(b"\n".join([*lines, good.encode()]))
    found, skips = read(tmp_path / "n.jsonl")
    assert found == {"n.jsonl:1": "one\n月", "n.jsonl:9": "one\n月"}
    assert skips.counts == {
        "line is not JSON": 1,
        "line has no text field": 3,
        "line is not Unicode text": 1,
        "line is not UTF-8": 1,
    }
    assert "n.jsonl:2: line is not JSON" in skips.names


def test_parquet_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}), tmp_path / "t.parquet")
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "u.parquet")
    (tmp_path / "v.parquet").write_bytes(b"not parquet")
    found, skips = read(tmp_path / "t.parquet", tmp_path / "u.parquet", tmp_path / "v.parquet")
    assert found == {"t.parquet:1": "a", "t.parquet:3": "c"}
    assert skips.counts["row has no text"] == 1 and skips.counts["no text column"] == 1
    assert any(name.startswith("v.parquet: not a readable Parquet file") for name in skips.names)


def test_unreadable_files_are_skipped_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    source = files([str(tmp_path)])
    (tmp_path / "good.txt").unlink()  # gone between the listing and the reading
    from perilune.data.sources import read as read_file

    skips = Skips()
    assert [document for file in source for document in read_file(file, skips)] == []
    assert sorted(name.split("/")[1] for name in skips.names) == [
        "good.txt: unreadable (No such file or directory)",
        "latin.txt: not UTF-8",
    ]


def test_what_the_user_named_must_exist(tmp_path: Path) -> None:
    (tmp_path / "x.pdf").write_text("x")
    with pytest.raises(DataError, match=r"there is no '.*missing'"):
        read(tmp_path / "missing")
    with pytest.raises(DataError, match=r"x.pdf' is none of \.txt, \.md, \.py, \.jsonl, \.parquet"):
        read(tmp_path / "x.pdf")
    with pytest.raises(DataError, match=r"no \.txt.* file in"):
        read(tmp_path)


def test_the_default_corpus_is_real_code_without_tests_and_tables() -> None:
    found = {file.name: file.size for file in files(["stdlib"])}
    assert {"stdlib/json/decoder.py", "stdlib/typing.py", "stdlib/asyncio/base_events.py"} <= set(found)
    assert 8e6 < sum(found.values()) < 14e6
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "__pycache__"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": []}, "data.sources is empty"),
        ({"held_out": 1.5}, "data.held_out = 1.5 is neither a share from 0 to 1 nor a count"),
        ({"near_duplicates": 80}, "data.near_duplicates = 80 is not between 0 and 1"),
        ({"quality_good": ["x"]}, "go together"),
    ],
)
def test_options_out_of_range_are_named(options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataConfig(**options)
