"""HOLDFAST_URL for Redis: valid URLs, and the errors for invalid ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.net.connection import (
    ClusterSeeds,
    RedisAddress,
    SentinelAddresses,
    is_cluster,
    parse_url,
    split_host_port,
)
from holdfast.errors import InvalidOption
from holdfast.observe.redact import redact
from holdfast.settings import Settings


def test_the_url_of_one_server_is_parsed() -> None:
    assert parse_url("redis://") == RedisAddress()
    assert parse_url("redis://cache") == RedisAddress("cache")
    assert parse_url("redis://cache:1/2") == RedisAddress("cache", 1, db=2)
    assert parse_url("redis://cache?db=3") == RedisAddress("cache", db=3)
    assert parse_url("redis://:p%40ss@[::1]:7/0") == RedisAddress("::1", 7, password="p@ss")
    assert parse_url("redis://ann:a:b%2F@cache") == RedisAddress("cache", username="ann", password="a:b/")


def test_the_url_of_sentinels_is_parsed() -> None:
    address = parse_url(
        "redis+sentinel://ann:pw@s1:1,[fe80::2]:2,s3/orders/4?sentinel_username=bob&sentinel_password=s%26p"
    )
    sentinel = RedisAddress(username="bob", password="s&p")
    assert address == SentinelAddresses(
        tuple(replace(sentinel, host=host, port=port) for host, port in (("s1", 1), ("fe80::2", 2), ("s3", 26379))),
        "orders",
        RedisAddress(db=4, username="ann", password="pw"),
    )


def test_the_masters_password_is_not_sent_to_sentinels() -> None:
    address = parse_url("redis+sentinel://:pw@s1/orders")
    assert isinstance(address, SentinelAddresses)
    assert (address.addresses, address.master) == ((RedisAddress("s1", 26379),), RedisAddress(password="pw"))


def test_the_url_of_a_cluster_is_parsed() -> None:
    assert parse_url("redis+cluster://:pw@a:1,[::1]:2,c") == ClusterSeeds(
        (RedisAddress("a", 1, password="pw"), RedisAddress("::1", 2, password="pw"), RedisAddress("c", password="pw"))
    )
    assert parse_url("redis+cluster://a/0") == ClusterSeeds((RedisAddress("a"),))
    assert is_cluster("rediss+cluster://a")
    assert not is_cluster("redis+sentinel://a/b")


@pytest.mark.parametrize(
    "url",
    [
        "rediss+sentinel://a/m",
        "redis+sentinel://a/m?ssl=true",
        "rediss+cluster://a",
        "redis+cluster://a?ssl=true",
        "rediss://a",
        "rediss+cluster://a?ssl_cert_reqs=none",
    ],
)
def test_tls_applies_to_every_address(url: str) -> None:
    parsed = parse_url(url)
    addresses = [parsed] if isinstance(parsed, RedisAddress) else list(parsed.addresses)
    if isinstance(parsed, SentinelAddresses):
        addresses.append(parsed.master)
    assert all(address.tls is not None for address in addresses)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://a:hunter2", "ports must be numbers"),
        ("redis://a:0", "ports must be numbers"),
        ("redis://a:70000", "ports must be numbers"),
        ("redis://a/x", "database"),
        ("redis://a,b", "redis+sentinel://HOSTS/SERVICE or redis+cluster://HOSTS"),
        ("redis://:hunter2@[::1/0", "brackets"),
        ("redis://:hunter2@a\u2100b/0", "%XX"),
        ("redis://:hun#ter2@a/0", "%23"),
        ("redis+sentinel://a,b", "redis+sentinel://HOST:26379,HOST:26379/SERVICE"),
        ("redis+sentinel://a,/m", "a host is missing"),
        ("redis+sentinel://:hunter2@/m", "a host is missing"),
        ("redis+sentinel://a/m/x", "database"),
        ("redis+sentinel://a/m?sentinel_username=u", "sentinel_password"),
        ("redis+sentinel://a/m?master=x", "unknown parameters master"),
        ("redis+cluster://", "a host is missing"),
        ("redis+cluster://a/1", "namespace"),
        ("redis+cluster://a?sentinel_password=hunter2", "unknown parameters sentinel_password"),
        ("redis+cluster://a?ssl=maybe", "true or false"),
        ("redis+cluster://a?ssl_ca_certs=/x", "rediss+cluster://"),
        ("rediss://a?ssl_ca_certs=/does/not/exist", "cannot use a file"),
    ],
)
def test_errors_name_the_remedy_and_no_password(url: str, message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_url(url)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, OSError)


def test_addresses_are_split_as_redis_writes_them() -> None:
    assert split_host_port("10.0.0.1:7000") == ("10.0.0.1", "7000")
    assert split_host_port("fe80::1:7000") == ("fe80::1", "7000")
    assert split_host_port("[fe80::1]:7000") == ("fe80::1", "7000")
    assert split_host_port(":7000") == ("", "7000")


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://ann:hunter2@a:1,b:2/m?sentinel_username=bob&sentinel_password=hunter2",
        "rediss+cluster://:hunter2@a:1,[::1]:2",
    ],
)
def test_passwords_are_redacted(url: str) -> None:
    redacted = redact(f"cannot reach {url} now")
    assert "hunter2" not in redacted
    assert "a:1" in redacted


async def test_settings_choose_the_layout() -> None:
    engine = RedisEngine.from_settings(Settings(url="redis+cluster://a:1", namespace="shop"))
    assert engine._names.prefix("default") == "{shop:default}:"
    assert Settings(url="rediss+cluster://a").on_cluster
    engine = RedisEngine.from_settings(Settings(url="redis+sentinel://a:1/m", namespace="shop"))
    assert engine._names.prefix("default") == "shop:"
    assert not Settings(url="redis+sentinel://a/m").on_cluster
