"""A part of all crash points, by a fixed seed; all of them by `python -m tests.chaos.crash_points --all`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from unittest.mock import Mock

import pytest

from holdfast.engine.port import Engine, EngineOptions, KnownKey
from holdfast.errors import LedgerUnavailable
from holdfast.upkeep.admission import admit
from tests.chaos.crash_points import NotReached, points, run, sample, sqlite_ledgers
from tests.chaos.crashing import Point, Way
from tests.chaos.places import Place, RedisPlace, SqlitePlace
from tests.chaos.stories import STORIES

pytestmark = pytest.mark.faults

_SEED: Final = 20_260
#: How many points of a story are tried; all of them, if there are no more.
_TRIED: Final = {
    ("sqlite", "life"): 6,
    ("sqlite", "effects"): 6,
    ("sqlite", "letters"): 4,
    ("sqlite", "people"): 4,
    ("sqlite", "verbs"): 4,
    ("sqlite", "outbox"): 4,
    ("redis", "life"): 30,
    ("redis", "verbs"): 30,
    ("redis+postgres", "life"): 2,
    ("redis+postgres", "effects"): 2,
    ("redis+postgres", "letters"): 2,
    ("redis+postgres", "people"): 2,
    ("redis+postgres", "wipe"): 2,
    ("redis+postgres", "outbox"): 2,
}
#: Where a mistake would cost most: tried in every run.
_ALWAYS: Final = {
    "sqlite": ("submit", "settle", "_conclude"),
    "redis": ("submit", "settle", "claim"),
    "redis+postgres": ("settle", "COMMIT after COPY job_events", "COMMIT after INSERT dlq_items"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A store that fails is complained of, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return SqlitePlace(tmp_path)
    redis_url: str = request.getfixturevalue("redis_url")
    if request.param == "redis":
        return RedisPlace(redis_url)
    if request.param == "redis+sqlite":
        return RedisPlace(redis_url, sqlite_ledgers(tmp_path), "redis+sqlite")
    url: str = request.getfixturevalue("postgres_url")
    return RedisPlace(redis_url, lambda: url, "redis+postgres")


@pytest.mark.parametrize(("place", "story"), list(_TRIED), indirect=["place"], ids=lambda value: str(value))
def test_no_call_fails_in_a_way_that_costs_a_job(place: Place, story: str) -> None:
    everything = points(place, STORIES[story])
    chosen = sample(everything, min(1.0, _TRIED[place.name, story] / len(everything)), _SEED)
    chosen += [p for p in everything if p.call in _ALWAYS[place.name] and p.number == 1 and p not in chosen]
    failed = []
    for point in chosen:
        try:
            run(place, STORIES[story], point)
        except Exception as exc:  # noqa: BLE001 - all of them are told
            failed.append(f"python -m tests.chaos.crash_points {place.name} {story} '{point}'\n    {exc!r}")
    assert not failed, f"{len(failed)} of {len(chosen)} points, seed {_SEED}:\n" + "\n".join(failed)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_point_that_is_never_reached_is_no_success(place: Place) -> None:
    with pytest.raises(NotReached):
        run(place, STORIES["life"], Point("settle", 99, Way.BEFORE))


def test_a_point_is_read_as_it_is_printed() -> None:
    point = Point("COMMIT after COPY job_events", 2, Way.LOST)
    assert Point.parse(str(point)) == point


class _Recovery:
    """Its first answers are lost with their connection."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def queues(self) -> list[str]:
        return ["default"]

    async def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[KnownKey]]:
        if self.failures:
            self.failures -= 1
            raise LedgerUnavailable("the connection broke")
        yield [KnownKey("default", "key", "job", 1)]


@pytest.mark.parametrize(("failures", "remembered"), [(0, 1), (1, 1), (2, 1), (3, 0)])
async def test_a_connection_that_breaks_does_not_cost_a_wiped_queue_its_keys(failures: int, remembered: int) -> None:
    # Found by the story `wipe`: after one lost reply, a second submission of a known key was accepted.
    engine = Mock(spec=Engine, options=EngineOptions(ledger=True))
    assert await admit(engine, Mock(recovery=_Recovery(failures)), "default") == remembered
    assert engine.remember_keys.await_count == remembered
    # A ledger that is down does not stop intake.
    engine.register_reader.assert_awaited_once_with("default")
