"""A part of all crash points, chosen by a fixed seed. `python -m tests.crash_points.run --all` runs all of them."""

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
from holdfast.ledger.port.ledger import FeedPosition, Projection
from holdfast.ledger.reopen_intake import reopen_intake
from tests.crash_points.run import NotReached, find_points, run, sample, sqlite_ledgers, try_point
from tests.crash_points.scenarios import SCENARIOS
from tests.crash_points.seams import Call, Point, Way, select_points
from tests.crash_points.stores import RedisStores, SqliteStores, Stores

pytestmark = pytest.mark.faults

_SEED: Final = 20_260
#: How many points of a scenario are run, at most.
_POINTS_RUN: Final = {
    ("sqlite", "life"): 4,
    ("sqlite", "pending"): 2,
    ("sqlite", "poison"): 2,
    ("sqlite", "effects"): 4,
    ("sqlite", "dead_letters"): 2,
    ("sqlite", "approvals"): 2,
    ("sqlite", "operations"): 2,
    ("sqlite", "bulk"): 2,
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
    ("redis+postgres", "dead_letters"): 2,
    ("redis+postgres", "approvals"): 2,
    ("redis+postgres", "operations"): 2,
    ("redis+postgres", "bulk"): 2,
    ("redis+postgres", "wipe"): 2,
    ("redis+postgres", "outbox"): 2,
    ("redis+postgres", "webhooks"): 2,
    ("redis+postgres", "trigger"): 2,
}
#: Calls whose lost reply would cost most: in every run.
_ALWAYS: Final = {
    "sqlite": ("submit", "settle", "_conclude", "cancel_replay"),
    "redis": ("submit", "settle", "claim", "adopt"),
    "redis+postgres": ("settle", "COMMIT after COPY job_events", "COMMIT after INSERT dlq_items"),
}


@pytest.fixture(autouse=True)
def silence_logs() -> Iterator[None]:
    """A failing store is logged thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    if request.param == "sqlite":
        return SqliteStores(tmp_path)
    redis_url: str = request.getfixturevalue("redis_url")
    if request.param == "redis":
        return RedisStores(redis_url)
    if request.param == "redis+sqlite":
        return RedisStores(redis_url, sqlite_ledgers(tmp_path), "redis+sqlite")
    url: str = request.getfixturevalue("postgres_url")
    return RedisStores(redis_url, lambda: url, "redis+postgres")


@pytest.mark.parametrize(("stores", "scenario"), list(_POINTS_RUN), indirect=["stores"], ids=lambda value: str(value))
def test_no_failing_call_loses_a_job(stores: Stores, scenario: str) -> None:
    all_points = find_points(stores, SCENARIOS[scenario])
    chosen = sample(all_points, min(1.0, _POINTS_RUN[stores.name, scenario] / len(all_points)), _SEED)
    always = {Point(call, 1, Way.LOST) for call in _ALWAYS[stores.name]} & set(all_points)
    chosen += sorted(always - set(chosen))
    failed, reached = [], 0
    for point in chosen:
        try:
            reached += try_point(stores, SCENARIOS[scenario], point)
        except Exception as exc:  # noqa: BLE001 - all of them are reported
            failed.append(f"python -m tests.crash_points.run {stores.name} {scenario} '{point}'\n    {exc!r}")
    assert not failed, f"{len(failed)} of {len(chosen)} points, seed {_SEED}:\n" + "\n".join(failed)
    assert reached > len(chosen) / 2, f"{reached} of {len(chosen)} points were reached"


@pytest.mark.parametrize("point", ["reclaim#2:lost", "settle#1:before"])
@pytest.mark.parametrize("stores", ["redis"], indirect=True)
def test_a_poison_pill_is_not_run_again_after_a_lost_reply(stores: Stores, point: str) -> None:
    # Found by the scenario `poison`: a worker that recovered its claims got the pill, and ran it.
    run(stores, SCENARIOS["poison"], Point.parse(point))


@pytest.mark.parametrize("stores", ["redis"], indirect=True)
def test_a_point_that_is_never_reached_is_a_failure(stores: Stores) -> None:
    with pytest.raises(NotReached):
        run(stores, SCENARIOS["life"], Point("settle", 99, Way.BEFORE))


def test_equivalent_points_are_not_run() -> None:
    calls = [Call("write", 1, True), Call("read", 1, False), Call("read", 2, False), Call("write", 2, True)]
    assert [str(point) for point in select_points(calls)] == [
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
    """The replies to the first calls are lost with their connection."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def queues(self) -> list[str]:
        return ["default"]

    async def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[SubmissionKey]]:
        if self.failures:
            self.failures -= 1
            raise LedgerUnavailable("the connection broke")
        yield [SubmissionKey("default", "key", "job", 1)]


@pytest.mark.parametrize(("failures", "restored"), [(0, 1), (1, 1), (2, 1), (3, 0)])
async def test_a_broken_connection_does_not_lose_the_keys_of_a_wiped_queue(failures: int, restored: int) -> None:
    # Found by the scenario `wipe`: after one lost reply, a second submission of a known key was accepted.
    engine = Mock(spec=Engine, options=EngineOptions(ledger=True))
    engine.epoch.return_value = "present"
    projection = Mock(spec=Projection)
    projection.position.return_value = FeedPosition()
    ledger = Mock(recovery=_Recovery(failures), projection=projection)
    assert await reopen_intake(engine, ledger, "default") == restored
    assert engine.restore_keys.await_count == restored
    # A ledger that is down does not stop intake.
    engine.attach_reader.assert_awaited_once_with("default", "present", keys_restored=bool(restored))
