"""The FastAPI application, standalone or mounted in the user's, and dispatch from request to handler.

`Endpoint` is plain ASGI. It checks the method, token, permission, headers, query and body before it calls the handler,
and turns errors into problem responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI

from holdfast._version import __version__
from holdfast.app import Holdfast
from holdfast.errors import EngineUnavailable
from holdfast.http import routes as _routes  # noqa: F401 - registers the operations
from holdfast.http.openapi import document
from holdfast.http.operation import (
    OPERATIONS,
    Call,
    FixedRoutes,
    Operation,
    QueryReader,
    Receive,
    Reply,
    Scope,
    Send,
    SlashRoute,
    check_headers,
    decode_body,
    problem_reply,
    read_body,
)
from holdfast.http.problems import MethodNotAllowed, NoSuchPath
from holdfast.http.service import Service
from holdfast.http.wire import NoQuery

_NO_QUERY: Final = QueryReader(NoQuery)


class Endpoint:
    """All methods of one path."""

    def __init__(self, service: Service, operations: Mapping[str, Operation]) -> None:
        self._service = service
        self._operations = operations
        self._allowed = tuple(sorted(operations))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_mark(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            operation = self._operations.get(scope["method"])
            if operation is None:
                raise MethodNotAllowed(scope["method"], self._allowed)
            reply = await self._answer(operation, scope, receive, send_and_mark)
        except asyncio.CancelledError:
            # The server cancels requests that outlast the grace time at shutdown.
            if started or not self._service.ending.is_set():
                raise
            reply = problem_reply(
                EngineUnavailable("the service is shutting down and the request took too long"), scope
            )
        except Exception as exc:
            if started:
                raise
            reply = problem_reply(exc, scope)
        if reply is not None:
            await reply.send(send)

    async def _answer(self, operation: Operation, scope: Scope, receive: Receive, send: Send) -> Reply | None:
        service = self._service
        principal = (
            await service.authenticator.authenticate(scope)
            if operation.permission is not None
            else service.authenticator.anonymous
        )
        if operation.permission is not None:
            principal.require(operation.permission)
        if operation.all_tenants:
            principal.require_all_tenants(operation.summary)
        check_headers(scope, operation.headers)
        query = (operation.reader or _NO_QUERY).read(scope.get("query_string", b""))
        body = None
        if operation.decoder is not None:
            body = decode_body(await read_body(scope, receive, service.body_limit), operation.decoder)
        return await operation.handle(Call(service, principal, scope, receive, send, query, body))


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer requests to paths without an operation."""
    await problem_reply(NoSuchPath(), scope).send(send)


def create_api(
    app: Holdfast,
    *,
    dev: bool = False,
    worker: bool | None = None,
    upkeep: bool | None = None,
    run_endpoint: bool | None = None,
) -> FastAPI:
    """Create the HTTP API of an app, for any ASGI server.

    `worker` and `upkeep`: run a worker and upkeep in this process. Default: the settings `http_worker` and
    `http_upkeep`. `dev` accepts requests from this machine without a token; use it only on loopback.
    """
    settings = app.settings
    service = Service(
        app,
        dev=dev,
        worker=settings.http_worker if worker is None else worker,
        upkeep=settings.http_upkeep if upkeep is None else upkeep,
        run_endpoint=run_endpoint,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    # A separate operation serves the document, because its content depends on the caller.
    api = FastAPI(title="holdfast", version=__version__, lifespan=lifespan, openapi_url=None)
    api.state.service = service
    api.openapi = lambda: document(OPERATIONS, app)  # type: ignore[method-assign]
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    paths = [SlashRoute(path, Endpoint(service, each)) for path, each in by_path.items()]
    api.router.routes[:] = [FixedRoutes(paths), *paths]
    api.router.redirect_slashes = False
    api.router.default = not_found
    return api


def mount(fastapi_app: FastAPI, app: Holdfast, prefix: str = "/holdfast", **options: Any) -> FastAPI:
    """Mount the API in the user's application, under a prefix. Returns the API.

    Both applications start and stop together.
    """
    api = create_api(app, **options)
    fastapi_app.mount(prefix, api)
    inner = fastapi_app.router.lifespan_context

    @asynccontextmanager
    async def both(outer: Any) -> AsyncIterator[Any]:
        async with api.state.service.running(), inner(outer) as state:
            yield state

    fastapi_app.router.lifespan_context = both
    return api
