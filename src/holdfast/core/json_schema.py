"""Check JSON values against a JSON Schema, as far as msgspec and pydantic generate it. Pure.

It knows the keywords that describe types, fields, items and bounds. Others (`format`, `pattern`) are ignored: a value
that passes may still be refused by the worker, which decodes it. Schemas come from a store, so they may be anything: a
schema that cannot be evaluated, or not in bounded time, accepts everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_MAX_DEPTH: Final = 100
#: Values and alternatives that are checked at most: nested alternatives can multiply.
_MAX_STEPS: Final = 20_000
_REFERENCE: Final = "#/$defs/"

_TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == value // 1,
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def find_mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Why a value does not fit, with its path; None if it fits."""
    definitions = schema.get("$defs")
    try:
        return next(_Check(definitions if isinstance(definitions, Mapping) else {}).errors(value, schema, "$"), None)
    except (RecursionError, TypeError, ValueError, AttributeError, OverflowError):
        return None


class _Check:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._depth = 0
        self._steps = 0

    def errors(self, value: Any, schema: Any, path: str) -> Iterator[str]:
        """Mismatches of a value; only the first one is exact."""
        if not isinstance(schema, Mapping):
            return
        self._depth += 1
        self._steps += 1
        if self._depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            raise RecursionError
        try:
            ref = schema.get("$ref")
            if isinstance(ref, str) and ref.startswith(_REFERENCE):
                yield from self.errors(value, self._definitions.get(ref.removeprefix(_REFERENCE)), path)
            yield from self._of_type(value, schema, path)
            yield from self._of_alternatives(value, schema, path)
            if isinstance(value, dict):
                yield from self._of_object(value, schema, path)
            elif isinstance(value, list):
                yield from self._of_array(value, schema, path)
            elif isinstance(value, str):
                yield from _of_text(value, schema, path)
            elif _is_number(value):
                yield from _of_number(value, schema, path)
        finally:
            self._depth -= 1

    def _of_type(self, value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        expected = schema.get("type")
        names = [expected] if isinstance(expected, str) else expected if isinstance(expected, list) else []
        if names and not any(_TYPES.get(name, _accept)(value) for name in names):
            yield f"expected {' or '.join(names)}, got {_name(value)} - at {path}"
        if "const" in schema and not _is_equal(schema["const"], value):
            yield f"expected {schema['const']!r} - at {path}"
        allowed = schema.get("enum")
        if isinstance(allowed, list) and not any(_is_equal(each, value) for each in allowed):
            yield f"{_name(value)} is not one of the allowed values - at {path}"

    def _of_alternatives(self, value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        for part in schema.get("allOf") or ():
            yield from self.errors(value, part, path)
        for keyword in ("anyOf", "oneOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list) and parts:
                found = [next(self.errors(value, part, path), None) for part in parts]
                if None not in found:
                    yield str(found[0]) if len(found) == 1 else f"{_name(value)} fits no alternative - at {path}"

    def _of_object(self, value: dict[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
        for name in schema.get("required") or ():
            if name not in value:
                yield f"missing field {name!r} - at {path}"
        properties = schema.get("properties") or {}
        more = schema.get("additionalProperties", True)
        for name, item in value.items():
            if name in properties:
                yield from self.errors(item, properties[name], f"{path}.{name}")
            elif more is False:
                yield f"unknown field {name!r} - at {path}"
            else:
                yield from self.errors(item, more, f"{path}.{name}")
        yield from _of_size(len(value), schema, "Properties", "fields", path)

    def _of_array(self, value: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        for number, (item, part) in enumerate(zip(value, first, strict=False)):
            yield from self.errors(item, part, f"{path}[{number}]")
        rest = schema.get("items", True)
        for number, item in enumerate(value[len(first) :], len(first)):
            if rest is False:
                yield f"too many items - at {path}"
                break
            yield from self.errors(item, rest, f"{path}[{number}]")
        yield from _of_size(len(value), schema, "Items", "items", path)


def _of_text(value: str, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _of_size(len(value), schema, "Length", "characters", path)


def _of_number(value: float, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    bounds: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("minimum", lambda bound: value >= bound),
        ("maximum", lambda bound: value <= bound),
        ("exclusiveMinimum", lambda bound: value > bound),
        ("exclusiveMaximum", lambda bound: value < bound),
    )
    for keyword, holds in bounds:
        if _is_number(schema.get(keyword)) and not holds(schema[keyword]):
            yield f"the number is out of bounds ({keyword} {schema[keyword]}) - at {path}"


def _of_size(size: int, schema: Mapping[str, Any], suffix: str, what: str, path: str) -> Iterator[str]:
    least, most = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    if isinstance(least, int) and size < least:
        yield f"fewer than {least} {what} - at {path}"
    if isinstance(most, int) and size > most:
        yield f"more than {most} {what} - at {path}"


def _accept(value: Any) -> bool:
    return True


def _is_equal(one: Any, other: Any) -> bool:
    # True equals 1 in Python, but not in JSON.
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def _name(value: Any) -> str:
    return next((name for name, is_type in _TYPES.items() if is_type(value)), "something else")
