"""Event ids: short, the same in every process, without information on others; a stream continues from any of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.core.job import Envelope, new_job_ids
from holdfast.core.principal import Role
from holdfast.http import feed_pages
from holdfast.http.event_hub import EventHub
from holdfast.http.subscribers import StreamFilter, StreamSubscriber
from tests.http.deployment import Deployment, sample, serving
from tests.http.test_jobs import _submit
from tests.http.test_stream import Event, _job_ids, _open_stream, _parse_events, _read

_ID = re.compile(r"[0-9]{13}-([A-Za-z0-9_-]{12}|0)")


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def settings(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> dict[str, Any]:
    """Of a deployment on each engine, with many batches behind the feeds' readers."""
    if request.param == "sqlite":
        return {"url": f"sqlite:///{tmp_path / 'jobs.db'}", "feed_tail": 1_000}
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    url = request.getfixturevalue("redis_url")
    return {"url": url, "ledger": ledger, "namespace": namespace, "feed_tail": 1_000}


@contextmanager
def _serve(settings: dict[str, Any]) -> Iterator[Deployment]:
    with serving(sample(**settings), upkeep=True) as deployment:
        yield deployment


def _submit_to(deployment: Deployment, queues: list[str], tenant: str = "acme") -> list[str]:
    """Submit a job to each of these queues, one after another."""
    jobs = [
        Envelope(job_id=new_job_ids(1)[0], task="add", payload=b'{"a":1}', queue=queue, tenant_id=tenant)
        for queue in queues
    ]

    async def submit() -> None:
        submitter = await deployment.service.backend.connections.submitter()
        for job in jobs:
            await submitter.submit(job)

    deployment.call(submit)
    return [job.job_id for job in jobs]


def _until_all(events: Iterator[Event], expected: list[Event]) -> list[Event]:
    """Read until these events have come, in whatever order: feeds are read one after another."""
    found: list[Event] = []
    while {each["id"] for each in expected} - {each["id"] for each in found}:
        found.append(next(events))
    return found


def _until_job(events: Iterator[Event], job_id: str) -> list[Event]:
    found: list[Event] = []
    while not found or _job_ids(found[-1:]) != [job_id]:
        found.append(next(events))
    return found


def test_ids_are_short_whatever_the_number_of_queues(settings: dict[str, Any]) -> None:
    with _serve(settings) as deployment:
        _submit_to(deployment, [f"a-queue-with-a-long-name-{number}" for number in range(150)])
        for client in (deployment.client(), deployment.client("eve", Role.VIEWER, ("acme",))):
            with client.stream("GET", "/api/v1/stream") as reply:
                events = _parse_events(reply)
                ready = next(events)
                submitted = _submit_to(deployment, ["here"])
                event = next(events)
            assert [bool(_ID.fullmatch(each["id"])) for each in (ready, event)] == [True, True]
            assert len(event["id"]) <= 100
            missed = _submit_to(deployment, ["there", "here"])
            for last in (ready["id"], event["id"]):
                expected = {*missed, *(submitted if last == ready["id"] else [])}
                received: list[Event] = []
                with _open_stream(client, last=last) as events:
                    while expected - {*_job_ids(received)}:
                        received.append(next(events))
                        assert received[-1]["event"] != "gap"


def test_ids_are_valid_in_every_process_and_after_a_restart(settings: dict[str, Any]) -> None:
    """An event that is sent again has the same id; no other has it."""
    with _serve(settings) as deployment:
        with _open_stream(deployment.client()) as events:
            submitted = _submit_to(deployment, ["a", "b", "a", "c", "a"])
            sent = _read(events, 5)
        assert sorted(_job_ids(sent)) == sorted(submitted)
        assert len({each["id"] for each in sent}) == 5
        with _serve(settings) as other, _open_stream(other.client("other"), last=sent[1]["id"]) as events:
            again = _until_all(events, sent[2:])
    with _serve(settings) as restarted, _open_stream(restarted.client("third"), last=sent[1]["id"]) as events:
        assert _until_all(events, sent[2:]) == again
    assert all(each in sent for each in again)


def test_a_stream_of_one_queue_continues_exactly(settings: dict[str, Any]) -> None:
    with _serve(settings) as deployment:
        client = deployment.client()
        with _open_stream(client, "?queue=a") as events:
            submitted = _submit_to(deployment, ["a", "a", "b", "a", "a"])
            del submitted[2]
            sent = _read(events, 4)
        for count, each in enumerate(sent[:3], 1):
            with _open_stream(client, "?queue=a", last=each["id"]) as events:
                assert _read(events, 4 - count) == sent[count:]


def test_a_stream_of_several_queues_repeats_at_most_a_second(settings: dict[str, Any]) -> None:
    """From whichever event it continues, the client has all events in the end, and knows what is repeated by its id."""
    queues = ["a", "b", "c", "a", "c", "b", "b", "a"]
    with _serve(settings) as deployment:
        client = deployment.client()
        with _open_stream(client) as events:
            submitted = _submit_to(deployment, queues)
            sent = _read(events, len(queues))
        assert sorted(_job_ids(sent)) == sorted(submitted)
        for count, each in enumerate(sent[:-1], 1):
            with _open_stream(client, last=each["id"]) as events:
                received = _until_all(events, sent[count:])
            assert all(other in sent for other in received)
            assert each not in received
            last_ms = int(each["id"].partition("-")[0])
            assert all(int(other["id"].partition("-")[0]) >= last_ms - 1_001 for other in received)


def test_events_are_published_in_the_order_of_time(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one feed has more than is read at once: later events of the others wait."""
    monkeypatch.setattr(feed_pages, "_PAGE", 3)
    with _serve(settings) as deployment:
        _submit_to(deployment, ["a", "b", "c"])
        hub = EventHub(deployment.service.operations.engine)
        subscriber = StreamSubscriber(StreamFilter(None), lambda: None)

        async def begin() -> None:
            await hub.subscribe(subscriber, None)
            # From here on it reads only when the test runs a round.
            assert hub._tailing is not None
            hub._tailing.cancel()
            await asyncio.gather(hub._tailing, return_exceptions=True)

        deployment.call(begin)
        submitted = _submit_to(deployment, ["a"] * 6 + ["b", "c", "a", "b"])

        async def receive() -> list[Any]:
            found: list[Any] = []
            while len(found) < len(submitted):
                await hub._run_round()
                chunk = (await subscriber.next_chunk(0)).decode()
                found += [json.loads(data) for data in re.findall("data: (.*task.created.*)", chunk)]
            await hub.unsubscribe(subscriber)
            return found

        found = deployment.call(receive)
        assert sorted(each["job_id"] for each in found) == sorted(submitted)
        instants = [datetime.fromisoformat(each["at"]) for each in found]
        assert instants == sorted(instants)


def test_ids_reveal_neither_position_nor_number() -> None:
    """What is not random in an id is in its event: two feeds with other neighbours give ids of the same form."""
    from holdfast.core.job import Event as JobEvent
    from holdfast.engine.port.feed import FeedEntry

    mine = JobEvent(type="task.created", job_id="mine", at_ms=1_790_000_000_000, tenant_id="acme")
    other = JobEvent(type="task.created", job_id="other", at_ms=1_790_000_000_000, tenant_id="globex")
    (alone,) = feed_pages.to_stream_events("q", FeedEntry("1-0", "nonce", [mine]))
    *_, last = feed_pages.to_stream_events("q", FeedEntry("5-700", "nonce", [other] * 40 + [mine]))
    assert alone.event_id == last.event_id
    # Equal events of one job in one entry have different ids.
    assert len({each.event_id for each in feed_pages.to_stream_events("q", FeedEntry("1-0", "n", [mine] * 3))}) == 3


@pytest.mark.parametrize(
    "last",
    [
        "no-such-id",
        "default=1-2-3.4",
        "17",
        "1790000000000-AAAAAAAAAAAA",
        "9790000000000-0",
        "a=1;" * 5_000,
        "x" * 8_001,
    ],
    ids=["text", "earlier release", "number", "no such event", "future", "many queues", "long"],
)
def test_another_id_is_a_gap(deployment: Deployment, last: str) -> None:
    """Also one of an earlier release, however long: the stream begins now."""
    _submit(deployment.client())
    with _open_stream(deployment.client(), last=last) as events:
        assert next(events)["event"] == "gap"
        submitted = _submit(deployment.client())
        assert _job_ids([_until_job(events, submitted)[-1]]) == [submitted]


def test_a_trimmed_feed_is_a_gap(settings: dict[str, Any]) -> None:
    with _serve(settings | {"feed_tail": 0, "feed_limit": 2}) as deployment:
        client = deployment.client()
        with _open_stream(client) as events:
            _submit_to(deployment, ["a"])
            last = next(events)
        submitted = _submit_to(deployment, ["a"] * 300)
        engine = deployment.service.operations.engine

        async def trim() -> None:
            end = (await engine.snapshot("a", [])).position
            await engine.trim_feed("a", end)

        deployment.call(trim)
        with _open_stream(client, last=last["id"]) as events:
            assert next(events)["event"] == "gap"
            assert _job_ids([next(events)]) == submitted[-1:]


@pytest.mark.redis
def test_a_lost_feed_is_a_gap(redis_url: str, namespace: str, tmp_path: Path) -> None:
    settings = {"url": redis_url, "namespace": namespace, "ledger": f"sqlite:///{tmp_path / 'ledger.db'}"}
    with serving(sample(**settings), upkeep=True) as deployment:
        client = deployment.client()
        with _open_stream(client) as events:
            _submit_to(deployment, ["a"])
            last = next(events)
        import redis

        store = redis.Redis.from_url(redis_url)
        keys = [key for key in store.scan_iter(f"*{namespace}*") if b"feed" in key]
        assert keys
        store.delete(*keys)
        store.close()
        submitted = _submit_to(deployment, ["a"])
        with _open_stream(client, last=last["id"]) as events:
            assert next(events)["event"] == "gap"
            assert _until_job(events, submitted[0])


@pytest.mark.redis
def test_a_jobs_stream_without_a_ledger_continues_exactly(redis_url: str, namespace: str) -> None:
    with serving(sample(redis_url, namespace=namespace), dev=True, run_endpoint=True) as deployment:
        client = deployment.anonymous()
        job_id = _submit(client)
        with _open_stream(client, f"?job_id={job_id}") as events:
            client.post(f"/api/v1/internal/jobs/{job_id}/run")
            sent = _read(events, 2)
        assert [each["event"] for each in sent] == ["task.claimed", "task.succeeded"]
        with _open_stream(client, f"?job_id={job_id}", last=sent[0]["id"]) as events:
            assert _read(events, 1) == sent[1:]


def test_a_hub_reads_only_what_its_streams_concern(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The named queues, and of these only feeds with new entries; all queues again for a stream without a filter."""
    with _serve(settings) as deployment:
        _submit_to(deployment, [f"q{number}" for number in range(20)])
        engine = deployment.service.operations.engine
        read: list[str] = []
        read_feed = type(engine).read_feed

        async def counted(self: Any, queue: str, start: str, limit: int) -> Any:
            read.append(queue)
            return await read_feed(self, queue, start, limit)

        hub = EventHub(engine)
        narrow = StreamSubscriber(StreamFilter(None, frozenset({"q3"})), lambda: None)
        wide = StreamSubscriber(StreamFilter(None), lambda: None)

        async def receive(subscriber: StreamSubscriber, job_id: str) -> None:
            text = b""
            while job_id.encode() not in text:
                text += await subscriber.next_chunk(5)

        deployment.call(lambda: hub.subscribe(narrow, None))
        assert set(hub._at) == {"q3"}
        monkeypatch.setattr(type(engine), "read_feed", counted)
        job_id = _submit_to(deployment, ["q2", "q3"])[1]
        deployment.call(lambda: receive(narrow, job_id))
        assert "q2" not in read or settings["url"].startswith("redis"), "only the projector reads it"
        deployment.call(lambda: hub.subscribe(wide, None))
        assert set(hub._at) == {f"q{number}" for number in range(20)}
        job_id = _submit_to(deployment, ["new"])[0]
        deployment.call(lambda: receive(wide, job_id))
        deployment.call(lambda: hub.unsubscribe(wide))
        job_id = _submit_to(deployment, ["q3"])[0]
        deployment.call(lambda: receive(narrow, job_id))
        deployment.call(lambda: hub.unsubscribe(narrow))
        assert not hub._at


def test_events_have_the_time_of_their_id(deployment: Deployment) -> None:
    client: httpx.Client = deployment.client()
    with _open_stream(client) as events:
        _submit(client)
        event = next(events)
    at = json.loads(event["data"])["at"]
    assert event["id"].startswith(str(deployment_ms(at)))


def deployment_ms(at: str) -> int:
    return round(datetime.fromisoformat(at).timestamp() * 1000)
