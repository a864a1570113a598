"""Event streams: no event is missed, repeated or sent to other tenants, and clients that do not read are dropped."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from holdfast.core.principal import Role
from holdfast.http import subscribers
from holdfast.http.event_hub import EventHub
from holdfast.http.subscribers import LastEvent, StreamFilter, StreamSubscriber
from tests.http.deployment import TIMEOUT_S, Deployment, sample, serving
from tests.http.test_jobs import _run, _submit

Event = dict[str, str]


@contextmanager
def _open_stream(client: httpx.Client, query: str = "", last: str | None = None) -> Iterator[Iterator[Event]]:
    headers = {} if last is None else {"Last-Event-ID": last}
    with client.stream("GET", f"/api/v1/stream{query}", headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream"
        events = _parse_events(reply)
        assert next(events)["event"] == "ready"
        yield events


def _parse_events(reply: httpx.Response) -> Iterator[Event]:
    event: Event = {}
    for line in reply.iter_lines():
        if not line:
            if "data" in event:
                yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value


def _read(events: Iterator[Event], count: int) -> list[Event]:
    return [next(events) for _ in range(count)]


def _job_ids(events: list[Event]) -> list[str]:
    return [json.loads(event["data"])["job_id"] for event in events]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_events_are_sent_as_they_happen(deployment: Deployment) -> None:
    client = deployment.client()
    with _open_stream(client) as events:
        job_id = _submit(deployment.client())
        event = next(events)
        assert (event["event"], json.loads(event["data"])["job_id"]) == ("task.created", job_id)


def test_a_stream_continues_after_the_last_event_id(deployment: Deployment) -> None:
    """In the same process from its buffer, and in another process, which does not have those events, from the feed."""
    client = deployment.client()
    with _open_stream(client) as events:
        submitted = [_submit(deployment.client()) for _ in range(3)]
        first = next(events)
    assert json.loads(first["data"])["job_id"] == submitted[0]
    submitted += [_submit(deployment.client()) for _ in range(3)]
    with _open_stream(client, last=first["id"]) as events:
        assert _job_ids(_read(events, 5)) == submitted[1:]
    other_hub = EventHub(deployment.service.operations.engine)

    async def resume_elsewhere() -> bytes:
        subscriber = StreamSubscriber(StreamFilter(None), lambda: None)
        await other_hub.subscribe(subscriber, first["id"])
        try:
            return await subscriber.next_chunk(5)
        finally:
            await other_hub.unsubscribe(subscriber)

    chunk = deployment.call(resume_elsewhere).decode()
    assert [job_id for job_id in submitted if job_id in chunk] == submitted[1:]
    assert "event: gap" not in chunk


def test_an_unknown_event_id_is_a_gap(deployment: Deployment) -> None:
    for _ in range(2):
        _submit(deployment.client())
    # Not an id, and an id with a position in the feed of another kind of engine.
    for last in ("no-such-id", "default=1-2-3.4"):
        with _open_stream(deployment.client(), last=last) as events:
            assert next(events)["event"] == "gap"


def test_a_jobs_stream_is_its_whole_history_and_ends_with_it(deployment: Deployment) -> None:
    client = deployment.client()
    job_id = _submit(client)
    with _open_stream(client, f"?job_id={job_id}") as events:
        assert next(events)["event"] == "task.created"
        assert _run(deployment.client(), job_id).json()["state"] == "succeeded"
        rest = list(events)
    assert [event["event"] for event in rest] == ["task.claimed", "task.succeeded"]
    with _open_stream(client, f"?job_id={job_id}", last="1") as events:
        assert [event["event"] for event in events] == ["task.claimed", "task.succeeded"]
    done = client.get(f"/api/v1/stream?job_id={job_id}", headers={"Last-Event-ID": rest[-1]["id"]})
    assert done.status_code == 204


@pytest.mark.parametrize("query", ["?task=refuse", "?type=task.cancelled", "?queue=other"])
def test_streams_are_filtered(deployment: Deployment, query: str) -> None:
    with _open_stream(deployment.client(), query) as events:
        operator = deployment.client()
        _submit(operator)
        matching = _submit(operator, "refuse", {}, queue="other" if "queue" in query else "default")
        operator.post(f"/api/v1/jobs/{matching}/cancel", json={"reason": "x"})
        assert json.loads(next(events)["data"])["job_id"] == matching


def test_events_of_other_tenants_are_not_sent(deployment: Deployment) -> None:
    acme = deployment.client("eve", Role.OPERATOR, ("acme",))
    with _open_stream(acme) as events:
        _submit(deployment.client())
        mine = _submit(acme)
        event = json.loads(next(events)["data"])
        assert (event["job_id"], event["tenant_id"]) == (mine, "acme")


async def test_the_backlog_of_a_client_is_bounded_in_bytes() -> None:
    """A client that reconnects may get more in its first chunk."""
    dropped: list[bool] = []
    subscriber = StreamSubscriber(StreamFilter(None), lambda: dropped.append(True))
    subscriber.send(b"x" * (subscribers.BACKLOG_BYTES + 1))
    assert not dropped
    subscriber.send(b"x")
    assert dropped
    assert len(await subscriber.next_chunk(0)) == subscribers.BACKLOG_BYTES + 1


def test_a_client_that_never_reads_is_dropped(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients are not delayed meanwhile."""
    monkeypatch.setattr(subscribers, "BACKLOG", 3)
    url = urlsplit(deployment.base)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        sock.connect((url.hostname, url.port))
        sock.sendall(
            f"GET /api/v1/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {deployment.token()}\r\n\r\n".encode()
        )
        _until(lambda: deployment.service.hub.subscriber_count == 1)
        client = deployment.client()
        jobs = [{"task": "refuse", "payload": {"reason": "x" * 2_000}} for _ in range(80)]
        # Enough to fill the buffers of both ends, whatever their size.
        deadline = time.monotonic() + TIMEOUT_S
        while deployment.service.hub.subscriber_count and time.monotonic() < deadline:
            assert client.post("/api/v1/jobs/bulk", json={"jobs": jobs}).status_code == 200
        assert deployment.service.hub.subscriber_count == 0


def test_a_disconnected_client_is_removed(deployment: Deployment) -> None:
    with _open_stream(deployment.client()):
        _until(lambda: deployment.service.hub.subscriber_count == 1)
    _until(lambda: deployment.service.hub.subscriber_count == 0)


def test_streams_on_redis_with_a_ledger(redis_url: str, postgres_url: str, namespace: str) -> None:
    app = sample(redis_url, ledger=postgres_url, namespace=namespace)
    with serving(app, worker=True, upkeep=True) as deployment:
        with _open_stream(deployment.client()) as events:
            job_id = _submit(deployment.client())
            received = _read(events, 3)
        assert [event["event"] for event in received] == ["task.created", "task.claimed", "task.succeeded"]
        assert set(_job_ids(received)) == {job_id}
        with _open_stream(deployment.client(), last=received[0]["id"]) as events:
            assert [event["event"] for event in _read(events, 2)] == ["task.claimed", "task.succeeded"]
        with _open_stream(deployment.client(), f"?job_id={job_id}") as events:
            assert [event["event"] for event in events] == ["task.created", "task.claimed", "task.succeeded"]


def test_a_missing_feed_entry_is_a_gap(deployment: Deployment) -> None:
    """Subscribers get a gap event if an expected entry is missing."""
    engine = deployment.service.operations.engine
    _submit(deployment.client())

    async def read_gap() -> Any:
        hub = EventHub(engine)
        subscriber = StreamSubscriber(StreamFilter(None), lambda: None)
        await hub.subscribe(subscriber, None)
        hub._at["default"] = (hub._at["default"][0], "another-nonce")
        try:
            await asyncio.to_thread(_submit, deployment.anonymous(authorization=f"Bearer {deployment.token()}"))
            received = b""
            while b"event: gap" not in received:
                received += await subscriber.next_chunk(5)
            return received
        finally:
            await hub.unsubscribe(subscriber)

    deployment.token()
    assert b"event: gap" in deployment.call(read_gap)


def test_event_ids_and_positions_are_parsed() -> None:
    event_id = "1790000000000-k3J9xQ2mZpAb"
    assert LastEvent.parse(event_id) == LastEvent(1_790_000_000_000, event_id)
    assert LastEvent.parse(subscribers.format_time_id(17)) == LastEvent(17, "")
    assert [LastEvent.parse(text) for text in ("x", "", "17", "17-", "-0", "a=12-3.4", f"{event_id}A")] == [None] * 7
    assert (
        subscribers.parse_position("12-3.4")
        < subscribers.parse_position("12-3.5")
        < subscribers.parse_position("12-3")
        < subscribers.parse_position("12-10.0")
    )


def test_a_jobs_stream_waits_for_the_ledger_without_polling_it(
    redis_url: str, postgres_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while the ledger is behind nor when other jobs move; afterwards no event is missing."""
    settings: dict[str, Any] = {"ledger": postgres_url, "namespace": namespace}
    with serving(sample(redis_url, **settings), upkeep=False) as deployment:
        client = deployment.client()
        job_id = _submit(client)
        reads: list[str] = []
        queries = type(deployment.service.queries)
        read_events = queries.events

        async def counted(self: Any, key: Any) -> Any:
            reads.append(key.job_id)
            return await read_events(self, key)

        monkeypatch.setattr(queries, "events", counted)
        with _open_stream(deployment.client(), f"?job_id={job_id}") as events:
            subscriber = StreamSubscriber(StreamFilter(None), lambda: None)
            deployment.call(lambda: deployment.service.hub.subscribe(subscriber, None))
            last = [_submit(client) for _ in range(30)][-1]
            received = b""
            while last.encode() not in received:
                received += deployment.call(lambda: subscriber.next_chunk(5))
            deployment.call(lambda: deployment.service.hub.unsubscribe(subscriber))
            assert reads == [job_id]
            # The ledger catches up only now.
            with serving(sample(redis_url, **settings), worker=True, upkeep=True):
                assert [event["event"] for event in events] == ["task.created", "task.claimed", "task.succeeded"]
        # At most once when it had caught up with the start, and once for each event.
        assert set(reads) == {job_id}
        assert len(reads) <= 1 + 1 + 3


def test_subscribers_with_equal_filters_share_one_match(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event is matched once for each distinct filter, and not at all for filters that cannot match."""
    matched: list[StreamFilter] = []
    matches = StreamFilter.matches

    def counted(self: StreamFilter, event: Any) -> bool:
        matched.append(self)
        return matches(self, event)

    monkeypatch.setattr(StreamFilter, "matches", counted)
    mine, others = StreamFilter(None), [StreamFilter(frozenset({f"tenant-{number}"})) for number in range(50)]
    typed = [StreamFilter(None, types=frozenset({f"task.t{number}"})) for number in range(50)]
    all_subscribers = [StreamSubscriber(stream_filter, lambda: None) for stream_filter in [mine] * 50 + others + typed]

    async def publish() -> bytes:
        hub = EventHub(deployment.service.operations.engine)
        for subscriber in all_subscribers:
            await hub.subscribe(subscriber, None)
        await asyncio.to_thread(_submit, client)
        received = b""
        while b"task.created" not in received:
            received += await all_subscribers[0].next_chunk(5)
        for subscriber in all_subscribers:
            await hub.unsubscribe(subscriber)
        return received

    client = deployment.client()
    assert b"task.created" in deployment.call(publish)
    assert matched == [mine]


def test_a_subscriber_that_joins_while_the_last_one_leaves_gets_events(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsubscribing must not stop the hub while another subscriber waits for a queue to be read."""
    _submit(deployment.client())
    engine = deployment.service.operations.engine
    reading, may_read = asyncio.Event(), asyncio.Event()
    snapshot = type(engine).snapshot

    async def slow(self: Any, queue: str, job_ids: Any) -> Any:
        if queue == "other":
            reading.set()
            await may_read.wait()
        return await snapshot(self, queue, job_ids)

    monkeypatch.setattr(type(engine), "snapshot", slow)
    client = deployment.client()

    async def join_and_leave() -> bytes:
        hub = EventHub(engine)
        first = StreamSubscriber(StreamFilter(None), lambda: None)
        second = StreamSubscriber(StreamFilter(None, frozenset({"default", "other"})), lambda: None)
        await hub.subscribe(first, None)
        joining = asyncio.create_task(hub.subscribe(second, None))
        await reading.wait()
        await hub.unsubscribe(first)
        may_read.set()
        try:
            await asyncio.wait_for(joining, 5)
            received = await second.next_chunk(5)
            await asyncio.to_thread(_submit, client)
            while b"task.created" not in received:
                received += await second.next_chunk(5)
            return received
        finally:
            await hub.unsubscribe(second)

    assert b"event: ready" in deployment.call(join_and_leave)
