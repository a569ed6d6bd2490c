"""The page of a run: whole, self-contained, safe against the text in it, and plain about what is absent."""

import importlib.util
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from perilune.train.record import ReportError, Run, binned, half_lives, payload, read_names, smooth, thin
from perilune.train.report import clock, count, report, size, toml

_spec = importlib.util.spec_from_file_location("example_run", Path(__file__).with_name("example_run.py"))
assert _spec is not None and _spec.loader is not None
example_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example_run)

VOID = {"meta", "input", "br", "ellipse", "circle"}


class Page(HTMLParser):
    """Checks that tags nest; keeps what it saw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    @property
    def data(self) -> dict:
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))


def page_of(directory: Path, earlier: tuple[Path, ...] = ()) -> tuple[str, Page]:
    text = report(directory, earlier).read_text(encoding="utf-8")
    return text, Page(text)


def test_a_run_and_an_earlier_one_make_one_whole_page_with_their_figures(tmp_path: Path) -> None:
    run = example_run.write(tmp_path / "new", steps=120)
    old = example_run.write(tmp_path / "old", steps=90, seed=3, offset=0.3, optimizer="adamw")
    text, page = page_of(run, (old,))
    assert page.open == [] and page.texts["h1"] == ["new"]
    for figure in ("2.41M", "1.21M active per token", "492K", "120 steps", "MFU 31.0% of 210 GFLOP/s", "1.5 GiB"):
        assert figure in text
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['val_bpb']:.3f}" in page.texts["dd"]
    assert page.data["runs"][1]["name"] == "old" and "train.optimizer = adamw" in page.texts["code"]
    assert page.data["runs"][0]["step"][-1] == 119 and page.data["runs"][0]["held_out"]["step"] == [49, 99, 119]
    assert not list(run.glob("*.part"))


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    text, page = page_of(example_run.write(tmp_path / "run", steps=60))
    assert not re.search(
        r"https?:|//[a-z]|url\(['\"]?[^#]|@import|\bfetch\(|XMLHttpRequest", text.split('id="data"')[0]
    )
    assert not re.search(r"https?:|(?<!:)//[a-z]|url\([^#]|@import|\bfetch\(|XMLHttpRequest|WebSocket|import\(", text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed") and "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert any("default-src 'none'" in (a.get("content") or "") for _, a in page.tags)


HOSTILE = '</script></pre><script>alert(1)</script><img src=x onerror="a&b">{{ 7 * 7 }} \u2028 -->'


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = example_run.write(tmp_path / "run<i>", steps=40, note=HOSTILE)
    looks = [json.loads(line) for line in (run / "inspect.jsonl").read_text().splitlines()]
    looks[-1]["samples"] = [{"prompt": HOSTILE, "text": HOSTILE}]
    (run / "inspect.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    plain = Page(report(example_run.write(tmp_path / "plain", steps=40)).read_text(encoding="utf-8"))
    _, page = page_of(run)
    assert page.open == [] and page.texts["h1"] == ["run<i>"]
    assert "".join(page.texts["pre"]).count(HOSTILE) == 1  # the continuation; the prompt is in <b>
    assert HOSTILE in page.texts["b"] and HOSTILE in page.texts["code"]
    assert [t for t, _ in page.tags].count("script") == [t for t, _ in plain.tags].count("script")
    assert not any(tag == "img" or (tag == "i" and not attributes) for tag, attributes in page.tags)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("inspect.jsonl", "inspect.jsonl has no KDA decays"),
        ("inspect.jsonl", "inspect.jsonl has no sample texts"),
        ("inspect.jsonl", "inspect.jsonl has no Attention Residuals weights"),
        ("run.json", "run.json has no recipe"),
    ],
)
def test_what_is_absent_becomes_a_sentence(tmp_path: Path, missing: str, sentence: str) -> None:
    run = example_run.write(tmp_path / "run", steps=30)
    (run / missing).unlink()
    text, page = page_of(run)
    assert sentence in " ".join(text.split()) and page.open == []


def test_a_dense_run_whose_steps_were_all_skipped_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "tokens": 64, "loss": null, "bpb": null, "grad_norm": null, "lr": 0.1, "tokens_per_second": 10.0,'
        ' "mfu": 0.1, "peak_flops": 1e9, "memory": 5, "max_logit": null, "skipped": 1, "layers": [],'
        ' "max_violation": [], "dead": [], "val_bpb": null}\n{"step": 1, "tok'
    )
    text, page = page_of(tmp_path)
    assert "No layer of this run has routed experts" in text and "gradient not finite" in text
    assert page.data["runs"][0]["loss"] == [None]


def test_no_metrics_is_one_sentence_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"^[^.]*no finished step in a metrics\.jsonl[^.]*\.$"):
        report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ReportError, match="is not a directory"):
        report(tmp_path / "nowhere")


def test_half_lives_halve() -> None:
    """After its half-life a channel exp(g t) holds one half; a channel that never forgets is drawn at the end."""
    for g, life in zip([-0.1, -2.0], half_lives([-0.1, -2.0])):
        assert math.exp(g * life) == pytest.approx(0.5, rel=0.01)
    assert half_lives([0.0, -1e-30]) == [1e7, 1e7]


def test_loads_are_relative_and_turned_to_rows_of_experts() -> None:
    run = Run(
        "r", [{"step": 0, "tokens": 1, "loss": 1.0, "bpb": 1.0}], [{"step": 0, "loads": {"1": [0.5, 0.5, 0, 0]}}], {}
    )
    assert payload(run)["loads"] == {"layers": ["1"], "steps": [0], "relative": [[[2.0], [2.0], [0.0], [0.0]]]}


def test_time_is_what_the_steps_took() -> None:
    steps = [{"tokens": 100, "tokens_per_second": 50.0}, {"tokens": 300, "tokens_per_second": 100.0}]
    assert Run("r", steps, [], {}).seconds == [2.0, 4.0]


def test_reads_are_named_from_the_first_that_mixes() -> None:
    assert read_names(4) == ["0 feed-forward", "1 attention", "1 feed-forward", "head"]


def test_long_curves_are_thinned_without_losing_their_ends_or_their_mean() -> None:
    records = [{"step": i, "tokens": 2 * i, "loss": float(i % 7), "layers": [1]} for i in range(10_000)]
    points = binned(records, 1000)
    assert len(points) == 1000 and points[-1]["step"] == 9999 and points[-1]["tokens"] == 19_998
    assert sum(p["loss"] for p in points) / 1000 == pytest.approx(sum(r["loss"] for r in records) / 10_000, abs=0.01)
    assert thin(list(range(100)), 4) == [0, 33, 66, 99] and thin([1, 2], 4) == [1, 2]


def test_smoothing_keeps_constants_and_passes_over_nulls() -> None:
    assert smooth([2.0, None, 2.0, 2.0], 10) == [2.0, 2.0, 2.0, 2.0]
    assert smooth([None, 4.0], 10) == [None, 4.0]
    noisy = smooth([float(i % 2) for i in range(1000)], 50)
    assert all(0.4 < x < 0.6 for x in noisy[300:] if x is not None)


def test_numbers_as_people_write_them() -> None:
    assert [count(n) for n in (12, 4096, 2_779_931_837_184)] == ["12", "4.1K", "2.78T"]
    assert [clock(s) for s in (9, 75, 7260)] == ["9 s", "1 min 15 s", "2 h 01 min"]
    assert [size(n) for n in (5, 2**20, 3 * 2**30)] == ["5 B", "1 MiB", "3 GiB"]


def test_the_recipe_reads_back_as_toml() -> None:
    import tomllib

    table = {"name": 'a "b"', "train": {"steps": 5, "wandb": None, "deep": {"x": [1, 2]}}, "on": True}
    assert tomllib.loads(toml(table)) == {"name": 'a "b"', "on": True, "train": {"steps": 5, "deep": {"x": [1, 2]}}}
