"""Every recipe in the repository is valid, and its model is the size it says."""

from pathlib import Path

import pytest

from perilune.recipe import RecipeError, build
from perilune.stages import Recipe, load_recipe, model_config

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    config = model_config(recipe.model)
    assert recipe.train.context <= config.max_position_embeddings
    assert recipe.data.vocab_size == config.vocab_size


def test_depth_lays_out_its_own_layers() -> None:
    assert model_config({"preset": "tiny", "num_hidden_layers": 9}).mla_layers == (3, 7, 8)
    assert model_config({"preset": "tiny", "mla_period": 2}).mla_layers == (1, 3)
    assert model_config({"preset": "tiny", "mla_layers": [0]}).mla_layers == (0,)


def test_none_is_spelled_none() -> None:
    assert model_config({"attn_res_block_size": "none"}).attn_res_block_size is None
    with pytest.raises(RecipeError, match=r"model\.attn_res_block_size must be of type int"):
        model_config({"attn_res_block_size": "some"})


def test_integers_are_numbers_but_booleans_are_not() -> None:
    assert build(Recipe, {"train": {"lr": 1}}).train.lr == 1.0
    with pytest.raises(RecipeError, match=r"train\.steps must be of type int, not True"):
        build(Recipe, {"train": {"steps": True}})
    with pytest.raises(RecipeError, match="train must be a section"):
        build(Recipe, {"train": 3})
