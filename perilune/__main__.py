"""`python -m perilune` is `perilune`."""

from perilune.cli import app

app()
