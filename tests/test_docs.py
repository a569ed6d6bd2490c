"""The documents keep their word: every relative link resolves, every path and test they name exists."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from perilune.accounting import account
from perilune.stages import load_recipe, model_config

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


def test_the_walk_s_shapes_are_those_of_its_recipe() -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny-cpu.toml")
    c, t = model_config(recipe.model), recipe.train.batch_tokens
    cost, rows, heads, width = account(c), t * c.num_experts_per_token, c.kda_num_heads, c.kda_head_dim
    n, sources = c.num_attention_heads, 1 + -(-c.num_hidden_layers // (c.attn_res_block_size or 1))
    shapes = [
        f"T = {t:,} tokens a",
        f"hidden width {c.hidden_size}, {heads} heads of {width}, {c.num_experts} experts",
        f"of which {c.num_experts_per_token} are chosen, {c.num_hidden_layers} layers",
        f"up to {sources} sources a token | [sources, {t}] → [{t}, {c.hidden_size}]",
        f"side by side | [{t}, {3 * c.kda_width}]",
        f"by head | [1, {t}, {heads}, {width}] each",
        f"output gate | [1, {t}, {heads}, {width}], [1, {t}, {heads}], [{t}, {c.kda_width}]",
        f"of N sequences | [N, {heads}, {width}, {width}] fp32",
        f"shared key | [{t}, {n}, {c.qk_head_dim}]; [{t}, {c.kv_lora_rank} + {c.qk_rope_head_dim}]",
        f"keys; values | [{t}, {n}, {c.qk_head_dim}]; [{t}, {n}, {c.v_head_dim}]",
        f"weights | [{t}, {c.num_experts}]; [{t}, {c.num_experts_per_token}]; [{t}, {c.num_experts_per_token}] fp32",
        f"by expert | [{rows}, {c.expert_width}]",
        f"every row | [{rows}, {2 * c.moe_intermediate_size}]",
        f"by token | [{rows}, {c.expert_width}] → [{t}, {c.expert_width}]",
        f"never kept | [{t}, {recipe.data.vocab_size}]",
        f"its state [1, {heads}, {width}, {width}] and convolution tail [1, {3 * c.kda_width}, 3]",
        f"appends n latents [n, {c.latent_width}]",
        f"{cost.kda_state_bytes:,} B of KDA state",
        f"{cost.mla_bytes_per_token} B a token of latents",
    ]
    walk = " ".join((ROOT / "docs" / "walk.md").read_text().split())
    assert [shape for shape in shapes if shape not in walk] == []
