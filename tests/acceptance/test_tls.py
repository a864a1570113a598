"""TLS and credentials (requirement T10): Redis as engine and broker, PostgreSQL; rotation without loss."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from holdfast.brokers.port import OutgoingMessage
from holdfast.brokers.redis_connection import RedisConfig, RedisPublisher
from holdfast.brokers.redis_streams import RedisAdapter
from holdfast.core.job import Envelope, new_job_ids
from holdfast.errors import BrokerRefused, BrokerUnavailable, EngineUnavailable, LedgerUnavailable
from holdfast.factory import build_engine
from holdfast.ledger.postgres.store import PostgresStore, StoreOptions
from holdfast.settings import Settings
from holdfast.testing.contract.broker_harness import MessageReader, eventually
from holdfast.verification.chaos.servers import RedisServer, free_port
from tests.certificates import Certificates, make_certificates
from tests.conftest import MakePostgres, MakeServer

OLD: Final = "old-correct-horse"
NEW: Final = "new-battery-staple"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "certificates")


def tls_redis(make_redis: MakeServer, certificates: Certificates, **options: str) -> tuple[RedisServer, str]:
    """Start a Redis with a second port for TLS. Return the server and the URL of that port."""
    port = free_port()
    files = {
        "tls_port": str(port),
        "tls_cert_file": str(certificates.certificate),
        "tls_key_file": str(certificates.key),
        "tls_ca_cert_file": str(certificates.ca),
        "tls_auth_clients": "no",
    }
    server = make_redis(**{**files, **options})
    return server, f"rediss://127.0.0.1:{port}/0"


def broker(url: str, **options: Any) -> RedisConfig:
    return RedisConfig.model_validate({"url": url, "visibility_timeout_s": 2.0, **options})


async def publish(connection: RedisConfig, *bodies: bytes) -> None:
    publisher = RedisPublisher(connection)
    await publisher.connect()
    assert await publisher.publish([OutgoingMessage("orders", body, {}) for body in bodies]) == [None] * len(bodies)
    await publisher.close()


@pytest.mark.redis
async def test_redis_streams_over_tls(make_redis: MakeServer, certificates: Certificates) -> None:
    _, url = tls_redis(make_redis, certificates)
    connection = broker(url, ca_file=str(certificates.ca))
    await publish(connection, b"encrypted")
    adapter = RedisAdapter(connection, "orders", "readers")
    await adapter.connect()
    reader = MessageReader(adapter)
    assert (await reader.handle(1))[0].body == b"encrypted"
    await reader.stop()
    assert await ping_unverified(url) == b"PONG"


async def ping_unverified(url: str) -> bytes:
    """Ping with a client that does not verify certificates."""
    client: Any = broker(url, verify=False).client()
    try:
        return b"PONG" if await client.ping() else b""
    finally:
        await client.aclose()


@pytest.mark.redis
async def test_redis_streams_reject_an_untrusted_certificate(
    make_redis: MakeServer, certificates: Certificates, tmp_path: Path
) -> None:
    _, url = tls_redis(make_redis, certificates)
    untrusted = make_certificates(tmp_path / "untrusted")
    for options in ({}, {"ca_file": str(untrusted.ca)}):
        adapter = RedisAdapter(broker(url, **options), "orders", "readers")
        with pytest.raises(BrokerUnavailable, match="certificate"):
            await adapter.connect()
        await adapter.close()


@pytest.mark.redis
async def test_a_server_may_require_a_client_certificate(make_redis: MakeServer, certificates: Certificates) -> None:
    _, url = tls_redis(make_redis, certificates, tls_auth_clients="yes")
    trust = {"ca_file": str(certificates.ca)}
    anonymous = RedisAdapter(broker(url, **trust), "orders", "readers")
    with pytest.raises(BrokerUnavailable):
        await anonymous.connect()
    await anonymous.close()
    client_certificate = {"cert_file": str(certificates.certificate), "key_file": str(certificates.key)}
    await publish(broker(url, **trust, **client_certificate), b"known")


@pytest.mark.redis
async def test_a_password_is_rotated_without_losing_a_message(make_redis: MakeServer) -> None:
    """As in docs/how-to/rotate-credentials.md: both passwords are valid while consumers are replaced one by one."""
    server = make_redis()
    admin: Any = Redis.from_url(server.url)
    await admin.execute_command("ACL", "SETUSER", "shop", "on", f">{OLD}", "~*", "&*", "+@all")
    old, new = (broker(server.url, username="shop", password=word) for word in (OLD, NEW))
    await publish(old, b"1", b"2", b"3")
    first = RedisAdapter(old, "orders", "readers")
    await first.connect()
    old_reader = MessageReader(first)
    await old_reader.handle(1)
    with pytest.raises(BrokerRefused, match="refuses this user name or password"):
        await publish(new, b"too early")

    await admin.execute_command("ACL", "SETUSER", "shop", f">{NEW}")
    second = RedisAdapter(new, "orders", "readers")
    await second.connect()
    new_reader = MessageReader(second)
    await publish(new, b"4")
    await old_reader.stop()

    await admin.execute_command("ACL", "SETUSER", "shop", f"<{OLD}")
    assert {message.body for message in await new_reader.handle(3)} == {b"2", b"3", b"4"}
    with pytest.raises(BrokerRefused):
        await publish(old, b"too late")
    await eventually(lambda: _nothing_pending(admin))
    await new_reader.stop()
    await admin.aclose()


async def _nothing_pending(admin: Any) -> bool:
    return bool((await admin.xpending("orders", "readers"))["pending"] == 0)


@pytest.mark.redis
async def test_the_engine_over_tls(make_redis: MakeServer, certificates: Certificates, tmp_path: Path) -> None:
    server, url = tls_redis(make_redis, certificates)
    admin: Any = Redis.from_url(server.url)
    await admin.execute_command("ACL", "SETUSER", "shop", "on", f">{OLD}", "~*", "&*", "+@all")
    await admin.aclose()
    url_with_password = url.replace("//", f"//shop:{OLD}@")
    engine = build_engine(Settings(url=f"{url_with_password}?ssl_ca_certs={certificates.ca}"))
    await engine.open()
    job_id = new_job_ids(1)[0]
    await engine.submit([Envelope(job_id=job_id, task="print", payload=b"{}")])
    assert [claim.job_id for claim in await engine.claim("w1", ["default"], 5, 0)] == [job_id]
    await engine.close()
    untrusted = make_certificates(tmp_path / "untrusted")
    for wrong_url in (
        f"{url_with_password}?ssl_ca_certs={untrusted.ca}",
        url_with_password,
        url_with_password.replace(OLD, NEW) + "?ssl_cert_reqs=none",
    ):
        untrusted_client = build_engine(Settings(url=wrong_url))
        with pytest.raises(EngineUnavailable) as caught:
            await untrusted_client.open()
        assert OLD not in str(caught.value)
        assert NEW not in str(caught.value)
        await untrusted_client.close()


@pytest.fixture
def postgres_files(certificates: Certificates) -> Iterator[Certificates]:
    """Copies that only the server's user can read."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-tls-"))
    account = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
    copies = []
    for file in certificates:
        copies.append(Path(shutil.copy(file, folder)))
        copies[-1].chmod(0o600)
    for path in (folder, *copies):
        if account is not None:
            os.chown(path, account.pw_uid, account.pw_gid)
    yield Certificates(*copies)
    shutil.rmtree(folder)


@pytest.mark.postgres
async def test_the_ledger_over_tls(
    make_postgres: MakePostgres, certificates: Certificates, postgres_files: Certificates, tmp_path: Path
) -> None:
    server = make_postgres(
        fsync=False, ssl="on", ssl_cert_file=str(postgres_files.certificate), ssl_key_file=str(postgres_files.key)
    )
    store = PostgresStore(f"{server.url}?sslmode=verify-full&sslrootcert={certificates.ca}", StoreOptions(pool_size=1))
    await store.open()
    assert [row["ssl"] for row in await store.fetch("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")] == [
        True
    ]
    assert await store.fetch("SELECT count(*) FROM jobs")
    await store.close()
    untrusted = make_certificates(tmp_path / "untrusted")
    untrusted_client = PostgresStore(
        f"{server.url}?sslmode=verify-full&sslrootcert={untrusted.ca}", StoreOptions(pool_size=1)
    )
    with pytest.raises(LedgerUnavailable, match="TLS failed"):
        await untrusted_client.open()
    await untrusted_client.close()
