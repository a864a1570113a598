"""Servers and harnesses for all tests. Servers start when a test first asks for one, and serve the whole session."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from holdfast.ledger.migrate import migration_store, up
from tests.servers import PostgresServer, RedisServer, find_server, in_own_loop
from tools.servers import POSTGRES, REDIS, REDIS_60, REDIS_62, Server

pytest.register_assert_rewrite(
    "holdfast.testing.contract", "holdfast.testing.history", "holdfast.testing.machine", "holdfast.testing.model"
)

#: A Redis that is there already, used instead of one of our own; tests that kill servers start theirs all the same.
REDIS_URL_VARIABLE: Final = "HOLDFAST_TEST_REDIS_URL"

#: A database with the ledger's tables, of which every test gets a copy.
_TEMPLATE: Final = "holdfast_template"

MakeServer = Callable[..., RedisServer]
MakePostgres = Callable[..., PostgresServer]

#: A test that may take so long is one of the long ones.
_LONG_S: Final = 600.0


class Servers:
    """One shared server of each kind, started on demand."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, RedisServer] = {}

    def get(self, server: Server) -> RedisServer:
        if server.name not in self._started:
            # A backlog of a test run is not worth a save.
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
    """A shared Redis 6.2: XAUTOCLAIM as it was first."""
    return servers.get(REDIS_62).url


@pytest.fixture(scope="session")
def redis_60_url(servers: Servers) -> str:
    """A shared Redis 6.0.9: neither XAUTOCLAIM nor XPENDING … IDLE."""
    return servers.get(REDIS_60).url


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[MakeServer]:
    """Servers of a test's own, to be killed, stopped, filled and restarted: `make_redis(appendonly="yes")`."""
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
def postgres_server() -> Iterator[PostgresServer]:
    """A shared PostgreSQL, without fsync: tests that kill it have one of their own."""
    server = PostgresServer(find_server(POSTGRES), {"max_connections": "200"}, fsync=False)
    try:
        server.start()
        server.execute(f"CREATE DATABASE {_TEMPLATE}")
        _migrate(server.url_of(_TEMPLATE))
        yield server
    finally:
        server.remove()


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database of this test's own, with nothing in it."""
    yield from _database(postgres_server, "template0")


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A database of this test's own, with the ledger's tables."""
    yield from _database(postgres_server, _TEMPLATE)


@pytest.fixture(scope="module")
def make_postgres_database(postgres_server: PostgresServer) -> Iterator[Callable[[], str]]:
    """Databases with the ledger's tables that a file's tests share."""
    with ExitStack() as made:
        yield lambda: made.enter_context(contextmanager(_database)(postgres_server, _TEMPLATE))


@pytest.fixture
def make_postgres() -> Iterator[MakePostgres]:
    """Servers of a test's own, with the ledger's tables in database `postgres`, to be killed, stopped, filled and
    restarted: `make_postgres(max_connections="10")`. They fsync, unless asked not to."""
    made: list[PostgresServer] = []

    def make(*, fsync: bool = True, migrated: bool = True, **options: str) -> PostgresServer:
        fresh = PostgresServer(find_server(POSTGRES), options, fsync=fsync)
        made.append(fresh)
        fresh.start()
        if migrated:
            _migrate(fresh.url)
        return fresh

    yield make
    for server in made:
        server.remove()


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both kinds of ledger that have a store of their own, one after the other."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


def _database(server: PostgresServer, template: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield server.url_of(name)
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _migrate(url: str) -> None:
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
    """Both engines, one after the other, for tests that go through the public API."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'holdfast.db'}"
    url: str = request.getfixturevalue("redis_url")
    return url


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes begin early and in different processes: each process gets a stretch of this list, and
    what is long must not be left to the end."""
    long = [item for item in items if _patience_s(item) >= _LONG_S]
    if not long:
        return
    rest = [item for item in items if _patience_s(item) < _LONG_S]
    stride = -(-len(rest) // len(long))
    items[:] = [item for at, one in enumerate(long) for item in (one, *rest[at * stride : (at + 1) * stride])]


def _patience_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0
