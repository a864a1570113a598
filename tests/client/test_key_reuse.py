"""Reuse of an idempotency key: equal arguments are a duplicate, others are refused or return the first job (E1)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from holdfast import Holdfast
from holdfast.errors import IdempotencyKeyReused, UsageError
from holdfast.execution.backend import backend_of
from holdfast.testing import inline


def add_tasks(app: Holdfast) -> tuple[Any, Any]:
    @app.task
    async def ship(order: int, carrier: str = "post", note: dict[str, Any] | None = None) -> int:
        return order

    @app.task
    async def bill(order: int, carrier: str = "post") -> int:
        return order

    return ship, bill


async def test_a_key_with_other_arguments_or_another_task_is_refused(both: Holdfast) -> None:
    ship, bill = add_tasks(both)
    first = await ship.options(idempotency_key="k").submit(1)
    for task, arguments in ((ship, (2,)), (ship, (1, "rail")), (bill, (1,))):
        with pytest.raises(IdempotencyKeyReused) as refused:
            await task.options(idempotency_key="k").submit(*arguments)
        assert (refused.value.job_id, refused.value.key, refused.value.code) == (
            first.id,
            "k",
            "IDEMPOTENCY_KEY_REUSED",
        )
        assert isinstance(refused.value, UsageError)
    stats = await both.engine.stats("default")
    assert sum(stats.states.values()) == 1
    # Refused submissions do not use up the key.
    assert (await ship.options(idempotency_key="k").submit(1)).id == first.id


async def test_equal_calls_are_duplicates_however_they_are_written(both: Holdfast) -> None:
    ship, _ = add_tasks(both)
    keyed = ship.options(idempotency_key="k")
    first = await keyed.submit(1, note={"a": 1, "b": 2.0})
    for call in (
        keyed.submit(order=1, note={"b": 2, "a": 1}),
        keyed.submit(1, "post", {"a": 1, "b": 2}),
        both.submit_raw("ship", b'[1, "post", {"b": 2, "a": 1.0}]', idempotency_key="k"),
        both.submit_raw("ship", b'{"note": {"b": 2e0, "a": 1}, "order": 1}', idempotency_key="k"),
        # How and when it runs is not part of the request.
        ship.options(idempotency_key="k", delay=60, priority="high", context={"user": "u"}).submit(
            1, note={"a": 1, "b": 2}
        ),
    ):
        again = await call
        assert (again.id, again.duplicate) == (first.id, True)


async def test_on_key_reuse_return_gives_the_first_job_and_leaves_an_event(both: Holdfast) -> None:
    ship, _ = add_tasks(both)
    first = await ship.options(idempotency_key="k").submit(1)
    again = await ship.options(idempotency_key="k", on_key_reuse="return").submit(2)
    assert (again.id, again.duplicate) == (first.id, True)
    assert (await again.info()).payload == b'{"order":1}'
    await ship.options(idempotency_key="k", on_key_reuse="return").submit(1)
    entries = await both.engine.read_feed("default", "", 100)
    duplicates = [event for entry in entries for event in entry.events if event.type == "task.duplicate"]
    assert [(event.job_id, event.data) for event in duplicates] == [(first.id, {"arguments_differ": True})]
    with pytest.raises(UsageError, match="on_key_reuse"):
        ship.options(idempotency_key="k", on_key_reuse="replace")


async def test_submit_many_refuses_a_reused_key_as_a_whole(both: Holdfast) -> None:
    ship, _ = add_tasks(both)
    first = await ship.options(idempotency_key="k").submit(1)
    with pytest.raises(IdempotencyKeyReused, match="'k'"):
        await ship.submit_many([(7,), ship.options(idempotency_key="k").bind(2)])
    assert sum((await both.engine.stats("default")).states.values()) == 1
    jobs = await ship.submit_many([(7,), ship.options(idempotency_key="k", on_key_reuse="return").bind(2)])
    assert (jobs[1].id, jobs[1].duplicate) == (first.id, True)


async def test_inline_mode_refuses_it_as_well(app: Holdfast) -> None:
    ship, bill = add_tasks(app)
    with inline(app):
        first = await ship.options(idempotency_key="k").submit(1)
        assert (await ship.options(idempotency_key="k").submit(order=1, carrier="post")).id == first.id
        with pytest.raises(IdempotencyKeyReused):
            await bill.options(idempotency_key="k").submit(1)
        assert (await bill.options(idempotency_key="k", on_key_reuse="return").submit(1)).id == first.id


class Parcel(BaseModel):
    weight: float
    label: str = "none"


async def test_arguments_that_are_models(both: Holdfast) -> None:
    @both.task
    async def send(parcel: Parcel, spare: Parcel = Parcel(weight=1)) -> None: ...  # noqa: B008 - must not change

    keyed = send.options(idempotency_key="k")
    first = await keyed.submit(Parcel(weight=2))
    assert (await keyed.submit(parcel=Parcel(weight=2, label="none"), spare=Parcel(weight=1.0))).id == first.id
    with pytest.raises(IdempotencyKeyReused):
        await keyed.submit(Parcel(weight=2, label="fragile"))


async def test_a_new_optional_argument_does_not_refuse_a_repetition(both: Holdfast, engine_url: str) -> None:
    @both.task(name="send")
    async def send(number: int) -> None: ...

    first = await send.options(idempotency_key="k").submit(1)
    deployed = Holdfast(engine_url, namespace=both.settings.namespace)

    @deployed.task(name="send")
    async def send_later(number: int, urgent: bool = False) -> None: ...

    async with deployed:
        assert (await send_later.options(idempotency_key="k").submit(1)).id == first.id
        with pytest.raises(IdempotencyKeyReused):
            await send_later.options(idempotency_key="k").submit(1, urgent=True)


async def test_an_app_without_the_task_compares_what_it_can(both: Holdfast, engine_url: str) -> None:
    ship, _ = add_tasks(both)
    first = await ship.options(idempotency_key="k").submit(1)
    bare = Holdfast(engine_url, namespace=both.settings.namespace)
    async with bare:
        # It does not know the defaults: this may be the same call.
        assert (await bare.submit_raw("ship", b'[1, "post"]', idempotency_key="k")).id == first.id
        with pytest.raises(IdempotencyKeyReused):
            await bare.submit_raw("bill", b"[1]", idempotency_key="k")
        raw = await bare.submit_raw("ship", b'{"order": 1, "note": {"a": 1}}', idempotency_key="raw")
        again = await bare.submit_raw("ship", b'{"note": {"a": 1.0}, "order": 1}', idempotency_key="raw")
        assert (again.id, again.duplicate) == (raw.id, True)
        with pytest.raises(IdempotencyKeyReused):
            await bare.submit_raw("ship", b'{"order": 2}', idempotency_key="raw")


async def test_the_fingerprint_is_stored_with_the_job(both: Holdfast) -> None:
    ship, _ = add_tasks(both)
    job = await ship.options(idempotency_key="k").submit(1)
    fingerprint = (await job.info()).meta.key_fingerprint
    assert 0 < len(fingerprint.encode()) <= 16
    assert fingerprint == backend_of(both).fingerprint("ship", b'{"order": 1}')
    assert (await (await ship.submit(1)).info()).meta.key_fingerprint == ""


async def test_deep_payloads_do_not_fail(both: Holdfast) -> None:
    @both.task
    async def keep(value: Any) -> None: ...

    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    keyed = keep.options(idempotency_key="k")
    first = await keyed.submit(deep)
    assert (await keyed.submit(msgspec.json.decode(msgspec.json.encode(deep)))).id == first.id
