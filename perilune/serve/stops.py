"""Stop strings in a stream of text: cut at the first one completed, and never show a part of one that may yet be one.

What is shown does not depend on how the text was cut into pieces: among the strings found, the one that ENDS first
wins (and of two that end together, the longer), because that is the one a reader of single characters meets first.
"""

from collections.abc import Iterable


class Stops:
    """`push` text as it comes, `flush` once at the end; together they give the text before the first stop string."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now. Once `found` is set, nothing more ever is."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._strings if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.found = min(hits)
            self._held = ""
            return text[:at]
        keep = self._pending(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back in vain; pushing may go on afterwards (a channel ended, the text did not)."""
        rest, self._held = self._held, ""
        return rest

    def _pending(self, text: str) -> int:
        """Characters at the end that begin some stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._strings):
                return size
        return 0
