"""The stage runner: a recipe's stages in order, each resumable, each leaving a directory the next one takes.

    RUN/recipe.json    the resolved recipe
    RUN/tokenizer/     shards and tokenizer
    RUN/pretrain/      checkpoints/, metrics.jsonl, report.html, weights/
    RUN/export/        weights/ in bf16 (or packed experts), for everyone else

Every stage directory that holds a model holds it as `weights/` in the released layout. Killed at any instant and run
again, a recipe continues where it was.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from perilune.config import ConfigError, ModelConfig, preset, three_to_one
from perilune.data import DataConfig, Prepared, prepare
from perilune.model.shards import write_json
from perilune.model.transfer import convert
from perilune.recipe import RecipeError, build, read, to_table, unknown
from perilune.tokenizer import Tokenizer
from perilune.train.loop import Trainer
from perilune.train.mesh.config import MeshConfig
from perilune.train.mesh.trainer import MeshTrainer, local_device
from perilune.train.mesh.watch import by_torchrun, in_turn, processes
from perilune.train.options import TrainConfig
from perilune.train.report import report

log = logging.getLogger("perilune")

_NAMED = 5  # skipped files named on the terminal; index.json names more

Stage = Literal["tokenizer", "pretrain", "export"]


@dataclass(frozen=True)
class ExportConfig:
    """How the final weights are stored."""

    dtype: Literal["BF16", "F32"] = "BF16"
    experts: Literal["bfloat16", "mxfp4"] = "bfloat16"


@dataclass(frozen=True)
class Recipe:
    """A whole run. `model` is a preset and any ModelConfig field; `tokenizer` a path to reuse one."""

    name: str = "run"
    stages: tuple[Stage, ...] = ("tokenizer", "pretrain", "export")
    model: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    export: ExportConfig = field(default_factory=ExportConfig)


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a TOML file with `a.b=v` overrides. Raises RecipeError in one sentence naming the key."""
    recipe = build(Recipe, read(path, overrides))
    if not recipe.stages:
        raise RecipeError(f"stages is empty, so there is nothing to run: name some of {', '.join(_STAGES)}.")
    model_config(recipe.model)  # its keys are checked before anything runs
    return recipe


def model_config(table: Mapping[str, Any]) -> ModelConfig:
    """`[model]`: `preset`, then any ModelConfig field. `mla_period` lays MLA every so many layers and last."""
    changes = dict(table)
    base = preset(changes.pop("preset", "tiny"))
    period = changes.pop("mla_period", None)
    known = [f.name for f in dataclasses.fields(ModelConfig)]
    for key in changes:
        if key not in known:
            raise RecipeError(unknown(f"model.{key}", [f"model.{name}" for name in ("preset", "mla_period", *known)]))
    for key, instead in _ELSEWHERE.items():
        if key in changes:
            raise RecipeError(f"model.{key} is not the recipe's to set: {instead}.")
    layers = changes.get("num_hidden_layers", base.num_hidden_layers)
    if "mla_layers" not in changes and (period or layers != base.num_hidden_layers):
        changes["mla_layers"] = three_to_one(layers, period or 4)
    values = {name: to_table(getattr(base, name)) for name in known}
    # A run trains text in full precision; a released preset's images and packed experts are not in its checkpoints.
    values |= {"expert_format": "bfloat16", "vision": None}
    return build(ModelConfig, {**values, **changes}, "model.")


# Fields of ModelConfig that another part of the recipe decides.
_ELSEWHERE = {
    "vocab_size": "it is the tokenizer's, see data.vocab_size",
    "expert_format": "set export.experts",
}


def run(recipe: Recipe, out: Path, say: Callable[[str], None] = print) -> Path | None:
    """Walk the stages into `out`; returns the last stage's directory. torchrun's processes train together, the first
    of them does the rest and alone returns a directory."""
    out = Path(out)
    if not by_torchrun():
        recipe.mesh.resolve(1)
        return _walk(recipe, out, say)
    with processes(recipe.mesh.patience, local_device(recipe.train.device)) as rank:
        _check_mesh(recipe)
        if rank == 0:
            return _walk(recipe, out, say)
        if "pretrain" in recipe.stages:
            _trainer(recipe, out).run()
    return None


def _check_mesh(recipe: Recipe) -> None:
    """What can be known before any data is prepared; the tokenizer's vocabulary is not."""
    mesh, config = recipe.mesh.resolve(dist.get_world_size()), model_config(recipe.model)
    mesh.check(config.replace(vocab_size=config.vocab_size // mesh.tp * mesh.tp), recipe.train)


def _walk(recipe: Recipe, out: Path, say: Callable[[str], None]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    new = not any(out.iterdir())
    if not (out / "recipe.json").exists():
        write_json(out / "recipe.json", to_table(recipe))
    directory = out
    try:
        for stage in recipe.stages:
            directory = _STAGES[stage](recipe, out, say)
    except ValueError:
        if new and [path.name for path in out.iterdir()] == ["recipe.json"]:  # refused before anything was made with it
            (out / "recipe.json").unlink()
            out.rmdir()
        raise
    write_json(out / "recipe.json", to_table(recipe))  # only now is a changed recipe what the run was made with
    return directory


def _data(recipe: Recipe, out: Path) -> Prepared:
    tokenizer = Tokenizer.load(recipe.tokenizer) if recipe.tokenizer else None
    return prepare(recipe.data, tokenizer, out / "tokenizer")


def _tokenizer(recipe: Recipe, out: Path, say: Callable[[str], None]) -> Path:
    data = _data(recipe, out)
    say(
        f"Data: {data.train.n_bytes / 1e6:.1f} MB in {data.train.n_documents} documents, "
        f"{data.train.n_tokens:,} tokens; {data.held_out.n_documents} documents held out."
    )
    skipped = data.index["report"]["skipped"]
    if total := sum(skipped["counts"].values()):
        named = skipped["first"][:_NAMED]
        say(f"Skipped {total}: {'; '.join(named)}{'; ...' if total > len(named) else ''}.")
    for source, licence in data.index["report"]["licences"].items():
        say(f"Source {source}: {licence}.")
    return out / "tokenizer"


def _pretrain(recipe: Recipe, out: Path, say: Callable[[str], None]) -> Path:
    trainer = _trainer(recipe, out)
    trainer.run()
    page = report(trainer.directory)
    say(f"Report: {page}")
    return trainer.directory


def _trainer(recipe: Recipe, out: Path) -> Trainer:
    data = in_turn(lambda: _data(recipe, out))
    config = _for_data(model_config(recipe.model), data)
    if recipe.train.context > config.max_position_embeddings:
        raise RecipeError(
            f"train.context {recipe.train.context} is longer than model.max_position_embeddings "
            f"{config.max_position_embeddings}."
        )
    table = {key: value for key, value in to_table(recipe).items() if key != "mesh"}  # a run may change its mesh
    if by_torchrun():
        return MeshTrainer(config, recipe.train, data, out / "pretrain", table, recipe.mesh)
    return Trainer(config, recipe.train, data, out / "pretrain", table)


def _for_data(config: ModelConfig, data: Prepared) -> ModelConfig:
    """The config with the tokenizer's vocabulary and special ids."""
    tokenizer = data.tokenizer()
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    return config.replace(vocab_size=data.vocab_size, **ids)


def _export(recipe: Recipe, out: Path, say: Callable[[str], None]) -> Path:
    source, target = out / "pretrain" / "weights", out / "export" / "weights"
    target.parent.mkdir(exist_ok=True)
    total = convert(source, target, dtype=recipe.export.dtype, experts=recipe.export.experts)
    say(f"Exported {total / 1e6:.1f} MB to {target}.")
    return target.parent


_STAGES: dict[str, Callable[[Recipe, Path, Callable[[str], None]], Path]] = {
    "tokenizer": _tokenizer,
    "pretrain": _pretrain,
    "export": _export,
}

# Where a run's newest model is looked for, last stage first.
_ORDER = ("export", "pretrain")


def find_weights(path: Path) -> Path:
    """The checkpoint directory that `path` means: itself, its weights/, its last stage's, or an unfinished run's newest
    checkpoint. Raises ConfigError in one sentence."""
    path = Path(path)
    candidates = [path, path / "weights", *(path / stage / "weights" for stage in _ORDER)]
    unfinished = [*path.glob("checkpoints/step-*"), *path.glob("pretrain/checkpoints/step-*")]
    candidates += [p / "weights" for p in sorted(unfinished, reverse=True)]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise ConfigError(f"{path} holds no model: no config.json in it, its weights/ or a stage's.")
