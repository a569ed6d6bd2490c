"""The house itself: versions, the command line's first words."""

from typer.testing import CliRunner

import perilune
from perilune.cli import app


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == perilune.__version__


def test_bare_command_shows_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "Usage" in result.output
