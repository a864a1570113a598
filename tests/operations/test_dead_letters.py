"""Dead letters: found, sent back to work once, thrown away by two people (requirements D3–D5)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.core.principal import Role
from holdfast.core.states import State
from holdfast.engine.port.operators import QueueControl
from holdfast.errors import (
    Conflict,
    Denied,
    EngineUnavailable,
    Forbidden,
    IntakeRefused,
    InvalidOption,
    InvalidPayload,
    NotFound,
    PayloadTooLarge,
)
from holdfast.execution.backend import backend_of
from holdfast.guard import decisions
from holdfast.ledger.port.operators import DeadLetterStatus
from holdfast.ledger.queries.operator_filters import DeadLetterFilter
from holdfast.operations.dead_letters import PayloadChange
from holdfast.upkeep.dispatch import ReplaySubmission
from tests.operations.dead_letters import EVERY, Broken, jobs_of, office, status
from tests.operations.deployment import ADA, APPROVER, BOB, LOCAL, OF_ACME, VIEWER, World, person

# Looking -------------------------------------------------------------------------------------------


async def test_letters_are_listed_grouped_and_shown_with_their_history(world: World) -> None:
    letters = office(world)
    dlq_ids = await world.dead(3)
    page = await letters.list(ADA, EVERY)
    assert {letter.dlq_id for letter in page.dead_letters} == set(dlq_ids)
    (group,) = await letters.groups(ADA, EVERY)
    # "card 10 refused", "card 11 refused" … are one kind of error.
    assert (group.count, group.job_type, group.error_code) == (3, "charge", page.dead_letters[0].error_code)
    assert await letters.count(ADA, DeadLetterFilter(fingerprint=group.fingerprint, text="CARD 11")) == 1
    letter = await letters.show(VIEWER, dlq_ids[0])
    assert letter.payload.value == {"amount": 10}
    assert "card 10 refused" in letter.error
    assert [event.type for event in letter.events][:2] == ["task.created", "task.claimed"]
    assert letter.events[-1].to_state is State.FAILED


async def test_of_another_tenant_nothing_is_there(world: World) -> None:
    letters = office(world)
    (theirs,) = await world.dead(1, tenant_id="globex")
    (ours,) = await world.dead(1, tenant_id="acme")
    for wanted in (EVERY, DeadLetterFilter(tenants=("globex", "acme"))):
        assert [letter.dlq_id for letter in (await letters.list(OF_ACME, wanted)).dead_letters] == [ours]
        assert await letters.count(OF_ACME, wanted) == 1
        assert [group.count for group in await letters.groups(OF_ACME, wanted)] == [1]
        report = await letters.replay_many(OF_ACME, wanted, reason="", dry_run=True)
        assert report.matched == 1
    only_theirs = DeadLetterFilter(tenants=("globex",))
    assert (await letters.list(OF_ACME, only_theirs)).dead_letters == []
    assert await letters.count(OF_ACME, only_theirs) == 0
    forbidden: list[Any] = [
        letters.show(OF_ACME, theirs),
        letters.diff(OF_ACME, theirs, b"{}"),
        letters.replay(OF_ACME, theirs, reason="r"),
        letters.discard(OF_ACME, theirs, "r"),
        letters.confirm(OF_ACME, theirs),
        letters.keep(OF_ACME, theirs),
    ]
    said = set()
    for attempt in forbidden:
        with pytest.raises(NotFound) as refused:
            await attempt
        said.add(str(refused.value))
    with pytest.raises(NotFound) as nobody:
        await letters.show(OF_ACME, "nobody")
    assert said == {str(nobody.value).replace("nobody", theirs)}
    for many in (letters.discard_many, letters.replay_many):
        assert (await many(OF_ACME, only_theirs, reason="r")).results == []
    assert (await letters.confirm_many(OF_ACME, only_theirs)).results == []
    assert await status(world, theirs) is DeadLetterStatus.OPEN


async def test_roles(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    for someone in (VIEWER, APPROVER):
        attempts: list[Any] = [
            letters.replay(someone, dlq_id, reason="r"),
            letters.replay_many(someone, EVERY, reason="r"),
            letters.replay_many(someone, EVERY, reason="r", dry_run=True),
            letters.discard(someone, dlq_id, "r"),
            letters.discard_many(someone, EVERY, reason="r"),
            letters.confirm(someone, dlq_id),
            letters.confirm_many(someone, EVERY),
            letters.keep(someone, dlq_id),
        ]
        for attempt in attempts:
            with pytest.raises(Forbidden):
                await attempt
    assert await status(world, dlq_id) is DeadLetterStatus.OPEN


# Back to work --------------------------------------------------------------------------------------


async def test_a_replay_is_a_new_job_that_knows_its_letter(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead(1, idempotency_key="order-1", context={"user": "u1"}, trace_id="t-1", priority="high")
    first = await letters.show(ADA, dlq_id)
    world.broken = False
    done = await letters.replay(ADA, dlq_id, reason="the bank is back")
    await world.run()
    view = await world.view(done.job_id)
    assert view.state is State.SUCCEEDED
    assert view.idempotency_key == f"dlq:{dlq_id}:1"
    assert view.meta.replay is not None
    assert (view.meta.replay.dlq_id, view.meta.replay.job_id, view.meta.replay.key) == (dlq_id, first.job_id, "order-1")
    assert (view.trace_id, view.meta.context, view.meta.priority) == ("t-1", {"user": "u1"}, 0)
    # The task's effects are still the first job's.
    assert world.runs == [(10, "order-1"), (10, "order-1")]
    assert world.paid == ["order-1"]
    letter = await letters.show(ADA, dlq_id)
    assert (letter.status, letter.replayed_as, letter.replay_count) == (DeadLetterStatus.REPLAYED, done.job_id, 1)
    (line,) = await world.log("operator.dlq_replay")
    assert (line.actor, line.reason, line.target_id, line.before.value["status"]) == (
        "ada",
        "the bank is back",
        dlq_id,
        "open",
    )
    assert line.after.value["replayed_as"] == done.job_id


async def test_a_replay_of_a_replay_keeps_the_first_key(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    first_job = (await letters.show(ADA, dlq_id)).job_id
    second = await letters.replay(ADA, dlq_id, reason="")
    await world.run()
    third = await letters.replay(ADA, (await world.view(second.job_id)).meta.dlq_id, reason="")
    world.broken = False
    await world.run()
    assert (await world.view(third.job_id)).state is State.SUCCEEDED
    assert [key for _, key in world.runs] == [first_job] * 3
    assert world.paid == [first_job]


async def test_a_letter_can_be_replayed_again(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    one = await letters.replay(ADA, dlq_id, reason="")
    two = await letters.replay(BOB, dlq_id, reason="")
    assert (one.number, two.number) == (1, 2)
    assert one.job_id != two.job_id
    assert (await world.view(two.job_id)).idempotency_key == f"dlq:{dlq_id}:2"


async def test_the_jobs_own_retry_policy_comes_along(world: World) -> None:
    from holdfast import Retry

    (dlq_id,) = await world.dead(1, retry=Retry(max_retries=7))
    done = await office(world).replay(ADA, dlq_id, reason="")
    assert (await world.view(done.job_id)).meta.retry == Retry(max_retries=7)


async def test_an_edited_payload_is_seen_checked_and_run(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    edited = b'{"amount": 99, "currency": "CHF"}'
    changes = await letters.diff(ADA, dlq_id, edited)
    assert [change.document for change in changes] == [
        {"path": "/amount", "before": 10, "after": 99},
        {"path": "/currency", "after": "CHF"},
    ]
    assert changes[0] == PayloadChange("/amount", 10, 99)
    world.broken = False
    done = await letters.replay(ADA, dlq_id, reason="wrong amount", payload=edited)
    await world.run()
    view = await world.view(done.job_id)
    assert view.result == b'"99 CHF"'
    # The letter itself stays what it was.
    assert (await letters.show(ADA, dlq_id)).payload.value == {"amount": 10}
    (line,) = await world.log("operator.dlq_replay")
    assert line.after.value["edited"] is True


async def test_a_payload_that_cannot_be_run_changes_nothing(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    large = b'{"amount": 1, "currency": "' + b"x" * (1024 * 1024) + b'"}'
    for payload in (b"not json", b"42", b'{"amount": "much"}', b'{"sum": 1}', b"\xff", large):
        error = PayloadTooLarge if payload is large else InvalidPayload
        with pytest.raises(error):
            await letters.diff(ADA, dlq_id, payload)
        with pytest.raises(error):
            await letters.replay(ADA, dlq_id, reason="", payload=payload)
    assert await status(world, dlq_id) is DeadLetterStatus.OPEN
    assert await world.log("operator.dlq_replay") == []


async def test_two_people_who_replay_one_letter_at_once_make_one_job(world: World) -> None:
    letters = [office(world) for _ in range(8)]
    (dlq_id,) = await world.dead()
    people = [person(f"p{number}") for number in range(8)]
    ended = await asyncio.gather(
        # All of them have seen it as it is now.
        *(one.replay(who, dlq_id, reason="", expected=0) for one, who in zip(letters, people, strict=True)),
        return_exceptions=True,
    )
    jobs = {done.job_id for done in ended if not isinstance(done, BaseException)}
    assert len(jobs) == 1
    assert all(isinstance(error, Conflict) for error in ended if isinstance(error, BaseException))
    assert len(await jobs_of(world)) == 2
    assert len(await world.log("operator.dlq_replay")) == 1


async def test_who_has_seen_an_older_letter_is_told(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    await letters.replay(ADA, dlq_id, reason="", expected=0)
    with pytest.raises(Conflict, match="replayed meanwhile"):
        await letters.replay(BOB, dlq_id, reason="", expected=0)


async def test_of_a_replay_and_a_discard_at_once_one_wins(world: World) -> None:
    letters = office(world)
    for dlq_id in await world.dead(6):
        await letters.discard(ADA, dlq_id, "too old")
        # A replay needs an open letter; whichever of the three comes first decides.
        kept, discarded, replayed = await asyncio.gather(
            letters.keep(BOB, dlq_id, "wait"),
            letters.confirm(BOB, dlq_id),
            letters.replay(BOB, dlq_id, reason="again"),
            return_exceptions=True,
        )
        letter = await letters.show(ADA, dlq_id)
        assert isinstance(discarded, Conflict) or isinstance(replayed, Conflict)
        if letter.status is DeadLetterStatus.DISCARDED:
            assert discarded is None
            assert letter.replayed_as is None
            assert isinstance(kept, Conflict)
            with pytest.raises(Conflict, match="discarded"):
                await letters.replay(ADA, dlq_id, reason="")
        elif letter.status is DeadLetterStatus.REPLAYED:
            assert letter.replayed_as == replayed.job_id  # type: ignore[union-attr]
            with pytest.raises(Conflict):
                await letters.discard(ADA, dlq_id, "too old")


async def test_two_who_discard_and_replay_an_open_letter(world: World) -> None:
    letters = office(world)
    for dlq_id in await world.dead(6):
        asked, replayed = await asyncio.gather(
            letters.discard(ADA, dlq_id, "too old"), letters.replay(BOB, dlq_id, reason=""), return_exceptions=True
        )
        assert [isinstance(asked, Conflict), isinstance(replayed, Conflict)].count(True) == 1
        won = await status(world, dlq_id)
        assert won is (DeadLetterStatus.REPLAYED if asked is not None else DeadLetterStatus.DISCARD_REQUESTED)


# Crashes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
async def test_upkeep_finishes_a_replay_that_a_crash_has_left(world: World, after: bool) -> None:
    (dlq_id,) = await world.dead()
    with pytest.raises(EngineUnavailable, match="upkeep submits it"):
        await office(world, Broken(world, after=after)).replay(
            ADA, dlq_id, reason="", payload=b'{"amount": 77}'
        )  # fmt: skip
    ledger = backend_of(world.app).ledger
    assert ledger is not None
    left = await ledger.operators.unsubmitted_replays(10)
    assert [row.dlq_id for row in left] == [dlq_id]
    world.broken = False
    # Two processes at once, and again: all make the same job.
    replays = [ReplaySubmission(world.app.engine, ledger) for _ in range(2)]
    await asyncio.gather(*(one.run_once() for one in replays))
    await replays[0].run_once()
    assert await ledger.operators.unsubmitted_replays(10) == []
    await world.run()
    letter = await office(world).show(ADA, dlq_id)
    assert letter.replayed_as is not None
    assert (await world.view(letter.replayed_as)).result == b'"77 EUR"'
    assert len(await jobs_of(world)) == 2
    assert len(world.runs) == 2


async def test_a_replay_that_the_engine_refuses_hinders_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [(await world.dead())[0] for _ in range(3)]
    for dlq_id in letters:
        with pytest.raises(EngineUnavailable):
            await office(world, Broken(world)).replay(ADA, dlq_id, reason="")
    world.broken = False
    ledger, engine = backend_of(world.app).ledger, world.app.engine
    assert ledger is not None
    refused, *others = await ledger.operators.unsubmitted_replays(10)
    submit = engine.submit

    async def busy(envelopes: Any) -> Any:
        if envelopes[0].job_id == refused.new_job_id:
            raise IntakeRefused(refused.queue, "made to fail by the test")
        return await submit(envelopes)

    monkeypatch.setattr(engine, "submit", busy)
    # A page that is all refused.
    assert await office(world).submit_pending(1) == len(others)
    assert await ledger.operators.unsubmitted_replays(10) == [refused]


async def test_who_comes_while_a_replay_is_on_its_way_gets_that_one(world: World) -> None:
    (dlq_id,) = await world.dead()
    with pytest.raises(EngineUnavailable):
        await office(world, Broken(world)).replay(ADA, dlq_id, reason="")
    done = await office(world).replay(BOB, dlq_id, reason="")
    assert done.number == 1
    assert len(await jobs_of(world)) == 2


async def test_a_queue_that_takes_nothing_leaves_the_letter_open(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    await world.app.engine.set_control("default", QueueControl(intake_paused=True))
    with pytest.raises(IntakeRefused):
        await letters.replay(ADA, dlq_id, reason="")
    assert await status(world, dlq_id) is DeadLetterStatus.OPEN
    (line,) = await world.log("operator.dlq_replay_refused")
    assert (line.actor, line.target_id) == ("ada", dlq_id)
    await world.app.engine.set_control("default", QueueControl())
    assert (await letters.replay(ADA, dlq_id, reason="")).number == 2


async def test_guards_see_a_replay_as_any_submission(world: World) -> None:
    (dlq_id,) = await world.dead()
    seen: list[Any] = []

    @world.app.guard
    def refuse(request: decisions.GuardRequest) -> Any:
        seen.append(request)
        return decisions.Deny("not this one") if request.arguments["amount"] == 10 else None

    letters = office(world)
    with pytest.raises(Denied, match="not this one"):
        await letters.replay(ADA, dlq_id, reason="")
    assert seen[0].task == "charge"
    assert await status(world, dlq_id) is DeadLetterStatus.OPEN
    assert len(await jobs_of(world)) == 1
    await letters.replay(ADA, dlq_id, reason="", payload=b'{"amount": 11}')
    assert await status(world, dlq_id) is DeadLetterStatus.REPLAYED


# Away with it --------------------------------------------------------------------------------------


async def test_two_people_and_a_reason_throw_a_letter_away(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    with pytest.raises(InvalidOption, match="reason"):
        await letters.discard(ADA, dlq_id, "  ")
    with pytest.raises(Conflict, match=r"no discard of .* was requested"):
        await letters.confirm(BOB, dlq_id)
    await letters.discard(ADA, dlq_id, "customer withdrew")
    with pytest.raises(Forbidden, match="another person"):
        await letters.confirm(ADA, dlq_id)
    # The same person with another role is still the same person.
    with pytest.raises(Forbidden, match="another person"):
        await letters.confirm(msgspec.structs.replace(ADA, role=Role.ADMIN), dlq_id)
    await letters.confirm(BOB, dlq_id)
    letter = await letters.show(ADA, dlq_id)
    assert (letter.status, letter.requested_by, letter.confirmed_by, letter.reason) == (
        DeadLetterStatus.DISCARDED,
        "ada",
        "bob",
        "customer withdrew",
    )
    (asked,) = await world.log("operator.dlq_discard_request")
    (done,) = await world.log("operator.dlq_discard")
    assert (asked.actor, asked.reason, done.actor) == ("ada", "customer withdrew", "bob")


async def test_nobody_whom_no_token_proves_discards(world: World) -> None:
    letters = office(world)
    (dlq_id,) = await world.dead()
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await letters.discard(LOCAL, dlq_id, "old")
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await letters.discard_many(LOCAL, EVERY, reason="old")
    await letters.discard(ADA, dlq_id, "old")
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await letters.confirm(LOCAL, dlq_id)
    with pytest.raises(Forbidden, match="HOLDFAST_TOKEN"):
        await letters.confirm_many(LOCAL, EVERY)
    # What one person may do alone they may.
    await letters.keep(LOCAL, dlq_id, "wait")
    assert await status(world, dlq_id) is DeadLetterStatus.OPEN
    await letters.replay(LOCAL, dlq_id, reason="")
