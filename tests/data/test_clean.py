"""Each rule removes what it is for and keeps prose, code and other scripts; duplicates are found as they should be."""

import base64
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data import clean as module
from perilune.data.clean import ExactDuplicates, NearDuplicates, Removals, clean, shingles
from perilune.data.options import DataConfig, DataError
from perilune.data.quality import Quality
from perilune.data.sources import Document

PROSE = (
    "The Moon does not shine by itself; it returns a tenth of the light that falls on it.\n"
    "At perilune, the lowest point of its path, a craft moves fastest, and there it burns to leave.\n"
)
CODE = Path(module.__file__).read_text(encoding="utf-8")
CHINESE = "近月点是绕月轨道上离月球最近的一点。飞船在这里速度最快,发动机也在这里点火。" * 3
NUMBERS = "".join(f"{i * 37 % 1009}, {i * 91 % 2003}, {i * 13 % 709}\n" for i in range(200))


def run(*texts: str, **options: object) -> tuple[list[str], Removals]:
    removals = Removals()
    config = DataConfig(**options)  # type: ignore[arg-type]
    kept = clean((Document(str(i), text) for i, text in enumerate(texts)), config, removals)
    return [document.text for document in kept], removals


def test_good_text_of_every_kind_stays() -> None:
    kept, removals = run(PROSE, CODE, CHINESE)
    assert kept == [PROSE, CODE, CHINESE]
    assert (removals.seen, removals.kept, removals.reasons) == (3, 3, {})
    assert removals.seen_bytes == removals.kept_bytes == sum(len(text.encode()) for text in kept)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("too short", "  hello  " + " " * 100),
        ("binary", PROSE + "\x00\x01" * 10),
        ("binary", PROSE + "\ufffd" * 10),
        ("long lines", PROSE + base64.b64encode(random.Random(0).randbytes(9000)).decode()),
        ("few letters", NUMBERS),
        ("repeated lines", "import os  # the same line again\n" * 40 + PROSE),
        ("duplicate", "  " + PROSE.upper().replace(" ", "\n\n")),
        ("near-duplicate", CODE.replace("minimum", "maximum", 1)),
    ],
)
def test_a_rule_removes_what_it_is_for(reason: str, text: str) -> None:
    kept, removals = run(PROSE, CODE, text)
    assert kept == [PROSE, CODE]
    assert removals.reasons == {reason: 1}


def test_duplicate_filters_can_be_switched_off() -> None:
    assert len(run(CODE, CODE)[0]) == 1
    assert len(run(CODE, CODE, exact_duplicates=False)[0]) == 1  # the near-duplicate filter finds it
    assert len(run(CODE, CODE, exact_duplicates=False, near_duplicates=0)[0]) == 2


def words(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghij", k=5)) for _ in range(count)]


def jaccard(a: str, b: str) -> float:
    x, y = set(shingles(a).tolist()), set(shingles(b).tolist())
    return len(x & y) / len(x | y)


@pytest.mark.parametrize("kind", [str, lambda text: "".join(chr(0x4E00 + ord(c)) for c in text if c != " ")])
def test_near_duplicates_follow_the_similarity(kind: Callable[[str], str]) -> None:
    base = words(1, 600)
    far, near = list(base), list(base)
    far[::8] = words(2, len(far[::8]))  # one word in eight: most shingles change
    near[300:310] = words(3, 10)
    base_text, far_text, near_text = (kind(" ".join(w)) for w in (base, far, near))
    assert jaccard(base_text, near_text) > 0.93 and jaccard(base_text, far_text) < 0.7
    duplicates = NearDuplicates(0.8)
    assert [duplicates.seen(text) for text in (base_text, far_text, near_text)] == [False, False, True]


def test_minhash_estimates_the_jaccard_similarity() -> None:
    """The mean absolute error over pairs stays near the standard error sqrt(J(1-J)/128) < 0.045."""
    duplicates, errors = NearDuplicates(1.0), []
    for shared in range(0, 400, 20):
        a, b = words(7, 400), words(7, 400)[:shared] + words(9, 400 - shared)
        texts = " ".join(a), " ".join(b)
        one, two = (duplicates._signature(text).hashvalues for text in texts)
        errors.append(abs(np.mean(one == two) - jaccard(*texts)))
    assert np.mean(errors) < 0.045


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["a b c", "A  b\nc", "x", "X ", "y z"]), max_size=8))
def test_exact_duplicates_keep_the_first_of_each(texts: list[str]) -> None:
    exact, kept = ExactDuplicates(), []
    for text in texts:
        if not exact.seen(text):
            kept.append(" ".join(text.casefold().split()))
    assert kept == list(dict.fromkeys(" ".join(text.casefold().split()) for text in texts))


def sentences(vocabulary: str, count: int, seed: int) -> list[str]:
    rng, stock = random.Random(seed), vocabulary.split()
    return [" ".join(rng.choices([*stock, "the", "of", "and", "a"], k=40)) for _ in range(count)]


def test_the_quality_classifier_learns_from_folders_and_counts(tmp_path: Path) -> None:
    good, bad = "orbit burn thrust apogee mass delta craft moon", "buy cheap click winner free offer now casino"
    for name, vocabulary in (("good", good), ("bad", bad)):
        (tmp_path / name).mkdir()
        for i, text in enumerate(sentences(vocabulary, 20, seed=1)):
            (tmp_path / name / f"{i}.txt").write_text(text)
    fresh = sentences(good, 10, seed=2) + sentences(bad, 10, seed=3)
    options = {"quality_good": [str(tmp_path / "good")], "quality_bad": [str(tmp_path / "bad")], "max_repeated": 1.0}
    kept, removals = run(*fresh, **options)
    assert kept == fresh[:10]
    assert removals.reasons == {"low quality": 10}


def test_the_quality_classifier_balances_its_classes_and_repeats_itself() -> None:
    good, bad = sentences("alpha beta gamma", 3, 4), sentences("delta epsilon zeta", 60, 5)
    one, two = Quality.train(good, bad), Quality.train(good[::-1], bad[::-1])
    assert np.array_equal(one.weights, two.weights)
    assert min(map(one.score, sentences("alpha beta gamma", 10, 6))) > 0.5


def test_an_empty_example_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="quality_bad holds no readable document"):
        Quality.from_sources([str(tmp_path / "g.txt")], [str(tmp_path / "b.txt")])
