"""What the API can do, one `Operation` each: the dispatcher serves them, the OpenAPI document lists them.

A handler gets a `Call` (who asks, and what, checked) and returns a `Reply`; it holds no logic of its own beyond
translating between wire and offices.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.core.person import Person, Right
from holdfast.errors import HoldfastError
from holdfast.http.asgi import Receive, Reply, Scope, Send, header
from holdfast.http.reading import QueryReader

if TYPE_CHECKING:
    from holdfast.http.service import Service


class Call:
    """One request that is allowed and well formed."""

    __slots__ = ("body", "path", "person", "query", "receive", "scope", "send", "service")

    def __init__(
        self, service: Service, person: Person, scope: Scope, receive: Receive, send: Send, query: Any, body: Any
    ) -> None:
        self.service = service
        self.person = person
        self.scope = scope
        self.receive = receive
        self.send = send
        self.path: dict[str, str] = scope.get("path_params", {})
        self.query = query
        self.body = body

    def header(self, name: str) -> str | None:
        return header(self.scope, name.encode())


#: None: the handler has sent its answer itself (a stream).
Handler = Callable[[Call], Awaitable[Reply | None]]
Decorator = Callable[[Handler], Handler]


@dataclass(frozen=True, slots=True)
class Answer:
    """A good answer, for the OpenAPI document."""

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
    #: None: open to everybody.
    right: Right | None
    answers: Mapping[int, Answer]
    errors: tuple[type[HoldfastError], ...] = ()
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    body_example: Any = None
    #: Header parameters: name → (description, pattern).
    headers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: Works on all tenants at once.
    all_tenants: bool = False
    reader: QueryReader | None = None
    decoder: msgspec.json.Decoder[Any] | None = None


#: All of them, in the order of the document.
OPERATIONS: Final[list[Operation]] = []


def operation(
    method: str,
    path: str,
    operation_id: str,
    *,
    tag: str,
    answers: Mapping[int, Answer],
    right: Right | None = Right.READ,
    query: type[msgspec.Struct] | None = None,
    body: type[msgspec.Struct] | None = None,
    **more: Any,
) -> Decorator:
    """Register a handler; its docstring is the summary and the description."""

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
                right=right,
                answers=answers,
                query=query,
                body=body,
                reader=QueryReader(query) if query is not None else None,
                decoder=msgspec.json.Decoder(body) if body is not None else None,
                **more,
            )
        )
        return handle

    return register
