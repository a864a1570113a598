"""Durable submission: what `submit` returns or raises, and when (requirement L4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.client.submitter import BatchingSubmitter
from holdfast.core.job import Envelope, JobKey, Receipt, new_job_ids
from holdfast.engine.port.feed import SubmissionKey
from holdfast.engine.port.jobs import EngineOptions
from holdfast.errors import FeedDetached, InvalidOption, LedgerUnavailable, NotDurableYet, SchemaMismatch
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.ledger import FeedPosition
from holdfast.ledger.reopen_intake import LedgerProbe
from tests.worker.support import eventually, working


class Engine:
    """Accepts every job once its feed has a reader."""

    def __init__(self, *, read: bool = True) -> None:
        self.options = EngineOptions(ledger=True)
        self.readers: set[str] = {"default"} if read else set()
        self.calls = 0
        self.keys: list[SubmissionKey] = []
        self.first: dict[str, str] = {}

    def server_of(self, queue: str) -> object:
        return None

    async def submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        self.calls += 1
        for envelope in envelopes:
            if envelope.queue not in self.readers:
                raise FeedDetached(envelope.queue, "no reader")
        receipts = []
        for envelope in envelopes:
            first = self.first.setdefault(envelope.idempotency_key or envelope.job_id, envelope.job_id)
            receipts.append(Receipt(first, first != envelope.job_id))
        return receipts

    submit_each = submit

    async def epoch(self, queue: str) -> str:
        return "first"

    async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
        await asyncio.sleep(0)
        self.readers.add(queue)

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        assert queue not in self.readers, "keys must be restored before intake opens"
        self.keys += keys


class Ledger:
    """Has the jobs that the test sets; implements all three roles that a submitter uses."""

    def __init__(self) -> None:
        self.projection: Any = self
        self.recovery = self
        self.recorded_keys: set[JobKey] = set()
        self.records_all = True
        self.down = 0
        self.calls_received: list[int] = []
        self.known: list[SubmissionKey] = []

    async def wait_recorded(self, keys: Sequence[JobKey], wait_ms: int) -> set[JobKey]:
        self.calls_received.append(len(keys))
        self._answer()
        found = set(keys) if self.records_all else self.recorded_keys & set(keys)
        if found != set(keys):
            await asyncio.sleep(wait_ms / 1000)
        return found

    async def queues(self) -> list[str]:
        self._answer()
        return ["default"]

    async def position(self, queue: str) -> FeedPosition:
        return FeedPosition()

    async def submission_keys(self, queue: str, window_ms: int, limit: int) -> AsyncIterator[list[SubmissionKey]]:
        for start in range(0, len(self.known), 2):
            yield self.known[start : start + 2]

    def _answer(self) -> None:
        if self.down:
            self.down -= 1
            raise LedgerUnavailable("unreachable")


def make_submitter(engine: Engine, ledger: Ledger | None, timeout_s: float = 5.0) -> BatchingSubmitter:
    return BatchingSubmitter(engine, ledger, durable_timeout_s=timeout_s)  # type: ignore[arg-type]


def envelope(**fields: Any) -> Envelope:
    return Envelope(job_id=new_job_ids(1)[0], task="t", payload=b"{}", **{"durable": True} | fields)


async def test_concurrent_callers_share_the_ledger_query() -> None:
    ledger = Ledger()
    submitter = make_submitter(Engine(), ledger)
    receipts = await asyncio.gather(*(submitter.submit(envelope()) for _ in range(100)))
    assert len({receipt.job_id for receipt in receipts}) == 100
    assert sum(ledger.calls_received) == 100
    assert len(ledger.calls_received) <= 3


async def test_a_submission_that_is_not_durable_does_not_wait() -> None:
    ledger = Ledger()
    ledger.records_all = False
    submitter = make_submitter(Engine(), ledger)
    waiting = asyncio.create_task(submitter.submit(envelope()))
    await submitter.submit(envelope(durable=False))
    assert not waiting.done()
    waiting.cancel()


async def test_a_timeout_means_accepted_but_not_yet_durable() -> None:
    ledger = Ledger()
    ledger.records_all = False
    submitter = make_submitter(Engine(), ledger, 0.05)
    submitted = envelope()
    with pytest.raises(NotDurableYet) as caught:
        await submitter.submit(submitted)
    assert caught.value.job_id == submitted.job_id
    with pytest.raises(NotDurableYet):
        await submitter.submit_many([envelope(), envelope()])


async def test_a_late_submission_does_not_delay_a_duplicate_of_another() -> None:
    ledger = Ledger()
    ledger.records_all = False
    engine = Engine()
    submitter = make_submitter(engine, ledger, 0.2)
    engine.first["known"] = "first"
    ledger.recorded_keys.add(JobKey("default", "default", "first"))
    late = asyncio.create_task(submitter.submit(envelope()))
    receipt = await submitter.submit(envelope(idempotency_key="known"))
    assert receipt == Receipt("first", duplicate=True)
    assert not late.done()
    with pytest.raises(NotDurableYet):
        await late


async def test_a_ledger_that_recovers_in_time_is_waited_for() -> None:
    ledger = Ledger()
    ledger.down = 2
    submitted = envelope()
    assert (await make_submitter(Engine(), ledger).submit(submitted)).job_id == submitted.job_id
    assert ledger.down == 0


async def test_a_durable_submission_without_a_ledger_is_an_error() -> None:
    engine = Engine()
    with pytest.raises(InvalidOption, match="HOLDFAST_LEDGER"):
        await make_submitter(engine, None).submit(envelope())
    with pytest.raises(InvalidOption):
        await make_submitter(engine, None).submit_many([envelope()])
    assert engine.calls == 0


# Intake ------------------------------------------------------------------------------------------


async def test_an_engine_that_lost_its_data_gets_its_keys_before_it_accepts_jobs() -> None:
    engine, ledger = Engine(read=False), Ledger()
    ledger.known = [SubmissionKey("default", f"k{number}", f"j{number}", 10**15) for number in range(5)]
    submitter = make_submitter(engine, ledger)
    await asyncio.gather(*(submitter.submit(envelope(durable=False)) for _ in range(10)))
    assert engine.keys == ledger.known, "restored once for all callers"
    assert engine.readers == {"default"}


async def test_an_unreachable_ledger_does_not_stop_intake(caplog: pytest.LogCaptureFixture) -> None:
    engine, ledger = Engine(read=False), Ledger()
    ledger.down = 10
    await make_submitter(engine, ledger).submit(envelope(durable=False))
    assert engine.readers == {"default"}
    assert "accepts jobs without the idempotency keys" in caplog.text


async def test_a_ledger_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ledger = Engine(read=False), Ledger()
    submitter = BatchingSubmitter(engine, ledger)  # type: ignore[arg-type]
    submitter._ledger_probe = LedgerProbe(answer_s=0.2, silent_s=60)
    calls_received: list[float] = []

    async def queues() -> list[str]:
        calls_received.append(time.monotonic())
        await asyncio.sleep(3_600)
        return []

    monkeypatch.setattr(ledger, "queues", queues)
    for queue in ("one", "two", "three"):
        await submitter.submit(Envelope(job_id=new_job_ids(1)[0], task="t", payload=b"[]", queue=queue))
    assert len(calls_received) == 1
    await submitter.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_long_restore_of_keys_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ledger = Engine(read=False), Ledger()
    submitter = BatchingSubmitter(engine, ledger)  # type: ignore[arg-type]
    submitter._ledger_probe = LedgerProbe(answer_s=0.1)
    known = [SubmissionKey("default", f"key-{number}", f"job-{number}", 1) for number in range(4)]

    async def submission_keys(queue: str, window_ms: int, limit: int) -> AsyncIterator[list[SubmissionKey]]:
        for key in known:
            await asyncio.sleep(0.1)
            yield [key]

    monkeypatch.setattr(ledger, "submission_keys", submission_keys)
    await submitter.submit(Envelope(job_id=new_job_ids(1)[0], task="t", payload=b"[]"))
    assert engine.keys == known


@pytest.mark.parametrize(
    "error", [SchemaMismatch("the ledger", None, "0001"), InvalidOption("another deployment's ledger")]
)
async def test_an_unusable_ledger_does_not_stop_intake(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, ledger = Engine(read=False), Ledger()

    async def queues() -> list[str]:
        raise error

    monkeypatch.setattr(ledger, "queues", queues)
    submitter = BatchingSubmitter(engine, ledger)  # type: ignore[arg-type]
    await submitter.submit(Envelope(job_id=new_job_ids(1)[0], task="t", payload=b"[]"))
    assert "without the idempotency keys of the ledger" in caplog.text


async def test_closing_the_submitter_ends_durable_waits() -> None:
    engine, ledger = Engine(), Ledger()
    ledger.records_all = False
    submitter = BatchingSubmitter(engine, ledger, durable_timeout_s=60)  # type: ignore[arg-type]
    first, second = (Envelope(job_id=job_id, task="t", payload=b"[]", durable=True) for job_id in new_job_ids(2))
    one, many = asyncio.create_task(submitter.submit(first)), asyncio.create_task(submitter.submit_many([second]))
    await eventually(lambda: len(ledger.calls_received) == 2)
    await submitter.close()
    with pytest.raises(NotDurableYet):
        await one
    with pytest.raises((NotDurableYet, asyncio.CancelledError)):
        await many
    assert len(asyncio.all_tasks()) == 1


async def test_submit_fails_if_the_reader_is_detached_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(read=False)

    async def detach_reader(queue: str, epoch: str, *, keys_restored: bool) -> None:
        engine.readers.clear()

    monkeypatch.setattr(engine, "attach_reader", detach_reader)
    with pytest.raises(FeedDetached):
        await make_submitter(engine, Ledger()).submit(envelope(durable=False))


# Real stores -------------------------------------------------------------------------------------


async def test_every_embedded_submission_is_durable(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'holdfast.db'}")

    @app.task
    async def work(number: int) -> int:
        return number

    async with app:
        job = await work.options(durable=True).submit(1)
        many = await work.options(durable=True).submit_many([(2,), (3,)])
        async with working(app):
            assert [await each.result(timedelta(seconds=20)) for each in (job, *many)] == [1, 2, 3]


@pytest.mark.redis
async def test_a_durable_submission_is_in_the_ledger_when_it_returns(
    redis_url: str, namespace: str, ledger_url: str
) -> None:
    app = Holdfast(redis_url, ledger=ledger_url, namespace=namespace, durable_timeout_s=20)

    @app.task
    async def work(number: int) -> int:
        return number

    async with app, working(app):
        ledger = backend_of(app).ledger
        assert ledger is not None
        assert ledger.projection is not None
        jobs = [await work.options(durable=True, idempotency_key="k").submit(1) for _ in range(2)]
        assert [job.duplicate for job in jobs] == [False, True]
        jobs += await work.options(durable=True).submit_many([(number,) for number in range(600)])
        keys = {JobKey("default", job.queue, job.id) for job in jobs}
        recorded = await ledger.recovery.histories(list(keys))
        assert all(history for history in recorded.values())
        assert len(recorded) == 601


@pytest.mark.redis
async def test_redis_without_a_ledger_refuses_durable_submissions(redis_url: str, namespace: str) -> None:
    app = Holdfast(redis_url, namespace=namespace)

    @app.task
    async def work() -> None: ...

    async with app:
        with pytest.raises(InvalidOption, match="HOLDFAST_LEDGER"):
            await work.options(durable=True).submit()


@pytest.mark.redis
async def test_without_a_projector_a_submission_is_not_durable_yet(
    redis_url: str, namespace: str, ledger_url: str
) -> None:
    """Without worker and upkeep the job is accepted, but not durable yet. It becomes durable later."""
    app = Holdfast(redis_url, ledger=ledger_url, namespace=namespace, durable_timeout_s=0.3)

    @app.task
    async def work() -> None: ...

    async with app:
        with pytest.raises(NotDurableYet) as caught:
            await work.options(durable=True).submit()
        key = JobKey("default", "default", caught.value.job_id)
        ledger = backend_of(app).ledger
        assert ledger is not None
        async with working(app):

            async def find_history() -> Any:
                return (await ledger.recovery.histories([key]))[key]

            await eventually(find_history, "the job to reach the ledger")
