"""The tokenizer against the released ids, and the laws of training, saving and streaming."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden import golden
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune import tokenizer as module
from perilune.tokenizer import MARKUP, RELEASED_OFFSETS, StreamDecoder, Tokenizer, TokenizerError, cuts, train_bpe

HERE = Path(__file__).resolve()
CORPUS = [Path(file).read_text(encoding="utf-8") for file in (module.__file__, __file__)]
CORPUS += ["    if  x:\n" + " " * n + "y = 12345\n\n\n" for n in range(40)] + [
    "月の近地点 périlune Перилуна 🌙🌗 don't I'LL"
] * 30
VOCAB = 700


@cache
def small() -> Tokenizer:
    return Tokenizer.train(CORPUS, VOCAB)


@cache
def released() -> Tokenizer:
    return Tokenizer.load(golden("tokenizer"))


def cases(part: str) -> list[dict[str, Any]]:
    return json.loads((golden("tokenizer") / "cases.json").read_text(encoding="utf-8"))[part]


def hash_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


# ---------------------------------------------------------------------- oracle: the released file


def test_released_ids() -> None:
    for case in cases("cases"):
        assert released().encode(case["text"]) == case["ids"], case["text"]
        assert released().encode(case["text"], allow_special=True) == case.get("ids_special", case["ids"]), case["text"]


def test_released_ids_around_the_cuts() -> None:
    cut_matters = 0
    for case in cases("big"):
        text = case["unit"] * case["count"] + case.get("suffix", "")
        ids = released().encode(text)
        assert (len(ids), ids[:12], ids[-12:], hash_of(ids)) == tuple(
            case[k] for k in ("n_ids", "first", "last", "sha256")
        )
        assert hash_of(released().encode(text, allow_special=True)) == case["sha256_special"]
        cut_matters += case["n_ids"] != case["n_ids_without_prechop"]
    assert cut_matters, "no case tells the cuts from their absence"


def test_released_special_ids() -> None:
    tokenizer = released()
    meta = json.loads((golden("tokenizer") / "README.json").read_text())
    assert {name: tokenizer.id(name) for name in meta["special_tokens"]} == meta["special_tokens"]
    assert tokenizer.vocab_size == meta["vocab_size"] and len(tokenizer.ranks) == meta["base_ranks"]
    assert len(tokenizer.specials) == 256
    assert tokenizer.decode([163591 + 1]) == "<|reserved_token_163592|>"
    assert (tokenizer.eos, tokenizer.end_of_msg, tokenizer.media_pad, tokenizer.pad) == (163585, 163586, 163605, 163839)


def test_released_file_alone_and_saved_again(tmp_path: Path) -> None:
    file = golden("tokenizer") / "tiktoken.model"
    again = Tokenizer.load(Tokenizer.load(file).save(tmp_path / "weights").parent)  # found as a stage directory
    assert again.fingerprint == released().fingerprint
    assert (tmp_path / "weights" / "tiktoken.model").read_bytes() == file.read_bytes()


def slow_cuts(text: str) -> list[str]:
    """The released rule, character by character: a new piece when a run grows past the limit, or at 400,000."""
    pieces = []
    for start in range(0, len(text), module.MAX_CHARS):
        part = text[start : start + module.MAX_CHARS]
        begin = run = 0
        for i, character in enumerate(part):
            run = run + 1 if i and character.isspace() == part[i - 1].isspace() else 1
            if run > module.MAX_RUN:
                pieces.append(part[begin:i])
                begin, run = i, 1
        pieces.append(part[begin:])
    return pieces


@settings(max_examples=200, deadline=None)
@given(st.text("ab \n\u2003月", max_size=60))
def test_cuts_follow_the_rule(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CHARS", 20)
        patch.setattr(module, "MAX_RUN", 4)
        patch.setattr(module, "_LONG_RUN", re.compile(r"(?<!\S)\S{5,}|(?<!\s)\s{5,}"))
        assert list(cuts(text)) == slow_cuts(text)


# ---------------------------------------------------------------------- training


@cache
def trained_object() -> Any:
    return train_bpe(CORPUS, VOCAB - len(RELEASED_OFFSETS))


def test_ranks_encode_as_the_trained_object_does() -> None:
    assert len(small().ranks) == VOCAB - len(RELEASED_OFFSETS)
    for text in CORPUS:
        assert small().encode(text) == trained_object().encode(text).ids


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from([*list("    \n\n\t_=()self.returnif0129'"), "é", "月", "🌙"]), max_size=80))
def test_ranks_encode_as_the_trained_object_does_anywhere(text: str) -> None:
    assert small().encode(text) == trained_object().encode(text).ids


def test_training_is_deterministic_across_processes() -> None:
    code = "import sys, test_tokenizer as t; sys.stdout.write(t.small().fingerprint)"
    paths = [str(HERE.parents[1]), str(HERE.parent)]
    for seed in "01":
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(paths), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == small().fingerprint


def test_special_ids_of_a_small_vocabulary_sit_at_the_top_in_released_order() -> None:
    assert [i for _, i in small().specials.items()] == list(range(VOCAB - 16, VOCAB))
    assert list(small().specials) == list(RELEASED_OFFSETS)
    assert small().encode("<|open|>think<|sep|>", allow_special=True)[0] == small().open
    assert small().open not in small().encode("<|open|>think<|sep|>")


def test_a_large_vocabulary_has_the_released_block_and_unused_ids_are_reserved() -> None:
    tokenizer = Tokenizer.train(["one small text"], 32_768)
    assert tokenizer.bos == 32_768 - 256 and tokenizer.pad == 32_767
    assert tokenizer.decode([tokenizer.bos - 1]) == f"<|reserved_token_{tokenizer.bos - 1}|>"
    assert len(tokenizer.ranks) + len(tokenizer.specials) == 32_768


def test_a_vocabulary_too_small_says_what_it_needs() -> None:
    with pytest.raises(TokenizerError, match=r"vocab_size 271 is too small: .* at least 272"):
        Tokenizer.train(["text"], 271)
    assert Tokenizer.train(["text"], 272).encode("t") == small().encode("t")


def test_max_bytes_bounds_what_is_read() -> None:
    read = []
    texts = (read.append(text) or text for text in ["abc " * 10] * 100)  # type: ignore[func-returns-value]
    Tokenizer.train(texts, 300, max_bytes=81)
    assert len(read) == 3


# ---------------------------------------------------------------------- files


def test_save_and_load(tmp_path: Path) -> None:
    small().save(tmp_path / "tokenizer")
    assert sorted(p.name for p in (tmp_path / "tokenizer").iterdir()) == ["tiktoken.model", "tokenizer_config.json"]
    again = Tokenizer.load(tmp_path)
    assert (again.ranks, again.specials, again.fingerprint) == (small().ranks, small().specials, small().fingerprint)
    flags = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {entry["content"] for entry in flags.values() if not entry["special"]} == MARKUP


@pytest.mark.parametrize(
    ("ranks", "config", "message"),
    [
        (None, None, "no tiktoken.model at"),
        ("!!! 0\n", None, "is not a tiktoken rank file"),
        ("YQ== 0\nYg== 2\n", None, "ranks are not 0 to 1"),
        ("YQ== 0\n", "{}", "does not name the special tokens"),
        ("YQ== 0\n", '{"added_tokens_decoder": {"0": {"content": "[BOS]"}}}', "id of '\\[BOS\\]' is not between"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, ranks: str | None, config: str | None, message: str) -> None:
    for name, text in (("tiktoken.model", ranks), ("tokenizer_config.json", config)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_missing_special_token_is_named() -> None:
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)}, {"[EOS]": 256}, 257)
    assert tokenizer.eos == 256
    with pytest.raises(TokenizerError, match=re.escape("no special token '<|end_of_msg|>'")):
        _ = tokenizer.end_of_msg


# ---------------------------------------------------------------------- laws


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_text_survives(text: str) -> None:
    ids = small().encode(text)
    assert small().decode(ids) == text
    assert small().token_bytes[ids].sum() == len(text.encode())


def test_a_batch_is_its_texts() -> None:
    texts = [*CORPUS[:5], "", "x" * 25_001 + " " * 3]
    assert small().encode_batch(texts, threads=2) == [small().encode(text) for text in texts]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.booleans())
def test_a_stream_says_what_the_whole_says(ids: list[int], skip: bool) -> None:
    stream = StreamDecoder(small(), skip)
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    assert "".join(pieces) == small().decode(ids, skip)
    assert stream.flush() == ""


def test_a_stream_never_shows_half_a_character() -> None:
    stream = StreamDecoder(small())
    pieces = [stream.push(i) for b in "é🚀".encode() for i in [small().ranks[bytes([b])]]]
    assert pieces == ["", "é", "", "", "", "🚀"]


def test_skip_special_keeps_the_markup() -> None:
    ids = small().encode("<|open|>think<|sep|>yes<|end_of_msg|>[PAD]", allow_special=True)
    assert small().decode(ids, skip_special=True) == "<|open|>think<|sep|>yes"


@pytest.mark.parametrize("wrong", [VOCAB, -1])
def test_an_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    with pytest.raises(TokenizerError, match=f"id {wrong} is outside the vocabulary of {VOCAB}"):
        small().decode([1, wrong])
