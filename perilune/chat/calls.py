"""One tool call as it is being written: typed XTML arguments -> the JSON text that clients expect, in fragments.

A string is passed on while it arrives. Any other value waits for its close, because half a number is a wrong number; it
is passed on verbatim if it is JSON (so 1.0 stays 1.0) and as a string if it is not. Whatever happens, a call whose
arguments were typed ends as one valid JSON object.
"""

import json
from typing import NoReturn


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value (NaN and Infinity are not). Numbers are not converted, so none is too long."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def quote(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class CallWriter:
    """Each method returns the fragment of JSON text it adds; together they are the call's `arguments`."""

    def __init__(self) -> None:
        self._kind: str | None = None  # "typed" or "json", whichever came first: the two cannot be mixed
        self._key: str | None = None
        self._streaming = False
        self._value: list[str] = []
        self._count = 0

    def open_argument(self, key: str | None, kind: str) -> str:
        """Begins `key`. Without a key, or after a json block, what follows is ignored."""
        if key is None or self._kind == "json":
            return ""
        self._kind, self._key, self._streaming = "typed", key, kind == "string"
        return self._name() + '"' if self._streaming else ""

    def open_json(self) -> bool:
        """Begins a block of raw JSON; false if it is to be ignored."""
        fresh = self._kind is None
        self._kind = "json" if fresh else self._kind
        return fresh

    def text(self, text: str) -> str:
        """More of the open argument's value."""
        if self._key is None:
            return ""
        if self._streaming:
            return quote(text)
        self._value.append(text)
        return ""

    def raw(self, text: str) -> str:
        """More of the raw block, verbatim; blanks wait, so that an empty block still becomes an object."""
        self._value.append(text)
        if self._count == 0 and text.isspace():
            return ""
        held, self._count = "".join(self._value), 1
        self._value.clear()
        return held

    def close_argument(self, cut: bool = False) -> str:
        """Ends the open argument, if any; `cut` says that the text ended inside it, so that a half value is dropped."""
        if self._key is None:
            return ""
        value = "".join(self._value)
        if self._streaming:
            fragment = '"'
        elif cut:
            fragment = ""
        else:
            fragment = self._name() + (value.strip() if is_json(value) else f'"{quote(value)}"')
        self._key = None
        self._value.clear()
        return fragment

    def close(self, cut: bool = False) -> str:
        """Ends the call."""
        fragment = self.close_argument(cut)
        if self._kind == "json":
            return fragment if self._count else "{}"
        return fragment + ("}" if self._count else "{}")

    def _name(self) -> str:
        self._count += 1
        return ("{" if self._count == 1 else ",") + f'"{quote(self._key or "")}":'
