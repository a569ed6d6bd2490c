"""The whole path as a user walks it: run, chat, generate, report, params, check, import, export, and every mistake."""

import json
import re
import shutil
from pathlib import Path

import pytest
from golden import golden
from typer.testing import CliRunner

from perilune.cli import app

RECIPE = """
name = "story"
[model]
preset = "tiny"
hidden_size = 32
num_hidden_layers = 3
kda_num_heads = 2
kda_head_dim = 16
num_experts = 4
num_experts_per_token = 2
moe_intermediate_size = 32
routed_expert_hidden_size = 32
max_position_embeddings = 512
[data]
vocab_size = 300
held_out = 2
[train]
steps = 4
context = 32
batch_tokens = 128
checkpoint_every = 2
sample_tokens = 4
peak_flops = 1e11
"""


def perilune(*args: object, code: int = 0, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for source in sorted(Path(json.__file__).parent.parent.glob("[a-c]*.py"))[:20]:
        (folder / source.name).write_text(source.read_text())
    (folder / "notes.jsonl").write_text('{"text": "' + "a note that is long enough to be kept in. " * 9 + '"}\n')
    (folder / "broken.txt").write_bytes(b"\xff\xfe not text")
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "story.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def run(corpus, recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "story"
    words = perilune("run", recipe, "--out", out, "--set", f'data.sources=["{corpus}"]')
    assert "perilune chat" in words
    assert "'def ' continues" in words
    assert re.search(r"Skipped 1: corpus\d/broken\.txt: not UTF-8\.", words)
    return out


def test_run_leaves_what_it_says(run) -> None:
    assert (run / "pretrain" / "report.html").is_file()
    assert (run / "export" / "weights" / "config.json").is_file()
    assert (run / "export" / "weights" / "tiktoken.model").is_file()
    config = json.loads((run / "export" / "weights" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 300


def test_running_again_is_a_no_op(run, corpus, recipe) -> None:
    before = (run / "pretrain" / "metrics.jsonl").read_bytes()
    perilune("run", recipe, "--out", run, "--set", f'data.sources=["{corpus}"]')
    assert (run / "pretrain" / "metrics.jsonl").read_bytes() == before


def test_generate_and_chat(run) -> None:
    texts = [perilune("generate", run, "import ", "--seed", 3, "--max-tokens", 8) for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("import ")
    said = perilune("chat", run, "--seed", 1, "--max-tokens", 6, stdin="def f(\n\n")
    assert "plain continuation" in said
    assert "K3 chat format" in perilune("chat", run, "--xtml", "--max-tokens", 6, stdin="hello\n\n")


def test_plain_chat_goes_on_with_what_was_said(run, monkeypatch) -> None:
    """The third line continues the first two and their answers, less what the context cannot hold."""
    from perilune import talk

    _, tokenizer = talk.open_model(run)
    prompts: list[str] = []

    def answer(_model, ids, _rule):
        prompts.append(tokenizer.decode(ids))
        return iter(tokenizer.encode("yes"))

    monkeypatch.setattr(talk, "generate", answer)
    perilune("chat", run, "--max-tokens", 6, stdin="one\ntwo\n" + "three " * 60 + "\n\n")
    assert prompts[:2] == ["one", "oneyes\ntwo"]
    assert prompts[2].startswith("oneyes\ntwoyes\nthree")
    prompts.clear()
    perilune("chat", run, "--max-tokens", 500, stdin="one\ntwo\n" + "three " * 60 + "\n\n")
    assert prompts[2] == "three " * 60 or prompts[2] == ("three " * 60).strip()


def test_report_params_check(run) -> None:
    assert perilune("report", run).strip().endswith("report.html")
    assert "2,779,931,837,184" in perilune("params", "k3")
    assert "checkpoint bytes" in perilune("params", run / "export" / "weights")
    assert "checkpoint bytes" in perilune("params", run)
    for place in (run, run / "export" / "weights"):
        assert "all passed" in perilune("check", place)


def test_export_import_round_trip(run, tmp_path) -> None:
    perilune("export", run, tmp_path / "mx", "--experts", "mxfp4")
    perilune("import", tmp_path / "mx", tmp_path / "in")
    perilune("export", tmp_path / "in", tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "mx").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "mx" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


def test_check_passes_the_golden_vectors() -> None:
    words = perilune("check", golden("kda-ops").parent)
    assert "all passed" in words
    assert words.count("pass  ") >= 10
    assert words.count("not yet") <= 2


def test_check_fails_on_a_wrong_vector(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    family = tmp_path / "situ"
    shutil.copytree(golden("situ"), family)
    values = load_file(family / "cases.safetensors")
    values["k3_f32.out"][0] += 1e-3
    (family / "cases.safetensors").unlink()
    save_file(values, family / "cases.safetensors")
    assert "1 failed: situ" in perilune("check", tmp_path, code=1)


def test_vectors_are_known_by_content_under_any_name(tmp_path) -> None:
    kinds = ("kda-ops", "attnres", "moe-router", "situ", "mxfp4", "tokenizer", "tiny-text-mxfp4", "tiny-vision")
    for i, kind in enumerate((*kinds, "image-processing")):
        (tmp_path / f"v{i}").symlink_to(golden(kind))
    from perilune import check

    found = [check.kind_of(p) for p in sorted(tmp_path.iterdir())]
    runs = (check.check_kda, check.check_attnres, check.check_router, check.check_situ, check.check_mxfp4)
    assert found == [*runs, check.check_tokenizer, check.check_text, "not yet (vision)", "not yet (vision)"]
    (tmp_path / "v9").mkdir()
    assert check.kind_of(tmp_path / "v9") == "no check knows this family"


MISTAKES = [
    (("run", "RECIPE", "--set", "train.stepz=3"), "did you mean 'train.steps'"),
    (("run", "RECIPE", "--set", "model.num_expert=3"), "did you mean 'model.num_experts'"),
    (("run", "RECIPE", "--set", "train.steps=many"), "train.steps must be of type int"),
    (("run", "RECIPE", "--set", "stages=[]"), "stages is empty"),
    (("export", "RUN", "OUT", "--shard-gb", "0"), "--shard-gb must be more than 0"),
    (("import", "RUN", "OUT", "--shard-gb", "-1"), "--shard-gb must be more than 0"),
    (("params", "tiny", "--context", "-5"), "--context counts tokens: -5"),
    (("run", "RECIPE", "--set", "train"), "--set takes key=value"),
    (("run", "RECIPE", "--set", "stages=['pretend']"), "stages[0] must be one of"),
    (("run", "RECIPE", "--set", "model.num_experts_per_token=9"), "num_experts_per_token must lie in 1..4"),
    (("run", "RECIPE", "--set", "train.lr=nan"), "train.lr must be at least 0 and finite"),
    (("run", "RECIPE", "--set", "train.micro_tokens=-32"), "train.micro_tokens must be at least 0"),
    (("run", "RECIPE", "--set", "train.balance_bins=0"), "train.balance_bins must be at least 1"),
    (("run", "RECIPE", "--set", "train.activations=forget"), 'activations must be "keep"'),
    (("generate", "RUN", "x", "--temperature", "nan"), "temperature must be at least 0"),
    (("export", "RUN", "EMPTY/notes.txt"), "is a file"),
    (("export", "RUN", "EMPTY"), "holds notes.txt, which is no part of a checkpoint"),
    (("run", "RECIPE", "--set", "model.vocab_size=77"), "model.vocab_size is not the recipe's to set"),
    (("run", "RECIPE", "--set", "model.expert_format=mxfp4"), "set export.experts"),
    (("run", "RECIPE", "--set", "model.moe_layer_freq=0"), "moe_layer_freq must be positive"),
    (("run", "RECIPE", "--set", "model.mla_layers=[0,0]"), "names a layer twice"),
    (("run", "RECIPE", "--set", "model.num_expert_group=4"), "more than the 1 experts"),
    (("run", "RECIPE", "--set", "data.vocab_size=100"), "vocab_size 100 is too small"),
    (("run", "RECIPE", "--set", "data.sources=['/nowhere']"), "/nowhere"),
    (("run", "RECIPE", "--set", "data.sources=['EMPTY']"), "no .txt, .md, .py"),
    (("run", "missing.toml"), "missing.toml does not exist"),
    (("run", "EMPTY"), "cannot be read: Is a directory"),
    (("generate", "EMPTY", "x"), "holds no model"),
    (("generate", "RUN", "word " * 800), "the context holds 512"),
    (("params", "huge"), "Unknown preset 'huge'"),
    (("import", "EMPTY", "OUT"), "config.json does not exist"),
    (("check", "EMPTY"), "neither golden vectors nor a checkpoint"),
    (("report", "EMPTY"), "EMPTY"),
]


@pytest.mark.parametrize("args, words", MISTAKES, ids=lambda x: " ".join(x[:1]) if isinstance(x, tuple) else x[:24])
def test_mistakes_are_one_sentence(run, recipe, tmp_path, args, words) -> None:
    empty = tmp_path / "EMPTY"
    empty.mkdir()
    if args[0] == "export":
        (empty / "notes.txt").write_text("dear")
    places = {"RECIPE": recipe, "EMPTY": empty, "RUN": run, "OUT": tmp_path / "OUT"}
    filled = [str(places.get(a, a)).replace("EMPTY/", f"{empty}/").replace("['EMPTY']", f"['{empty}']") for a in args]
    if args[0] == "run":
        filled += ["--out", str(tmp_path / "OUT")]
    result = CliRunner().invoke(app, filled)
    assert result.exit_code == 2, result.output
    sentence = result.output.strip().splitlines()[-1]
    assert words in sentence.replace(str(empty), "EMPTY") if words == "EMPTY" else words in sentence
    assert sentence.startswith("perilune: ") and sentence.endswith((".", "?"))
    assert "Traceback" not in result.output
    assert args[0] != "export" or (empty / "notes.txt").read_text() == "dear"


def test_a_checkpoint_of_another_config_is_named(run, corpus, recipe) -> None:
    source = f'data.sources=["{corpus}"]'
    args = ["run", str(recipe), "--out", str(run), "--set", source, "--set", "train.lr=0.5"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "train.lr" in result.output


def test_a_finished_run_takes_more_steps(run, corpus, recipe, tmp_path) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(run, longer)
    args = ["run", recipe, "--out", longer, "--set", f'data.sources=["{corpus}"]']
    perilune(*args, "--set", "train.steps=6", "--set", "train.sample_tokens=2")
    steps = [json.loads(line)["step"] for line in (longer / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(6))
    assert json.loads((longer / "pretrain" / "run.json").read_text())["recipe"]["train"]["steps"] == 6
    assert "has taken 6 steps, so train.steps = 5 is behind it" in perilune(*args, "--set", "train.steps=5", code=2)
