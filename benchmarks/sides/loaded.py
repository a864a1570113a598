"""The HTTP service with its worker, or one of the two, as `holdfast serve` and `holdfast worker` run them. Each step
of a job leaves a stamp."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.sides.channel import Answer, Spec, main, serve
from benchmarks.sides.http import start
from holdfast import Holdfast
from holdfast.http import create_api
from holdfast.http.server import HttpServer, bind
from holdfast.worker.worker import Worker

#: Of the request, so that its stamps are found; also the job's idempotency key.
NUMBER_HEADER: Final = b"x-number"


class Stamps:
    """By the number of the request."""

    def __init__(self) -> None:
        #: In ns of the clock that all processes share.
        self.collected: dict[str, dict[str, int]] = {}

    def add(self, number: str, step: str) -> None:
        # The last one counts: a job that runs again is as late as its last run.
        self.collected.setdefault(number, {})[step] = time.monotonic_ns()


def _make_app(spec: Spec, stamps: Stamps) -> Holdfast:
    app = Holdfast(spec.url, **spec.settings)

    @app.task
    async def noop(number: str) -> int:
        stamps.add(number, "started")
        return 1

    return app


def _watch(app: Holdfast, stamps: Stamps) -> None:
    """Stamp the calls of the engine. Numbers are known by the idempotency key, which the worker sees, too."""
    engine: Any = app.engine
    submit, claim, settle = engine.submit, engine.claim, engine.settle

    async def stamped_submit(envelopes: Sequence[Any]) -> Any:
        for envelope in envelopes:
            stamps.add(envelope.idempotency_key, "submitting")
        receipts = await submit(envelopes)
        for envelope in envelopes:
            stamps.add(envelope.idempotency_key, "submitted")
        return receipts

    async def stamped_claim(*arguments: Any) -> Any:
        claims = await claim(*arguments)
        for each in claims:
            stamps.add(each.idempotency_key, "claimed")
        return claims

    async def stamped_settle(settlements: Sequence[Any]) -> Any:
        for each in settlements:
            stamps.add(each.claim.idempotency_key, "settling")
        answers = await settle(settlements)
        for each in settlements:
            stamps.add(each.claim.idempotency_key, "settled")
        return answers

    engine.submit, engine.claim, engine.settle = stamped_submit, stamped_claim, stamped_settle


def _stamped(api: Any, stamps: Stamps) -> Callable[..., Any]:
    """The application in between: when a request comes in, and when its answer is given to the server."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        number = dict(scope.get("headers", ())).get(NUMBER_HEADER, b"").decode()

        async def stamped_send(message: Any) -> None:
            await send(message)
            if number and message["type"] == "http.response.body":
                stamps.add(number, "answered")

        if number:
            stamps.add(number, "received")
        await api(scope, receive, stamped_send)

    return call


async def server(spec: Spec) -> None:
    """`holdfast serve --dev`, with a worker if that is the flavour."""
    stamps = Stamps()
    app = _make_app(spec, stamps)
    api = create_api(app, dev=True, worker=spec.flavour == "with worker", upkeep=spec.flavour == "with worker")
    http = HttpServer(api, bind("127.0.0.1", 0))
    http.config.app = _stamped(api, stamps)
    running = await start(http)
    _watch(app, stamps)

    async def where() -> Answer:
        return {"url": http.address}

    async def collected() -> Answer:
        return {"stamps": stamps.collected}

    await serve({"where": where, "collected": collected})
    http.stop()
    await running


async def worker(spec: Spec) -> None:
    """`holdfast worker`."""
    stamps = Stamps()
    app = _make_app(spec, stamps)
    async with app:
        _watch(app, stamps)
        working = Worker(app)
        running = asyncio.create_task(working.run())

        async def collected() -> Answer:
            return {"stamps": stamps.collected}

        await serve({"collected": collected})
        working.drain()
        await running


if __name__ == "__main__":
    main({"server": server, "worker": worker})
