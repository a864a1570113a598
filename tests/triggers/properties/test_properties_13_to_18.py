"""Properties 13 to 18 of triggers (requirement T6): exhausted retries, duplicates, counters and records."""

from __future__ import annotations

import json
import logging
import string
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import Fatal
from holdfast.clock import to_datetime
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.triggers.dedup import InMemoryIdempotencyStore
from tests.triggers.properties.memory_rig import PROPERTY, LoopClock, MemoryRig, get_history, run_example, until
from tests.triggers.properties.store_rig import KINDS, Kind, LogCapture, Store, TriggerRig, open_store, scrape_metrics
from tests.triggers.properties.strategies import EVENTS, TENANTS
from tests.triggers.rig import Recorder

pytestmark = pytest.mark.search

WORDS: Final = st.text(string.ascii_letters, min_size=1, max_size=12)
POLICIES: Final = st.sampled_from(["ack", "nack", "requeue", "dlq"])
#: How many of the first and of the latest attempts a history keeps.
FIRST, LATEST = 5, 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(tmp_path_factory.mktemp("store")) as store:
        yield store


class FailingRuntime(Recorder):
    """Fails each message as often as planned, and records the times."""

    def __init__(self, plans: list[tuple[int, str]]) -> None:
        super().__init__(self._run)
        self._plans = plans
        self.tried_at_ms: dict[int, list[int]] = defaultdict(list)

    async def _run(self, context: Mapping[str, Any]) -> str:
        number = context["message"]["n"]
        failures, word = self._plans[number]
        self.tried_at_ms[number].append(LoopClock().now_ms())
        tries = len(self.tried_at_ms[number])
        if tries <= failures:
            raise RuntimeError(f"{word} {tries}")
        return f"run-{number}"


@PROPERTY
@given(
    plans=st.lists(st.tuples(st.integers(0, 30), WORDS), min_size=1, max_size=5),
    max_retries=st.integers(0, 28),
    policy=POLICIES,
    concurrency=st.integers(1, 4),
)
@example(plans=[(30, "no"), (0, "yes")], max_retries=28, policy="ack", concurrency=1)
def test_property_13_exhausted_retries_are_a_dead_letter_with_reason_and_history(
    plans: list[tuple[int, str]], max_retries: int, policy: str, concurrency: int
) -> None:
    async def scenario() -> None:
        runtime = FailingRuntime(plans)
        rig = MemoryRig(
            runtime,
            max_retries=max_retries,
            ack_policy=policy,
            concurrency=concurrency,
            retry_backoff_base=0.25,
            retry_backoff_multiplier=1.1,
        )
        ids = [rig.write({"n": n}, headers={"x-event-name": f"event-{n}"}) for n in range(len(plans))]
        await rig.run(len(plans))
        rig.close()
        tries = max_retries + 1
        exhausted = [n for n, (failures, _) in enumerate(plans) if failures > max_retries]
        by_message_id = {dead_letter.headers["x-dead-message-id"]: dead_letter for dead_letter in rig.dead_letters}
        assert len(rig.dead_letters) == len(exhausted)
        assert set(by_message_id) == {ids[n] for n in exhausted}
        for n in exhausted:
            dead_letter, word = by_message_id[ids[n]], plans[n][1]
            assert dead_letter.body == json.dumps({"n": n}).encode()
            assert (dead_letter.headers["x-event-name"], dead_letter.headers["x-dead-source"]) == (
                f"event-{n}",
                "orders",
            )
            assert (
                dead_letter.headers["x-dead-reason"] == f"failed after {tries} attempts: RuntimeError: {word} {tries}"
            )
            lines = [
                f"attempt {number} at {to_datetime(at_ms).isoformat()}: RuntimeError: {word} {number}"
                for number, at_ms in enumerate(runtime.tried_at_ms[n], 1)
            ]
            assert len(lines) == tries
            kept = lines if tries <= FIRST + LATEST else lines[:FIRST] + lines[-LATEST:]
            assert get_history(dead_letter) == kept
            assert rig.settle_actions(ids[n]) == ["dlq"]
        assert {row.message_id: (row.status, row.retry_count) for row in rig.rows} == {
            ids[n]: ("failed", max_retries) if n in exhausted else ("success", failures)
            for n, (failures, _) in enumerate(plans)
        }
        assert await rig.adapter.lag() == 0

    run_example(scenario())


@PROPERTY
@given(
    plans=st.lists(st.tuples(st.integers(0, 8), WORDS), min_size=1, max_size=5),
    max_retries=st.integers(0, 6),
    base=st.sampled_from([0.1, 1.0, 7.5]),
    multiplier=st.sampled_from([1.0, 2.0, 3.5]),
    concurrency=st.integers(1, 4),
)
def test_property_14_every_retry_is_logged_with_number_time_and_reason(
    plans: list[tuple[int, str]], max_retries: int, base: float, multiplier: float, concurrency: int
) -> None:
    async def scenario() -> None:
        runtime, clock = FailingRuntime(plans), LoopClock()
        rig = MemoryRig(
            runtime,
            max_retries=max_retries,
            retry_backoff_base=base,
            retry_backoff_multiplier=multiplier,
            concurrency=concurrency,
        )
        ids = [rig.write({"n": n}, headers={"x-trace-id": f"trace-{n}"}) for n in range(len(plans))]
        with LogCapture(clock.now_ms).capture() as log:
            await rig.run(len(plans))
        rig.close()
        for n, (failures, word) in enumerate(plans):
            logged = [
                (at_ms, record.levelno, getattr(record, "trace_id", ""), record.getMessage())
                for at_ms, record in log.records
                if getattr(record, "message_id", "") == ids[n] and getattr(record, "stage", "") == "retry"
            ]
            assert logged == [
                (
                    runtime.tried_at_ms[n][number - 1],
                    logging.WARNING,
                    f"trace-{n}",
                    (
                        f"message {ids[n]}: retry {number} of {max_retries} "
                        f"in {base * multiplier ** (number - 1):g} s: RuntimeError: {word} {number}"
                    ),
                )
                for number in range(1, min(failures, max_retries) + 1)
            ]
        assert rig.counts.retries == sum(min(failures, max_retries) for failures, _ in plans)

    run_example(scenario())


@PROPERTY
@given(
    kind=st.sampled_from(KINDS),
    keys=st.lists(st.none() | st.sampled_from(["a", "b", "ü" * 300]), min_size=1, max_size=10),
    data=st.data(),
    concurrency=st.integers(1, 4),
    ordered=st.booleans(),
)
def test_property_15_one_run_per_key_and_duplicates_are_skipped_and_acknowledged(
    store: Store, kind: Kind, keys: list[str | None], data: st.DataObject, concurrency: int, ordered: bool
) -> None:
    """The key is a header or the message id; a redelivery after a lost acknowledgement is a duplicate."""
    lost = data.draw(st.sets(st.integers(0, len(keys) - 1)), "messages whose first acknowledgement is lost")

    async def scenario() -> None:
        rig = TriggerRig(store, kind, concurrency=concurrency)
        store.ran.clear()
        async with rig.trigger:
            ids = [
                rig.write(n, {} if key is None else {"x-dedup-key": key}, "line" if ordered else "")
                for n, key in enumerate(keys)
            ]
            rig.adapter.lose_ack_of.update(ids[n] for n in lost)
            await rig.wait_handled(len(keys))
            rig.broker.lose_connections()
            await rig.wait_handled(len(keys) + len(lost))
            assert await rig.adapter.lag() == 0
        await store.finish_jobs()
        rows = await rig.rows()
        rig.close()
        runs = Counter(keys[n] or ids[n] for _, n in store.ran)
        assert runs == dict.fromkeys((key or ids[n] for n, key in enumerate(keys)), 1)
        assert Counter(rig.adapter.settle_calls) == Counter(("ack", each) for each in ids)
        assert rig.counts.consumed[ExecutionStatus.SUCCESS] == len(runs)
        assert rig.counts.consumed[ExecutionStatus.DUPLICATE] == len(keys) + len(lost) - len(runs)
        # Duplicates are recorded with the run id of the original.
        run_ids_by_key = defaultdict(set)
        for row in rows:
            run_ids_by_key[keys[ids.index(row.message_id)] or row.message_id].add(row.agent_run_id)
        assert all(len(run_ids) == 1 and "" not in run_ids for run_ids in run_ids_by_key.values())

    store.run_example(scenario())


@PROPERTY
@given(
    window_ms=st.integers(1, 100_000),
    steps=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([-1.0, -0.5, -0.1, 0.0, 0.1, 1.0])),
        min_size=2,
        max_size=5,
    ),
)
def test_property_16_a_key_runs_again_after_its_window_and_not_before(
    store: Store, window_ms: int, steps: list[tuple[str, float]]
) -> None:
    """Each message arrives shortly before, at, or shortly after the end of its key's window.

    With keys in the engine and in the ledger.
    """

    async def scenario(kind: Kind) -> None:
        rig = TriggerRig(store, kind, idempotency_window=window_ms / 1000)
        expected, known_until = list[tuple[str, int]](), dict[str, int]()
        store.ran.clear()
        async with rig.trigger:
            for number, (key, distance) in enumerate(steps):
                end_ms = known_until.get(key, 0)
                # Move to the drawn distance from the end of the window, never backwards.
                shift_ms = end_ms - store.clock.now_ms() + round(distance * window_ms)
                if key in known_until and shift_ms > 0:
                    store.clock.advance(shift_ms / 1000)
                now_ms = store.clock.now_ms()
                if now_ms >= end_ms:
                    expected.append(("default", number))
                    known_until[key] = now_ms + window_ms
                rig.write(number, {"x-dedup-key": key})
                await rig.wait_handled(number + 1)
                # While its job is open, a key is kept regardless of the window.
                if kind == "task":
                    await store.finish_jobs()
        rig.close()
        assert store.ran == expected
        assert rig.counts.dedup_hits == len(steps) - len(expected)

    for kind in KINDS:
        store.run_example(scenario(kind))


@PROPERTY
@given(
    plans=st.lists(
        st.tuples(st.none() | st.sampled_from(["a", "b", "c"]), st.sampled_from(["runs", "retries", "fails"])),
        max_size=15,
    ),
    triggers=st.integers(1, 3),
)
def test_property_17_the_counter_of_duplicates_is_exact(plans: list[tuple[str | None, str]], triggers: int) -> None:
    """As Prometheus reads it. A permanent failure releases its key: the next message runs and is not a duplicate."""

    async def scenario() -> None:
        tried: set[int] = set()

        def act(context: Mapping[str, Any]) -> str:
            number = context["message"]
            first = number not in tried
            tried.add(number)
            if plans[number][1] == "fails":
                raise Fatal("never")
            if plans[number][1] == "retries" and first:
                raise RuntimeError("not yet")
            return "run"

        dedup = InMemoryIdempotencyStore(LoopClock())
        first = MemoryRig(Recorder(act), dedup=dedup)
        rigs = [first, *(MemoryRig(Recorder(act), dedup=dedup, broker=first.name) for _ in range(triggers - 1))]
        for rig in rigs:
            await rig.trigger.start()
        known, duplicates = set[str](), 0
        for number, (key, fate) in enumerate(plans):
            # With one key, so that the order is defined.
            first.write(number, "line", {} if key is None else {"x-dedup-key": key})
            if key in known:
                duplicates += 1
            elif key is not None and fate != "fails":
                known.add(key)
        await until(lambda: sum(rig.handled for rig in rigs) >= len(plans))
        metrics = scrape_metrics(*(rig.counts for rig in rigs))
        assert metrics['queue_dedup_hits_total{queue="orders"}'] == duplicates
        assert metrics['queue_messages_consumed_total{queue="orders",status="duplicate"}'] == duplicates
        for rig in rigs:
            await rig.trigger.stop()
        assert sum(rig.counts.dedup_hits for rig in rigs) == duplicates
        first.close()

    run_example(scenario())


FATES: Final = st.sampled_from(["runs", "retries", "exhausted", "fatal", "unparsable", "twice"])
TRACES: Final = st.none() | WORDS | st.just("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")


@PROPERTY
@given(
    kind=st.sampled_from(KINDS),
    plans=st.lists(
        st.tuples(FATES, st.none() | EVENTS, st.none() | TENANTS, TRACES, st.integers(0, 5_000)),
        min_size=1,
        max_size=5,
    ),
    max_retries=st.integers(1, 3),
)
def test_property_18_the_ledgers_record_is_complete(
    store: Store, kind: Kind, plans: list[tuple[str, str | None, str | None, str | None, int]], max_retries: int
) -> None:
    """One row for each message with all columns, read from the table `queue_executions`."""
    tried: Counter[int] = Counter()

    async def act(_: str, context: Mapping[str, Any], __: str | None, ___: str) -> str:
        number = context["message"]
        fate, *_rest, takes_ms = plans[number]
        tried[number] += 1
        store.clock.advance(takes_ms / 1000)
        if fate == "fatal":
            raise Fatal(f"never {number}")
        if fate == "exhausted" or (fate == "retries" and tried[number] == 1):
            raise RuntimeError(f"no {number}")
        return f"run-{number}"

    def outcome(number: int, repeated: bool) -> tuple[str, int, str, str]:
        """Return status, retries, error and run id."""
        fate = plans[number][0]
        if fate == "unparsable":
            return "unparsable", 0, "the message is not valid JSON: Input data was truncated", ""
        run_id = "" if kind == "task" else f"run-{number}"
        if repeated:
            return "duplicate", 0, "", run_id
        if kind == "callable" and fate == "fatal":
            return "failed", 0, f"never {number}", ""
        if kind == "callable" and fate == "exhausted":
            error = f"failed after {max_retries + 1} attempts: RuntimeError: no {number}"
            return "failed", max_retries, error, ""
        return "success", int(kind == "callable" and fate == "retries"), "", run_id

    async def scenario() -> None:
        rig = TriggerRig(store, kind, act, max_retries=max_retries)
        expected: dict[str, tuple[Any, ...]] = {}
        numbers: dict[str, int] = {}
        async with rig.trigger:
            for number, (fate, event, tenant, trace, _) in enumerate(plans):
                headers = {"x-dedup-key": str(number)}
                headers |= {} if event is None else {"x-event-name": event}
                headers |= {} if tenant is None else {"x-tenant-id": tenant}
                headers |= {} if trace is None else {"traceparent" if "-" in trace else "x-trace-id": trace}
                for repeated in (False, True) if fate == "twice" else (False,):
                    store.clock.advance(1)
                    # Sequential messages, so that only the runtime and its retries move the clock.
                    started_ms = store.clock.now_ms()
                    message_id = rig.write(b"{" if fate == "unparsable" else number, headers)
                    numbers[message_id] = number
                    await rig.wait_handled(len(expected) + 1)
                    ended_ms = store.clock.now_ms()
                    trace_id = f"queue-{message_id}" if trace is None else "ab" * 16 if "-" in trace else trace
                    identity = (tenant or "default", event or "queue_message", trace_id)
                    expected[message_id] = (
                        *identity,
                        started_ms,
                        ended_ms,
                        ended_ms - started_ms,
                        *outcome(number, repeated),
                    )
        rows = await rig.rows()
        durations = store.durations(rig.config.queue_name)
        rig.close()
        actual: dict[str, tuple[Any, ...]] = {}
        for row in rows:
            run_id = row.agent_run_id
            if kind == "task" and run_id:
                job = await store.app.job(run_id).info()
                assert (job.tenant_id, json.loads(job.payload)["message"]) == (row.tenant_id, numbers[row.message_id])
                run_id = ""
            actual[row.message_id] = (
                *(row.tenant_id, row.event_name, row.trace_id),
                *(row.started_at_ms, row.completed_at_ms, durations[row.message_id]),
                *(row.status, row.retry_count, row.error_message, run_id),
            )
        assert actual == expected
        assert len(rows) == len(expected)
        if kind == "task":
            assert all(row.agent_run_id for row in rows if row.status in ("success", "duplicate"))
            await store.finish_jobs()

    store.run_example(scenario())
