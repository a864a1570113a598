"""What becomes of messages that fail, that come twice, and what is written down of them (requirement T6, 13 to 18)."""

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
from holdfast.triggers.dedup import InMemoryDedupStore
from tests.triggers.properties.memory_rig import PROPERTY, LoopClock, World, history_of, play, until
from tests.triggers.properties.store_rig import KINDS, Bench, Kind, Listener, Store, open_store, scraped
from tests.triggers.properties.strategies import EVENTS, TENANTS
from tests.triggers.rig import Recorder

pytestmark = pytest.mark.search

WORDS: Final = st.text(string.ascii_letters, min_size=1, max_size=12)
POLICIES: Final = st.sampled_from(["ack", "nack", "requeue", "dlq"])
#: A history keeps so many of the first and of the latest tries.
FIRST, LATEST = 5, 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(tmp_path_factory.mktemp("store")) as store:
        yield store


class Trying(Recorder):
    """Fails each message as often as it is told, and notes when."""

    def __init__(self, plans: list[tuple[int, str]]) -> None:
        super().__init__(self._try)
        self._plans = plans
        self.tried_at_ms: dict[int, list[int]] = defaultdict(list)

    async def _try(self, context: Mapping[str, Any]) -> str:
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
def test_property_13_exhausted_is_a_dead_letter_with_reason_and_history(
    plans: list[tuple[int, str]], max_retries: int, policy: str, concurrency: int
) -> None:
    async def story() -> None:
        runtime = Trying(plans)
        world = World(
            runtime,
            max_retries=max_retries,
            ack_policy=policy,
            concurrency=concurrency,
            retry_backoff_base=0.25,
            retry_backoff_multiplier=1.1,
        )
        ids = [world.write({"n": n}, headers={"x-event-name": f"event-{n}"}) for n in range(len(plans))]
        await world.run(len(plans))
        world.close()
        tries = max_retries + 1
        exhausted = [n for n, (failures, _) in enumerate(plans) if failures > max_retries]
        letters = {letter.headers["x-dead-message-id"]: letter for letter in world.dead}
        assert len(world.dead) == len(exhausted)
        assert set(letters) == {ids[n] for n in exhausted}
        for n in exhausted:
            letter, word = letters[ids[n]], plans[n][1]
            assert letter.body == json.dumps({"n": n}).encode()
            assert (letter.headers["x-event-name"], letter.headers["x-dead-source"]) == (f"event-{n}", "orders")
            assert letter.headers["x-dead-reason"] == f"failed after {tries} attempts: RuntimeError: {word} {tries}"
            lines = [
                f"attempt {number} at {to_datetime(at_ms).isoformat()}: RuntimeError: {word} {number}"
                for number, at_ms in enumerate(runtime.tried_at_ms[n], 1)
            ]
            assert len(lines) == tries
            kept = lines if tries <= FIRST + LATEST else lines[:FIRST] + lines[-LATEST:]
            assert history_of(letter) == kept
            assert world.words(ids[n]) == ["dlq"]
        assert {row.message_id: (row.status, row.retry_count) for row in world.rows} == {
            ids[n]: ("failed", max_retries) if n in exhausted else ("success", failures)
            for n, (failures, _) in enumerate(plans)
        }
        assert await world.adapter.lag() == 0

    play(story())


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
    async def story() -> None:
        runtime, clock = Trying(plans), LoopClock()
        world = World(
            runtime,
            max_retries=max_retries,
            retry_backoff_base=base,
            retry_backoff_multiplier=multiplier,
            concurrency=concurrency,
        )
        ids = [world.write({"n": n}, headers={"x-trace-id": f"trace-{n}"}) for n in range(len(plans))]
        with Listener(clock.now_ms).listening() as log:
            await world.run(len(plans))
        world.close()
        for n, (failures, word) in enumerate(plans):
            told = [
                (at_ms, record.levelno, getattr(record, "trace_id", ""), record.getMessage())
                for at_ms, record in log.heard
                if getattr(record, "message_id", "") == ids[n] and getattr(record, "stage", "") == "retry"
            ]
            assert told == [
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
        assert world.counts.retries == sum(min(failures, max_retries) for failures, _ in plans)

    play(story())


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
    """A key is the message's own or its id: then its second delivery, after a lost acknowledgement, is a duplicate."""
    lost = data.draw(st.sets(st.integers(0, len(keys) - 1)), "whose first acknowledgement is lost")

    async def story() -> None:
        bench = Bench(store, kind, concurrency=concurrency)
        store.ran.clear()
        async with bench.trigger:
            ids = [
                bench.write(n, {} if key is None else {"x-dedup-key": key}, "line" if ordered else "")
                for n, key in enumerate(keys)
            ]
            bench.adapter.forget.update(ids[n] for n in lost)
            await bench.off(len(keys))
            bench.broker.lose_connections()
            await bench.off(len(keys) + len(lost))
            assert await bench.adapter.lag() == 0
        await store.finish_jobs()
        rows = await bench.rows()
        bench.close()
        runs = Counter(keys[n] or ids[n] for _, n in store.ran)
        assert runs == dict.fromkeys((key or ids[n] for n, key in enumerate(keys)), 1)
        assert Counter(bench.adapter.told) == Counter(("ack", each) for each in ids)
        assert bench.counts.consumed[ExecutionStatus.SUCCESS] == len(runs)
        assert bench.counts.consumed[ExecutionStatus.DUPLICATE] == len(keys) + len(lost) - len(runs)
        # Duplicates are told the run of the one that ran.
        of_key = defaultdict(set)
        for row in rows:
            of_key[keys[ids.index(row.message_id)] or row.message_id].add(row.agent_run_id)
        assert all(len(run_ids) == 1 and "" not in run_ids for run_ids in of_key.values())

    store.play(story())


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
    """Each message comes a little before, just at, or a little after the end of its key's window; on the engine's keys
    and on the ledger's."""

    async def story(kind: Kind) -> None:
        bench = Bench(store, kind, idempotency_window=window_ms / 1000)
        expected, known_until = list[tuple[str, int]](), dict[str, int]()
        store.ran.clear()
        async with bench.trigger:
            for number, (key, distance) in enumerate(steps):
                end_ms = known_until.get(key, 0)
                # As far from the end of the window as is asked for; never backwards.
                shift_ms = end_ms - store.clock.now_ms() + round(distance * window_ms)
                if key in known_until and shift_ms > 0:
                    store.clock.advance(shift_ms / 1000)
                now_ms = store.clock.now_ms()
                if now_ms >= end_ms:
                    expected.append(("default", number))
                    known_until[key] = now_ms + window_ms
                bench.write(number, {"x-dedup-key": key})
                await bench.off(number + 1)
                # As long as its job is open a key is known, whatever the window says.
                if kind == "task":
                    await store.finish_jobs()
        bench.close()
        assert store.ran == expected
        assert bench.counts.dedup_hits == len(steps) - len(expected)

    for kind in KINDS:
        store.play(story(kind))


@PROPERTY
@given(
    plans=st.lists(
        st.tuples(st.none() | st.sampled_from(["a", "b", "c"]), st.sampled_from(["runs", "retries", "fails"])),
        max_size=15,
    ),
    triggers=st.integers(1, 3),
)
def test_property_17_the_counter_of_duplicates_is_exact(plans: list[tuple[str | None, str]], triggers: int) -> None:
    """As Prometheus reads it. What failed for good is not known: the next of its key runs, and is no duplicate."""

    async def story() -> None:
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

        dedup = InMemoryDedupStore(LoopClock())
        first = World(Recorder(act), dedup=dedup)
        worlds = [first, *(World(Recorder(act), dedup=dedup, broker=first.name) for _ in range(triggers - 1))]
        for world in worlds:
            await world.trigger.start()
        known, duplicates = set[str](), 0
        for number, (key, what) in enumerate(plans):
            # In one line, so that it is known which of two comes first.
            first.write(number, "line", {} if key is None else {"x-dedup-key": key})
            if key in known:
                duplicates += 1
            elif key is not None and what != "fails":
                known.add(key)
        await until(lambda: sum(world.taken_care_of for world in worlds) >= len(plans))
        seen = scraped(*(world.counts for world in worlds))
        assert seen['queue_dedup_hits_total{queue="orders"}'] == duplicates
        assert seen['queue_messages_consumed_total{queue="orders",status="duplicate"}'] == duplicates
        for world in worlds:
            await world.trigger.stop()
        assert sum(world.counts.dedup_hits for world in worlds) == duplicates
        first.close()

    play(story())


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
    """One row for each message, with everything that is known of it; read from `queue_executions` itself."""
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

    def outcome(number: int, again: bool) -> tuple[str, int, str, str]:
        """Status, retries, error and run."""
        fate = plans[number][0]
        if fate == "unparsable":
            return "unparsable", 0, "the message is not valid JSON: Input data was truncated", ""
        run_id = "" if kind == "task" else f"run-{number}"
        if again:
            return "duplicate", 0, "", run_id
        if kind == "callable" and fate == "fatal":
            return "failed", 0, f"never {number}", ""
        if kind == "callable" and fate == "exhausted":
            words = f"failed after {max_retries + 1} attempts: RuntimeError: no {number}"
            return "failed", max_retries, words, ""
        return "success", int(kind == "callable" and fate == "retries"), "", run_id

    async def story() -> None:
        bench = Bench(store, kind, act, max_retries=max_retries)
        wanted: dict[str, tuple[Any, ...]] = {}
        numbers: dict[str, int] = {}
        async with bench.trigger:
            for number, (fate, event, tenant, trace, _) in enumerate(plans):
                headers = {"x-dedup-key": str(number)}
                headers |= {} if event is None else {"x-event-name": event}
                headers |= {} if tenant is None else {"x-tenant-id": tenant}
                headers |= {} if trace is None else {"traceparent" if "-" in trace else "x-trace-id": trace}
                for again in (False, True) if fate == "twice" else (False,):
                    store.clock.advance(1)
                    # Only the runtime and its retries move the clock: one message after the other.
                    begun_ms = store.clock.now_ms()
                    message_id = bench.write(b"{" if fate == "unparsable" else number, headers)
                    numbers[message_id] = number
                    await bench.off(len(wanted) + 1)
                    ended_ms = store.clock.now_ms()
                    trace_id = f"queue-{message_id}" if trace is None else "ab" * 16 if "-" in trace else trace
                    about = (tenant or "default", event or "queue_message", trace_id)
                    wanted[message_id] = (*about, begun_ms, ended_ms, ended_ms - begun_ms, *outcome(number, again))
        rows = await bench.rows()
        durations = store.durations(bench.config.queue_name)
        bench.close()
        found: dict[str, tuple[Any, ...]] = {}
        for row in rows:
            run_id = row.agent_run_id
            if kind == "task" and run_id:
                job = await store.app.job(run_id).info()
                assert (job.tenant_id, json.loads(job.payload)["message"]) == (row.tenant_id, numbers[row.message_id])
                run_id = ""
            found[row.message_id] = (
                *(row.tenant_id, row.event_name, row.trace_id),
                *(row.started_at_ms, row.completed_at_ms, durations[row.message_id]),
                *(row.status, row.retry_count, row.error_message, run_id),
            )
        assert found == wanted
        assert len(rows) == len(wanted)
        if kind == "task":
            assert all(row.agent_run_id for row in rows if row.status in ("success", "duplicate"))
            await store.finish_jobs()

    store.play(story())
