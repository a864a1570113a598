"""Engine contract for reads: job state, statistics, waiting, retention and the feed (Q13, Q15, H5)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.states import FINAL, State
from holdfast.core.verdict import DeadLetter, RetryLater, Succeed, Suspend
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import FeedFull
from holdfast.testing.contract.harness import FAILURE, LONG_WAIT_MS, OTHER_QUEUE, Contract, EngineHarness, Rig, soon

OPEN_STATES = [State.QUEUED, State.WAITING_APPROVAL, State.RUNNING, State.RETRYING, State.SUSPENDED, State.DLQ_PENDING]


class ReaderContract(Contract):
    """Guarantees of the read-only methods."""

    async def test_get_keeps_the_order_and_returns_none_for_unknown_jobs(self, rig: Rig) -> None:
        one, two = await rig.submit(2)
        views = await rig.engine.get(rig.queue, [two, "never-submitted", one])
        assert [view.job_id if view else None for view in views] == [two, None, one]
        assert await rig.engine.get(rig.queue, []) == []
        assert await rig.engine.get(OTHER_QUEUE, [one]) == [None]

    async def test_announced_tasks_are_kept_with_all_their_schemas(self, rig: Rig) -> None:
        assert await rig.engine.announced_tasks() == []
        mail = AnnouncedTask(
            task="mail \u00e9\u4e2d", queue=rig.queue, fingerprint="0a1b2c3d", schema='{"b":1,"a":2}', priority=2
        )
        other = AnnouncedTask(task="add", queue="default", fingerprint="4e5f6071")
        await rig.engine.announce_tasks([mail, other])
        await rig.engine.announce_tasks([])
        found = await rig.engine.announced_tasks()
        assert [msgspec.structs.replace(each, seen_at_ms=0) for each in found] == [other, mail]
        now_ms = await rig.engine.now_ms()
        assert all(0 < each.seen_at_ms <= now_ms for each in found)
        await rig.harness.advance(1_000)
        newer = msgspec.structs.replace(mail, fingerprint="11111111", queue=OTHER_QUEUE)
        await rig.engine.announce_tasks([newer])
        await rig.engine.announce_tasks([newer])
        found = await rig.engine.announced_tasks()
        assert [(each.task, each.fingerprint) for each in found[1:]] == [
            (mail.task, "11111111"),
            (mail.task, "0a1b2c3d"),
        ]
        # A second process, too.
        assert await (await rig.harness.make()).announced_tasks() == found

    async def test_job_info_is_complete_in_every_state(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, ledger=True)
        fields = {"tenant_id": "acme", "trace_id": "t", "idempotency_key": "", "payload": b'{"n":3}', "task": "print"}
        for state in State:
            job_id, _ = await rig.put_in(state, **fields)
            view = await rig.view(job_id)
            assert (view.job_id, view.state, view.task, view.queue) == (job_id, state, "print", rig.queue)
            assert (view.tenant_id, view.trace_id) == ("acme", "t")
            # An engine need not keep the payload of a finished job.
            assert view.payload == b'{"n":3}' or state in FINAL
            assert view.attempt == (0 if state in (State.QUEUED, State.WAITING_APPROVAL) else 1)
            await rig.succeed(*await rig.claim())

    async def test_stats_count_open_jobs_by_state(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, ledger=True)
        assert await rig.open_jobs() == 0
        # First the states that need a claim, which would otherwise claim the queued jobs.
        for state in reversed(OPEN_STATES):
            await rig.put_in(state)
        await rig.submit(2, delay_ms=60_000)
        stats = await rig.engine.stats(rig.queue)
        assert {state: count for state, count in stats.states.items() if count} == {
            **dict.fromkeys(OPEN_STATES, 1),
            State.QUEUED: 3,
        }
        assert (stats.queue, stats.delayed, stats.workers, stats.control) == (rig.queue, 2, 1, QueueControl())
        assert stats.feed_entries > 0

    async def test_find_returns_jobs_in_the_given_states(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, ledger=True)
        made = {state: (await rig.put_in(state))[0] for state in reversed(OPEN_STATES)}
        for state in OPEN_STATES:
            (view,) = await rig.engine.find(rig.queue, [state], 10)
            assert (view.job_id, view.state) == (made[state], state)
        both = await rig.engine.find(rig.queue, [State.QUEUED, State.SUSPENDED], 10)
        assert {view.job_id for view in both} == {made[State.QUEUED], made[State.SUSPENDED]}

    async def test_find_returns_no_more_than_its_limit(self, rig: Rig) -> None:
        submitted = set(await rig.submit(5))
        views = await rig.engine.find(rig.queue, [State.QUEUED], 3)
        assert len(views) == 3
        assert {view.job_id for view in views} < submitted
        assert await rig.engine.find(rig.queue, [], 3) == []

    async def test_queues_lists_queues_that_had_a_job(self, rig: Rig) -> None:
        assert await rig.engine.queues() == []
        await rig.submit_one()
        await rig.submit_one(queue=OTHER_QUEUE)
        assert await rig.engine.queues() == [OTHER_QUEUE, rig.queue]

    async def test_for_each_queue_returns_a_result_per_queue(self, rig: Rig) -> None:
        await rig.submit_one()

        async def jobs(queue: str) -> int | None:
            return (await rig.engine.stats(queue)).backlog or None

        assert await rig.engine.for_each_queue([rig.queue, OTHER_QUEUE], jobs) == (
            {rig.queue: 1, OTHER_QUEUE: None},
            {},
        )

    # Waiting for a final state ---------------------------------------------------------------------

    async def test_waiting_for_a_finished_job_returns_at_once(self, rig: Rig) -> None:
        claim = await rig.start_one()
        await rig.settle(claim, Succeed(b"1"))
        view = await soon(rig.engine.wait_final(rig.queue, claim.job_id, LONG_WAIT_MS))
        assert view is not None
        assert (view.state, view.result) == (State.SUCCEEDED, b"1")

    @pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled"])
    async def test_waiting_ends_when_the_job_finishes(self, rig: Rig, end: str) -> None:
        claim = await rig.start_one()
        other = await rig.harness.make()
        waiting = asyncio.create_task(other.wait_final(rig.queue, claim.job_id, LONG_WAIT_MS))
        # After this short wait the waiter has read the state once; from now on only the end of the job can wake it.
        assert await rig.engine.wait_final(rig.queue, claim.job_id, 50) is not None
        if end == "succeeded":
            await rig.settle(claim, Succeed(b"1"))
        elif end == "failed":
            await rig.settle(claim, DeadLetter(FAILURE))
        else:
            await rig.move(claim.job_id, State.CANCELLED)
        view = await soon(waiting)
        assert view is not None
        assert view.state == end

    async def test_a_wait_that_times_out_returns_the_current_state(self, rig: Rig) -> None:
        claim = await rig.start_one()
        view = await soon(rig.engine.wait_final(rig.queue, claim.job_id, 20))
        assert view is not None
        assert view.state is State.RUNNING

    async def test_waiting_for_an_unknown_job_returns_none(self, rig: Rig) -> None:
        assert await soon(rig.engine.wait_final(rig.queue, "never-submitted", LONG_WAIT_MS)) is None

    async def test_several_callers_can_wait_for_one_job(self, rig: Rig) -> None:
        claim = await rig.start_one()
        engines = [rig.engine, rig.engine, await rig.harness.make()]
        waiting = [asyncio.create_task(each.wait_final(rig.queue, claim.job_id, LONG_WAIT_MS)) for each in engines]
        assert await rig.engine.wait_final(rig.queue, claim.job_id, 50) is not None
        await rig.succeed(claim)
        views = await soon(asyncio.gather(*waiting))
        assert [view.state if view else None for view in views] == [State.SUCCEEDED] * 3

    # Retention -------------------------------------------------------------------------------------

    async def test_nothing_is_left_when_all_jobs_have_finished(self, rig: Rig) -> None:
        await rig.submit(30)
        await rig.submit(5, delay_ms=1_000)
        claims = await rig.claim("w1")
        for position, claim in enumerate(claims):
            verdicts = (Succeed(b"1"), RetryLater(500, FAILURE), DeadLetter(FAILURE), Suspend(FAILURE))
            await rig.settle(claim, verdicts[position % 4])
        for view in await rig.engine.find(rig.queue, [State.SUSPENDED], 100):
            await rig.move(view.job_id, State.CANCELLED)
        await rig.harness.advance(1_001)
        await rig.succeed(*await rig.claim_due("w2"))
        for worker in ("w1", "w2"):
            await rig.engine.deregister_worker(worker, [rig.queue])
        stats = await rig.engine.stats(rig.queue)
        assert (sum(stats.states.values()), stats.delayed, stats.workers) == (0, 0, 0)
        assert (await rig.engine.promote([rig.queue], 10)).next_due_at_ms == 0
        assert await rig.engine.find(rig.queue, OPEN_STATES, 10) == []

    async def test_an_idle_worker_is_counted_until_it_deregisters(self, rig: Rig) -> None:
        assert await rig.claim("w1") == []
        assert (await rig.engine.stats(rig.queue)).workers == 1
        await rig.engine.deregister_worker("w1", [rig.queue])
        assert (await rig.engine.stats(rig.queue)).workers == 0

    async def test_finished_jobs_expire_and_open_ones_do_not(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, finished_ttl_ms=60_000, ledger=True)
        finished = [(await rig.put_in(state))[0] for state in (State.SUCCEEDED, State.FAILED, State.CANCELLED)]
        opened = [(await rig.put_in(state))[0] for state in reversed(OPEN_STATES)]
        await harness.advance(30_000)
        assert None not in await rig.engine.get(rig.queue, finished)
        await harness.advance(30_001)
        await rig.engine.prune([rig.queue])
        assert await rig.engine.get(rig.queue, finished) == [None] * 3
        assert None not in await rig.engine.get(rig.queue, opened)
        assert await rig.engine.prune([rig.queue, "never-used"]) == 0

    # Opening and closing ---------------------------------------------------------------------------

    async def test_a_clone_uses_the_same_store(self, rig: Rig) -> None:
        clone = rig.engine.clone()
        await clone.open()
        try:
            job_id = await rig.submit_one()
            (claim,) = await clone.claim("w1", [rig.queue], 1, 0)
            assert claim.job_id == job_id
            assert clone.options == rig.engine.options
        finally:
            await clone.close()
            await clone.close()
        assert await rig.succeed(claim) == ["applied"]

    async def test_jobs_outlive_the_engine_that_accepted_them(self, rig: Rig) -> None:
        job_id = await rig.submit_one()
        await rig.engine.close()
        again = await Rig.on(rig.harness)
        assert (await again.claim_one()).job_id == job_id

    async def test_a_store_can_be_diagnosed(self, rig: Rig) -> None:
        await rig.submit_one()
        findings = await rig.engine.diagnose([rig.queue])
        assert findings
        assert all(finding.check and finding.message for finding in findings)
        assert all(finding.ok or finding.remedy for finding in findings)


class FeedContract(Contract):
    """Guarantees of the feed to its reader."""

    async def test_feed_entries_are_ordered_and_paged(self, rig: Rig) -> None:
        submitted = [await rig.submit_one() for _ in range(7)]
        whole = await rig.entries(page=100)
        assert [event.job_id for entry in whole for event in entry.events] == submitted
        assert await rig.entries(page=2) == whole
        assert len({entry.position for entry in whole}) == len({entry.nonce for entry in whole}) == len(whole)
        assert await rig.engine.read_feed(rig.queue, whole[-1].position, 10) == whole[-1:]
        assert await rig.engine.read_feed(rig.queue, whole[2].position, 2) == whole[2:4]

    async def test_one_atomic_step_is_one_feed_entry(self, rig: Rig) -> None:
        submitted = await rig.submit(20)
        await rig.succeed(*await rig.claim())
        entries = await rig.entries()
        assert [len(entry.events) for entry in entries] == [20, 20, 20]
        for entry in entries:
            assert [event.job_id for event in entry.events] == submitted

    async def test_each_queue_has_its_own_feed(self, rig: Rig) -> None:
        here = await rig.submit_one()
        await rig.submit_one(queue=OTHER_QUEUE)
        assert [event.job_id for event in await rig.events()] == [here]
        assert await rig.engine.read_feed("never-used", "", 10) == []

    async def test_calls_that_change_nothing_leave_no_feed_entry(self, rig: Rig) -> None:
        envelope = rig.envelope(idempotency_key="k")
        await rig.engine.submit([envelope])
        claim = await rig.claim_one("w1")
        await rig.lose_leases()
        await rig.reclaim_one("w2")
        before = await rig.entries()
        await rig.engine.submit([envelope, rig.envelope(idempotency_key="k")])
        await rig.succeed(claim)
        await rig.engine.renew([claim.lease])
        await rig.claim_due()
        assert await rig.entries() == before

    async def test_without_a_reader_the_feed_is_bounded(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, feed_limit=20)
        for _ in range(300):
            await rig.submit_one()
        await rig.engine.prune([rig.queue])
        kept = await rig.entries()
        # A store may drop whole stream nodes only.
        assert 20 <= len(kept) <= 150
        assert (await rig.engine.stats(rig.queue)).feed_entries == len(kept)

    async def test_with_a_reader_nothing_unread_is_dropped(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, feed_limit=20)
        await rig.engine.attach_reader(rig.queue)
        await rig.engine.attach_reader(rig.queue)
        submitted = [await rig.submit_one() for _ in range(300)]
        await rig.engine.prune([rig.queue])
        assert [event.job_id for event in await rig.events()] == submitted

    async def test_entries_that_were_read_can_be_trimmed(self, rig: Rig) -> None:
        await rig.engine.attach_reader(rig.queue)
        for _ in range(10):
            await rig.submit_one()
        whole = await rig.entries()
        await rig.engine.trim_feed(rig.queue, whole[5].position)
        await rig.engine.trim_feed(rig.queue, whole[5].position)
        # The entry at the position stays: it identifies the feed.
        assert await rig.entries() == whole[5:]
        assert await rig.engine.read_feed(rig.queue, whole[5].position, 100) == whole[5:]

    async def test_a_full_feed_refuses_submissions_but_work_continues(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, feed_max_bytes=20_000)
        await rig.engine.attach_reader(rig.queue)
        payload = b'{"text":"' + b"x" * 500 + b'"}'
        accepted = len(await rig.submit(100, payload=payload))
        with pytest.raises(FeedFull):
            await rig.submit(1, payload=payload)
        assert rig.engine.counters.intake_refused >= 1
        stats = await rig.engine.stats(rig.queue)
        assert stats.feed_share > 1
        feed = [finding for finding in await rig.engine.diagnose([rig.queue]) if finding.check.startswith("feed of")]
        assert [finding.ok for finding in feed] == [False]
        claims = await rig.claim(limit=accepted)
        assert len(claims) == accepted
        assert set(await rig.succeed(*claims)) == {"applied"}

        await rig.engine.trim_feed(rig.queue, (await rig.entries())[-1].position)
        assert len(await rig.submit(1)) == 1
