"""Servers and fixtures for all tests. A server starts with the first test that needs it and runs for the session."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.ledger.migrate import migration_store, up
from holdfast.verification.chaos.servers import PostgresServer, RedisServer, in_own_loop
from holdfast.verification.chaos.topologies import ClusterRedis, SentinelRedis, Topology
from tests.brokers.kafka_server import kafka_server as kafka_server
from tests.brokers.kafka_server import make_kafka as make_kafka
from tests.brokers.rabbitmq_server import make_rabbitmq as make_rabbitmq
from tests.brokers.rabbitmq_server import rabbitmq_server as rabbitmq_server
from tests.brokers.sqs_server import sqs_server as sqs_server
from tests.databases import Databases
from tests.environment import normalise
from tests.servers import find_server
from tools.servers import POSTGRES, REDIS, REDIS_60, REDIS_62, Server

pytest.register_assert_rewrite(
    "holdfast.testing.contract", "holdfast.core.history", "holdfast.testing.state_machine", "holdfast.testing.model"
)

#: URL of a running Redis to use instead of a started one; tests that kill servers always start their own.
REDIS_URL_VARIABLE: Final = "HOLDFAST_TEST_REDIS_URL"

#: Fixtures that start a broker, which takes seconds.
_BROKERS: Final = frozenset({"kafka", "kafka_server", "make_kafka", "rabbitmq_server", "make_rabbitmq", "sqs_server"})

MakeServer = Callable[..., RedisServer]
MakePostgres = Callable[..., PostgresServer]
MakeSentinel = Callable[..., SentinelRedis]
MakeCluster = Callable[..., ClusterRedis]


class Servers:
    """One shared server of each kind, started on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, RedisServer] = {}

    def get(self, server: Server) -> RedisServer:
        if server.name not in self._started:
            # Without persistence: the data of a test run is not kept.
            started = RedisServer(find_server(server), self._folder / server.name)
            started.start()
            self._started[server.name] = started
        return self._started[server.name]

    def stop(self) -> None:
        for server in self._started.values():
            server.stop()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def redis_url(servers: Servers) -> str:
    """A shared Redis of the current version."""
    return os.environ.get(REDIS_URL_VARIABLE) or servers.get(REDIS).url


@pytest.fixture(scope="session")
def redis_62_url(servers: Servers) -> str:
    """A shared Redis 6.2, the first version with XAUTOCLAIM."""
    return servers.get(REDIS_62).url


@pytest.fixture(scope="session")
def redis_60_url(servers: Servers) -> str:
    """A shared Redis 6.0.9: neither XAUTOCLAIM nor XPENDING … IDLE."""
    return servers.get(REDIS_60).url


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[MakeServer]:
    """Servers of one test, which may kill, stop, fill and restart them: `make_redis(appendonly="yes")`."""
    made: list[RedisServer] = []

    def make(server: Server = REDIS, **options: str) -> RedisServer:
        arguments = {key.replace("_", "-"): value for key, value in options.items()}
        fresh = RedisServer(find_server(server), tmp_path / f"redis-{len(made)}", arguments)
        made.append(fresh)
        fresh.start()
        return fresh

    yield make
    for server in made:
        server.stop()


@pytest.fixture(scope="session")
def sentinel_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shared Redis behind sentinels whose timeout is too long to fail over on a busy machine."""
    topology = SentinelRedis(tmp_path_factory.mktemp("sentinel"), binary=find_server(REDIS), down_after_ms=60_000)
    with _running(topology):
        yield topology.url


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shared Cluster of three masters without replicas."""
    folder = tmp_path_factory.mktemp("cluster")
    topology = ClusterRedis(folder, binary=find_server(REDIS), replicas=0, node_timeout_ms=60_000)
    with _running(topology):
        yield topology.url


@pytest.fixture
def make_sentinel(tmp_path: Path) -> Iterator[MakeSentinel]:
    """Owned by one test: `make_sentinel(REDIS_60, aof=True, options={"min-replicas-to-write": "1"})`."""
    with ExitStack() as running:

        def make(server: Server = REDIS, **settings: Any) -> SentinelRedis:
            fresh = SentinelRedis(_new_folder(tmp_path, "sentinel"), binary=find_server(server), **settings)
            running.enter_context(_running(fresh))
            return fresh

        yield make


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Owned by one test: `make_cluster(masters=3, replicas=1)`."""
    with ExitStack() as running:

        def make(server: Server = REDIS, **settings: Any) -> ClusterRedis:
            fresh = ClusterRedis(_new_folder(tmp_path, "cluster"), binary=find_server(server), **settings)
            running.enter_context(_running(fresh))
            return fresh

        yield make


@contextmanager
def _running(topology: Topology) -> Iterator[None]:
    try:
        topology.start()
        yield
    finally:
        topology.stop()


def _new_folder(parent: Path, name: str) -> Path:
    folder = parent / f"{name}-{len(list(parent.glob(f'{name}-*')))}"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A shared PostgreSQL without fsync. Tests that kill a server use `make_postgres`."""
    server = PostgresServer(find_server(POSTGRES), {"max_connections": "200"}, fsync=False)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def databases(postgres_server: PostgresServer) -> Databases:
    """Empty databases with the ledger's tables."""
    return Databases(postgres_server, migrate)


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty database for one test, without the ledger's tables."""
    name = f"test_{secrets.token_hex(6)}"
    postgres_server.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    yield postgres_server.url_of(name)
    postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgres_url(databases: Databases) -> Iterator[str]:
    """A database for one test, with the ledger's tables."""
    with databases.borrow() as url:
        yield url


@pytest.fixture(scope="module")
def make_postgres_database(databases: Databases) -> Iterator[Callable[[], str]]:
    """Databases with the ledger's tables, shared by the tests of a module."""
    with ExitStack() as borrowed:
        yield lambda: borrowed.enter_context(databases.borrow())


@pytest.fixture
def make_postgres() -> Iterator[MakePostgres]:
    """Servers of one test, which may kill, stop, fill and restart them: `make_postgres(max_connections="10")`.

    The database `postgres` has the ledger's tables. They fsync unless `fsync=False`.
    """
    made: list[PostgresServer] = []

    def make(*, fsync: bool = True, migrated: bool = True, **options: str) -> PostgresServer:
        fresh = PostgresServer(find_server(POSTGRES), options, fsync=fsync)
        made.append(fresh)
        fresh.start()
        if migrated:
            migrate(fresh.url)
        return fresh

    yield make
    for server in made:
        server.remove()


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of ledger with a separate store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


def migrate(url: str) -> None:
    """Create the ledger's tables in a database."""

    async def create() -> None:
        store = migration_store(url)
        try:
            await up(store)
        finally:
            await store.close()

    in_own_loop(create)


@pytest.fixture
def namespace() -> str:
    """A prefix that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture(params=["sqlite", "redis"])
def engine_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each engine, for tests of the public API."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'holdfast.db'}"
    url: str = request.getfixturevalue("redis_url")
    return url


def pytest_configure() -> None:
    """Normalise before collection: test modules read the environment, and child processes inherit it."""
    normalise()


def pytest_collection_finish() -> None:
    """Exclude what is loaded by now from garbage collection: it lives until the process ends."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start a broker: fewer processes run them, so fewer brokers start."""
    for item in items:
        if not _BROKERS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.brokers)
