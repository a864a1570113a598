"""Engine contract for intake: submission, idempotency (E1), delays, holds, priorities, pauses (H5)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.core.fingerprint import raw_fingerprint
from holdfast.core.history import check_history
from holdfast.core.job import MAX_BATCH, Claim, KeyReuse, Meta, Priority, Receipt
from holdfast.core.retry import Retry
from holdfast.core.states import State
from holdfast.core.verdict import DeadLetter, RetryLater, SettleResult
from holdfast.engine.port.feed import SubmissionKey
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import IdempotencyKeyReused, IntakeRefused
from holdfast.testing.contract.harness import (
    FAILURE,
    OTHER_QUEUE,
    QUEUE,
    Contract,
    EngineHarness,
    Rig,
    ids,
    with_priority,
)

MINUTE_MS = 60_000


class IntakeContract(Contract):
    """Guarantees of `submit`."""

    async def test_a_job_matches_its_submission(self, rig: Rig) -> None:
        meta = Meta(context={"user": "u1"}, max_retries=7, retry=Retry(2, base=5), priority=Priority.HIGH)
        envelope = rig.envelope(
            tenant_id="acme", trace_id="t-1", idempotency_key="k", payload=b'[1,"\xc3\xa9"]', meta=meta
        )
        before = await rig.engine.now_ms()

        assert await rig.engine.submit([envelope]) == [Receipt(envelope.job_id)]

        view = await rig.view(envelope.job_id)
        assert (view.state, view.attempt, view.worker, view.result) == (State.QUEUED, 0, "", None)
        assert (view.task, view.payload, view.queue) == (envelope.task, envelope.payload, QUEUE)
        assert (view.tenant_id, view.trace_id, view.idempotency_key) == ("acme", "t-1", "k")
        assert before <= view.created_at_ms <= await rig.engine.now_ms()
        claim = await rig.claim_one()
        assert (claim.task, claim.payload, claim.queue) == (envelope.task, envelope.payload, QUEUE)
        assert (claim.tenant_id, claim.trace_id, claim.idempotency_key) == ("acme", "t-1", "k")
        fingerprint = raw_fingerprint(envelope.task, envelope.payload)
        assert claim.meta == view.meta == msgspec.structs.replace(meta, key_fingerprint=fingerprint)

    async def test_payloads_are_preserved_byte_for_byte(self, rig: Rig) -> None:
        payloads = [
            b"{}",
            b"[]",
            b'{"n":12345678901234567}',
            '{"é":"\\u0000"}'.encode(),
            b'{"big":"' + b"x" * 300_000 + b'"}',
        ]
        for payload in payloads:
            await rig.submit(payload=payload)
        assert [claim.payload for claim in await rig.claim()] == payloads

    async def test_an_empty_batch_is_accepted(self, rig: Rig) -> None:
        assert await rig.engine.submit([]) == []

    async def test_a_batch_may_be_larger_than_one_step(self, rig: Rig) -> None:
        submitted = await rig.submit(2 * MAX_BATCH + 7)
        assert len(set(submitted)) == 2 * MAX_BATCH + 7
        claims: list[Claim] = []
        while more := await rig.claim(limit=2 * MAX_BATCH):
            claims += more
        assert ids(claims) == submitted
        assert None not in await rig.engine.get(rig.queue, submitted)
        assert await rig.engine.renew([claim.lease for claim in claims]) == []
        assert await rig.succeed(*claims) == [SettleResult.APPLIED] * len(submitted)
        assert await rig.open_jobs() == 0

    async def test_a_batch_may_name_several_queues(self, rig: Rig) -> None:
        envelopes = [rig.envelope(queue=queue) for queue in (QUEUE, OTHER_QUEUE, QUEUE)]
        receipts = await rig.engine.submit(envelopes)
        assert [receipt.job_id for receipt in receipts] == [envelope.job_id for envelope in envelopes]
        assert ids(await rig.claim()) == [envelopes[0].job_id, envelopes[2].job_id]
        assert ids(await rig.engine.claim("w1", [OTHER_QUEUE], 10, 0)) == [envelopes[1].job_id]

    # Idempotency -----------------------------------------------------------------------------------

    async def test_a_repeated_key_returns_the_first_job(self, rig: Rig) -> None:
        first = await rig.submit_one(idempotency_key="k")
        again = await rig.engine.submit([rig.envelope(idempotency_key="k", payload=b'{"n": 1.0}')])
        assert again == [Receipt(first, duplicate=True)]
        assert ids(await rig.claim()) == [first]
        assert (await rig.view(first)).payload == b'{"n":1}'

    async def test_a_duplicate_leaves_nothing_behind(self, rig: Rig) -> None:
        first = await rig.submit_one(idempotency_key="k")
        second = rig.envelope(idempotency_key="k")
        await rig.engine.submit([second])
        assert await rig.find(second.job_id) is None
        assert await rig.events(second.job_id) == []
        assert await rig.event_types(first) == ["task.created"]
        assert await rig.open_jobs() == 1

    async def test_a_key_repeated_in_one_batch_is_a_duplicate(self, rig: Rig) -> None:
        one, two, three = (rig.envelope(idempotency_key=key) for key in ("k", "k", "other"))
        assert await rig.engine.submit([one, two, three]) == [
            Receipt(one.job_id),
            Receipt(one.job_id, duplicate=True),
            Receipt(three.job_id),
        ]
        assert ids(await rig.claim()) == [one.job_id, three.job_id]

    async def test_a_key_belongs_to_a_tenant_and_a_queue(self, rig: Rig) -> None:
        envelopes = [
            rig.envelope(idempotency_key="k", tenant_id="acme"),
            rig.envelope(idempotency_key="k", tenant_id="zeta"),
            rig.envelope(idempotency_key="k", tenant_id="acme", queue=OTHER_QUEUE),
            # A separator in tenant or key does not make two keys equal.
            rig.envelope(idempotency_key="b:k", tenant_id="a"),
            rig.envelope(idempotency_key="k", tenant_id="a:b"),
        ]
        receipts = [(await rig.engine.submit([envelope]))[0] for envelope in envelopes]
        assert receipts == [Receipt(envelope.job_id) for envelope in envelopes]

    async def test_jobs_without_a_key_are_all_different(self, rig: Rig) -> None:
        assert len(set(await rig.submit(3))) == 3
        assert len(await rig.claim()) == 3

    async def test_a_finished_job_keeps_its_key(self, rig: Rig) -> None:
        claim = await rig.start_one(idempotency_key="k")
        await rig.succeed(claim)
        again = await rig.engine.submit([rig.envelope(idempotency_key="k")])
        assert again == [Receipt(claim.job_id, duplicate=True)]
        assert await rig.claim() == []

    async def test_a_key_is_free_after_its_window(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, idempotency_window_ms=MINUTE_MS)
        for end in ("succeed", "dead-letter", "cancel"):
            claim = await rig.start_one(idempotency_key="k")
            if end == "succeed":
                await rig.succeed(claim)
            elif end == "dead-letter":
                await rig.settle(claim, DeadLetter(FAILURE))
            else:
                await rig.move(claim.job_id, State.CANCELLED)
            await harness.advance(MINUTE_MS // 2)
            assert (await rig.engine.submit([rig.envelope(idempotency_key="k")]))[0].duplicate
            await harness.advance(MINUTE_MS)

    async def test_an_open_job_keeps_its_key_however_long_it_takes(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, idempotency_window_ms=MINUTE_MS)
        waiting = await rig.submit_one(idempotency_key="delayed", delay_ms=100 * MINUTE_MS)
        held = await rig.submit_one(idempotency_key="held", hold=True)
        claim = await rig.start_one(idempotency_key="running")
        await harness.advance(10 * MINUTE_MS)
        for first, key in ((waiting, "delayed"), (held, "held"), (claim.job_id, "running")):
            assert await rig.engine.submit([rig.envelope(idempotency_key=key)]) == [Receipt(first, duplicate=True)]

    @pytest.mark.parametrize("end", ["succeed", "dead-letter", "cancel"])
    async def test_a_key_with_its_own_window_is_free_after_it_and_not_before(
        self, harness: EngineHarness, end: str
    ) -> None:
        rig = await Rig.on(harness, idempotency_window_ms=100 * MINUTE_MS)
        claim = await rig.start_one(idempotency_key="k", meta=Meta(key_window_ms=MINUTE_MS))
        others = await rig.start_one(idempotency_key="other")
        await rig.succeed(others)
        if end == "succeed":
            await rig.succeed(claim)
        elif end == "dead-letter":
            await rig.settle(claim, DeadLetter(FAILURE))
        else:
            await rig.move(claim.job_id, State.CANCELLED)
        await harness.advance(MINUTE_MS // 2)
        assert await rig.engine.submit([rig.envelope(idempotency_key="k")]) == [Receipt(claim.job_id, duplicate=True)]
        await harness.advance(MINUTE_MS // 2 + 1)
        assert not (await rig.engine.submit([rig.envelope(idempotency_key="k")]))[0].duplicate
        assert (await rig.engine.submit([rig.envelope(idempotency_key="other")]))[0].duplicate

    async def test_a_keys_own_window_may_be_longer_than_the_engines(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, idempotency_window_ms=MINUTE_MS)
        claim = await rig.start_one(idempotency_key="k", meta=Meta(key_window_ms=10 * MINUTE_MS))
        await rig.succeed(claim)
        await harness.advance(9 * MINUTE_MS)
        assert (await rig.engine.submit([rig.envelope(idempotency_key="k")]))[0].duplicate
        await harness.advance(MINUTE_MS + 1)
        assert not (await rig.engine.submit([rig.envelope(idempotency_key="k")]))[0].duplicate

    async def test_an_open_job_keeps_its_key_beyond_its_own_window(self, rig: Rig) -> None:
        meta = Meta(key_window_ms=MINUTE_MS)
        waiting = await rig.submit_one(idempotency_key="delayed", delay_ms=100 * MINUTE_MS, meta=meta)
        claim = await rig.start_one(idempotency_key="running", meta=meta)
        retrying = await rig.start_one(idempotency_key="retrying", meta=meta)
        await rig.settle(retrying, RetryLater(50 * MINUTE_MS, FAILURE))
        await rig.harness.advance(10 * MINUTE_MS)
        for first, key in ((waiting, "delayed"), (claim.job_id, "running"), (retrying.job_id, "retrying")):
            assert await rig.engine.submit([rig.envelope(idempotency_key=key)]) == [Receipt(first, duplicate=True)]
        await rig.move(waiting, State.CANCELLED)
        await rig.harness.advance(MINUTE_MS + 1)
        assert not (await rig.engine.submit([rig.envelope(idempotency_key="delayed")]))[0].duplicate

    # A key that belongs to another request ---------------------------------------------------------

    @pytest.mark.parametrize("other", [{"payload": b'{"n":2}'}, {"task": "scan"}])
    async def test_a_key_of_another_request_is_refused(self, rig: Rig, other: dict[str, Any]) -> None:
        first = await rig.submit_one(idempotency_key="k")
        before = await rig.entries()
        reuse, new = rig.envelope(idempotency_key="k", **other), rig.envelope()
        with pytest.raises(IdempotencyKeyReused) as refused:
            await rig.engine.submit([new, reuse])
        assert (refused.value.queue, refused.value.key, refused.value.job_id) == (rig.queue, "k", first)
        # A batch is accepted whole or not at all.
        assert await rig.engine.get(rig.queue, [new.job_id, reuse.job_id]) == [None, None]
        assert await rig.entries() == before
        assert (await rig.engine.submit([rig.envelope(idempotency_key="k")]))[0].duplicate

    async def test_each_envelope_is_judged_by_its_own_key(self, rig: Rig) -> None:
        first, reuse, same, new = (
            rig.envelope(idempotency_key="k"),
            rig.envelope(idempotency_key="k", payload=b'{"n":2}'),
            rig.envelope(idempotency_key="k"),
            rig.envelope(),
        )
        answers = await rig.engine.submit_each([first, reuse, same, new])
        assert [answers[0], *answers[2:]] == [
            Receipt(first.job_id),
            Receipt(first.job_id, duplicate=True),
            Receipt(new.job_id),
        ]
        assert isinstance(answers[1], IdempotencyKeyReused)
        assert answers[1].job_id == first.job_id
        assert ids(await rig.claim()) == [first.job_id, new.job_id]
        assert await rig.find(reuse.job_id) is None
        # A lost reply changes nothing.
        again = await rig.engine.submit_each([first, reuse, same, new])
        assert [type(answer) for answer in again] == [type(answer) for answer in answers]

    async def test_a_reused_key_may_return_the_first_job_and_leave_an_event(self, rig: Rig) -> None:
        first = await rig.submit_one(idempotency_key="k")
        other = rig.envelope(idempotency_key="k", payload=b'{"n":2}', on_key_reuse=KeyReuse.RETURN)
        for new in ([], [rig.envelope()]):
            receipts = await rig.engine.submit([other, *new])
            assert receipts == [Receipt(first, duplicate=True), *(Receipt(envelope.job_id) for envelope in new)]
        events = await rig.events(first)
        assert [event.type for event in events] == ["task.created", "task.duplicate", "task.duplicate"]
        assert [(event.data, event.to_state) for event in events[1:]] == [({"arguments_differ": True}, None)] * 2
        assert (await rig.view(first)).payload == b'{"n":1}'
        assert await rig.find(other.job_id) is None
        claim = await rig.claim_one()
        await rig.succeed(claim)
        await rig.engine.submit([other])
        assert (await rig.event_types(first))[-1] == "task.duplicate"
        check_history(await rig.events())

    async def test_an_equal_request_with_any_choice_leaves_no_event(self, rig: Rig) -> None:
        first = await rig.submit_one(idempotency_key="k", payload=b'{"a":{"x":1,"y":[2]},"b":1e2}')
        for choice in KeyReuse:
            payload = b'{"b": 100, "a": {"y": [2.0], "x": 1}}'
            again = rig.envelope(idempotency_key="k", payload=payload, on_key_reuse=choice, delay_ms=5)
            assert await rig.engine.submit([again]) == [Receipt(first, duplicate=True)]
        assert await rig.event_types(first) == ["task.created"]

    async def test_a_key_without_a_fingerprint_belongs_to_every_request(self, rig: Rig) -> None:
        now_ms = await rig.engine.now_ms()
        await rig.engine.restore_keys(rig.queue, [SubmissionKey("default", "k", "first", now_ms + MINUTE_MS)])
        assert await rig.engine.submit([rig.envelope(idempotency_key="k")]) == [Receipt("first", duplicate=True)]

    async def test_a_restored_key_has_its_fingerprint(self, rig: Rig) -> None:
        job_id = await rig.submit_one(idempotency_key="k")
        fingerprint = (await rig.view(job_id)).meta.key_fingerprint
        assert len(fingerprint.encode()) == 16
        expires_at_ms = await rig.engine.now_ms() + MINUTE_MS
        key = SubmissionKey("default", "restored", "first", expires_at_ms, fingerprint)
        await rig.engine.restore_keys(rig.queue, [key])
        same, other = (rig.envelope(idempotency_key="restored", payload=payload) for payload in (b'{"n":1}', b"{}"))
        receipt, refusal = await rig.engine.submit_each([same, other])
        assert receipt == Receipt("first", duplicate=True)
        assert isinstance(refusal, IdempotencyKeyReused)

    async def test_a_fingerprint_from_outside_is_not_used(self, rig: Rig) -> None:
        first = await rig.submit_one(idempotency_key="k")
        forged = Meta(key_fingerprint=(await rig.view(first)).meta.key_fingerprint)
        with pytest.raises(IdempotencyKeyReused):
            await rig.engine.submit([rig.envelope(idempotency_key="k", payload=b"{}", meta=forged)])

    async def test_an_engine_uses_the_fingerprints_of_its_app(self, harness: EngineHarness) -> None:
        rig = await Rig.on(harness, fingerprint=lambda task, payload: "taskb" + "0" * 11)
        first = await rig.submit_one(idempotency_key="k")
        assert await rig.engine.submit([rig.envelope(idempotency_key="k", payload=b"{}")]) == [
            Receipt(first, duplicate=True)
        ]

    # A job's own id as a key -----------------------------------------------------------------------

    @pytest.mark.parametrize("tenant", ["default", "acme"])
    @pytest.mark.parametrize("state", [State.QUEUED, State.RUNNING, State.RETRYING, State.SUCCEEDED, State.CANCELLED])
    async def test_the_id_of_a_job_without_a_key_is_its_key(self, rig: Rig, state: State, tenant: str) -> None:
        job_id, _ = await rig.put_in(state, tenant_id=tenant)
        again = rig.envelope(idempotency_key=job_id, tenant_id=tenant, payload=b'{"n":2}')
        assert await rig.engine.submit([again]) == [Receipt(job_id, duplicate=True)]
        elsewhere = rig.envelope(idempotency_key=job_id, tenant_id="other")
        assert await rig.engine.submit([elsewhere]) == [Receipt(elsewhere.job_id)]

    async def test_the_id_of_a_job_with_a_key_is_not_its_key(self, rig: Rig) -> None:
        for tenant in ("default", "acme"):
            job_id = await rig.submit_one(idempotency_key="k", tenant_id=tenant)
            other = rig.envelope(idempotency_key=job_id, tenant_id=tenant)
            assert await rig.engine.submit([other]) == [Receipt(other.job_id)]

    async def test_a_jobs_own_id_given_as_its_key_changes_nothing(self, rig: Rig) -> None:
        envelope = rig.envelope(job_id="own", idempotency_key="own")
        assert await rig.engine.submit([envelope]) == [Receipt("own")]
        assert await rig.engine.submit([envelope]) == [Receipt("own")]
        assert (await rig.view("own")).meta.key_fingerprint == ""
        again = rig.envelope(idempotency_key="own", payload=b'{"n":2}')
        assert await rig.engine.submit([again]) == [Receipt("own", duplicate=True)]
        await rig.succeed(await rig.claim_one())
        await rig.harness.advance(rig.engine.options.finished_ttl_ms + 1)
        new = rig.envelope(idempotency_key="own")
        assert await rig.engine.submit([new]) == [Receipt(new.job_id)]

    async def test_ids_and_keys_in_one_batch(self, rig: Rig) -> None:
        plain, keyed = rig.envelope(job_id="one"), rig.envelope(idempotency_key="one")
        assert await rig.engine.submit([plain, keyed]) == [Receipt("one"), Receipt("one", duplicate=True)]
        # A submission without a key is identified by its id only.
        first, second = rig.envelope(idempotency_key="two"), rig.envelope(job_id="two")
        assert await rig.engine.submit([first, second]) == [Receipt(first.job_id), Receipt("two")]
        again = rig.envelope(idempotency_key="two")
        assert await rig.engine.submit([again]) == [Receipt(first.job_id, duplicate=True)]

    async def test_a_resend_after_the_record_has_expired_is_not_a_duplicate(self, rig: Rig) -> None:
        envelope = rig.envelope(idempotency_key="k")
        await rig.engine.submit([envelope])
        await rig.succeed(await rig.claim_one())
        await rig.harness.advance(rig.engine.options.finished_ttl_ms + 1)
        assert await rig.engine.submit([envelope]) == [Receipt(envelope.job_id)]

    async def test_concurrent_submissions_of_one_key_create_one_job(self, rig: Rig) -> None:
        engines = [rig.engine, await rig.harness.make(), await rig.harness.make()]
        envelopes = [rig.envelope(idempotency_key="k") for _ in range(12)]
        calls = (engines[number % 3].submit([envelope]) for number, envelope in enumerate(envelopes))
        receipts = [receipt for (receipt,) in await asyncio.gather(*calls)]
        assert len({receipt.job_id for receipt in receipts}) == 1
        assert [receipt.duplicate for receipt in receipts].count(False) == 1
        assert ids(await rig.claim()) == [receipts[0].job_id]

    # After a lost reply ----------------------------------------------------------------------------

    async def test_a_resent_submission_is_not_a_duplicate(self, rig: Rig) -> None:
        envelopes = [
            rig.envelope(),
            rig.envelope(idempotency_key="k"),
            rig.envelope(delay_ms=MINUTE_MS),
            rig.envelope(hold=True),
        ]
        receipts = await rig.engine.submit(envelopes)
        assert await rig.engine.submit(envelopes) == receipts
        assert await rig.engine.submit(list(reversed(envelopes))) == list(reversed(receipts))
        assert len(await rig.events()) == len(envelopes)
        assert await rig.open_jobs() == len(envelopes)

    async def test_a_resent_submission_of_a_claimed_or_finished_job_changes_nothing(self, rig: Rig) -> None:
        envelope = rig.envelope(idempotency_key="k")
        await rig.engine.submit([envelope])
        claim = await rig.claim_one()
        assert await rig.engine.submit([envelope]) == [Receipt(envelope.job_id)]
        assert await rig.state(envelope.job_id) is State.RUNNING
        await rig.succeed(claim)
        assert await rig.engine.submit([envelope]) == [Receipt(envelope.job_id)]
        assert await rig.state(envelope.job_id) is State.SUCCEEDED
        assert await rig.claim() == []

    async def test_a_resent_duplicate_is_still_a_duplicate(self, rig: Rig) -> None:
        first = await rig.submit_one(idempotency_key="k")
        second = rig.envelope(idempotency_key="k")
        for _ in range(2):
            assert await rig.engine.submit([second]) == [Receipt(first, duplicate=True)]

    async def test_one_envelope_twice_in_one_batch_is_one_job(self, rig: Rig) -> None:
        for envelope in (rig.envelope(), rig.envelope(idempotency_key="k")):
            receipts = await rig.engine.submit([envelope, envelope])
            assert [receipt.job_id for receipt in receipts] == [envelope.job_id] * 2
            assert ids(await rig.claim()) == [envelope.job_id]

    # Delays ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", ["delay", "run_at"])
    async def test_a_delayed_job_does_not_run_before_it_is_due(self, rig: Rig, how: str) -> None:
        due_at_ms = await rig.engine.now_ms() + MINUTE_MS
        job_id = await rig.submit_one(**({"delay_ms": MINUTE_MS} if how == "delay" else {"run_at_ms": due_at_ms}))
        assert await rig.state(job_id) is State.QUEUED
        assert await rig.claim_due() == []

        await rig.harness.advance(MINUTE_MS - 10_000)
        assert await rig.claim_due() == []

        await rig.harness.advance(10_000)
        assert ids(await rig.claim_due()) == [job_id]
        assert await rig.event_types(job_id) == ["task.created", "task.claimed"]

    async def test_a_run_time_in_the_past_means_now(self, rig: Rig) -> None:
        job_id = await rig.submit_one(run_at_ms=await rig.engine.now_ms() - MINUTE_MS)
        assert ids(await rig.claim_due()) == [job_id]

    async def test_promote_returns_when_the_next_job_is_due(self, rig: Rig) -> None:
        assert (await rig.engine.promote([rig.queue], 10)).next_due_at_ms == 0
        await rig.submit(delay_ms=5 * MINUTE_MS)
        await rig.submit(delay_ms=MINUTE_MS)
        promotion = await rig.engine.promote([rig.queue], 10)
        assert promotion.count == 0
        assert 0 < promotion.next_due_at_ms - promotion.now_ms <= MINUTE_MS

    async def test_promote_takes_no_more_than_its_limit(self, rig: Rig) -> None:
        await rig.submit(5, delay_ms=MINUTE_MS)
        await rig.harness.advance(MINUTE_MS + 1)
        counts = [(await rig.engine.promote([rig.queue], 2)).count for _ in range(4)]
        assert counts == [2, 2, 1, 0]
        assert len(await rig.claim()) == 5

    # Holds -----------------------------------------------------------------------------------------

    async def test_a_held_job_waits_for_approval(self, rig: Rig) -> None:
        job_id = await rig.submit_one(hold=True)
        assert await rig.state(job_id) is State.WAITING_APPROVAL
        assert await rig.claim_due() == []
        assert await rig.move(job_id, State.QUEUED, actor="bea", reason="looks fine") is State.WAITING_APPROVAL
        assert ids(await rig.claim()) == [job_id]
        assert await rig.event_types(job_id) == ["approval.requested", "approval.approved", "task.claimed"]

    @pytest.mark.parametrize("park", [State.WAITING_APPROVAL, State.SUSPENDED])
    async def test_resuming_a_parked_job_does_not_shorten_its_delay(self, rig: Rig, park: State) -> None:
        held = await rig.submit_one(delay_ms=MINUTE_MS, hold=park is State.WAITING_APPROVAL)
        if park is State.SUSPENDED:
            await rig.move(held, park)
        await rig.move(held, State.QUEUED)
        assert await rig.state(held) is State.QUEUED
        assert await rig.claim_due() == []
        await rig.harness.advance(MINUTE_MS + 1)
        assert ids(await rig.claim_due()) == [held]

    # Priorities ------------------------------------------------------------------------------------

    async def test_high_priority_jobs_run_first_and_equal_priorities_in_order(self, rig: Rig) -> None:
        low = await rig.submit(2, meta=with_priority(Priority.LOW))
        normal = await rig.submit(2)
        high = await rig.submit(2, meta=with_priority(Priority.HIGH))
        assert ids(await rig.claim()) == high + normal + low

    async def test_a_flood_of_high_priority_jobs_does_not_starve_the_rest(self, rig: Rig) -> None:
        low = await rig.submit_one(meta=with_priority(Priority.LOW))
        normal = await rig.submit_one()
        claimed: set[str] = set()
        for _ in range(16):
            # In every round more high-priority jobs arrive than this worker claims.
            await rig.submit(10, meta=with_priority(Priority.HIGH))
            claims = await rig.claim(limit=5)
            assert len(claims) == 5
            claimed.update(ids(claims))
        assert {low, normal} <= claimed

    async def test_a_promoted_job_keeps_its_priority(self, rig: Rig) -> None:
        high = await rig.submit_one(meta=with_priority(Priority.HIGH), delay_ms=MINUTE_MS)
        low = await rig.submit_one(meta=with_priority(Priority.LOW), delay_ms=MINUTE_MS - 1)
        await rig.harness.advance(MINUTE_MS)
        await rig.promote()
        assert ids(await rig.claim()) == [high, low]

    # Paused intake ---------------------------------------------------------------------------------

    async def test_paused_intake_refuses_submissions_and_stores_nothing(self, rig: Rig) -> None:
        before = await rig.submit_one()
        await rig.engine.set_control(rig.queue, QueueControl(intake_paused=True))
        envelope = rig.envelope()
        with pytest.raises(IntakeRefused) as refused:
            await rig.engine.submit([envelope])
        assert refused.value.queue == rig.queue
        assert rig.engine.counters.intake_refused == 1
        assert await rig.find(envelope.job_id) is None
        assert ids(await rig.claim()) == [before]

        other = rig.envelope(queue=OTHER_QUEUE)
        assert await rig.engine.submit([other]) == [Receipt(other.job_id)]
        await rig.engine.set_control(rig.queue, QueueControl())
        assert await rig.engine.submit([envelope]) == [Receipt(envelope.job_id)]
