"""The command line: `perilune run | chat | generate | report | params | check | export | import`."""

import typer

from perilune import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def main() -> None:
    """Perilune: train, talk to and serve models of the Kimi K3 architecture."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
