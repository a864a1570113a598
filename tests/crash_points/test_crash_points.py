"""A part of all crash points, by a fixed seed; all of them by `python -m tests.crash_points.run --all`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from unittest.mock import Mock

import pytest

from holdfast.engine.port import Engine
from holdfast.engine.port.feed import SubmissionKey
from holdfast.engine.port.jobs import EngineOptions
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.intake_recovery import reopen_intake
from holdfast.ledger.port.ledger import FeedPosition, Projection
from tests.crash_points.run import NotReached, points, run, sample, sqlite_ledgers, try_point
from tests.crash_points.scenarios import STORIES
from tests.crash_points.seams import Call, Point, Way, points_of
from tests.crash_points.stores import Place, RedisPlace, SqlitePlace

pytestmark = pytest.mark.faults

_SEED: Final = 20_260
#: How many points of a story are tried; all of them, if there are no more.
_TRIED: Final = {
    ("sqlite", "life"): 4,
    ("sqlite", "pending"): 2,
    ("sqlite", "poison"): 2,
    ("sqlite", "effects"): 4,
    ("sqlite", "letters"): 2,
    ("sqlite", "people"): 2,
    ("sqlite", "office"): 2,
    ("sqlite", "many"): 2,
    ("sqlite", "verbs"): 2,
    ("sqlite", "outbox"): 2,
    ("sqlite", "webhooks"): 2,
    ("sqlite", "trigger"): 2,
    ("redis", "life"): 10,
    ("redis", "pending"): 6,
    ("redis", "poison"): 6,
    ("redis", "verbs"): 10,
    ("redis", "trigger"): 6,
    ("redis", "foreign"): 6,
    ("redis+postgres", "life"): 2,
    ("redis+postgres", "effects"): 2,
    ("redis+postgres", "letters"): 2,
    ("redis+postgres", "people"): 2,
    ("redis+postgres", "office"): 2,
    ("redis+postgres", "many"): 2,
    ("redis+postgres", "wipe"): 2,
    ("redis+postgres", "outbox"): 2,
    ("redis+postgres", "webhooks"): 2,
    ("redis+postgres", "trigger"): 2,
}
#: Where a lost reply would cost most: tried in every run.
_ALWAYS: Final = {
    "sqlite": ("submit", "settle", "_conclude", "cancel_replay"),
    "redis": ("submit", "settle", "claim", "adopt"),
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
    always = {Point(call, 1, Way.LOST) for call in _ALWAYS[place.name]} & set(everything)
    chosen += sorted(always - set(chosen))
    failed, reached = [], 0
    for point in chosen:
        try:
            reached += try_point(place, STORIES[story], point)
        except Exception as exc:  # noqa: BLE001 - all of them are told
            failed.append(f"python -m tests.crash_points.run {place.name} {story} '{point}'\n    {exc!r}")
    assert not failed, f"{len(failed)} of {len(chosen)} points, seed {_SEED}:\n" + "\n".join(failed)
    assert reached > len(chosen) / 2, f"{reached} of {len(chosen)} points were reached"


@pytest.mark.parametrize("point", ["reclaim#2:lost", "settle#1:before"])
@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_poison_pill_is_not_run_once_more_because_a_reply_was_lost(place: Place, point: str) -> None:
    # Found by the story `poison`: whoever asked for what it holds got the pill, and ran it.
    run(place, STORIES["poison"], Point.parse(point))


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_point_that_is_never_reached_is_no_success(place: Place) -> None:
    with pytest.raises(NotReached):
        run(place, STORIES["life"], Point("settle", 99, Way.BEFORE))


def test_what_would_be_the_same_again_is_not_tried() -> None:
    calls = [Call("write", 1, True), Call("read", 1, False), Call("read", 2, False), Call("write", 2, True)]
    assert [str(point) for point in points_of(calls)] == [
        "write#1:before",
        "write#1:after",
        "write#1:lost",
        "read#1:before",
        "read#2:before",
        "read#2:after",
        "write#2:before",
        "write#2:after",
        "write#2:lost",
    ]


def test_a_point_is_read_as_it_is_printed() -> None:
    point = Point("COMMIT after COPY job_events", 2, Way.LOST)
    assert Point.parse(str(point)) == point


class _Recovery:
    """Its first answers are lost with their connection."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def queues(self) -> list[str]:
        return ["default"]

    async def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[SubmissionKey]]:
        if self.failures:
            self.failures -= 1
            raise LedgerUnavailable("the connection broke")
        yield [SubmissionKey("default", "key", "job", 1)]


@pytest.mark.parametrize(("failures", "remembered"), [(0, 1), (1, 1), (2, 1), (3, 0)])
async def test_a_connection_that_breaks_does_not_cost_a_wiped_queue_its_keys(failures: int, remembered: int) -> None:
    # Found by the story `wipe`: after one lost reply, a second submission of a known key was accepted.
    engine = Mock(spec=Engine, options=EngineOptions(ledger=True))
    engine.epoch.return_value = "present"
    projection = Mock(spec=Projection)
    projection.position.return_value = FeedPosition()
    ledger = Mock(recovery=_Recovery(failures), projection=projection)
    assert await reopen_intake(engine, ledger, "default") == remembered
    assert engine.restore_keys.await_count == remembered
    # A ledger that is down does not stop intake.
    engine.attach_reader.assert_awaited_once_with("default", "present", keys_restored=bool(remembered))
