"""From a request to its handler and back: method, who asks, what they may, limits, errors. Plain ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from holdfast.errors import EngineUnavailable
from holdfast.http.asgi import Receive, Reply, Scope, Send
from holdfast.http.operation import Call, Operation
from holdfast.http.problems import CONTENT_TYPE, MethodNotAllowed, NoSuchPath, problem_of
from holdfast.http.reading import QueryReader, check_headers, decode_body, read_body
from holdfast.http.wire import NoQuery

if TYPE_CHECKING:
    from holdfast.http.service import Service

_NO_QUERY: Final = QueryReader(NoQuery)


class Endpoint:
    """All methods of one path."""

    def __init__(self, service: Service, operations: Mapping[str, Operation]) -> None:
        self._service = service
        self._operations = operations
        self._allowed = tuple(sorted(operations))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            operation = self._operations.get(scope["method"])
            if operation is None:
                raise MethodNotAllowed(scope["method"], self._allowed)
            reply = await self._answer(operation, scope, receive, watched)
        except asyncio.CancelledError:
            # At the end of the service a request has so long, and no longer.
            if started or not self._service.ending.is_set():
                raise
            reply = problem_reply(EngineUnavailable("the service is ending, and this took too long"), scope)
        except Exception as exc:
            if started:
                raise
            reply = problem_reply(exc, scope)
        if reply is not None:
            await reply.send(send)

    async def _answer(self, operation: Operation, scope: Scope, receive: Receive, send: Send) -> Reply | None:
        service = self._service
        person = await service.gate.person(scope) if operation.right is not None else service.gate.nobody
        if operation.right is not None:
            person.check(operation.right)
        if operation.all_tenants:
            person.check_all_tenants(operation.summary)
        check_headers(scope, operation.headers)
        query = (operation.reader or _NO_QUERY).read(scope.get("query_string", b""))
        body = None
        if operation.decoder is not None:
            body = decode_body(await read_body(scope, receive, service.body_limit), operation.decoder)
        return await operation.handle(Call(service, person, scope, receive, send, query, body))


async def nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    """For paths that nobody serves."""
    await problem_reply(NoSuchPath(), scope).send(send)


def problem_reply(error: Exception, scope: Scope) -> Reply:
    """The answer to an error."""
    problem, headers = problem_of(error, quote(scope.get("path", ""), safe="/:@"))
    return Reply(problem, problem.status, headers, CONTENT_TYPE)
