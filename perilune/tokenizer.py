"""Byte-level BPE in the released tiktoken layout: train it, load it, encode, decode, decode a stream.

A text is cut into pieces by one regular expression; inside a piece, the adjacent pair whose joined bytes have the
lowest rank is merged first, until no pair has a rank. A token's rank is its id. On disk that is

    tiktoken.model          one line a token: base64(bytes), space, rank
    tokenizer_config.json   vocabulary size and the special ids, which sit at the top of the vocabulary

The release has 163,584 ranks and 256 special ids above them, 16 of them named. A vocabulary below 32,768 keeps only the
16 named ids, in the released order: a block of 256 would take a sixteenth of a 4,096-token vocabulary.
Ids between the last rank and the top that have no name are `<|reserved_token_ID|>`, as released.
"""

import base64
import codecs
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

RANKS_FILE, CONFIG_FILE = "tiktoken.model", "tokenizer_config.json"

# The named special ids, as offsets in the released block of 256.
RELEASED_BLOCK = 256
RELEASED_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
WHOLE_BLOCK_FROM = 32_768  # vocabularies of this size and above carry the whole block
SMALLEST_VOCABULARY = 256 + len(RELEASED_OFFSETS)  # every byte and every named special id
# Markup is content to whoever parses it: decoding with `skip_special` keeps these three.
MARKUP = frozenset({"<|open|>", "<|close|>", "<|sep|>"})

# The released cuts. Both limits change ids, so they are part of the tokenizer, not a tuning knob.
MAX_CHARS, MAX_RUN = 400_000, 25_000
# The look-behind lets a match start only where a run starts: linear time on any text.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{MAX_RUN + 1},}}|(?<!\s)\s{{{MAX_RUN + 1},}}")


def _split_pattern() -> str:
    """The eight alternatives of the released split, most specific first."""
    lead, contraction = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    return "|".join(
        [
            r"[\p{Han}]+",
            f"{lead}{upper}*{lower}+{contraction}",
            f"{lead}{upper}+{lower}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


SPLIT = _split_pattern()


class TokenizerError(ValueError):
    """A tokenizer that cannot be trained or loaded; the message is one sentence for the user."""


class _Special:
    """An id read by name: `tokenizer.eos` is `tokenizer.id("[EOS]")`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, tokenizer: "Tokenizer", owner: type | None = None) -> int:
        return tokenizer.id(self.name)


class Tokenizer:
    """Text to ids and back; immutable.

    `ranks` maps a token's bytes to its id, `specials` a name to its id; `vocab_size` counts both, gaps included.
    """

    bos, eos, unk, pad = _Special("[BOS]"), _Special("[EOS]"), _Special("[UNK]"), _Special("[PAD]")
    end_of_msg = _Special("<|end_of_msg|>")
    open, close, sep = _Special("<|open|>"), _Special("<|close|>"), _Special("<|sep|>")
    media_begin, media_content = _Special("<|media_begin|>"), _Special("<|media_content|>")
    media_end, media_pad = _Special("<|media_end|>"), _Special("<|media_pad|>")

    def __init__(self, ranks: Mapping[bytes, int], specials: Mapping[str, int], vocab_size: int) -> None:
        taken = set(specials.values())
        reserved = {f"<|reserved_token_{i}|>": i for i in range(len(ranks), vocab_size) if i not in taken}
        self.ranks = dict(ranks)
        self.specials = dict(sorted({**reserved, **specials}.items(), key=lambda item: item[1]))
        self.vocab_size = vocab_size

    # ------------------------------------------------------------------ making one

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, max_bytes: int | None = None) -> "Tokenizer":
        """Byte-level BPE over `texts`, split as released; the same texts give the same tokenizer.

        `max_bytes` stops reading after so many bytes of text. Texts too few to fill the vocabulary leave reserved ids.
        """
        specials = special_ids(vocab_size)
        trained = train_bpe(_take(texts, max_bytes), specials["[BOS]"])
        return cls(_ranks_of(trained), specials, vocab_size)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """From a `tiktoken.model`, a directory that holds one, or a stage directory with `tokenizer/` or `weights/`.

        Without a `tokenizer_config.json` beside it, the released block of 256 special ids follows the last rank.
        """
        file = _find(Path(path))
        ranks = _read_ranks(file)
        config = file.with_name(CONFIG_FILE)
        if config.is_file():
            return cls(ranks, *_read_config(config, len(ranks)))
        return cls(ranks, released_ids(len(ranks)), len(ranks) + RELEASED_BLOCK)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes both files, each whole or not at all; the configuration comes last."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in self._by_rank)
        _write(directory / RANKS_FILE, b"".join(lines))
        _write(directory / CONFIG_FILE, json.dumps(self._config(), indent=1, ensure_ascii=False).encode() + b"\n")
        return directory

    # ------------------------------------------------------------------ ids

    def id(self, name: str) -> int:
        """The id of a special token, by its name."""
        try:
            return self.specials[name]
        except KeyError:
            raise TokenizerError(f"this tokenizer has no special token {name!r}") from None

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`; names of special tokens are ordinary text unless `allow_special`."""
        if allow_special:
            return [i for cut in cuts(text) for i in self._bpe.encode(cut, allowed_special="all")]
        return [i for cut in cuts(text) for i in self._bpe.encode_ordinary(cut)]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """`encode` of each text, in `threads` threads."""
        pieces = [list(cuts(text)) for text in texts]
        ids = iter(self._bpe.encode_ordinary_batch([cut for piece in pieces for cut in piece], num_threads=threads))
        return [[i for _ in piece for i in next(ids)] for piece in pieces]

    def decode_bytes(self, ids: Sequence[int], skip_special: bool = False) -> bytes:
        """The bytes of `ids`. `skip_special` leaves special tokens out, except the markup `open`, `close`, `sep`."""
        if skip_special:
            ids = [i for i in ids if i not in self._skipped]
        try:
            return self._bpe.decode_bytes(ids)
        except (KeyError, OverflowError):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise TokenizerError(f"id {wrong} is outside the vocabulary of {self.vocab_size}") from None

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text each id stands for, int32 `[vocab_size]`; special ids stand for none."""
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, rank in self.ranks.items():
            sizes[rank] = len(token)
        return sizes

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of a hash over ranks, special ids and vocabulary size."""
        digest = hashlib.sha256()
        for token, rank in self._by_rank:
            digest.update(b"%d %d " % (rank, len(token)) + token)
        digest.update(json.dumps([self.specials, self.vocab_size]).encode())
        return digest.hexdigest()[:16]

    # ------------------------------------------------------------------ inside

    @cached_property
    def _bpe(self) -> "tiktoken.Encoding":
        import tiktoken  # training from finished shards needs no encoder, so only this line needs the package

        return tiktoken.Encoding("k3", pat_str=SPLIT, mergeable_ranks=self.ranks, special_tokens=self.specials)

    @cached_property
    def _skipped(self) -> frozenset[int]:
        return frozenset(i for name, i in self.specials.items() if name not in MARKUP)

    @cached_property
    def _by_rank(self) -> list[tuple[bytes, int]]:
        return sorted(self.ranks.items(), key=lambda item: item[1])

    def _config(self) -> dict[str, Any]:
        roles = {"bos": "[BOS]", "eos": "[EOS]", "unk": "[UNK]", "pad": "[PAD]"}
        return {
            "tokenizer_class": "TikTokenTokenizer",
            "vocab_size": self.vocab_size,
            **{f"{role}_token": name for role, name in roles.items() if name in self.specials},
            "added_tokens_decoder": {
                str(i): {"content": name, "special": name not in MARKUP} for name, i in self.specials.items()
            },
        }


class StreamDecoder:
    """Decodes ids as they come and holds back the bytes of an unfinished character.

    All that `push` returned, plus `flush`, equals `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, *ids: int) -> str:
        return self._utf8.decode(self.tokenizer.decode_bytes(ids, self.skip_special))

    def flush(self) -> str:
        """What is left at the end; the decoder is as new afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def special_ids(vocab_size: int) -> dict[str, int]:
    """Named special ids of a vocabulary, at its top and in the released order; `[BOS]` is the lowest."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(RELEASED_OFFSETS)} special tokens "
            f"need at least {SMALLEST_VOCABULARY}"
        )
    if vocab_size < WHOLE_BLOCK_FROM:
        first = vocab_size - len(RELEASED_OFFSETS)
        return {name: first + i for i, name in enumerate(RELEASED_OFFSETS)}
    return released_ids(vocab_size - RELEASED_BLOCK)


def released_ids(first: int) -> dict[str, int]:
    """The named special ids of a block of 256 that begins at `first`."""
    return {name: first + offset for name, offset in RELEASED_OFFSETS.items()}


def cuts(text: str) -> Iterator[str]:
    """The text in pieces of at most 400,000 characters and without a longer run of (non-)space than 25,000."""
    for start in range(0, len(text), MAX_CHARS):
        part = text[start : start + MAX_CHARS]
        begin = 0
        for run in _LONG_RUN.finditer(part) if len(part) > MAX_RUN else ():
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def train_bpe(texts: Iterable[str], size: int) -> "tokenizers.Tokenizer":
    """A byte-level BPE of `size` tokens with the released split, as a `tokenizers` object."""
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trained

    trained = Trained(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    trained.train_from_iterator((cut for text in texts for cut in cuts(text)), trainer)
    return trained


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a `tokenizers` vocabulary (GPT-2's table), to the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


def _ranks_of(trained: "tokenizers.Tokenizer") -> dict[bytes, int]:
    alphabet = byte_alphabet()
    vocabulary = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return {bytes(alphabet[c] for c in token): rank for rank, (token, _) in enumerate(vocabulary)}


def _take(texts: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    read = 0
    for text in texts:
        yield text
        read += len(text.encode("utf-8", errors="replace"))
        if max_bytes is not None and read >= max_bytes:
            return


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for folder in (path, path / "tokenizer", path / "weights"):
        if (folder / RANKS_FILE).is_file():
            return folder / RANKS_FILE
    raise TokenizerError(f"no {RANKS_FILE} at {path}, nor in its tokenizer/ or weights/")


def _read_ranks(file: Path) -> dict[bytes, int]:
    try:
        pairs = (line.split() for line in file.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise TokenizerError(f"{file} is not a tiktoken rank file: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{file} is damaged: its ranks are not 0 to {len(ranks) - 1}, each once")
    return ranks


def _read_config(file: Path, n_ranks: int) -> tuple[dict[str, int], int]:
    """Special ids by name, and the vocabulary size (released configurations leave it to the block of 256)."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        specials = {entry["content"]: int(i) for i, entry in config["added_tokens_decoder"].items()}
        size = int(config.get("vocab_size") or n_ranks + RELEASED_BLOCK)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TokenizerError(f"{file} does not name the special tokens in added_tokens_decoder ({error!r})") from None
    wrong = [name for name, i in specials.items() if not n_ranks <= i < size]
    if wrong:
        raise TokenizerError(f"{file}: the id of {wrong[0]!r} is not between the {n_ranks} ranks and the top, {size}")
    return specials, size


def _write(file: Path, content: bytes) -> None:
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
