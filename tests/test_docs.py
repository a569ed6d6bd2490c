"""The documents keep their word: every relative link resolves, every path and test they name exists."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"(?<![\w./-])((?:perilune|bench|tests|recipes|docs)/[\w./*-]*[\w*])")
_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def anchors(document: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(document: Path, text: str) -> list[str]:
    """What `text`, standing in `document`, names in vain."""
    lost = []
    for link in _LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    lost += [path for path in _PATH.findall(text) if not list(ROOT.glob(path)) and not list(ROOT.glob(path + ".py"))]
    for path, name in _TEST.findall(text):
        if not re.search(rf"def {name}\b", (ROOT / path).read_text()):
            lost.append(f"{path}::{name}")
    return lost


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(document: Path) -> None:
    assert broken(document, document.read_text()) == []


def test_docstrings_name_documents_that_exist() -> None:
    for source in sorted((ROOT / "perilune").rglob("*.py")):
        for path in re.findall(r"docs/[\w/]+\.md", source.read_text()):
            assert (ROOT / path).is_file(), f"{source.relative_to(ROOT)} names {path}"


def test_a_wrong_name_is_noticed() -> None:
    text = "[a](nowhere.md) [b](#no-such-heading) `perilune/nothing.py` `tests/test_docs.py::test_gone` [c](README.md)"
    lost = broken(ROOT / "README.md", text)
    assert lost == ["nowhere.md", "#no-such-heading", "perilune/nothing.py", "tests/test_docs.py::test_gone"]


def test_the_readme_s_python_prints_what_it_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    code = "".join(blocks)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().split("\n")[:-1] == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
