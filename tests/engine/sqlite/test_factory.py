"""Engines built from URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.errors import InvalidOption
from holdfast.factory import build_engine, sqlite_path
from holdfast.settings import Settings
from holdfast.testing.inline import ManualClock


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///jobs.db", "jobs.db"),
        ("sqlite:///data/jobs.db", "data/jobs.db"),
        ("sqlite:////var/lib/jobs.db", "/var/lib/jobs.db"),
        ("sqlite:///with%20space.db", "with space.db"),
        ("sqlite://", ":memory:"),
        ("sqlite:///", ":memory:"),
        ("sqlite:///:memory:", ":memory:"),
    ],
)
def test_the_path_in_a_url(url: str, path: str) -> None:
    assert sqlite_path(url) == path


@pytest.mark.parametrize("url", ["sqlite://jobs.db", "sqlite://host/jobs.db", "sqlite:///jobs.db?mode=ro"])
def test_a_url_without_a_path_is_refused(url: str) -> None:
    with pytest.raises(InvalidOption):
        build_engine(Settings.load(url=url))


async def test_sqlite_is_built_with_the_settings_and_the_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = Settings.load(url=f"sqlite:///{tmp_path / 'jobs.db'}", max_deliveries=3)
    engine = build_engine(settings, clock)
    assert isinstance(engine, SqliteEngine)
    assert engine.options == settings.engine_options()
    assert await engine.now_ms() == clock.now_ms()
    await engine.open()
    await engine.close()


def test_a_redis_url_gives_the_redis_engine() -> None:
    assert isinstance(build_engine(Settings.load(url="redis://localhost:1/0")), RedisEngine)
