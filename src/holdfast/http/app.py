"""The FastAPI application: the API by itself, or mounted in the user's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from holdfast._version import __version__
from holdfast.app import Holdfast
from holdfast.http import routes as _routes  # noqa: F401 - registers the operations
from holdfast.http.dispatch import Endpoint, nothing_here
from holdfast.http.openapi import document
from holdfast.http.operation import OPERATIONS, Operation
from holdfast.http.place import Place
from holdfast.http.service import Service


def create_api(
    app: Holdfast,
    *,
    dev: bool = False,
    worker: bool | None = None,
    upkeep: bool | None = None,
    run_endpoint: bool | None = None,
) -> FastAPI:
    """The HTTP API of an app, ready for any ASGI server.

    `worker` and `upkeep`: whether this process also works on jobs and does the upkeep; unset, the settings
    `http_worker` and `http_upkeep` say so. `dev` lets everybody on this machine in without a token: only for a server
    that listens on loopback.
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

    # The document is served by an operation of its own: what it tells depends on who asks.
    api = FastAPI(title="holdfast", version=__version__, lifespan=lifespan, openapi_url=None)
    api.state.service = service
    api.openapi = lambda: document(OPERATIONS, app)  # type: ignore[method-assign]
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    api.router.routes[:] = [Place(path, Endpoint(service, each)) for path, each in by_path.items()]
    api.router.redirect_slashes = False
    api.router.default = nothing_here
    return api


def mount(fastapi_app: FastAPI, app: Holdfast, prefix: str = "/holdfast", **options: Any) -> FastAPI:
    """Put the API under a prefix of the user's own application; returns it. It starts and ends with that one."""
    api = create_api(app, **options)
    fastapi_app.mount(prefix, api)
    inner = fastapi_app.router.lifespan_context

    @asynccontextmanager
    async def both(outer: Any) -> AsyncIterator[Any]:
        async with api.state.service.running(), inner(outer) as state:
            yield state

    fastapi_app.router.lifespan_context = both
    return api
