"""Talking to a model in the terminal: plain continuation, or the K3 chat format for models trained on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perilune.chat import Content, Parser, Reasoning, read_request, render
from perilune.config import ConfigError
from perilune.model.generate import Sampling, generate
from perilune.model.net import K3
from perilune.model.weights import load_model
from perilune.stages import find_weights
from perilune.tokenizer import StreamDecoder, Tokenizer


def open_model(where: Path, dtype: torch.dtype = torch.float32, packed: bool = False) -> tuple[K3, Tokenizer]:
    """Model and tokenizer of a run, stage or checkpoint directory. Raises ConfigError where they do not fit.

    packed: MXFP4 experts stay packed in memory.
    """
    weights = find_weights(where)
    tokenizer = Tokenizer.load(weights)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(weights, device=device, dtype=dtype, packed=packed)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"The tokenizer in {weights} has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}."
        )
    if tokenizer.vocab_size < model.config.vocab_size:  # ids that only pad the model's table are reserved
        tokenizer = Tokenizer(tokenizer.ranks, tokenizer.specials, model.config.vocab_size)
    return model.eval(), tokenizer


def continuation(model: K3, tokenizer: Tokenizer, text: str, rule: Sampling, before: str = "") -> Iterator[str]:
    """What follows `before` and `text`, in pieces that are whole characters.

    Of `before` as much is kept, from its end, as leaves room for `text` and the answer.
    """
    decoder, ids = StreamDecoder(tokenizer, skip_special=True), tokenizer.encode(text)
    room = max(0, model.config.max_position_embeddings - rule.max_tokens - len(ids))
    earlier = tokenizer.encode(before)
    for token in generate(model, earlier[max(0, len(earlier) - room) :] + ids or [tokenizer.eos], rule):
        if piece := decoder.push(token):
            yield piece
    if rest := decoder.flush():
        yield rest


def talk(where: Path, *, xtml: bool, seed: int | None, **sampling: Any) -> None:
    """The loop: read a line, stream the answer. Ends at an empty line or the end of input."""
    console = Console(highlight=False)
    model, tokenizer = open_model(where)
    kind = "K3 chat format" if xtml else "plain continuation: it goes on with your text"
    console.print(f"{model.config.num_hidden_layers} layers, {kind}. An empty line ends.", style="dim")
    messages: list[dict[str, Any]] = []
    so_far = ""
    while text := _read(console):
        stop = (tokenizer.end_of_msg, tokenizer.eos) if xtml else (tokenizer.eos,)
        rule = Sampling(stop=stop, seed=seed, **sampling)
        if xtml:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(console, model, tokenizer, messages, rule)})
        else:
            so_far += text + _continued(console, continuation(model, tokenizer, text, rule, so_far)) + "\n"
        console.print()


def _continued(console: Console, pieces: Iterator[str]) -> str:
    said = ""
    for piece in pieces:
        console.out(piece, end="", highlight=False)
        said += piece
    return said


def _read(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]")
    except EOFError:
        return ""


def _answer(console: Console, model: K3, tokenizer: Tokenizer, messages: list[dict[str, Any]], rule: Sampling) -> str:
    """Stream one assistant turn, thought dimmed; returns its visible content."""
    prompt = render(read_request({"messages": messages}))
    parser, content = Parser(tokenizer, prompt.channel), ""
    for token in generate(model, prompt.ids(tokenizer), rule):
        content += _show(console, parser.feed([token]))
    return content + _show(console, parser.finish())


def _show(console: Console, events: list[Any]) -> str:
    seen = ""
    for event in events:
        if isinstance(event, Reasoning):
            console.out(event.text, end="", highlight=False, style="dim")
        elif isinstance(event, Content):
            seen += event.text
            console.out(event.text, end="", highlight=False)
    return seen
