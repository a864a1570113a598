"""API operations: `Operation`, `Call`, `Reply`; reading of paths, headers, queries and bodies.

The dispatcher serves the registered operations and the OpenAPI document lists them. A handler gets a `Call` (principal
and validated input) and returns a `Reply`; it only translates between the wire format and `Operations`.

`SlashRoute` allows slashes in path parameters, because names of queues, tenants and jobs are any printable ASCII.
`FixedRoutes` finds the other routes in one step; one by one, submitting a job would cost a tenth more.

A body is counted while it is received, so that one over the limit is refused early, and its depth is measured before it
is parsed. Unknown fields and query parameters are refused: a misspelt filter must not return everything.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import msgspec
from msgspec import inspect
from starlette.routing import BaseRoute, Match, Route

from holdfast.core.principal import Permission, Principal
from holdfast.core.text import too_deep
from holdfast.errors import HoldfastError
from holdfast.http.problems import (
    CONTENT_TYPE,
    BadRequest,
    BodyTooLarge,
    Unprocessable,
    UnsupportedMediaType,
    problem_of,
)

if TYPE_CHECKING:
    from holdfast.http.service import Service


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON: Final = "application/json"
_NO_STORE: Final = (b"cache-control", b"no-store")
_NO_SNIFF: Final = (b"x-content-type-options", b"nosniff")
_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


class Reply:
    """A complete response. `value` is encoded as JSON unless it is bytes."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        value: Any,
        status: int = 200,
        headers: list[tuple[bytes, bytes]] | None = None,
        content_type: str = JSON,
    ) -> None:
        self.body: bytes = value if isinstance(value, bytes) else _encode(value)
        self.status = status
        self.headers = headers or []
        self.content_type = content_type

    def all_headers(self) -> list[tuple[bytes, bytes]]:
        """Names and values, with those that every reply has."""
        return [
            (b"content-type", self.content_type.encode()),
            (b"content-length", str(len(self.body)).encode()),
            _NO_STORE,
            _NO_SNIFF,
            *self.headers,
        ]

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.all_headers()})
        await send({"type": "http.response.body", "body": self.body})


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of a header, or None; repeated headers are joined with commas, as HTTP specifies."""
    found = [value for key, value in scope["headers"] if key == name]
    return ", ".join(value.decode("latin-1") for value in found) if found else None


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected.

    Run it in a separate task. ASGI guarantees only an awaitable: what `receive` returns may resemble a future and lack
    what `asyncio.gather` and others use (granian's does).
    """
    while (await receive())["type"] != "http.disconnect":
        pass


_SLASH: Final = re.compile(rb"%2f", re.IGNORECASE)
#: Replaces an encoded slash while the path is matched; a noncharacter that no name contains.
_SLASH_MARK: Final = "\ufdd0"


class SlashRoute(Route):
    """A route that distinguishes `%2F`, which is part of a name, from `/`; servers pass both as `/`."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw: bytes = scope.get("raw_path") or b""
        if not _SLASH.search(raw):
            found, child = super().matches(scope)
        else:
            path = unquote_to_bytes(_SLASH.sub(_SLASH_MARK.encode(), raw.partition(b"?")[0])).decode("utf-8", "replace")
            found, child = super().matches(dict(scope) | {"path": path})
            parameters: dict[str, Any] = child.get("path_params", {})
            for name, value in parameters.items():
                parameters[name] = value.replace(_SLASH_MARK, "/")
        # For middleware that reports the route.
        child["route"] = self
        return found, child


class FixedRoutes(BaseRoute):
    """Finds the route of a path without parameters. Does not match if there is none."""

    def __init__(self, routes: Iterable[SlashRoute]) -> None:
        self._by_path = {route.path: route for route in routes if not route.param_convertors}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        route = self._by_path.get(scope["path"].removeprefix(scope.get("root_path", "")))
        return (Match.NONE, {}) if route is None else route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].handle(scope, receive, send)


S = TypeVar("S", bound=msgspec.Struct)

#: Deepest nesting of JSON that is accepted.
MAX_DEPTH: Final = 64
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def check_headers(scope: Scope, known: Mapping[str, tuple[str, str]]) -> None:
    """Check header parameters that are present. `known`: name → (description, pattern)."""
    for name, (_, pattern) in known.items():
        text = header(scope, name.lower().encode())
        if text is not None and not re.fullmatch(pattern, text):
            raise Unprocessable(f"header {name} is invalid: it must match {pattern}")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read the body. Raises `UnsupportedMediaType` unless it is declared as JSON, and `BodyTooLarge`."""
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
    """Decode and validate the body. Raises `Unprocessable` and `BadRequest`."""
    if too_deep(body, MAX_DEPTH):
        raise Unprocessable(f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise Unprocessable(f"the body is invalid: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"the body is not valid JSON: {exc}") from exc


def raw_arguments(raw: msgspec.Raw) -> bytes:
    """Return a task's arguments byte for byte as received.

    Raises `Unprocessable` unless they are an object.
    """
    arguments = bytes(raw)
    if arguments.lstrip()[:1] != b"{":
        raise Unprocessable("the body is invalid: Expected `object` - at `$.payload`")
    return arguments


class QueryReader:
    """Reads a query string into a struct."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self.kind = kind
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        self._fields = {field.encode_name: _plain(field.type) for field in info.fields}

    def read(self, raw: bytes) -> Any:
        """Read the query string. Raises `Unprocessable` for unknown, repeated or invalid parameters."""
        if not raw:
            return self._convert({})
        try:
            pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=100)
        except ValueError as exc:
            raise Unprocessable("the query string cannot be parsed") from exc
        values: dict[str, Any] = {}
        for name, text in pairs:
            field = self._fields.get(name)
            if field is None:
                known = ", ".join(self._fields) or "none"
                raise Unprocessable(f"unknown parameter {name[:100]!r} (known: {known})")
            if isinstance(field, inspect.CollectionType):
                values.setdefault(name, []).append(_scalar(name, text, _plain(field.item_type)))
            elif name in values:
                raise Unprocessable(f"parameter {name} is given more than once")
            else:
                values[name] = _scalar(name, text, field)
        return self._convert(values)

    def _convert(self, values: dict[str, Any]) -> Any:
        try:
            return msgspec.convert(values, self.kind)
        except msgspec.ValidationError as exc:
            raise Unprocessable(f"the parameters are invalid: {exc}") from exc


def _plain(kind: inspect.Type) -> inspect.Type:
    """Type of a parameter without annotations and null."""
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
            expected = type(kind).__name__.removesuffix("Type").lower()
            raise Unprocessable(f"parameter {name} is not of type {expected}: {text[:100]!r}")
        case _:
            return text


class Call:
    """One authorised and validated request."""

    __slots__ = ("body", "path", "principal", "query", "receive", "scope", "send", "service")

    def __init__(
        self, service: Service, principal: Principal, scope: Scope, receive: Receive, send: Send, query: Any, body: Any
    ) -> None:
        self.service = service
        self.principal = principal
        self.scope = scope
        self.receive = receive
        self.send = send
        self.path: dict[str, str] = scope.get("path_params", {})
        self.query = query
        self.body = body

    def header(self, name: str) -> str | None:
        return header(self.scope, name.encode())

    def ending_with_token(self, end: Callable[[], None], abort: Callable[[], None]) -> AbstractContextManager[None]:
        """End the request if its token becomes invalid while the block runs: `end`, and soon after it `abort`."""
        return self.service.ending_with_token(self.scope, self.principal, end, abort)


#: Returns None if the handler has sent the response itself (a stream).
Handler = Callable[[Call], Awaitable[Reply | None]]
Decorator = Callable[[Handler], Handler]


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """A successful response, for the OpenAPI document."""

    description: str
    kind: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Name → (operation, parameter → runtime expression), for tools that follow links.
    links: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    content_type: str = "application/json"
    example: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    id: str
    tag: str
    summary: str
    description: str
    handle: Handler
    #: None: no token needed.
    permission: Permission | None
    responses: Mapping[int, ResponseSpec]
    errors: tuple[type[HoldfastError], ...] = ()
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    body_example: Any = None
    #: Header parameters: name → (description, pattern).
    headers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: Affects all tenants; needs a token for all of them.
    all_tenants: bool = False
    reader: QueryReader | None = None
    decoder: msgspec.json.Decoder[Any] | None = None


#: All operations, in the order of the OpenAPI document.
OPERATIONS: Final[list[Operation]] = []


def operation(
    method: str,
    path: str,
    operation_id: str,
    *,
    tag: str,
    responses: Mapping[int, ResponseSpec],
    permission: Permission | None = Permission.READ,
    query: type[msgspec.Struct] | None = None,
    body: type[msgspec.Struct] | None = None,
    **more: Any,
) -> Decorator:
    """Register a handler. Its docstring gives the summary and the description in the OpenAPI document."""

    def register(handle: Handler) -> Handler:
        summary, _, description = (handle.__doc__ or "").strip().partition("\n")
        OPERATIONS.append(
            Operation(
                method=method,
                path=path,
                id=operation_id,
                tag=tag,
                summary=summary.rstrip("."),
                description=" ".join(description.split()),
                handle=handle,
                permission=permission,
                responses=responses,
                query=query,
                body=body,
                reader=QueryReader(query) if query is not None else None,
                decoder=msgspec.json.Decoder(body) if body is not None else None,
                **more,
            )
        )
        return handle

    return register


def problem_reply(error: Exception, scope: Scope) -> Reply:
    """Response to an error."""
    problem, headers = problem_of(error, quote(scope.get("path", ""), safe="/:@"))
    return Reply(problem, problem.status, headers, CONTENT_TYPE)
