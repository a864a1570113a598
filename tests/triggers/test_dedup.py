"""One run per key for runtimes without keys, in memory and on both ledgers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.errors import LedgerUnavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.effects import EffectStore
from holdfast.testing import ManualClock
from holdfast.triggers.dedup import (
    AlreadyHandled,
    Answer,
    DedupTicket,
    IdempotencyStore,
    InMemoryIdempotencyStore,
    LedgerIdempotencyStore,
)
from holdfast.triggers.state import TriggerState
from tests.triggers.rig import Recorder, Rig, until


@pytest.fixture
async def effects(ledger_url: str, redis_url: str, namespace: str) -> AsyncIterator[EffectStore]:
    app = Holdfast(redis_url, ledger=ledger_url, namespace=namespace)
    async with app:
        backend = backend_of(app)
        assert backend.ledger is not None
        yield backend.ledger.effects


@pytest.fixture(params=["memory", "ledger"])
async def dedup(request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[IdempotencyStore]:
    if request.param == "memory":
        yield InMemoryIdempotencyStore()
        return
    app = Holdfast(f"sqlite:///{tmp_path / 'x.db'}")
    async with app:
        backend = backend_of(app)
        assert backend.ledger is not None
        store = LedgerIdempotencyStore(backend.ledger.effects, "orders")
        yield store
        await store.close()


async def _reserve(dedup: IdempotencyStore, key: str = "k", tenant: str = "default") -> DedupTicket:
    answer = await dedup.reserve(tenant, key, "m")
    assert isinstance(answer, DedupTicket)
    return answer


async def test_the_contract(dedup: IdempotencyStore) -> None:
    ticket = await _reserve(dedup)
    assert await dedup.reserve("default", "k", "m2") == "busy"
    other = await _reserve(dedup, tenant="acme")
    await dedup.release(other)
    other = await _reserve(dedup, tenant="acme")
    await dedup.complete(other, "", 60_000)
    assert await dedup.reserve("acme", "k", "m3") == AlreadyHandled("")
    await dedup.complete(ticket, "run-1", 60_000)
    assert await dedup.reserve("default", "k", "m2") == AlreadyHandled("run-1")
    short = await _reserve(dedup, "short")
    await dedup.complete(short, "run-2", 1)
    await asyncio.sleep(0.01)
    assert isinstance(await dedup.reserve("default", "short", "m4"), DedupTicket)


async def test_two_processes(effects: EffectStore) -> None:
    first, second = LedgerIdempotencyStore(effects, "orders"), LedgerIdempotencyStore(effects, "orders")
    answers = await asyncio.gather(*(store.reserve("t", "k", "m") for store in (first, second) * 10))
    tickets = [answer for answer in answers if isinstance(answer, DedupTicket)]
    assert len(tickets) == 1
    assert answers.count("busy") == 19
    owner = first if tickets[0] in answers[::2] else second
    await owner.complete(tickets[0], "r", 60_000)
    assert await first.reserve("t", "k", "m") == await second.reserve("t", "k", "m") == AlreadyHandled("r")
    await first.close()
    await second.close()


async def test_a_reservation_of_a_dead_process_is_reclaimed_after_its_lease(effects: EffectStore) -> None:
    clock = ManualClock()
    dead = LedgerIdempotencyStore(effects, "orders", lease_s=3600)
    alive = LedgerIdempotencyStore(effects, "orders", lease_s=30, monotonic=lambda: clock.now_ms() / 1000)
    ticket = await _reserve(dead)
    assert await alive.reserve("default", "k", "m") == "busy"
    clock.advance(29)
    assert await alive.reserve("default", "k", "m") == "busy"
    clock.advance(1)
    reclaimed = await alive.reserve("default", "k", "m")
    assert isinstance(reclaimed, DedupTicket)
    await alive.complete(reclaimed, "second", 60_000)
    # The late completion does not overwrite the result of the other process.
    await dead.complete(ticket, "first", 60_000)
    assert await alive.reserve("default", "k", "m") == AlreadyHandled("second")
    await dead.close()
    await alive.close()


async def test_a_renewed_reservation_is_not_reclaimed(effects: EffectStore) -> None:
    clock = ManualClock()
    owner = LedgerIdempotencyStore(effects, "orders", lease_s=0.06)
    other = LedgerIdempotencyStore(effects, "orders", lease_s=30, monotonic=lambda: clock.now_ms() / 1000)
    ticket = await _reserve(owner)
    for _ in range(3):
        assert await other.reserve("default", "k", "m") == "busy"
        reservation = (await effects.get([("default", "trigger:k")]))[0]
        assert reservation is not None
        clock.advance(31)

        async def renewed(before: int = reservation.updated_at_ms) -> None:
            while True:
                now = (await effects.get([("default", "trigger:k")]))[0]
                if now is not None and now.updated_at_ms != before:
                    return
                await asyncio.sleep(0.005)

        await asyncio.wait_for(renewed(), 5)
    assert await other.reserve("default", "k", "m") == "busy"
    await owner.complete(ticket, "r", 60_000)
    await owner.close()
    await other.close()


async def test_a_storm_of_duplicates_on_four_triggers(effects: EffectStore) -> None:
    ran: list[int] = []

    async def act(context: Mapping[str, Any]) -> str:
        ran.append(context["message"])
        await asyncio.sleep(0)
        return str(context["message"])

    rigs = [
        Rig(
            Recorder(act), broker="storm", dedup=LedgerIdempotencyStore(effects, "orders"), concurrency=8, prefetch=16,
            sleep=asyncio.sleep,
        )
        for _ in range(4)
    ]  # fmt: skip
    broker = rigs[0].broker
    for number in range(400):
        broker.write("orders", str(number % 10).encode(), {"x-dedup-key": str(number % 10)})
    for rig in rigs:
        await rig.trigger.start()
    await until(lambda: sum(sum(rig.counts.consumed.values()) for rig in rigs) == 400)
    for rig in rigs:
        await rig.trigger.stop()
    type(broker).reset("storm")
    assert sorted(ran) == list(range(10))
    assert sum(rig.counts.dedup_hits for rig in rigs) == 390


async def test_a_key_runs_again_after_its_window_and_after_a_dead_letter() -> None:
    clock = ManualClock()
    failures_left = 1

    def act(_: Mapping[str, Any]) -> str:
        nonlocal failures_left
        if failures_left:
            failures_left -= 1
            raise RuntimeError("no")
        return "r"

    runtime = Recorder(act)
    rig = Rig(runtime, clock=clock, max_retries=0, idempotency_window=10)
    async with rig.trigger:
        rig.write("dead", dedup_key="k")
        await rig.wait_handled(1)
        rig.write("runs", dedup_key="k")
        await rig.wait_handled(2)
        clock.advance(9.999)
        rig.write("known", dedup_key="k")
        await rig.wait_handled(3)
        clock.advance(0.001)
        rig.write("again", dedup_key="k")
        await rig.wait_handled(4)
    assert runtime.messages == ["dead", "runs", "again"]
    assert rig.counts.dedup_hits == 1
    assert len(rig.rows) == 4


async def test_a_stopped_trigger_releases_the_keys_of_unfinished_messages(effects: EffectStore) -> None:
    async def sleep_forever(_: float) -> None:
        await asyncio.Event().wait()

    def fail(_: Mapping[str, Any]) -> str:
        raise RuntimeError("not yet")

    rig = Rig(Recorder(fail), dedup=LedgerIdempotencyStore(effects, "orders"), sleep=sleep_forever)
    rig.write(1, dedup_key="k")
    await rig.trigger.start()
    await until(lambda: rig.counts.retries == 1)
    assert (await effects.get([("default", "trigger:orders:workers:k")]))[0] is not None
    await rig.trigger.stop()
    assert (await effects.get([("default", "trigger:orders:workers:k")]))[0] is None


async def test_the_key_of_an_interrupted_run_stays_reserved_for_a_lease(effects: EffectStore) -> None:
    async def hang(_: Mapping[str, Any]) -> str:
        await asyncio.Event().wait()
        return ""

    runtime = Recorder(hang)
    rig = Rig(runtime, dedup=LedgerIdempotencyStore(effects, "orders"))
    rig.write(1, dedup_key="k")
    await rig.trigger.start()
    await until(lambda: runtime.calls)
    await rig.trigger.stop(timeout_s=0.01)
    assert await LedgerIdempotencyStore(effects, "orders").reserve("default", "orders:workers:k", "m") == "busy"


class _FlakyStore(InMemoryIdempotencyStore):
    """A store that is unreachable on request."""

    def __init__(self) -> None:
        super().__init__()
        self.reserve_down = self.complete_down = False

    async def reserve(self, tenant_id: str, key: str, message_id: str) -> Answer:
        if self.reserve_down:
            raise LedgerUnavailable("the ledger is unreachable")
        return await super().reserve(tenant_id, key, message_id)

    async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
        if self.complete_down:
            raise LedgerUnavailable("the ledger is unreachable")
        await super().complete(ticket, run_id, window_ms)


@pytest.mark.parametrize("outage", ["reserve_down", "complete_down"])
async def test_an_unreachable_store_holds_the_trigger(outage: str) -> None:
    store, runtime = _FlakyStore(), Recorder()
    rig = Rig(runtime, dedup=store)
    setattr(store, outage, True)
    rig.write(1)
    async with rig.trigger:
        await until(lambda: rig.trigger.state is TriggerState.HOLDING)
        assert len(runtime.calls) == (outage == "complete_down")
        assert not rig.adapter.settle_calls
        setattr(store, outage, False)
        await rig.wait_handled(1)
    assert len(runtime.calls) == 1
    assert rig.rows[0].retry_count == 0


@pytest.mark.parametrize("outage", ["reserve_down", "complete_down"])
async def test_an_unreachable_store_only_warns_if_configured(outage: str, caplog: pytest.LogCaptureFixture) -> None:
    store, runtime = _FlakyStore(), Recorder()
    rig = Rig(runtime, dedup=store, dedup_down="warn")
    setattr(store, outage, True)
    rig.write(1)
    rig.write(2)
    await rig.run(2)
    assert len(runtime.calls) == 2
    assert caplog.text.count("continues without dedup") == 1


@pytest.mark.faults
async def test_the_trigger_holds_during_an_outage_of_the_ledger(
    make_postgres: Any, redis_url: str, namespace: str
) -> None:
    server = make_postgres()
    app = Holdfast(redis_url, ledger=server.url, namespace=namespace)
    async with app:
        backend = backend_of(app)
        assert backend.ledger is not None
        runtime = Recorder()
        rig = Rig(runtime, dedup=LedgerIdempotencyStore(backend.ledger.effects, "orders"), sleep=asyncio.sleep)
        async with rig.trigger:
            rig.write(1)
            await rig.wait_handled(1)
            server.kill()
            rig.write(2)
            await until(lambda: rig.trigger.state is TriggerState.HOLDING, "holding")
            assert runtime.messages == [1]
            server.start()
            await rig.wait_handled(2)
        assert runtime.messages == [1, 2]


async def test_a_run_is_recorded_even_if_its_message_is_lost_during_an_outage() -> None:
    """Otherwise the next consumer would run the message again."""
    dedup = _FlakyStore()
    dedup.complete_down = True
    rig = Rig(Recorder(), dedup=dedup)
    rig.write(1, dedup_key="k")
    async with rig.trigger:
        await until(lambda: rig.trigger.state is TriggerState.HOLDING)
        rig.broker.lose_connections()
        dedup.complete_down = False
        await rig.wait_handled(1)
    assert rig.counts.calls == 1
    assert [row.status.value for row in rig.rows] == ["duplicate"]


async def test_a_run_is_recorded_even_if_the_trigger_stops_during_an_outage() -> None:
    dedup = _FlakyStore()
    dedup.complete_down = True
    rig = Rig(Recorder(), dedup=dedup, sleep=lambda _: asyncio.sleep(60))
    rig.write(1, dedup_key="k")
    async with rig.trigger:
        await until(lambda: rig.trigger.state is TriggerState.HOLDING)
        dedup.complete_down = False
    assert await dedup.reserve("default", "orders:workers:k", "m") == AlreadyHandled("run-1")


async def test_duplicates_do_not_wait_forever_after_an_outage_with_warnings(effects: EffectStore) -> None:
    class UnreachableStore(LedgerIdempotencyStore):
        async def complete(self, ticket: DedupTicket, run_id: str, window_ms: int) -> None:
            raise LedgerUnavailable("unreachable")

    dedup = UnreachableStore(effects, "orders")
    rig = Rig(Recorder(), dedup=dedup, dedup_down="warn")
    rig.write(1, dedup_key="k")
    rig.write(2, dedup_key="k")
    await rig.run(2)
    assert rig.counts.calls == 2
