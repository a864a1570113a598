"""MongoDB (requirement E5) by its wire protocol: one document for each key, results, an outage waited out.

No `mongod` can be had where these run, so the server is nx-27017 (pure Python, SQLite inside): it proves that the calls
are right, not how a replica set behaves.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError, ServerSelectionTimeoutError

from holdfast import Context, Holdfast, Retry, State
from holdfast.core.job import EMPTY_META, Claim, Lease
from holdfast.errors import Unavailable, UsageError
from holdfast.mongo import UNAVAILABLE, ResultSink, upsert_once
from holdfast.verification.chaos.servers import free_port
from tests.worker.support import eventually, working


class MongoServer:
    """A server of our own, on a file, to be killed and brought back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return (
            f"mongodb://127.0.0.1:{self.port}/?serverSelectionTimeoutMS=300&connectTimeoutMS=300&socketTimeoutMS=3000"
        )

    def start(self) -> None:
        binary = Path(sys.executable).parent / "nx-27017"
        words = ["--db", str(self.folder / "mongo.db"), "--host", "127.0.0.1", "-p", str(self.port)]
        files = ["--log-file", str(self.folder / "nx.log"), "--pid-file", str(self.folder / "nx.pid")]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([str(binary), *words, *files], cwd=self.folder, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MongoServer]:
    server = MongoServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def tidy_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyMongo (4.19) leaves a socket open if its client is closed while it connects."""
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def connect_or_close(sock: socket.socket, address: Any) -> None:
        try:
            await connect(sock, address)
        except asyncio.CancelledError:
            sock.close()
            raise

    monkeypatch.setattr(loop, "sock_connect", connect_or_close)


@pytest.fixture
async def client(server: MongoServer, tidy_connects: None) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](server.url) as client:
        give_up_at = time.monotonic() + 20
        while True:
            try:
                await client.admin.command("ping")
                break
            except PyMongoError:
                assert time.monotonic() < give_up_at, "the server does not come up"
                await asyncio.sleep(0.05)
        yield client


def context(job_id: str = "j", attempt: int = 1) -> Context:
    return Context(Claim(Lease("q", job_id, "1-0", 1, "w"), "task", b"{}", "t", "", "trace", attempt, 0, 0, EMPTY_META))


async def test_one_document_for_each_key(client: AsyncMongoClient[Any]) -> None:
    orders = client.shop.orders
    first = await upsert_once(orders, "k", {"total": 1})
    second = await upsert_once(orders, "k", {"total": 2})
    assert first == second
    assert (first["total"], first["tenant_id"], first["idempotency_key"]) == (1, "default", "k")
    other = await upsert_once(orders, "k", {"total": 3}, tenant_id="acme")
    assert other["total"] == 3
    assert await orders.count_documents({}) == 2


async def test_many_at_once_are_one_document(client: AsyncMongoClient[Any]) -> None:
    orders = client.shop.orders
    found = await asyncio.gather(*(upsert_once(orders, "k", {"number": number}) for number in range(20)))
    assert len({document["number"] for document in found}) == 1
    assert await orders.count_documents({}) == 1


async def test_a_unique_index_is_made(client: AsyncMongoClient[Any]) -> None:
    await upsert_once(client.shop.orders, "k", {"total": 1})
    indexes = await client.shop.orders.index_information()
    assert any(index.get("unique") and len(index["key"]) == 2 for index in indexes.values()), indexes


async def test_a_document_that_says_something_else_is_an_error(client: AsyncMongoClient[Any]) -> None:
    with pytest.raises(UsageError, match="tenant_id"):
        await upsert_once(client.shop.orders, "k", {"tenant_id": "other"})
    with pytest.raises(UsageError, match="non-empty"):
        await upsert_once(client.shop.orders, "", {})
    same = await upsert_once(client.shop.orders, "k", {"idempotency_key": "k", "n": 1})
    assert same["n"] == 1


async def test_results_are_kept_once_for_each_job(client: AsyncMongoClient[Any]) -> None:
    sink = ResultSink(client.shop.results)
    await sink.write(context(), {"ok": True})
    stored = await sink.write(context(attempt=2), {"ok": False})
    assert (stored["job_id"], stored["task"], stored["attempt"], stored["result"]) == ("j", "task", 1, {"ok": True})
    await sink.write(context("other"), [1])
    assert await client.shop.results.count_documents({}) == 2


async def test_an_outage_is_named(client: AsyncMongoClient[Any], server: MongoServer) -> None:
    await upsert_once(client.shop.orders, "k", {"total": 1})
    server.kill()
    with pytest.raises(Unavailable, match="MongoDB does not answer"):
        await upsert_once(client.shop.orders, "k2", {"total": 1})
    assert issubclass(ServerSelectionTimeoutError, UNAVAILABLE)


@pytest.mark.faults
async def test_an_outage_is_waited_out_without_using_up_retries(
    client: AsyncMongoClient[Any], server: MongoServer, tmp_path: Path
) -> None:
    retry = Retry(max_retries=0, base=0.05, cap=0.1, jitter=None)
    app = Holdfast(f"sqlite:///{tmp_path / 'holdfast.db'}", retry=retry)

    @app.task
    async def by_helper(ctx: Context) -> int:
        return int((await upsert_once(client.shop.orders, ctx.job_id, {"n": 1}, tenant_id=ctx.tenant_id))["n"])

    @app.task(unavailable_on=UNAVAILABLE)
    async def by_hand(ctx: Context) -> int:
        await client.shop.orders.update_one({"job": ctx.job_id}, {"$set": {"n": 2}}, upsert=True)
        return 2

    server.kill()
    async with app, working(app):
        jobs = [await by_helper.submit(), await by_hand.submit()]

        async def waited() -> bool:
            views = await app.engine.get("default", [job.id for job in jobs])
            return all(view is not None and view.meta.unavailable_count >= 2 for view in views)

        await eventually(waited, "both jobs to back off twice")
        server.start()
        assert [await job.result(60) for job in jobs] == [1, 2]
        views = await app.engine.get("default", [job.id for job in jobs])
    assert [(view.state, view.meta.retry_count) for view in views if view] == [(State.SUCCEEDED, 0)] * 2


async def test_a_key_is_a_text(client: AsyncMongoClient[Any]) -> None:
    for key in ("", 3, None, b"k"):
        with pytest.raises(UsageError, match="must be a non-empty string"):
            await upsert_once(client.shop.orders, key, {})  # type: ignore[arg-type]
    assert await client.shop.orders.count_documents({}) == 0
