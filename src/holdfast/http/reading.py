"""Requests as the handlers want them: bodies within limits, query parameters, headers; all checked by msgspec structs.

A body is counted while it comes in, so that a huge one is refused before it is here, and its depth is measured before
it is parsed. Unknown fields and unknown parameters are refused: a filter that was misspelt must not show everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect

from holdfast.http.asgi import Receive, Scope, header
from holdfast.http.problems import BadRequest, BodyTooLarge, Unprocessable, UnsupportedMediaType

S = TypeVar("S", bound=msgspec.Struct)

#: Deeper JSON than this is nobody's arguments.
MAX_DEPTH: Final = 64
#: Also one that does not end, so that no quote inside of it is taken for the start of another: always one pass.
_STRINGS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def check_headers(scope: Scope, known: Mapping[str, tuple[str, str]]) -> None:
    """Header parameters, by name with description and pattern: those that are there must fit."""
    for name, (_, pattern) in known.items():
        text = header(scope, name.lower().encode())
        if text is not None and not re.fullmatch(pattern, text):
            raise Unprocessable(f"the header {name} does not fit: it must match {pattern}")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body, if it is JSON by its header and not too large."""
    kind = header(scope, b"content-type")
    if kind is None or kind.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        if len(body) > limit:
            raise BodyTooLarge(limit)
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise BodyTooLarge(limit)
    return b"".join(parts)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[S]) -> S:
    """The body as its structure says."""
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and too_deep(body):
        raise Unprocessable(f"the body is nested more than {MAX_DEPTH} levels deep")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise Unprocessable(f"the body does not fit: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"the body is no JSON: {exc}") from exc


def arguments_of(raw: msgspec.Raw) -> bytes:
    """A task's arguments, byte for byte as they came: by name, as the document says."""
    arguments = bytes(raw)
    if arguments.lstrip()[:1] != b"{":
        raise Unprocessable("the body does not fit: Expected `object` - at `$.payload`")
    return arguments


def too_deep(body: bytes) -> bool:
    """Whether brackets are nested deeper than `MAX_DEPTH`. Every pass takes the innermost pairs away."""
    brackets = _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        # Siblings: what is left between pairs that have gone is the level above.
    return bool(brackets)


class QueryReader:
    """Reads the query string into one kind of struct."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self.kind = kind
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        self._fields = {field.encode_name: _plain(field.type) for field in info.fields}

    def read(self, raw: bytes) -> Any:
        """Raises `Unprocessable` for what is unknown, given twice or does not fit."""
        if not raw:
            return self._convert({})
        try:
            pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
        except ValueError as exc:
            raise Unprocessable("the query string cannot be read") from exc
        values: dict[str, Any] = {}
        for name, text in pairs:
            field = self._fields.get(name)
            if field is None:
                known = ", ".join(self._fields) or "none"
                raise Unprocessable(f"there is no parameter {name[:100]!r} here (known: {known})")
            if isinstance(field, inspect.CollectionType):
                values.setdefault(name, []).append(_scalar(name, text, _plain(field.item_type)))
            elif name in values:
                raise Unprocessable(f"the parameter {name} is given twice")
            else:
                values[name] = _scalar(name, text, field)
        return self._convert(values)

    def _convert(self, values: dict[str, Any]) -> Any:
        try:
            return msgspec.convert(values, self.kind)
        except msgspec.ValidationError as exc:
            raise Unprocessable(f"the parameters do not fit: {exc}") from exc


def _plain(kind: inspect.Type) -> inspect.Type:
    """What a parameter is when it is there."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        kinds = [_plain(each) for each in kind.types if not isinstance(each, inspect.NoneType)]
        return kinds[0]
    return kind


def _scalar(name: str, text: str, kind: inspect.Type) -> Any:
    match kind:
        case inspect.BoolType() if text in ("true", "false"):
            return text == "true"
        case inspect.IntType() if _INTEGER.fullmatch(text):
            return int(text)
        case inspect.FloatType() if _NUMBER.fullmatch(text):
            return float(text)
        case inspect.BoolType() | inspect.IntType() | inspect.FloatType():
            wanted = type(kind).__name__.removesuffix("Type").lower()
            raise Unprocessable(f"the parameter {name} is no {wanted}: {text[:100]!r}")
        case _:
            return text
