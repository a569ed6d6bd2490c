"""Shards hold exactly the text, are whole or absent, and are made again when and only when something changed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data import DataConfig, DataError, Prepared, open_shards, prepare
from perilune.data.shards import dtype_for, held_out_indices
from perilune.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
BYTES = Tokenizer.train([], 272)


def corpus(folder: Path, count: int = 12) -> dict[str, str]:
    rng = random.Random(5)
    texts = {}
    for i in range(count):
        lines = [" ".join(rng.choices(["lune", "périgée", "月", "orbit", "burn"], k=8)) + f" {i}" for _ in range(6)]
        texts[f"{folder.name}/{i:02d}.txt"] = "\n".join(lines)
        folder.mkdir(exist_ok=True)
        (folder / f"{i:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return texts


def config(folder: Path, **options: object) -> DataConfig:
    return DataConfig(**{"sources": (str(folder),), "held_out": 3, "vocab_size": 300, **options})  # type: ignore[arg-type]


def made(path: Path) -> int:
    return (path / "index.json").stat().st_ino


def test_the_shards_hold_the_text_to_the_byte(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "c")
    data = prepare(config(tmp_path / "c"), None, tmp_path / "data")
    tokenizer, found = data.tokenizer(), {}
    for shard in (data.train, data.held_out):
        for i, name in enumerate(shard.names):
            *ids, last = shard.document(i).tolist()
            assert last == tokenizer.eos == data.eos and tokenizer.eos not in ids
            found[name] = tokenizer.decode(ids)
            assert shard.sizes[i] == len(found[name].encode()) == shard.token_bytes[shard.document(i)].sum()
    assert found == texts
    assert data.held_out.n_documents == 3 and data.train.n_documents == 9
    assert data.train.n_bytes + data.held_out.n_bytes == sum(len(text.encode()) for text in texts.values())
    assert isinstance(data.train.tokens, np.memmap) and not data.train.tokens.flags.writeable
    assert data.index["report"]["kept"]["documents"] == 12


def test_the_tokenizer_is_trained_on_the_training_split_only(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "c")
    data = prepare(config(tmp_path / "c"), None, tmp_path / "data")
    again = Tokenizer.train([texts[name] for name in data.train.names], 300)
    assert again.fingerprint == data.tokenizer().fingerprint == data.index["tokenizer"]
    assert again.fingerprint != Tokenizer.train(texts.values(), 300).fingerprint


def test_made_again_only_when_something_changed(tmp_path: Path) -> None:
    corpus(tmp_path / "c")
    path = tmp_path / "data"
    first = prepare(config(tmp_path / "c"), BYTES, path)
    stamp = made(path)
    assert prepare(config(tmp_path / "c"), BYTES, path).fingerprint == first.fingerprint and made(path) == stamp
    changes = [
        lambda: prepare(config(tmp_path / "c", seed=1), BYTES, path),
        lambda: prepare(config(tmp_path / "c", seed=1), None, path),
        lambda: (tmp_path / "c" / "00.txt").write_text("changed " * 20 + "text " * 3) and None,
        lambda: (
            (tmp_path / "c" / "99.txt").write_text("new words in a new file, enough of them to stay: " * 2) and None
        ),
    ]
    seen = {first.fingerprint}
    for change in changes:
        data = change() or prepare(config(tmp_path / "c", seed=1, max_repeated=1.0), BYTES, path)
        assert isinstance(data, Prepared) and data.fingerprint not in seen
        seen.add(data.fingerprint)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "data"]


def test_content_and_not_time_makes_the_fingerprint(tmp_path: Path) -> None:
    corpus(tmp_path / "c")
    one = prepare(config(tmp_path / "c"), None, tmp_path / "one")
    os.utime(tmp_path / "c" / "00.txt", ns=(1, 1))
    assert prepare(config(tmp_path / "c"), None, tmp_path / "two").fingerprint == one.fingerprint


KILLED = """
import sys
from pathlib import Path
from perilune.data import DataConfig, prepare
folder, path = map(Path, sys.argv[1:])
print("go", flush=True)
prepare(DataConfig(sources=(str(folder),), held_out=3, vocab_size=300), None, path)
"""


def test_killed_at_any_instant_and_run_again(tmp_path: Path) -> None:
    corpus(tmp_path / "c", 60)
    start = time.perf_counter()
    whole = prepare(config(tmp_path / "c"), None, tmp_path / "whole")
    took, rng, path = time.perf_counter() - start, random.Random(0), tmp_path / "data"
    for _ in range(3):
        run = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "c"), str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert run.stdout is not None and run.stdout.readline() == b"go\n"
        time.sleep(rng.uniform(0, 2 * took))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        if path.exists():  # whole or absent
            assert open_shards(path).fingerprint == whole.fingerprint
    assert prepare(config(tmp_path / "c"), None, path).fingerprint == whole.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "data", "whole"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    corpus(tmp_path / "c")
    first = prepare(config(tmp_path / "c"), BYTES, tmp_path / "data")
    with pytest.raises(DataError, match=r"holds out 12 of 12 whole documents"):
        prepare(config(tmp_path / "c", held_out=12), BYTES, tmp_path / "data")
    assert open_shards(tmp_path / "data").fingerprint == first.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "data"]


def test_an_empty_corpus_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "b.txt").write_bytes(b"\xff" * 100)
    with pytest.raises(DataError, match=r"no document is left of .*: 1 removed \(too short\), 1 skipped \(not UTF-8\)"):
        prepare(config(tmp_path), BYTES, tmp_path / "data")
    assert not (tmp_path / "data").exists() and not (tmp_path / "data.tmp").exists()


def test_a_directory_of_other_files_is_left_alone(tmp_path: Path) -> None:
    corpus(tmp_path / "c")
    with pytest.raises(DataError, match="holds other files"):
        prepare(config(tmp_path / "c"), BYTES, tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 12


def test_damage_is_named(tmp_path: Path) -> None:
    corpus(tmp_path / "c")
    prepare(config(tmp_path / "c"), BYTES, tmp_path / "data")
    with (tmp_path / "data" / "train.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"train.bin has 100 bytes where the index says"):
        open_shards(tmp_path / "data")
    (tmp_path / "data" / "index.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(DataError, match="holds no finished shards"):
        open_shards(tmp_path / "data")


def test_no_held_out_split_is_allowed(tmp_path: Path) -> None:
    corpus(tmp_path / "c", 2)
    data = prepare(config(tmp_path / "c", held_out=0), BYTES, tmp_path / "data")
    assert (data.train.n_documents, data.held_out.n_documents, data.held_out.n_tokens) == (2, 0, 0)


@given(st.integers(2, 60), st.floats(0.001, 0.5), st.integers(0, 5))
def test_held_out_documents_are_a_share_and_do_not_depend_on_order(n: int, share: float, seed: int) -> None:
    names = [f"file{i}" for i in range(n)]
    chosen = held_out_indices(names, share, seed)
    assert len(chosen) == max(1, round(share * n)) and chosen == sorted(set(chosen))
    backwards = held_out_indices(names[::-1], share, seed)
    assert {names[i] for i in chosen} == {names[::-1][i] for i in backwards}


def test_ids_take_two_bytes_where_they_fit() -> None:
    assert (dtype_for(65_536).itemsize, dtype_for(65_537).itemsize, dtype_for(163_840).itemsize) == (2, 4, 4)
