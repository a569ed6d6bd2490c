"""What the stage runner refuses leaves nothing behind."""

from pathlib import Path

import pytest

from perilune.recipe import RecipeError
from perilune.stages import Recipe, _check_mesh, run
from perilune.train.mesh.config import MeshConfig


def refused(**changes: object) -> Recipe:
    from perilune.data import DataConfig

    return Recipe(data=DataConfig(sources=("nowhere/at/all",)), **changes)  # type: ignore[arg-type]


def test_a_run_that_never_began_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere/at/all"):
        run(refused(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_lay_in_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note").write_text("mine")
    with pytest.raises(ValueError):
        run(refused(), tmp_path / "run")
    assert (tmp_path / "run" / "note").read_text() == "mine"


def test_a_mesh_is_checked_before_any_data_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    _check_mesh(refused(model={"preset": "mini"}, mesh=MeshConfig(dp=2, tp=4)))
    with pytest.raises(ValueError, match=r"kda_num_heads \d+ is not divided by the mesh"):
        _check_mesh(refused(model={"preset": "mini", "kda_num_heads": 6}, mesh=MeshConfig(dp=2, tp=4)))
    with pytest.raises(RecipeError, match=r"model\.heads"):
        _check_mesh(refused(model={"heads": 3}, mesh=MeshConfig(dp=8)))
