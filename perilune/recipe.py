"""Recipes: TOML plus `--set a.b=v`, read strictly into frozen dataclasses. No framework.

    [train]                      perilune run recipe.toml --set train.steps=100 --set data.sources='["my/folder"]'
    steps = 500

`build(cls, table)` knows dataclasses, tuples, literals, unions and scalars; a key that no field has is an error that
names the nearest one.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe that cannot be used; the message is one sentence naming the key."""


def read(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The recipe's table with overrides applied. Raises RecipeError for an unreadable file or override."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(f"Recipe {path} does not exist.") from error
    except OSError as error:
        raise RecipeError(f"Recipe {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"Recipe {path} is not valid TOML: {error}.") from error
    for override in overrides:
        set_key(table, override)
    return table


def set_key(table: dict[str, Any], override: str) -> None:
    """Apply one `a.b=v` in place; v is a TOML value, or else a bare string."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set takes key=value, not {override!r}.")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {key}: {parent} is a value, not a section.")
    table[last] = value


def build(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from a table; absent keys take the field's default.

    Raises RecipeError naming the key (`where` is its section): unknown, missing or of a wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise RecipeError(unknown(f"{where}{key}", [where + name for name in fields]))
    values = {key: _convert(hints[key], value, f"{where}{key}") for key, value in table.items()}
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise RecipeError(f"The recipe lacks the key {where}{name}.")
    try:
        return cls(**values)
    except RecipeError:
        raise
    except ValueError as error:  # a dataclass's own checks
        raise RecipeError(str(error)) from error


def unknown(key: str, known: Iterable[str]) -> str:
    """The sentence for a key nobody has, naming the nearest valid one."""
    near = difflib.get_close_matches(key, list(known), 1, 0.5)
    return f"Unknown recipe key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ".")


def _convert(hint: Any, value: Any, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise RecipeError(f"{key} must be a section, not {value!r}.")
        return build(hint, value, key + ".")
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, key)
    if origin is Literal:
        if value not in args:
            raise RecipeError(f"{key} must be one of {', '.join(map(repr, args))}, not {value!r}.")
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{key} must be a section, not {value!r}.")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{key} must be a list, not {value!r}.")
        return tuple(_convert(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    return _scalar(hint, value, key)


def _convert_union(args: tuple[Any, ...], value: Any, key: str) -> Any:
    if type(None) in args and value in (None, "none"):  # TOML has no null
        return None
    rest = [arg for arg in args if arg is not type(None)]
    for arg in rest[:-1]:
        try:
            return _convert(arg, value, key)
        except RecipeError:
            continue
    return _convert(rest[-1], value, key)


def _scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is Any or (isinstance(value, hint) and not (hint is int and isinstance(value, bool))):
        return value
    raise RecipeError(f"{key} must be of type {hint.__name__}, not {value!r}.")


def to_table(value: Any) -> Any:
    """A dataclass as plain tables and lists, as a recipe would write it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_table(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_table(item) for item in value]
    return str(value) if isinstance(value, Path) else value
