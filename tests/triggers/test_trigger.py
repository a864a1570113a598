"""The lifecycle of a trigger and of its messages (requirements T4, T5, T8, A4)."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from holdfast import Deny, Fatal, RequireApproval, Unavailable
from holdfast.brokers.memory import MemoryBroker
from holdfast.brokers.port import RawMessage
from holdfast.clock import SystemClock
from holdfast.errors import BrokerUnavailable, IntakeRefused, InvalidOption, UsageError
from holdfast.guard.decisions import Decision, GuardRequest
from holdfast.guard.registry import GuardRegistry
from holdfast.guard.runner import GuardRunner
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.testing import ManualClock
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.execution_log import ExecutionLog
from holdfast.triggers.state import TriggerCounters, TriggerState
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.rig import MemoryTriggerStore, Recorder, Rig, until


def _failing(times: int, error: Exception | None = None) -> Recorder:
    failures_left = times

    def act(_: Mapping[str, Any]) -> str:
        nonlocal failures_left
        if failures_left:
            failures_left -= 1
            raise error or RuntimeError("not yet")
        return "run-1"

    return Recorder(act)


def _gate(guards: GuardRegistry) -> GuardRunner:
    return GuardRunner(guards, {}, SystemClock(), None, can_request_approval=True)


def _guarded(decide: Any) -> GuardRunner:
    guards = GuardRegistry(lambda: 5.0)
    guards(decide)
    return _gate(guards)


# One message ---------------------------------------------------------------------------------------------


async def test_a_message_runs_is_acknowledged_and_recorded() -> None:
    runtime, clock = Recorder(), ManualClock()
    rig = Rig(runtime, clock=clock, focus="billing")
    message_id = rig.write({"n": 1}, event_name="order.paid", tenant_id="acme")
    await rig.run(1)
    (event_name, context, focus, tenant_id) = runtime.calls[0]
    assert (event_name, focus, tenant_id) == ("order.paid", "billing", "acme")
    assert context["message"] == {"n": 1}
    assert (context["source"], context["message_id"]) == ("orders", message_id)
    assert rig.adapter.settle_actions == ["ack"]
    (row,) = rig.rows
    assert (row.status, row.tenant_id, row.event_name, row.agent_run_id) == ("success", "acme", "order.paid", "run-1")
    assert (row.message_id, row.queue_name, row.trace_id) == (message_id, "orders", f"queue-{message_id}")
    assert row.started_at_ms == row.completed_at_ms == clock.now_ms()
    assert (rig.counts.calls, rig.counts.consumed[ExecutionStatus.SUCCESS]) == (1, 1)
    assert sum(rig.counts.durations.buckets) == sum(rig.counts.delays.buckets) == 1


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b'{"a"'])
@pytest.mark.parametrize("policy", ["ack", "requeue"])
async def test_an_unparsable_message_is_dead_lettered_and_acknowledged(body: bytes, policy: str) -> None:
    runtime = Recorder()
    rig = Rig(runtime, ack_policy=policy)
    rig.write(body, tenant_id="acme")
    rig.write(1)
    await rig.run(2)
    (dead_letter,) = rig.dead_letters
    assert dead_letter.body == body
    assert "not valid JSON" in dead_letter.headers["x-dead-reason"]
    assert runtime.messages == [1]
    assert await rig.adapter.lag() == 0
    assert rig.adapter.settle_calls[0][0] == "ack"
    row = next(row for row in rig.rows if row.status == "unparsable")
    assert (row.tenant_id, row.trace_id) == ("acme", f"queue-{row.message_id}")


async def test_too_large_messages_and_invalid_tenants_are_dead_letters() -> None:
    runtime = Recorder()
    rig = Rig(runtime, payload_limit=100)
    rig.write("x" * 200)
    rig.write(1, tenant_id="a b")
    await rig.run(2)
    reasons = [dead_letter.headers["x-dead-reason"] for dead_letter in rig.dead_letters]
    assert "the message has 202 bytes" in reasons[0]
    assert "in header x-tenant-id is not valid" in reasons[1]
    assert not runtime.calls
    assert {row.status for row in rig.rows} == {ExecutionStatus.UNPARSABLE}


async def test_a_dead_letter_that_cannot_be_written_is_retried() -> None:
    rig = Rig(Recorder())
    refused = 0

    def refuse(_: object) -> bool:
        nonlocal refused
        refused += 1
        return refused <= 3

    rig.broker.refuse = refuse
    rig.write(b"{")
    async with rig.trigger:
        await rig.wait_handled(1)
    assert (refused, len(rig.dead_letters), rig.counts.dead_letters) == (4, 1, 1)
    assert len(rig.slept) == 3


async def test_characters_that_cannot_be_encoded_are_removed_from_reasons() -> None:
    """For example a file name that is not UTF-8: otherwise the dead letter could not be written."""

    def act(_: Mapping[str, Any]) -> str:
        raise ValueError("cannot open \udcff\0.txt")

    rig = Rig(Recorder(act), max_retries=0)
    rig.write(1)
    await rig.run(1)
    (dead_letter,) = rig.dead_letters
    for name in ("x-dead-reason", "x-dead-history"):
        assert b"cannot open" in dead_letter.headers[name].encode()
        assert "\0" not in dead_letter.headers[name]


async def test_messages_of_a_lost_connection_are_dropped() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def act(_: Mapping[str, Any]) -> str:
        started.set()
        await go.wait()
        return ""

    runtime = Recorder(act)
    rig = Rig(runtime, concurrency=1, enable_dedup=False)
    rig.write(1)
    rig.write(2)
    async with rig.trigger:
        await started.wait()
        rig.broker.lose_connections()
        go.set()
        await rig.wait_handled(3)
    assert rig.counts.lost_messages == 1
    assert sorted(runtime.messages) == [1, 1, 2]


# Retries and policies ------------------------------------------------------------------------------------


async def test_retries_follow_base_times_multiplier() -> None:
    runtime = _failing(3)
    rig = Rig(runtime, max_retries=3, retry_backoff_base=0.5, retry_backoff_multiplier=3)
    rig.write(1)
    await rig.run(1)
    assert rig.slept == [0.5, 1.5, 4.5]
    assert (rig.rows[0].status, rig.rows[0].retry_count, len(runtime.calls)) == ("success", 3, 4)
    assert (rig.counts.calls, rig.counts.retries) == (4, 3)


@pytest.mark.parametrize("policy", ["ack", "nack", "requeue", "dlq"])
async def test_exhausted_retries_are_a_dead_letter_with_every_policy(policy: str) -> None:
    rig = Rig(_failing(99), max_retries=2, ack_policy=policy)
    rig.write({"n": 1}, event_name="e")
    await rig.run(1)
    (dead_letter,) = rig.dead_letters
    assert rig.adapter.settle_actions == ["dlq"]
    assert dead_letter.headers["x-event-name"] == "e"
    assert dead_letter.headers["x-dead-reason"] == "failed after 3 attempts: RuntimeError: not yet"
    history = json.loads(dead_letter.headers["x-dead-history"])
    assert [line.split(" at ")[0] for line in history] == ["attempt 1", "attempt 2", "attempt 3"]
    assert (rig.rows[0].status, rig.rows[0].retry_count) == ("failed", 2)


async def test_history_and_delays_are_bounded() -> None:
    rig = Rig(_failing(2_000), max_retries=1_500, retry_backoff_multiplier=10)
    rig.write(1)
    await rig.run(1)
    history = json.loads(rig.dead_letters[0].headers["x-dead-history"])
    assert len(history) == 25
    assert history[0].startswith("attempt 1 ")
    assert history[-1].startswith("attempt 1501 ")
    assert max(rig.slept) == 86_400


@pytest.mark.parametrize(
    ("policy", "action"), [("ack", "ack"), ("nack", "nack"), ("requeue", "requeue"), ("dlq", "dlq")]
)
async def test_permanent_failures_follow_the_policy(policy: str, action: str) -> None:
    rig = Rig(_failing(1, Fatal("never")), ack_policy=policy)
    rig.write(1)
    await rig.run(2 if policy == "requeue" else 1)
    assert rig.adapter.settle_actions[0] == action
    assert not rig.slept
    assert (rig.rows[0].status, rig.rows[0].error_message) == ("failed", "never")
    assert len(rig.dead_letters) == (policy == "dlq")


@pytest.mark.parametrize(("policy", "action"), [("ack", "ack"), ("nack", "ack"), ("requeue", "ack"), ("dlq", "dlq")])
async def test_denied_messages_are_recorded_and_settled(policy: str, action: str) -> None:
    requests: list[GuardRequest] = []

    async def budget(request: GuardRequest) -> Decision | None:
        requests.append(request)
        return Deny("too much") if len(requests) == 1 else None

    runtime = Recorder()
    rig = Rig(runtime, gate=_guarded(budget), ack_policy=policy)
    rig.write({"n": 1}, event_name="pay", tenant_id="acme")
    await rig.run(1)
    assert rig.adapter.settle_actions == [action]
    assert not runtime.calls
    row = next(row for row in rig.rows if row.status == "rejected")
    assert "too much" in row.error_message
    assert "budget" in row.error_message
    request = requests[0]
    assert (request.task, request.tenant_id, request.source, request.queue) == ("pay", "acme", "trigger", "orders")
    assert request.arguments["message"] == {"n": 1}


async def test_a_message_requeued_repeatedly_is_delayed() -> None:
    rig = Rig(_failing(99, Fatal("no")), ack_policy="requeue", retry_backoff_base=1, retry_backoff_multiplier=4)
    rig.write(1)
    async with rig.trigger:
        await rig.wait_handled(6)
    assert rig.slept[:5] == [1, 4, 16, 60, 60]
    assert len(rig.rows) == 1, "one row per outcome"


async def test_required_approval_is_a_denial_without_a_job() -> None:
    async def require_approval(_: GuardRequest) -> Decision | None:
        return RequireApproval("a lot of money")

    runtime = Recorder()
    rig = Rig(runtime, gate=_guarded(require_approval))
    rig.write(1)
    await rig.run(1)
    assert not runtime.calls
    assert "a lot of money" in rig.rows[0].error_message
    assert "only for jobs of a holdfast task" in rig.rows[0].error_message


async def test_a_failing_guard_is_a_failed_attempt() -> None:
    async def broken(_: GuardRequest) -> Decision | None:
        raise ValueError("oops")

    runtime = Recorder()
    rig = Rig(runtime, gate=_guarded(broken), max_retries=1)
    rig.write(1)
    await rig.run(1)
    assert not runtime.calls
    assert "oops" in rig.dead_letters[0].headers["x-dead-reason"]


async def test_a_run_that_cancels_itself_is_a_failed_attempt() -> None:
    calls = 0

    async def act(_: Mapping[str, Any]) -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise asyncio.CancelledError
        return ""

    rig = Rig(Recorder(act))
    rig.write(1)
    async with rig.trigger:
        await rig.wait_handled(1)
        assert (await rig.trigger.health()).active_workers == 1
    assert rig.rows[0].retry_count == 1


async def test_guards_run_before_every_attempt() -> None:
    calls = 0

    async def count(_: GuardRequest) -> Decision | None:
        nonlocal calls
        calls += 1
        return None

    rig = Rig(_failing(2), gate=_guarded(count))
    rig.write(1)
    await rig.run(1)
    assert calls == 3


# Lifecycle ----------------------------------------------------------------------------------------------------


async def test_a_failed_first_connection_is_raised_at_once() -> None:
    rig = Rig(Recorder())
    rig.broker.down = True
    with pytest.raises(BrokerUnavailable, match="is down"):
        await rig.trigger.start()
    assert rig.trigger.state is TriggerState.STOPPED
    assert (await rig.trigger.health()).status == "stopped"
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("holdfast")]


async def test_a_stop_while_connecting() -> None:
    rig = Rig(Recorder())
    connect, go = rig.adapter.connect, asyncio.Event()

    async def slow_connect() -> None:
        await go.wait()
        await connect()

    rig.adapter.connect = slow_connect  # type: ignore[method-assign]
    starting = asyncio.ensure_future(rig.trigger.start())
    await asyncio.sleep(0)
    await rig.trigger.stop()
    go.set()
    with pytest.raises(UsageError, match="stopped while starting"):
        await starting
    assert not rig.trigger.ready


async def test_states_and_health() -> None:
    rig = Rig(Recorder(), concurrency=3)
    trigger = rig.trigger
    assert trigger.state == "new"
    with pytest.raises(UsageError, match="is new"):
        await trigger.pause()
    async with trigger:
        assert trigger.state is TriggerState.RUNNING
        assert trigger.ready
        health = await trigger.health()
        assert msgspec.to_builtins(health) == {
            "status": "healthy",
            "running": True,
            "adapter_healthy": True,
            "active_workers": 3,
            "paused": False,
        }
        with pytest.raises(UsageError, match="create a new one"):
            await trigger.start()
        rig.broker.down = True
        assert (await trigger.health()).status == "unhealthy"
        rig.broker.down = False
        assert (await trigger.health()).status == "healthy"
    assert str(trigger.state) == "stopped"
    assert not trigger.ready
    stopped = await trigger.health()
    assert (stopped.status, stopped.running, stopped.active_workers) == ("stopped", False, 0)
    await trigger.stop()
    with pytest.raises(UsageError, match="create a new one"):
        await trigger.start()


async def test_pause_keeps_the_consumer_and_runs_nothing() -> None:
    runtime = Recorder()
    rig = Rig(runtime)
    async with rig.trigger:
        await rig.trigger.pause()
        await rig.trigger.pause()
        assert rig.trigger.state is TriggerState.PAUSED
        rig.write(1)
        for _ in range(50):
            await asyncio.sleep(0)
        health = await rig.trigger.health()
        assert (health.status, health.running, health.paused, health.active_workers) == ("paused", True, True, 1)
        assert not runtime.calls
        await rig.trigger.resume()
        await rig.wait_handled(1)
    assert rig.adapter.pauses == ["pause", "resume"]
    assert runtime.messages == [1]


async def test_a_pause_cancelled_before_it_starts_has_no_effect() -> None:
    # Otherwise the interpreter warns of a coroutine that was never awaited.
    rig = Rig(Recorder())
    async with rig.trigger:
        rig.trigger._on_holding()
        (pausing,) = rig.trigger._background
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        gc.collect()
    assert rig.adapter.pauses == []


async def test_messages_in_flight_wait_during_a_pause() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def act(_: Mapping[str, Any]) -> str:
        started.set()
        await go.wait()
        return ""

    runtime = Recorder(act)
    rig = Rig(runtime, concurrency=1)
    rig.write(1)
    rig.write(2)
    async with rig.trigger:
        await started.wait()
        await rig.trigger.pause()
        go.set()
        await rig.wait_handled(1)
        assert runtime.messages == [1]
        await rig.trigger.resume()
        await rig.wait_handled(2)


async def test_stop_waits_for_running_messages() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def act(_: Mapping[str, Any]) -> str:
        started.set()
        await go.wait()
        return ""

    runtime = Recorder(act)
    rig = Rig(runtime, concurrency=1)
    for number in range(3):
        rig.write(number)
    await rig.trigger.start()
    await started.wait()
    stopping = asyncio.ensure_future(rig.trigger.stop())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not stopping.done()
    assert rig.trigger.state is TriggerState.STOPPING
    go.set()
    await stopping
    assert runtime.messages == [0]
    assert rig.adapter.settle_actions == ["ack"]
    assert len(rig.rows) == 1
    successor = Rig(Recorder(), broker=_broker_name(rig))
    await successor.run(2)
    assert len(successor.rows) == 2


async def test_stop_abandons_slow_messages_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    async def act(_: Mapping[str, Any]) -> str:
        await asyncio.Event().wait()
        return ""

    runtime = Recorder(act)
    rig = Rig(runtime, concurrency=2)
    ids = [rig.write(number) for number in range(3)]
    await rig.trigger.start()
    await until(lambda: len(runtime.calls) == 2)
    with caplog.at_level(logging.WARNING, "holdfast.triggers"):
        await rig.trigger.stop(timeout_s=0.05)
    assert "stopped with 2 unfinished messages" in caplog.text
    assert "and 1 not started" in caplog.text
    assert ids[0] in caplog.text
    assert not rig.adapter.settle_calls
    assert (await rig.trigger.health()).active_workers == 0
    successor = Rig(Recorder(), broker=_broker_name(rig), enable_dedup=False)
    await successor.run(3)


async def test_stop_now_does_not_wait() -> None:
    async def act(_: Mapping[str, Any]) -> str:
        await asyncio.Event().wait()
        return ""

    runtime = Recorder(act)
    rig = Rig(runtime)
    rig.write(1)
    await rig.trigger.start()
    await until(lambda: runtime.calls)
    stopping = asyncio.ensure_future(rig.trigger.stop())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not stopping.done()
    rig.trigger.stop_now()
    async with asyncio.timeout(2):
        await stopping
    assert not rig.adapter.settle_calls


async def test_a_pause_right_after_the_start_runs_nothing() -> None:
    runtime = Recorder()
    rig = Rig(runtime)
    rig.write(1)
    await rig.trigger.start()
    await rig.trigger.pause()
    for _ in range(50):
        await asyncio.sleep(0)
    await rig.trigger.stop()
    assert not runtime.calls


async def test_stop_does_not_wait_for_retries() -> None:
    async def sleep_forever(_: float) -> None:
        await asyncio.Event().wait()

    rig = Rig(_failing(99), sleep=sleep_forever)
    rig.write(1)
    await rig.trigger.start()
    await until(lambda: rig.counts.retries == 1)
    async with asyncio.timeout(2):
        await rig.trigger.stop()
    assert not rig.adapter.settle_calls
    assert not rig.dead_letters
    successor = Rig(Recorder(), broker=_broker_name(rig))
    await successor.run(1)


async def test_a_runtime_without_keys_needs_a_dedup_store() -> None:
    rig = Rig(Recorder())
    with pytest.raises(InvalidOption, match="enable_dedup"):
        QueueTrigger(rig.config, rig.adapter, Recorder())
    QueueTrigger(QueueTriggerConfig(queue_name="q", consumer_group="g", enable_dedup=False), rig.adapter, Recorder())


def _broker_name(rig: Rig) -> str:
    return next(name for name, broker in MemoryBroker._named.items() if broker is rig.broker)


# Outages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Unavailable("unreachable"), IntakeRefused("default", "paused")])
async def test_an_outage_holds_and_uses_up_no_retries(error: Exception) -> None:
    rounds = asyncio.Semaphore(0)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await rounds.acquire()

    runtime = _failing(20, error)
    rig = Rig(runtime, concurrency=4, prefetch=10, max_retries=0, sleep=sleep)
    for number in range(6):
        rig.write(number)
    async with rig.trigger:
        await until(lambda: len(slept) == 1)
        await until(lambda: rig.adapter.pauses == ["pause"])
        health = await rig.trigger.health()
        assert (health.status, health.adapter_healthy, health.paused) == ("holding", True, False)
        assert rig.trigger.state is TriggerState.HOLDING
        assert not rig.trigger.ready
        rig.write(6)
        for _ in range(20):
            rounds.release()
        await rig.wait_handled(7)
        await until(lambda: rig.adapter.pauses == ["pause", "resume"])
        assert rig.trigger.ready
        assert rig.counts.held == 0
    assert not rig.dead_letters
    assert rig.adapter.settle_actions == ["ack"] * 7
    assert {row.retry_count for row in rig.rows} == {0}


async def test_stop_while_holding_loses_nothing() -> None:
    async def sleep_forever(_: float) -> None:
        await asyncio.Event().wait()

    rig = Rig(_failing(99, Unavailable("unreachable")), sleep=sleep_forever)
    rig.write(1)
    await rig.trigger.start()
    await until(lambda: rig.trigger.state is TriggerState.HOLDING)
    async with asyncio.timeout(2):
        await rig.trigger.stop()
    assert not rig.adapter.settle_calls
    successor = Rig(Recorder(), broker=_broker_name(rig))
    await successor.run(1)


async def test_resume_by_an_operator_does_not_end_an_outage() -> None:
    async def sleep_forever(_: float) -> None:
        await asyncio.Event().wait()

    rig = Rig(_failing(99, Unavailable("unreachable")), sleep=sleep_forever)
    rig.write(1)
    async with rig.trigger:
        await until(lambda: rig.adapter.pauses == ["pause"])
        await rig.trigger.pause()
        await rig.trigger.resume()
        assert rig.adapter.pauses == ["pause"]


async def test_a_client_that_cancels_its_own_calls_does_not_stop_the_trigger() -> None:
    """Some libraries cancel pending calls when a connection is lost."""
    rig = Rig(Recorder(), max_retries=0)
    consume, send = rig.adapter.consume, rig.adapter.send_to_dlq
    cancel = {"consume", "send"}

    async def flaky_consume() -> AsyncIterator[RawMessage]:
        if "consume" in cancel:
            cancel.remove("consume")
            raise asyncio.CancelledError
        async for message in consume():
            yield message

    async def flaky_send(*args: Any) -> None:
        if "send" in cancel:
            cancel.remove("send")
            raise asyncio.CancelledError
        await send(*args)

    rig.adapter.consume = flaky_consume  # type: ignore[method-assign]
    rig.adapter.send_to_dlq = flaky_send  # type: ignore[method-assign,assignment]
    rig.write(b"{")
    await rig.run(1)
    assert len(rig.dead_letters) == 1
    assert rig.counts.active_workers == 0


async def test_a_failed_consumer_is_restarted() -> None:
    rig = Rig(Recorder())
    consume, failed = rig.adapter.consume, False

    def flaky() -> Any:
        nonlocal failed
        if not failed:
            failed = True
            raise BrokerUnavailable("amqp://user:s3cret@host is unreachable")
        return consume()

    rig.adapter.consume = flaky  # type: ignore[method-assign]
    rig.write(1)
    await rig.run(1)
    assert failed


# Logs and records ----------------------------------------------------------------------------------------


async def test_every_stage_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(_failing(1), parser_type="text")
    with caplog.at_level(logging.DEBUG, "holdfast.triggers"):
        message_id = rig.write(b"the payload password=hunter2", trace_id="t-1")
        await rig.run(1)
    records = [record for record in caplog.records if getattr(record, "message_id", "") == message_id]
    assert [getattr(record, "stage", "") for record in records] == ["received", "parsed", "retry", "handed_over", "ack"]
    assert {getattr(record, "trace_id", "") for record in records} == {"t-1"}
    retry = records[2]
    assert retry.levelno == logging.WARNING
    assert "retry 1 of 3 in 1 s: RuntimeError: not yet" in retry.getMessage()
    assert "hunter2" not in caplog.text
    assert "the payload" not in caplog.text


async def test_reasons_are_redacted_single_lines(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("redis://u:hunter2@h failed\nmessage was: my payload")
    rig = Rig(_failing(9, error), max_retries=1)
    rig.write(1)
    with caplog.at_level(logging.DEBUG):
        await rig.run(1)
    everything = caplog.text + str(rig.dead_letters) + str(rig.rows)
    assert "hunter2" not in everything
    assert "my payload" not in everything


async def test_an_unreachable_ledger_does_not_stop_messages() -> None:
    rig = Rig(Recorder())
    rig.book.down = True
    for number in range(5):
        rig.write(number)
    async with rig.trigger:
        await rig.wait_handled(5)
        await until(lambda: rig.book.failures >= 2)
        assert not rig.rows
        rig.book.down = False
        await until(lambda: len(rig.rows) == 5)
    assert rig.counts.records_lost == 0


async def test_dropped_records_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(Recorder())
    for number in range(6):
        rig.write(number)
    await rig.run(6)
    book, counts = MemoryTriggerStore(), TriggerCounters("q")
    book.down = True
    records = ExecutionLog(book, counts, limit=4)
    with caplog.at_level(logging.WARNING, "holdfast.triggers"):
        for row in rig.rows:
            records.put(row)
        assert counts.records_lost == 2
        assert caplog.text.count("are dropped; messages are not affected") == 1
        book.down = False
        await records.close(5)
    assert len(book.rows) == 4


async def test_an_invalid_record_does_not_block_others(caplog: pytest.LogCaptureFixture) -> None:
    class RefusingStore(MemoryTriggerStore):
        async def record_executions(self, executions: Any) -> None:
            if any(execution.message_id == "orders-2" for execution in executions):
                raise ValueError("cannot be stored")
            await super().record_executions(executions)

    rig = Rig(Recorder())
    refusing = RefusingStore()
    rig.trigger._book = refusing
    for number in range(3):
        rig.write(number)
    await rig.run(3)
    assert len(refusing.rows) == 2
    assert rig.counts.records_lost == 1


@pytest.mark.parametrize(("policy", "action"), [("ack", "ack"), ("dlq", "dlq")])
async def test_a_trigger_limited_to_tenants_ignores_others(policy: str, action: str) -> None:
    runtime = Recorder()
    rig = Rig(runtime, tenants=["acme", "zoo"], ack_policy=policy)
    rig.write(1, tenant_id="victim")
    rig.write(2, tenant_id="zoo")
    rig.write(3)
    rig.write(b"{", tenant_id="victim")
    await rig.run(4)
    assert [(context["message"], tenant) for _, context, _, tenant in runtime.calls] == [(2, "zoo"), (3, "acme")]
    assert rig.adapter.settle_actions[0] == action
    assert sorted((row.tenant_id, row.status.value) for row in rig.rows) == [
        ("acme", "rejected"),
        ("acme", "success"),
        ("acme", "unparsable"),
        ("zoo", "success"),
    ]
    assert any("tenant victim is not one of this trigger's tenants" in row.error_message for row in rig.rows)


@pytest.mark.parametrize("tenants", [[], ["with blank"], [""]])
def test_invalid_tenants_are_refused(tenants: list[str]) -> None:
    with pytest.raises(ValidationError):
        QueueTriggerConfig(queue_name="q", consumer_group="g", tenants=tenants)
