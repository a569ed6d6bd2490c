"""The command line. Commands import what they need when they run, so that `perilune --help` is instant.

Every mistake a user can make ends in one sentence on stderr and exit code 2; a failed check in exit code 1.
"""

import logging
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from perilune import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe key: a.b=v (v is TOML).")]
Where = Annotated[Path, typer.Argument(help="A run, a stage or a checkpoint directory.")]


def _one_sentence(command: Callable[..., Any]) -> Callable[..., Any]:
    """User errors as one sentence; anything else is a bug and keeps its traceback."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError by descent
            raise
        except (ValueError, OSError) as error:
            sentence = _sentence(error)
        except ModuleNotFoundError as error:  # the base install is light
            if error.name is None or error.name.startswith("perilune"):
                raise
            sentence = f"{error.name} is not installed; this command needs pip install 'perilune[all]'."
        except RuntimeError as error:
            if type(error) is RuntimeError:  # torch's own: not a user's mistake
                raise
            sentence = _sentence(error)
        except KeyboardInterrupt:
            sentence = "Interrupted; run the same command again to continue."
        typer.echo(f"perilune: {sentence}", err=True)
        raise typer.Exit(2)

    return guarded


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == 28:
        return f"The disk is full{f': {error.filename}' if error.filename else ''}; nothing was left half-written."
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    text = str(error) or type(error).__name__
    return text if text.endswith((".", "?")) else text + "."


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done and which kernels run.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,  # noqa: ARG001
) -> None:
    """Perilune: train, talk to and serve models of the Kimi K3 architecture."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")


@app.command()
@_one_sentence
def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe.")],
    out: Annotated[Path | None, typer.Option(help="Run directory; runs/<recipe name> by default.")] = None,
    set_: SetOption = None,
) -> None:
    """Walk a recipe's stages (tokenizer, pretrain, export). Interrupted, the same command continues."""
    from perilune.stages import load_recipe
    from perilune.stages import run as run_recipe

    loaded = load_recipe(recipe, set_ or ())
    directory = out or Path("runs") / loaded.name
    if run_recipe(loaded, directory, typer.echo) is not None:
        _closing_words(directory)


def _closing_words(directory: Path) -> None:
    import json

    looks = directory / "pretrain" / "inspect.jsonl"
    if looks.is_file() and (lines := looks.read_text().splitlines()):
        for sample in json.loads(lines[-1])["samples"]:
            typer.secho(f"\n--- {sample['prompt']!r} continues:", fg="cyan")
            typer.echo(sample["prompt"] + sample["text"])
    typer.echo(f"\nTalk to it: perilune chat {directory}")


@app.command()
@_one_sentence
def chat(
    where: Where,
    temperature: float = 0.8,
    top_p: float = 0.95,
    max_tokens: int = 256,
    seed: Annotated[int | None, typer.Option(help="Fixes the text.")] = None,
    xtml: Annotated[bool, typer.Option(help="Use the K3 chat format (models trained on it).")] = False,
) -> None:
    """Talk to a model in the terminal, streaming. An empty line or Ctrl-D ends it."""
    from perilune.talk import talk

    talk(where, temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, xtml=xtml)


@app.command()
@_one_sentence
def generate(
    where: Where,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 0,
    max_tokens: int = 128,
    seed: Annotated[int | None, typer.Option(help="Fixes the text.")] = None,
) -> None:
    """Continue a text."""
    from perilune.model.generate import Sampling
    from perilune.talk import continuation, open_model

    model, tokenizer = open_model(where)
    text = sys.stdin.read() if prompt == "-" else prompt
    stop = (tokenizer.eos,)
    rule = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens, stop=stop)
    pieces = continuation(model, tokenizer, text, rule)
    typer.echo(text + next(pieces, ""), nl=False)  # nothing is printed for a prompt that is refused
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


@app.command()
@_one_sentence
def serve(
    where: Where,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one and logs it.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in the API; the directory's by default.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(envvar="PERILUNE_API_KEY", help="Opens /v1.")] = None,
    context: Annotated[int | None, typer.Option(help="Longest sequence; the model's by default.")] = None,
    max_batch: Annotated[int, typer.Option(help="Requests running at once.")] = 32,
    max_waiting: Annotated[int, typer.Option(help="Requests in the queue before 429.")] = 1024,
    max_tokens: Annotated[int | None, typer.Option(help="Answer length where a request names none.")] = None,
    pool_tokens: Annotated[int, typer.Option(help="Tokens of context the pool holds.")] = 65536,
    block_tokens: Annotated[int | None, typer.Option(help="Prefix-hash block.")] = None,
    token_budget: Annotated[int, typer.Option(help="New prompt tokens a step.")] = 2048,
    offload_gb: Annotated[float, typer.Option(help="CPU memory for idle prefixes.")] = 0.0,
    speculate: Annotated[int, typer.Option(help="Tokens drafted a step by the MTP layer.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; by default what the device likes.")] = None,
    prefix_cache: bool = True,
    cuda_graphs: Annotated[bool, typer.Option(help="Record decoding steps, on a GPU.")] = True,
    packed_experts: Annotated[bool, typer.Option(help="On a GPU, MXFP4 experts stay packed in memory.")] = True,
    shard_latents: Annotated[bool, typer.Option(help="Ranks share out latents by token.")] = False,
    mxfp8_activations: Annotated[bool, typer.Option(help="Round what enters MXFP4 experts to MXFP8.")] = False,
    strict_vendor: Annotated[bool, typer.Option(help="Refuse sampling the hosted API fixes.")] = False,
    drain_seconds: Annotated[float, typer.Option(help="For running requests after SIGTERM.")] = 60.0,
) -> None:
    """Serve a model: the OpenAI API under /v1, a chat page at /. SIGTERM lets running requests finish.

    On several devices: torchrun --nproc-per-node N -m perilune serve ...
    """
    import os

    import torch

    from perilune.serve.engine import Engine
    from perilune.serve.http import ServeOptions, Service
    from perilune.serve.http import serve as run_server
    from perilune.serve.parallel import Ranks, join_world
    from perilune.serve.request import EngineOptions
    from perilune.serve.worker import Worker
    from perilune.talk import open_model

    floats = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    dtype = dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    if dtype not in floats:
        raise ValueError("--dtype is float32 or bfloat16.")
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if shard_latents and not many:
        raise ValueError("--shard-latents needs several ranks: torchrun --nproc-per-node 2 -m perilune serve ...")
    orders = join_world() if many else None
    packed = packed_experts and (mxfp8_activations or torch.cuda.is_available())
    model, tokenizer = open_model(where, floats[dtype], packed=packed)
    if mxfp8_activations:
        model.round_activations()
    sizes = EngineOptions(
        pool_tokens=pool_tokens,
        block_tokens=block_tokens,
        context=context,
        token_budget=token_budget,
        max_batch=max_batch,
        max_waiting=max_waiting,
        prefix_cache=prefix_cache,
        offload_bytes=int(offload_gb * 1e9),
        speculate=speculate,
        cuda_graphs=cuda_graphs,
        priorities=("short", "interactive", "medium", "long", "batch"),  # the router's classes, a client's between
    )
    manners = ServeOptions(
        name=name or where.resolve().name,
        api_keys=frozenset(api_key or ()),
        max_tokens=max_tokens,
        strict_vendor=strict_vendor,
        drain_seconds=drain_seconds,
    )
    engine = Ranks(model, sizes, orders=orders, shard_latents=shard_latents) if many else Engine(model, sizes)
    if isinstance(engine, Ranks) and engine.rank:
        engine.follow()
        return
    service = Service(Worker(engine), tokenizer, engine.context, model.config.vocab_size, manners)
    run_server(service, host, port)
    if isinstance(engine, Ranks):
        engine.close()


@app.command()
@_one_sentence
def route(
    workers: Annotated[list[str], typer.Option(help="Addresses of `perilune serve`, comma-separated or repeated.")],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one and logs it.")] = 8080,
    api_key: Annotated[list[str] | None, typer.Option(envvar="PERILUNE_API_KEY", help="Opens /v1.")] = None,
    budget: Annotated[float, typer.Option(help="Cost in flight on a worker, in new tokens.")] = 1e6,
    wait: Annotated[float, typer.Option(help="Seconds a request may wait for its budget before 429.")] = 10.0,
    drain_seconds: Annotated[float, typer.Option(help="For running requests after SIGTERM.")] = 60.0,
) -> None:
    """Route to many servers: a session stays on its worker, a burst of long prompts starves no short one."""
    from perilune.serve.http import ServeOptions
    from perilune.serve.router import route as run_router

    urls = [url for one in workers for url in one.split(",") if url]
    manners = ServeOptions(api_keys=frozenset(api_key or ()))
    run_router(urls, host, port, drain_seconds=drain_seconds, budget=budget, wait=wait, options=manners)


@app.command()
@_one_sentence
def report(
    where: Annotated[Path, typer.Argument(help="A run or its pretrain directory.")],
    against: Annotated[list[Path] | None, typer.Option(help="Earlier runs to overlay.")] = None,
) -> None:
    """Write a run's report page and print its path."""
    from perilune.train.report import report as write_report

    def stage(path: Path) -> Path:
        return path / "pretrain" if (path / "pretrain").is_dir() else path

    typer.echo(write_report(stage(where), [stage(path) for path in against or ()]))


@app.command()
@_one_sentence
def params(
    model: Annotated[str, typer.Argument(help="A preset (tiny, mini, small, kimi_linear, k3), a run or a checkpoint.")],
    context: Annotated[list[int] | None, typer.Option(help="Context lengths for FLOPs per token.")] = None,
) -> None:
    """Parameters by part, bytes, decode state and FLOPs, all computed from the config."""
    from perilune.config import PRESETS
    from perilune.params import show
    from perilune.stages import find_weights

    if any(length < 0 for length in context or ()):
        raise ValueError(f"--context counts tokens: {min(context or ())} is none.")
    is_place = model not in PRESETS and Path(model).exists()
    show(str(find_weights(Path(model))) if is_place else model, tuple(context or ()))


@app.command()
@_one_sentence
def check(path: Annotated[Path, typer.Argument(help="Golden vectors, one family, a run or a checkpoint.")]) -> None:
    """Golden vectors against this build, one line a family; exit code 1 on any failure."""
    from perilune.check import Result
    from perilune.check import check as run_checks
    from perilune.stages import find_weights

    results = []
    for outcome in run_checks(find_weights(path) if (path / "recipe.json").is_file() else path):
        if isinstance(outcome, Result):
            results.append(outcome)
            verdict = "pass" if outcome.passed else "FAIL"
            typer.echo(
                f"{verdict}  {outcome.family:<18} {outcome.cases:>5} comparisons, largest error {outcome.error:.2e} "
                f"({outcome.share:.2f} of its tolerance{', ' + outcome.note if outcome.note else ''})"
            )
        else:
            typer.echo(f"skip  {outcome}")
    failed = [r.family for r in results if not r.passed]
    words = f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed" if results else "nothing to check"
    typer.echo(f"{len(results)} families checked, {words}.")
    if failed or not results:
        raise typer.Exit(1)


def _shard_bytes(gigabytes: float) -> int:
    if not 1e-9 <= gigabytes < float("inf"):
        raise ValueError(f"--shard-gb must be more than 0 and finite, not {gigabytes:g}.")
    return int(gigabytes * 1e9)


@app.command("import")
@_one_sentence
def import_(
    source: Annotated[Path, typer.Argument(help="A released checkpoint: config.json and *.safetensors.")],
    out: Annotated[Path, typer.Argument(help="Stage directory to make; the model lies in OUT/weights.")],
    shard_gb: Annotated[float, typer.Option(help="Largest shard.")] = 5.0,
) -> None:
    """Take a released checkpoint in, checked tensor by tensor."""
    from perilune.model.transfer import import_checkpoint

    total = import_checkpoint(source, out / "weights", _shard_bytes(shard_gb))
    typer.echo(f"Imported {total:,} bytes into {out / 'weights'}.")


@app.command()
@_one_sentence
def export(
    where: Where,
    out: Annotated[Path, typer.Argument(help="Checkpoint directory to write.")],
    experts: Annotated[str | None, typer.Option(help="bfloat16 or mxfp4; as they are by default.")] = None,
    dtype: Annotated[str, typer.Option(help="BF16 or F32.")] = "BF16",
    shard_gb: Annotated[float, typer.Option(help="Largest shard.")] = 5.0,
) -> None:
    """Write a model in the released layout."""
    from perilune.model.transfer import convert
    from perilune.stages import find_weights

    if dtype not in ("BF16", "F32") or experts not in (None, "bfloat16", "mxfp4"):
        raise ValueError("--dtype is BF16 or F32, --experts is bfloat16 or mxfp4.")
    total = convert(find_weights(where), out, dtype=dtype, experts=experts, shard_bytes=_shard_bytes(shard_gb))  # type: ignore[arg-type]
    typer.echo(f"Exported {total:,} bytes to {out}.")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sandbox(context: typer.Context) -> None:
    """MicroVMs: create, exec, pause, fork, snapshot, build, serve, doctor."""
    from perilune.sandbox.cli import app as inner

    inner(args=context.args, prog_name="perilune sandbox")
