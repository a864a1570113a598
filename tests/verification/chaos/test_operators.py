"""Simulated operators of a chaos run act as the workload requires, and refusals are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import Unavailable
from holdfast.verification.chaos.load import ACCEPTED, JournalEntry, ServiceClient, SubmissionJournal, SubmissionRefused
from holdfast.verification.chaos.operators import SimulatedOperators
from holdfast.verification.chaos.workload import WorkItem, work_item

SEED = 365


class Service(ServiceClient):
    """Returns the given responses, and records the requests."""

    def __init__(self, *responses: Any) -> None:
        self._responses = list(responses)
        self.requests: list[str] = []

    async def call(self, method: str, path: str, **request: Any) -> Any:
        self.requests.append(f"{method} {path} {request.get('params', {}).get('queue', '')}".rstrip())
        response = self._responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SubmissionJournal]:
    journal = SubmissionJournal(tmp_path / "journal.jsonl", SEED)
    yield journal
    journal.close()


def make_operators(service: Service, journal: SubmissionJournal, folder: Path) -> SimulatedOperators:
    return SimulatedOperators(service, journal, seed=SEED, folder=folder)


def journal_entries(journal: SubmissionJournal) -> list[tuple[str, str]]:
    lines = [msgspec.json.decode(line, type=JournalEntry) for line in journal.path.read_bytes().splitlines()]
    return [(line.said, line.job_id) for line in lines]


async def wait_idle(operators: SimulatedOperators) -> None:
    await asyncio.gather(*operators._in_flight)


def find_work_item(folder: Path, matches: Callable[[WorkItem], bool]) -> WorkItem:
    return next(item for item in (work_item(SEED, number, folder) for number in range(999)) if matches(item))


async def test_one_delayed_job_in_three_is_expedited(journal: SubmissionJournal, tmp_path: Path) -> None:
    service = Service({})
    operators = make_operators(service, journal, tmp_path)
    work_items = [work_item(SEED, number, tmp_path) for number in range(200)]
    for third in (0, 1, 2):
        item = next(item for item in work_items if item.kind == "delayed" and item.number % 3 == third)
        operators.accepted(item, f"job-{third}")
    await wait_idle(operators)
    assert service.requests == ["POST /api/v1/jobs/job-0/retry default"]
    assert (journal_entries(journal), operators.counts) == ([("expedited", "job-0")], {"expedited": 1})


async def test_a_job_to_be_cancelled_is_cancelled(
    journal: SubmissionJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A missing response is retried.
    service = Service(Unavailable("no answer"), {})
    operators = make_operators(service, journal, tmp_path)
    monkeypatch.setattr(operators._random, "uniform", lambda *_: 0.0)
    operators.accepted(find_work_item(tmp_path, lambda item: item.kind == "cancelled"), "job")
    await wait_idle(operators)
    assert service.requests == 2 * ["POST /api/v1/jobs/job/cancel default"]
    assert journal.cancelled == {"job"}


@pytest.mark.parametrize(("status", "refused"), [(409, 0), (404, 0), (403, 1), (422, 1)])
async def test_too_late_is_not_a_defect_but_a_refusal_is(
    journal: SubmissionJournal, tmp_path: Path, status: int, refused: int
) -> None:
    operators = make_operators(Service(SubmissionRefused(status, "no")), journal, tmp_path)
    operators.accepted(find_work_item(tmp_path, lambda item: item.kind == "delayed" and item.number % 3 == 0), "job")
    await wait_idle(operators)
    assert (len(operators.refused), journal_entries(journal), operators.counts) == (refused, [], {})


async def test_a_pause_is_repeated_until_confirmed_and_then_resumed(
    journal: SubmissionJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_WORKS_S", "_PAUSED_S"):
        monkeypatch.setattr(f"holdfast.verification.chaos.operators.{name}", (0.0, 0.0))
    monkeypatch.setattr("holdfast.verification.chaos.operators._ROUND_S", 0.0)
    service = Service({"paused": False}, {"paused": True}, {"paused": False})
    await make_operators(service, journal, tmp_path)._pause()
    pause, resume = (f"POST /api/v1/queues/side/{action}" for action in ("pause", "resume"))
    assert service.requests == [pause, pause, resume]


async def test_one_dead_letter_in_four_is_replayed_once(journal: SubmissionJournal, tmp_path: Path) -> None:
    for number in (4, 5):
        journal.write(ACCEPTED, number, f"job-{number}")
    page = {"dead_letters": [{"job_id": f"job-{number}", "dlq_id": f"dead-letter-{number}"} for number in (4, 5)]}
    service = Service(page, {"job_id": "replayed"}, page)
    operators = make_operators(service, journal, tmp_path)
    for _ in range(2):
        await operators._replay()
        # A caller that waits for all jobs to end also waits for this one.
        assert operators.busy or journal.replayed
        await wait_idle(operators)
    assert service.requests == ["GET /api/v1/dlq", "POST /api/v1/dlq/dead-letter-4/replay", "GET /api/v1/dlq"]
    assert journal.replayed == {"job-4": "replayed"}


async def test_operators_vote_as_the_work_item_says(journal: SubmissionJournal, tmp_path: Path) -> None:
    items = [
        find_work_item(tmp_path, lambda item: item.decision == "approve"),
        find_work_item(tmp_path, lambda item: item.decision == "reject"),
    ]
    for item in items:
        journal.write(ACCEPTED, item.number, f"job-{item.number}")
    open_requests = [{"job_id": f"job-{item.number}", "approval_id": str(item.number)} for item in items]
    service = Service({"approvals": [*open_requests, {"job_id": "without a receipt yet", "approval_id": "x"}]}, {}, {})
    await make_operators(service, journal, tmp_path)._decide()
    paths = [f"POST /api/v1/approvals/{item.number}/{item.decision}" for item in items]
    assert service.requests == ["GET /api/v1/approvals", *paths]
