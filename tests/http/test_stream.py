"""Event streams: nothing is missed, nothing comes twice, nobody hears of others, and who does not read is let go."""

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
from holdfast.http.subscribers import StreamFilter, StreamSubscriber
from tests.http.deployment import PATIENCE_S, World, sample, serving
from tests.http.test_jobs import _run, _submit

Event = dict[str, str]


@contextmanager
def _listening(client: httpx.Client, query: str = "", last: str | None = None) -> Iterator[Iterator[Event]]:
    headers = {} if last is None else {"Last-Event-ID": last}
    with client.stream("GET", f"/api/v1/stream{query}", headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream"
        events = _events(reply)
        assert next(events)["event"] == "ready"
        yield events


def _events(reply: httpx.Response) -> Iterator[Event]:
    event: Event = {}
    for line in reply.iter_lines():
        if not line:
            if "data" in event:
                yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value


def _take(events: Iterator[Event], count: int) -> list[Event]:
    return [next(events) for _ in range(count)]


def _ids(events: list[Event]) -> list[str]:
    return [json.loads(event["data"])["job_id"] for event in events]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_events_are_told_as_they_happen(world: World) -> None:
    client = world.client()
    with _listening(client) as events:
        job_id = _submit(world.client())
        event = next(events)
        assert (event["event"], json.loads(event["data"])["job_id"]) == ("task.created", job_id)


def test_a_stream_goes_on_where_it_broke(world: World) -> None:
    """In the same process from the ring, and in another, which has never seen those events, from the feed."""
    client = world.client()
    with _listening(client) as events:
        made = [_submit(world.client()) for _ in range(3)]
        first = next(events)
    assert json.loads(first["data"])["job_id"] == made[0]
    made += [_submit(world.client()) for _ in range(3)]
    with _listening(client, last=first["id"]) as events:
        assert _ids(_take(events, 5)) == made[1:]
    other = EventHub(world.service.operations.engine)

    async def elsewhere() -> bytes:
        listener = StreamSubscriber(StreamFilter(None), lambda: None)
        await other.subscribe(listener, first["id"])
        try:
            return await listener.next_chunk(5)
        finally:
            await other.unsubscribe(listener)

    told = world.call(elsewhere).decode()
    assert [job_id for job_id in made if job_id in told] == made[1:]
    assert "event: gap" not in told


def test_a_place_that_is_gone_is_told_as_a_gap(world: World) -> None:
    for _ in range(2):
        _submit(world.client())
    # No place at all, and one in the feed of another kind of engine.
    for last in ("no-such-place", "default=1-2-3.4"):
        with _listening(world.client(), last=last) as events:
            assert next(events)["event"] == "gap"


def test_a_jobs_stream_is_its_whole_story_and_ends_with_it(world: World) -> None:
    client = world.client()
    job_id = _submit(client)
    with _listening(client, f"?job_id={job_id}") as events:
        assert next(events)["event"] == "task.created"
        assert _run(world.client(), job_id).json()["state"] == "succeeded"
        rest = list(events)
    assert [event["event"] for event in rest] == ["task.claimed", "task.succeeded"]
    with _listening(client, f"?job_id={job_id}", last="1") as events:
        assert [event["event"] for event in events] == ["task.claimed", "task.succeeded"]
    done = client.get(f"/api/v1/stream?job_id={job_id}", headers={"Last-Event-ID": rest[-1]["id"]})
    assert done.status_code == 204


@pytest.mark.parametrize("query", ["?task=refuse", "?type=task.cancelled", "?queue=other"])
def test_filters(world: World, query: str) -> None:
    with _listening(world.client(), query) as events:
        operator = world.client()
        _submit(operator)
        wanted = _submit(operator, "refuse", {}, queue="other" if "queue" in query else "default")
        operator.post(f"/api/v1/jobs/{wanted}/cancel", json={"reason": "x"})
        assert json.loads(next(events)["data"])["job_id"] == wanted


def test_nobody_hears_of_other_tenants(world: World) -> None:
    acme = world.client("eve", Role.OPERATOR, ("acme",))
    with _listening(acme) as events:
        _submit(world.client())
        mine = _submit(acme)
        event = json.loads(next(events)["data"])
        assert (event["job_id"], event["tenant_id"]) == (mine, "acme")


async def test_what_waits_for_a_client_is_bounded_in_bytes_too() -> None:
    """Only one who comes back gets more at once."""
    let_go: list[bool] = []
    listener = StreamSubscriber(StreamFilter(None), lambda: let_go.append(True))
    listener.send(b"x" * (subscribers.BACKLOG_BYTES + 1))
    assert not let_go
    listener.send(b"x")
    assert let_go
    assert len(await listener.next_chunk(0)) == subscribers.BACKLOG_BYTES + 1


def test_a_client_that_never_reads_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody else is held up meanwhile."""
    monkeypatch.setattr(subscribers, "BACKLOG", 3)
    place = urlsplit(world.base)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        sock.connect((place.hostname, place.port))
        sock.sendall(
            f"GET /api/v1/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.token()}\r\n\r\n".encode()
        )
        _until(lambda: world.service.hub.subscriber_count == 1)
        client = world.client()
        jobs = [{"task": "refuse", "payload": {"why": "x" * 2_000}} for _ in range(80)]
        # As many as it takes to fill the buffers of both ends, however large they are.
        deadline = time.monotonic() + PATIENCE_S
        while world.service.hub.subscriber_count and time.monotonic() < deadline:
            assert client.post("/api/v1/jobs/bulk", json={"jobs": jobs}).status_code == 200
        assert world.service.hub.subscriber_count == 0


def test_a_client_that_goes_away_is_forgotten(world: World) -> None:
    with _listening(world.client()):
        _until(lambda: world.service.hub.subscriber_count == 1)
    _until(lambda: world.service.hub.subscriber_count == 0)


def test_streams_on_redis_with_a_ledger(redis_url: str, postgres_url: str, namespace: str) -> None:
    app = sample(redis_url, ledger=postgres_url, namespace=namespace)
    with serving(app, worker=True, upkeep=True) as world:
        with _listening(world.client()) as events:
            job_id = _submit(world.client())
            told = _take(events, 3)
        assert [event["event"] for event in told] == ["task.created", "task.claimed", "task.succeeded"]
        assert set(_ids(told)) == {job_id}
        with _listening(world.client(), last=told[0]["id"]) as events:
            assert [event["event"] for event in _take(events, 2)] == ["task.claimed", "task.succeeded"]
        with _listening(world.client(), f"?job_id={job_id}") as events:
            assert [event["event"] for event in events] == ["task.created", "task.claimed", "task.succeeded"]


def test_a_feed_that_was_cut_is_told(world: World) -> None:
    """An entry that should be there and is not: whoever listens hears of it."""
    engine = world.service.operations.engine
    _submit(world.client())

    async def cut() -> Any:
        hub = EventHub(engine)
        listener = StreamSubscriber(StreamFilter(None), lambda: None)
        await hub.subscribe(listener, None)
        hub._at["default"] = (hub._at["default"][0], "another-nonce")
        try:
            await asyncio.to_thread(_submit, world.stranger(authorization=f"Bearer {world.token()}"))
            told = b""
            while b"event: gap" not in told:
                told += await listener.next_chunk(5)
            return told
        finally:
            await hub.unsubscribe(listener)

    world.token()
    assert b"event: gap" in world.call(cut)


def test_places_are_told_apart() -> None:
    assert subscribers.parse_event_id("a%3Bb=12-3.4;c=5") == {"a;b": "12-3.4", "c": "5"}
    assert subscribers.format_event_id("a;b", "12-3.4", {"c": "5", "d": ""}) == "a%3Bb=12-3.4;c=5"
    assert subscribers.parse_event_id("x") is None
    assert (
        subscribers.parse_position("12-3.4")
        < subscribers.parse_position("12-3.5")
        < subscribers.parse_position("12-3")
        < subscribers.parse_position("12-10.0")
    )


def test_a_jobs_stream_waits_for_the_ledger_without_asking_it_again_and_again(
    redis_url: str, postgres_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while the ledger is behind nor when others' jobs move; and then nothing is missing."""
    settings: dict[str, Any] = {"ledger": postgres_url, "namespace": namespace}
    with serving(sample(redis_url, **settings), upkeep=False) as world:
        client = world.client()
        job_id = _submit(client)
        looks: list[str] = []
        queries = type(world.service.queries)
        story = queries.events

        async def counted(self: Any, key: Any) -> Any:
            looks.append(key.job_id)
            return await story(self, key)

        monkeypatch.setattr(queries, "events", counted)
        with _listening(world.client(), f"?job_id={job_id}") as events:
            heard = StreamSubscriber(StreamFilter(None), lambda: None)
            world.call(lambda: world.service.hub.subscribe(heard, None))
            last = [_submit(client) for _ in range(30)][-1]
            told = b""
            while last.encode() not in told:
                told += world.call(lambda: heard.next_chunk(5))
            world.call(lambda: world.service.hub.unsubscribe(heard))
            assert looks == [job_id]
            # The ledger catches up only now.
            with serving(sample(redis_url, **settings), worker=True, upkeep=True):
                assert [event["event"] for event in events] == ["task.created", "task.claimed", "task.succeeded"]
        # At most once when it had caught up with the beginning, and once for each event.
        assert set(looks) == {job_id}
        assert len(looks) <= 1 + 1 + 3


def test_those_with_the_same_wish_share_what_is_found_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event is looked at once for each kind of wish, and not at all for wishes that none of them can be."""
    asked: list[StreamFilter] = []
    wants = StreamFilter.matches

    def counted(self: StreamFilter, told: Any) -> bool:
        asked.append(self)
        return wants(self, told)

    monkeypatch.setattr(StreamFilter, "matches", counted)
    mine, others = StreamFilter(None), [StreamFilter(frozenset({f"tenant-{number}"})) for number in range(50)]
    typed = [StreamFilter(None, types=frozenset({f"task.t{number}"})) for number in range(50)]
    listeners = [StreamSubscriber(wish, lambda: None) for wish in [mine] * 50 + others + typed]

    async def tell() -> bytes:
        hub = EventHub(world.service.operations.engine)
        for listener in listeners:
            await hub.subscribe(listener, None)
        await asyncio.to_thread(_submit, client)
        told = b""
        while b"task.created" not in told:
            told += await listeners[0].next_chunk(5)
        for listener in listeners:
            await hub.unsubscribe(listener)
        return told

    client = world.client()
    assert b"task.created" in world.call(tell)
    assert asked == [mine]


def test_who_comes_while_the_last_one_leaves_is_told(world: World) -> None:
    """The one who leaves must not put the hub to rest under the one who waits for it to begin."""
    _submit(world.client())

    async def meet() -> bytes:
        hub = EventHub(world.service.operations.engine)
        first, second = (StreamSubscriber(StreamFilter(None), lambda: None) for _ in range(2))
        await hub.subscribe(first, None)
        # As if the tail had only just been started.
        hub._begun.clear()
        coming = asyncio.create_task(hub.subscribe(second, None))
        await asyncio.sleep(0)
        await hub.unsubscribe(first)
        try:
            await asyncio.wait_for(coming, 5)
            return await second.next_chunk(5)
        finally:
            await hub.unsubscribe(second)

    assert b"event: ready" in world.call(meet)
