"""What the user says about data: one frozen dataclass that the recipe nests as `[data]`."""

from dataclasses import dataclass


class DataError(ValueError):
    """Data that cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class DataConfig:
    """Sources, filters and split. Any change rebuilds the shards; the row length and the order belong to training."""

    sources: tuple[str, ...] = ("stdlib",)
    """"stdlib" (the running Python's standard library, PSF licence), folders, or .txt .md .py .jsonl .parquet files."""
    vocab_size: int = 4096
    """Vocabulary of the tokenizer trained on the training split; unused where a tokenizer is given."""
    tokenizer_bytes: int = 100_000_000
    """Bytes of text that the tokenizer is trained on, at most."""
    held_out: float = 0.05
    """Held-out documents: a share of all below 1, a count from 1 on; whole documents, chosen by a hash of the name."""
    seed: int = 0
    """Changes which documents are held out."""
    min_chars: int = 64
    """Shorter documents are removed."""
    max_line: int = 2000
    """A document with more than half of its characters in lines longer than this is removed (minified, base64)."""
    min_alphabetic: float = 0.25
    """Least share of letters among the visible characters (tables of numbers, hex dumps have less)."""
    max_repeated: float = 0.5
    """Greatest share of characters in lines that stood in the document before."""
    exact_duplicates: bool = True
    """Remove documents equal to an earlier one but for case and white space."""
    near_duplicates: float = 0.8
    """Remove documents whose 5-word shingles have this Jaccard similarity with an earlier one; 0 keeps them."""
    quality_good: tuple[str, ...] = ()
    """Sources of good documents; with `quality_bad` they train the optional quality classifier."""
    quality_bad: tuple[str, ...] = ()
    """Sources of documents one does not want."""
    quality_threshold: float = 0.5
    """Documents with a lower probability of being good are removed."""

    def __post_init__(self) -> None:
        for name in ("sources", "quality_good", "quality_bad"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.sources:
            raise DataError("data.sources is empty: name at least one source")
        if self.held_out < 0 or (self.held_out > 1 and self.held_out != int(self.held_out)):
            raise DataError(f"data.held_out = {self.held_out} is neither a share from 0 to 1 nor a count")
        for name in ("min_alphabetic", "max_repeated", "near_duplicates", "quality_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"data.{name} = {getattr(self, name)} is not between 0 and 1")
        if bool(self.quality_good) != bool(self.quality_bad):
            raise DataError("data.quality_good and data.quality_bad go together: the classifier needs both")
