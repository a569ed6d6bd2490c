"""JSON Schema -> JSON texts that satisfy it: a subset that is always valid, and never empty where the schema is not.

Written compactly, with at most one space behind a comma or colon, declared properties in their order, strings with
short escapes, numbers without exponents. Properties that a schema merely tolerates are written only if it declares none
or speaks of `additionalProperties`. A keyword that would change what is valid and is not read here is an error that
names it.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from perilune.serve.grammar.expression import EMPTY, INFINITE, NOTHING, Arena
from perilune.serve.grammar.number import Number
from perilune.serve.grammar.text import Write, pattern, quoted, spelled, string

Schema = Mapping[str, Any] | bool
TYPES = ("string", "number", "boolean", "null", "object", "array")

# Keywords that say nothing about validity, and those read here; any other is refused.
_SILENT = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding"}
_SILENT |= {"contentMediaType", "$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "strict", "nullable"}
_READ = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "required", "additionalProperties"}
_READ |= {"patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"}
_READ |= {"minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_READ |= {"multipleOf"}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# What the value of a keyword must be. Draft 4's exclusive bounds are booleans.
_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_COUNTS, ("a whole number, at least 0", _is_count)),
    **dict.fromkeys(("minimum", "maximum"), ("a number", _is_number)),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), ("a number", lambda v: isinstance(v, bool) or _is_number(v))
    ),
    "multipleOf": ("a number above 0", lambda v: _is_number(v) and v > 0),
    **dict.fromkeys(("pattern", "format", "$ref"), ("a string", lambda v: isinstance(v, str))),
    **dict.fromkeys(("properties", "patternProperties"), ("an object", lambda v: isinstance(v, Mapping))),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "prefixItems"), ("an array", lambda v: isinstance(v, list))),
    "allOf": ("an array of schemas", lambda v: isinstance(v, list) and all(isinstance(s, Mapping | bool) for s in v)),
    "required": ("an array of names", lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v)),
}
_DATE = (
    r"\d{4}-(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|\d{4}-(0[469]|11)-(0[1-9]|[12]\d|30)|\d{4}-02-(0[1-9]|1\d|2[0-8])"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})T{_TIME}",
    "duration": r"P(\d+W|\d+D(T\d+H)?|T\d+[HMS])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,5}}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,5}}",
    "uri": r"https?://[A-Za-z0-9._~-]+(:\d{1,4})?(/[A-Za-z0-9._~%-]*)*(\?[A-Za-z0-9._~%=&-]*)?",
}


class JsonSchema:
    """Expressions in `arena` for the values of one schema document."""

    def __init__(self, arena: Arena, document: Schema) -> None:
        self.arena, self.document = arena, document
        self._name = f"#{len(arena._rules)}"  # rules of several documents may share an arena
        self._open: set[str] = set()

    def value(self, schema: Schema | None = None) -> int:
        """Any value that satisfies the schema (default: the whole document), as JSON."""
        return self.arena.either(*self.kinds(self.document if schema is None else schema).values())

    def kinds(self, schema: Schema, write: Write | None = None) -> dict[str, int]:
        """The same by JSON type. With `write`, strings are bare text, written so, instead of JSON strings."""
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise ValueError(f"A schema must be an object or a boolean, not {json.dumps(schema)[:80]}.")
        if unread := sorted(set(schema) - _READ - _SILENT):
            raise ValueError(f"The schema's keyword {unread[0]!r} is not supported in constrained output.")
        _vet(schema)
        self.arena.spend(20)
        if "$ref" in schema:
            return self._reference(schema, write)
        if "allOf" in schema:
            return self.kinds(self._merge(schema), write)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._any_of(schema, key, write)
        if "enum" in schema or "const" in schema:
            return self._listed(schema, write)
        return {kind: self._typed(kind, schema, write) for kind in self._types(schema)}

    # ---------------------------------------------------------------- combining

    def _reference(self, schema: Mapping[str, Any], write: Write | None) -> dict[str, int]:
        """A rule by JSON type of the target, so that a schema may hold itself."""
        siblings = {key: value for key, value in schema.items() if key != "$ref" and key not in _SILENT}
        pointer = schema["$ref"]
        target = self.resolve(pointer)
        if siblings:
            return self.kinds({"allOf": [target, siblings]}, write)
        kinds = self._guarded(pointer, lambda: dict.fromkeys(self._reachable(target)))
        if write is not None:  # not within the guard: the target's children may hold it again
            return self.kinds(target, write)
        name = f"{self._name}{pointer}"
        for kind in kinds:
            if not self.arena.is_defined(f"{name} {kind}"):
                self.arena.define(f"{name} {kind}", NOTHING)
                self.arena.define(f"{name} {kind}", self.kinds(target).get(kind, NOTHING))
        return {kind: self.arena.rule(f"{name} {kind}") for kind in kinds}

    def _reachable(self, schema: Schema) -> Sequence[str]:
        """Types that a schema may take, without looking into its children."""
        if not isinstance(schema, Mapping):
            return TYPES
        if "$ref" in schema:
            return self._guarded(schema["$ref"], lambda: self._reachable(self.resolve(schema["$ref"])))
        return self._types(schema) if "type" in schema else TYPES

    def _guarded(self, pointer: str, read: Any) -> Any:
        if pointer in self._open:
            raise ValueError(f"The schema's $ref {pointer!r} refers to itself and nothing else.")
        self._open.add(pointer)
        try:
            return read()
        finally:
            self._open.discard(pointer)

    def resolve(self, pointer: str) -> Schema:
        """The schema that a `$ref` within the document names."""
        found: Any = self.document
        if pointer != "#" and not pointer.startswith("#/"):
            raise ValueError(f"The schema's $ref {pointer!r} is not a pointer into it (#/...).")
        for part in pointer.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Sequence) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                raise ValueError(f"The schema's $ref {pointer!r} points to nothing.")
        return found

    def _any_of(self, schema: Mapping[str, Any], key: str, write: Write | None) -> dict[str, int]:
        """Beside the alternatives stand keywords that hold for each of them."""
        rest = {name: value for name, value in schema.items() if name != key and name not in _SILENT}
        forms: dict[str, list[int]] = {}
        for part in schema[key]:
            for kind, form in self.kinds({"allOf": [rest, part]} if rest else part, write).items():
                forms.setdefault(kind, []).append(form)
        return {kind: self.arena.either(*several) for kind, several in forms.items()}

    def _merge(self, schema: Mapping[str, Any]) -> Schema:
        """One schema for `allOf` and what stands beside it."""
        self.arena.spend(20)
        merged: dict[str, Any] = {}
        for part in [{key: value for key, value in schema.items() if key != "allOf"}, *schema["allOf"]]:
            while isinstance(part, Mapping) and "$ref" in part:
                self.arena.spend(20)  # two may name each other
                rest = {key: value for key, value in part.items() if key != "$ref"}
                part = {"allOf": [self.resolve(part["$ref"]), rest]} if rest else self.resolve(part["$ref"])
            if part is False:
                return False
            if isinstance(part, Mapping) and "allOf" in part:
                part = self._merge(part)
            for key, value in part.items() if isinstance(part, Mapping) else ():
                merged[key] = value if key not in merged else self._meet(key, merged[key], value)
        return merged

    def _meet(self, key: str, one: Any, other: Any) -> Any:
        if one == other or key in _SILENT:
            return one
        match key:
            case "required":
                return [*one, *(name for name in other if name not in one)]
            case "properties" | "$defs" | "definitions" | "patternProperties":
                return {
                    name: {"allOf": [one[name], other[name]]}
                    if name in one and name in other
                    else {**one, **other}[name]
                    for name in {**one, **other}
                }
            case "enum":
                return [value for value in one if value in other]
            case "type":
                return [
                    kind
                    for kind in _list(one)
                    if kind in _list(other) or (kind == "integer" and "number" in _list(other))
                ]
            case "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties":
                return max(one, other)
            case "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties":
                return min(one, other)
            case "additionalProperties" | "items":
                return False if False in (one, other) else {"allOf": [one, other]}
        raise ValueError(f"The schema states {key!r} twice, in ways that cannot be combined in constrained output.")

    def _listed(self, schema: Mapping[str, Any], write: Write | None) -> dict[str, int]:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "const" in schema and "enum" in schema:
            values = [value for value in values if value in schema["enum"]]
        allowed = self._types(schema)
        forms: dict[str, list[int]] = {}
        for value in values:
            kind = _kind(value)
            if kind in allowed or (kind == "integer" and "number" in allowed):
                text = spelled(self.arena, write, value) if write and kind == "string" else self._literal(value)
                forms.setdefault("number" if kind == "integer" else kind, []).append(text)
        return {kind: self.arena.either(*several) for kind, several in forms.items()}

    def _literal(self, value: Any) -> int:
        match value:
            case str():
                return self._quote(spelled(self.arena, quoted, value))
            case list():
                return self._between("[", "]", [self._literal(item) for item in value])
            case dict():
                items = [
                    self._pair(spelled(self.arena, quoted, key), self._literal(item)) for key, item in value.items()
                ]
                return self._between("{", "}", items)
        return self.arena.text(json.dumps(value))

    def _between(self, left: str, right: str, items: list[int]) -> int:
        comma = self._after(",")
        body = [part for n, item in enumerate(items) for part in ([comma] if n else []) + [item]]
        return self.arena.sequence(self.arena.text(left), *body, self.arena.text(right))

    # ---------------------------------------------------------------- one type

    def _types(self, schema: Mapping[str, Any]) -> list[str]:
        if "type" not in schema:
            return list(TYPES)
        types = _list(schema["type"])
        if unknown := [kind for kind in types if kind not in (*TYPES, "integer")]:
            raise ValueError(f"The schema's type {unknown[0]!r} is none of JSON's.")
        return [kind for kind in types if not (kind == "integer" and "number" in types)]

    def _typed(self, kind: str, schema: Mapping[str, Any], write: Write | None) -> int:
        match kind:
            case "string":
                return self._string(schema, write) if write else self._quote(self._string(schema, quoted))
            case "integer" | "number":
                return self._number(schema, integer=kind == "integer")
            case "boolean":
                return self.arena.either(self.arena.text("true"), self.arena.text("false"))
            case "null":
                return self.arena.text("null")
            case "array":
                return self._array(schema)
        return self._object(schema)

    def _string(self, schema: Mapping[str, Any], write: Write) -> int:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        body = string(self.arena, write, least, most)
        for regex, whole in ((schema.get("pattern"), False), (FORMATS.get(schema.get("format", "")), True)):
            if regex is not None:
                found = pattern(self.arena, regex, write, whole)
                body = found if (least, most) == (0, None) else self.arena.both(body, found)
                least = -1  # a second one meets the first
        return body

    def _number(self, schema: Mapping[str, Any], integer: bool) -> int:
        low, above = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, below = _bound(schema, "maximum", "exclusiveMaximum", min)
        step = _exact(schema["multipleOf"]) if "multipleOf" in schema else None
        if low is None and high is None and step is None:
            return pattern(self.arena, "-?(0|[1-9][0-9]*)" + ("" if integer else r"(\.[0-9]+)?"), quoted, whole=True)
        number = Number(low, high, above, below, integer, step)
        return NOTHING if number.remaining is None else self.arena.leaf(number)

    def _array(self, schema: Mapping[str, Any]) -> int:
        first = [self.value(item) for item in schema.get("prefixItems", [])]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self.value(schema["items"]) if "items" in schema else self.anything()
        comma, fixed = self._after(","), len(first)
        more = self.arena.repeat(
            self.arena.sequence(comma, item),
            max(least - max(fixed, 1), 0),
            None if most is None else max(most - max(fixed, 1), 0),
        )
        forms = [EMPTY] if least == 0 else []
        forms += [self._listing(first[:n]) for n in range(max(1, least), fixed) if most is None or n <= most]
        if most is None or most >= max(fixed, 1):
            forms.append(self.arena.sequence(self._listing(first or [item]), more))
        return self._wrap("[", "]", self.arena.either(*forms))

    def _listing(self, items: list[int]) -> int:
        comma = self._after(",")
        return self.arena.sequence(*(part for n, item in enumerate(items) for part in ([comma] if n else []) + [item]))

    def _object(self, schema: Mapping[str, Any]) -> int:
        properties = schema.get("properties", {})
        required = list(dict.fromkeys(schema.get("required", [])))
        extra = self._extra(schema, [*properties, *required])
        pairs = [
            (self._pair(spelled(self.arena, quoted, key), self.value(part)), key in required)
            for key, part in properties.items()
        ]
        rest = self._unlisted(schema)
        pairs += [
            (self._pair(spelled(self.arena, quoted, key), rest), True) for key in required if key not in properties
        ]
        most = schema.get("maxProperties", INFINITE)
        return self._wrap("{", "}", self._members(pairs, extra, schema.get("minProperties", 0), most))

    def _members(self, pairs: list[tuple[int, bool]], extra: int, least: int, most: int) -> int:
        """Pairs in order, the optional ones or not, then extra ones; from the back, by how many came before."""
        counted = least > 0 or most < INFINITE
        comma = self._after(",")

        def close(count: int) -> int:
            if count > most:
                return NOTHING
            room = None if most == INFINITE else most - count
            need = max(least - count, 0)
            if count:
                return self.arena.repeat(self.arena.sequence(comma, extra), need, room)
            if room == 0:
                return EMPTY
            more = self.arena.repeat(
                self.arena.sequence(comma, extra), max(need - 1, 0), None if room is None else room - 1
            )
            some = self.arena.sequence(extra, more)
            return some if need else self.arena.optional(some)

        # counts that matter: whether any came, or exactly how many when they are bounded
        after = {count: close(count) for count in range(len(pairs) + 1 if counted else 2)}
        for place in range(len(pairs) - 1, -1, -1):
            pair, required = pairs[place]
            before = {}
            for count in range(place + 1) if counted else (0, 1):
                one = self.arena.sequence(comma, pair) if count else pair
                taken = self.arena.sequence(one, after[count + 1 if counted else 1])
                before[count] = taken if required else self.arena.either(taken, after[count])
            after = before
        return after[0]

    def _extra(self, schema: Mapping[str, Any], declared: list[str]) -> int:
        """A pair whose key is not declared."""
        patterns = schema.get("patternProperties", {})
        keys = self.arena.either(*(spelled(self.arena, quoted, key) for key in declared))
        forms = []
        for regex, part in patterns.items():
            key = pattern(self.arena, regex, quoted)
            forms.append(self._pair(self._but(key, keys), self.value(part)))
            keys = self.arena.either(keys, key)
        if "additionalProperties" in schema or not (declared or patterns):
            forms.append(self._pair(self._but(string(self.arena, quoted), keys), self._unlisted(schema)))
        return self.arena.either(*forms)

    def _but(self, keys: int, taken: int) -> int:
        return keys if taken == NOTHING else self.arena.both(keys, self.arena.outside(taken))

    def _unlisted(self, schema: Mapping[str, Any]) -> int:
        extra = schema.get("additionalProperties", True)
        return self.anything() if extra is True or extra == {} else self.value(extra)

    def anything(self) -> int:
        """Any JSON value."""
        if not self.arena.is_defined("any"):
            self.arena.define("any", NOTHING)
            self.arena.define("any", self.value({}))
        return self.arena.rule("any")

    # ---------------------------------------------------------------- spelling

    def _after(self, mark: str) -> int:
        return self.arena.sequence(self.arena.text(mark), self.arena.optional(self.arena.text(" ")))

    def _quote(self, body: int) -> int:
        return self.arena.sequence(self.arena.text('"'), body, self.arena.text('"'))

    def _pair(self, key: int, value: int) -> int:
        return self.arena.sequence(self._quote(key), self._after(":"), value)

    def _wrap(self, left: str, right: str, body: int) -> int:
        return self.arena.sequence(self.arena.text(left), body, self.arena.text(right))


def _vet(schema: Mapping[str, Any]) -> None:
    """Raises ValueError for a keyword whose value is of the wrong kind."""
    for key, value in schema.items():
        words, fits = _SHAPES.get(key, ("", None))
        if fits is not None and not fits(value):
            raise ValueError(f"The schema's {key} must be {words}, not {json.dumps(value)[:80]}.")


def _list(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return {str: "string", int: "integer", float: "number", dict: "object", list: "array"}.get(type(value), "null")


def _exact(value: Any) -> Fraction:
    return Fraction(str(value))  # 0.1 means a tenth


def _bound(schema: Mapping[str, Any], plain: str, strict: str, pick: Any) -> tuple[Fraction | None, bool]:
    """The tighter of the two bounds, and whether it is excluded (draft 4 says so by a boolean)."""
    low, edge = schema.get(plain), schema.get(strict)
    if isinstance(edge, bool) or edge is None:
        return (None if low is None else _exact(low)), edge is True
    if low is None:
        return _exact(edge), True
    tight = pick(_exact(low), _exact(edge))
    return tight, tight == _exact(edge)
