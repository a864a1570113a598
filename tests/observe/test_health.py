"""`/livez` and `/readyz` next to the metrics of workers and upkeep."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, Worker
from holdfast.execution.backend import backend_of
from holdfast.observe.prometheus import serve_metrics
from holdfast.operations.readiness import upkeep_readiness, worker_readiness
from holdfast.upkeep.upkeep import Upkeep
from holdfast.verification.chaos.servers import free_port
from tests.cli.harness import SAMPLE_APP, Shell, environment
from tests.cli.harness import eventually as eventually_sync
from tests.conftest import MakeServer
from tests.observe.support import eventually, fetch


async def text() -> tuple[bytes, str]:
    return b"x 1\n", "text/plain"


async def get_health(port: int, path: str = "/readyz") -> tuple[int, Any]:
    head, body = await fetch(port, path)
    assert "application/json" in head
    return int(head.split()[1]), json.loads(body)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "sample.py").write_text(SAMPLE_APP)
    return Shell(tmp_path, environment(tmp_path))


@pytest.mark.parametrize("words", [("worker", "sample.py:app"), ("upkeep",)])
def test_worker_and_upkeep_serve_health_and_metrics(shell: Shell, words: tuple[str, ...]) -> None:
    port = free_port()

    def ready() -> Any:
        with suppress(ConnectionError):
            status, body = asyncio.run(get_health(port))
            return body if status == 200 else None
        return None

    with shell.start(*words, "--metrics-port", str(port)) as process:
        body = eventually_sync(ready, what="the process to be ready")
        assert body == {
            "ready": True,
            "engine": "ok",
            "ledger": "ok",
            "worker": "ok" if words[0] == "worker" else "none",
            "upkeep": "ok",
            "reasons": [],
            "warnings": [],
        }
        assert asyncio.run(get_health(port, "/livez")) == (200, {"status": "ok"})
        head, body = asyncio.run(fetch(port, "/other"))
        assert head.startswith("HTTP/1.1 404")
        assert body == "not found; use /metrics, /livez or /readyz\n"
        assert process.end() == 0


async def test_a_worker_is_ready_while_it_can_claim(make_redis: MakeServer, namespace: str) -> None:
    server = make_redis()
    async with Holdfast(server.url, namespace=namespace, reply_timeout_s=1, connect_timeout_s=0.5) as app:
        started, finish = asyncio.Event(), asyncio.Event()

        @app.task
        async def work() -> None:
            started.set()
            await finish.wait()

        worker = Worker(app)
        async with serve_metrics("127.0.0.1", 0, text, lambda: worker_readiness(app, worker)) as port:
            status, body = await get_health(port)
            assert (status, body["ready"], body["worker"], body["reasons"]) == (503, False, "starting", ["starting"])
            running = asyncio.create_task(worker.run())

            async def ready() -> bool:
                return (await get_health(port))[0] == 200

            async def unreachable() -> Any:
                status, body = await get_health(port)
                return body if status == 503 else None

            await eventually(ready, "the worker to be ready")
            server.kill()
            body = await eventually(unreachable, "the outage to be reported")
            assert body["engine"] == "down"
            assert "engine unreachable" in body["reasons"]
            assert "127.0.0.1" not in json.dumps(body)
            assert (await get_health(port, "/livez"))[0] == 200
            server.start()
            await eventually(ready, "the worker to be ready again")
            await work.submit()
            await started.wait()
            worker.drain()
            status, body = await get_health(port)
            assert (status, body["worker"], body["reasons"]) == (503, "draining", ["draining"])
            finish.set()
            await running


async def test_an_unreachable_ledger_is_a_warning(redis_url: str, namespace: str) -> None:
    ledger = f"postgresql://app:s3cret@127.0.0.1:{free_port()}/holdfast"
    async with Holdfast(redis_url, namespace=namespace, ledger=ledger, connect_timeout_s=0.5) as app:
        upkeep = Upkeep(app.engine, [], app.settings, backend_of(app).ledger)
        async with serve_metrics("127.0.0.1", 0, text, lambda: upkeep_readiness(app, upkeep)) as port:
            status, body = await get_health(port)
            assert (status, body["reasons"]) == (503, ["starting"])
            running = asyncio.create_task(upkeep.run())

            async def ready() -> Any:
                status, body = await get_health(port)
                return body if status == 200 else None

            body = await eventually(ready, "upkeep to be ready")
            assert (body["ledger"], body["warnings"]) == ("down", ["ledger unreachable"])
            assert "s3cret" not in json.dumps(body)
            upkeep.stop()
            status, body = await get_health(port)
            assert (status, body["reasons"]) == (503, ["draining"])
            await running
