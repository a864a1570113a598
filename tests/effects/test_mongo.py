"""MongoDB (requirement E5) over its wire protocol: one document for each key, results, outages.

`mongod` is not available where these tests run, so the server is nx-27017 (pure Python, SQLite inside). It verifies the
calls, not the behaviour of a replica set.
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
    """A server on a file, which tests can kill and restart."""

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
        options = ["--db", str(self.folder / "mongo.db"), "--host", "127.0.0.1", "-p", str(self.port)]
        files = ["--log-file", str(self.folder / "nx.log"), "--pid-file", str(self.folder / "nx.pid")]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([str(binary), *options, *files], cwd=self.folder, stdout=log, stderr=log)

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
async def close_cancelled_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closes the socket that PyMongo (4.19) leaves open if its client is closed while it connects."""
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
async def client(server: MongoServer, close_cancelled_connects: None) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](server.url) as client:
        deadline = time.monotonic() + 20
        while True:
            try:
                await client.admin.command("ping")
                break
            except PyMongoError:
                assert time.monotonic() < deadline, "the server did not start"
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


async def test_concurrent_upserts_make_one_document(client: AsyncMongoClient[Any]) -> None:
    orders = client.shop.orders
    documents = await asyncio.gather(*(upsert_once(orders, "k", {"number": number}) for number in range(20)))
    assert len({document["number"] for document in documents}) == 1
    assert await orders.count_documents({}) == 1


async def test_a_unique_index_is_created(client: AsyncMongoClient[Any]) -> None:
    await upsert_once(client.shop.orders, "k", {"total": 1})
    indexes = await client.shop.orders.index_information()
    assert any(index.get("unique") and len(index["key"]) == 2 for index in indexes.values()), indexes


async def test_a_document_with_other_key_fields_is_an_error(client: AsyncMongoClient[Any]) -> None:
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


async def test_an_outage_raises_unavailable(client: AsyncMongoClient[Any], server: MongoServer) -> None:
    await upsert_once(client.shop.orders, "k", {"total": 1})
    server.kill()
    with pytest.raises(Unavailable, match="MongoDB does not answer"):
        await upsert_once(client.shop.orders, "k2", {"total": 1})
    assert issubclass(ServerSelectionTimeoutError, UNAVAILABLE)


@pytest.mark.faults
async def test_an_outage_uses_up_no_retries(client: AsyncMongoClient[Any], server: MongoServer, tmp_path: Path) -> None:
    retry = Retry(max_retries=0, base=0.05, cap=0.1, jitter=None)
    app = Holdfast(f"sqlite:///{tmp_path / 'holdfast.db'}", retry=retry)

    @app.task
    async def upsert_by_helper(ctx: Context) -> int:
        return int((await upsert_once(client.shop.orders, ctx.job_id, {"n": 1}, tenant_id=ctx.tenant_id))["n"])

    @app.task(unavailable_on=UNAVAILABLE)
    async def update_directly(ctx: Context) -> int:
        await client.shop.orders.update_one({"job": ctx.job_id}, {"$set": {"n": 2}}, upsert=True)
        return 2

    server.kill()
    async with app, working(app):
        jobs = [await upsert_by_helper.submit(), await update_directly.submit()]

        async def have_backed_off() -> bool:
            infos = await app.engine.get("default", [job.id for job in jobs])
            return all(info is not None and info.meta.unavailable_count >= 2 for info in infos)

        await eventually(have_backed_off, "both jobs to back off twice")
        server.start()
        assert [await job.result(60) for job in jobs] == [1, 2]
        infos = await app.engine.get("default", [job.id for job in jobs])
    assert [(info.state, info.meta.retry_count) for info in infos if info] == [(State.SUCCEEDED, 0)] * 2


async def test_a_key_must_be_a_string(client: AsyncMongoClient[Any]) -> None:
    for key in ("", 3, None, b"k"):
        with pytest.raises(UsageError, match="must be a non-empty string"):
            await upsert_once(client.shop.orders, key, {})  # type: ignore[arg-type]
    assert await client.shop.orders.count_documents({}) == 0
