"""People of a chaos run do what the plan of the load wants of them, and what they are refused comes to light."""

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
    """Answers as it was told to, and remembers what was asked of it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def call(self, method: str, path: str, **request: Any) -> Any:
        self.asked.append(f"{method} {path} {request.get('params', {}).get('queue', '')}".rstrip())
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SubmissionJournal]:
    journal = SubmissionJournal(tmp_path / "journal.jsonl", SEED)
    yield journal
    journal.close()


def people(service: Service, journal: SubmissionJournal, folder: Path) -> SimulatedOperators:
    return SimulatedOperators(service, journal, seed=SEED, folder=folder)


def said(journal: SubmissionJournal) -> list[tuple[str, str]]:
    lines = [msgspec.json.decode(line, type=JournalEntry) for line in journal.path.read_bytes().splitlines()]
    return [(line.said, line.job_id) for line in lines]


async def idle(them: SimulatedOperators) -> None:
    await asyncio.gather(*them._in_flight)


def some(folder: Path, wanted: Callable[[WorkItem], bool]) -> WorkItem:
    return next(each for each in (work_item(SEED, number, folder) for number in range(999)) if wanted(each))


async def test_one_delayed_job_in_three_is_wanted_at_once(journal: SubmissionJournal, tmp_path: Path) -> None:
    service = Service({})
    them = people(service, journal, tmp_path)
    errands = [work_item(SEED, number, tmp_path) for number in range(200)]
    for third in (0, 1, 2):
        each = next(each for each in errands if each.kind == "delayed" and each.number % 3 == third)
        them.accepted(each, f"job-{third}")
    await idle(them)
    assert service.asked == ["POST /api/v1/jobs/job-0/retry default"]
    assert (said(journal), them.counts) == ([("expedited", "job-0")], {"expedited": 1})


async def test_a_job_that_nobody_wants_is_cancelled(
    journal: SubmissionJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No answer is no reason to give up.
    service = Service(Unavailable("no answer"), {})
    them = people(service, journal, tmp_path)
    monkeypatch.setattr(them._random, "uniform", lambda *_: 0.0)
    them.accepted(some(tmp_path, lambda each: each.kind == "cancelled"), "job")
    await idle(them)
    assert service.asked == 2 * ["POST /api/v1/jobs/job/cancel default"]
    assert journal.cancelled == {"job"}


@pytest.mark.parametrize(("status", "refused"), [(409, 0), (404, 0), (403, 1), (422, 1)])
async def test_too_late_is_no_defect_and_a_refusal_is(
    journal: SubmissionJournal, tmp_path: Path, status: int, refused: int
) -> None:
    them = people(Service(SubmissionRefused(status, "no")), journal, tmp_path)
    them.accepted(some(tmp_path, lambda each: each.kind == "delayed" and each.number % 3 == 0), "job")
    await idle(them)
    assert (len(them.refused), said(journal), them.counts) == (refused, [], {})


async def test_a_queue_is_paused_until_that_is_seen_and_then_resumed(
    journal: SubmissionJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_WORKS_S", "_PAUSED_S"):
        monkeypatch.setattr(f"holdfast.verification.chaos.operators.{name}", (0.0, 0.0))
    monkeypatch.setattr("holdfast.verification.chaos.operators._ROUND_S", 0.0)
    service = Service({"paused": False}, {"paused": True}, {"paused": False})
    await people(service, journal, tmp_path)._pause()
    pause, resume = (f"POST /api/v1/queues/side/{lever}" for lever in ("pause", "resume"))
    assert service.asked == [pause, pause, resume]


async def test_one_dead_letter_in_four_is_tried_again_and_once(journal: SubmissionJournal, tmp_path: Path) -> None:
    for number in (4, 5):
        journal.write(ACCEPTED, number, f"job-{number}")
    page = {"dead_letters": [{"job_id": f"job-{number}", "dlq_id": f"letter-{number}"} for number in (4, 5)]}
    service = Service(page, {"job_id": "again"}, page)
    them = people(service, journal, tmp_path)
    for _ in range(2):
        await them._replay()
        # Whoever waits for all jobs to end waits for this one, too.
        assert them.busy or journal.replayed
        await idle(them)
    assert service.asked == ["GET /api/v1/dlq", "POST /api/v1/dlq/letter-4/replay", "GET /api/v1/dlq"]
    assert journal.replayed == {"job-4": "again"}


async def test_people_decide_as_the_job_was_meant(journal: SubmissionJournal, tmp_path: Path) -> None:
    meant = [
        some(tmp_path, lambda each: each.decision == "approve"),
        some(tmp_path, lambda each: each.decision == "reject"),
    ]
    for each in meant:
        journal.write(ACCEPTED, each.number, f"job-{each.number}")
    asked = [{"job_id": f"job-{each.number}", "approval_id": str(each.number)} for each in meant]
    service = Service({"approvals": [*asked, {"job_id": "a receipt on its way", "approval_id": "x"}]}, {}, {})
    await people(service, journal, tmp_path)._decide()
    paths = [f"POST /api/v1/approvals/{each.number}/{each.decision}" for each in meant]
    assert service.asked == ["GET /api/v1/approvals", *paths]
