"""Garbage in the streams: whatever another program writes, the worker continues, and each message ends once.

`tests/engine/redis/test_foreign.py` tests the engine; here a real worker runs.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from holdfast import State
from holdfast.core.states import FINAL
from holdfast.core.verdict import MESSAGE_MALFORMED
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.errors import EngineUnavailable
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]

GARBAGE: Final[dict[str, bytes]] = {
    "empty": b"",
    "not text": b"\xff\xfe\x80",
    "zero byte": b"a\x00b",
    "line feed": b"a\nb",
    "blanks": b" ",
    "JSON": b'{"a": [1, null]}',
    "large number": b"9" * 400,
    "negative": b"-1",
    "long": b"x" * 100_000,
}
#: A message as another program writes it.
FOREIGN: Final = {
    "task_id": b"j1",
    "type": b"work",
    "payload": b'{"number":1}',
    "tenant_id": b"acme",
    "idempotency_key": b"k1",
    "trace_id": b"t1",
    "max_retries": b"1",
    "context": b"{}",
}
#: Messages as holdfast writes them: short, and with all fields.
SHORT: Final = {
    "holdfast": b"1 queued 0 0 1700000000000",
    "task_id": b"j1",
    "type": b"work",
    "payload": b'{"number":1}',
}
LONG: Final = SHORT | {"tenant_id": b"acme", "idempotency_key": b"k1", "trace_id": b"t1", "meta": b""}

#: Forged markers that can be parsed.
MARKERS: Final[dict[str, bytes]] = {
    "another version": b"2 queued 0 0 1700000000000",
    "no version": b"x queued 0 0 1700000000000",
    "a state that is never queued": b"1 succeeded 0 0 1700000000000",
    "no state": b"1 bogus 0 0 1700000000000",
    "negative attempts": b"1 queued -5 0 1700000000000",
    "too many attempts": b"1 queued " + b"9" * 30 + b" 0 1700000000000",
    "negative retries": b"1 retrying 1 -3 1700000000000",
    "no retries": b"1 queued 0 x 1700000000000",
    "a negative creation time": b"1 queued 0 0 -1",
    "a creation time out of range": b"1 queued 0 0 " + b"9" * 30,
    "too few fields": b"1 queued 0 0",
    "too many fields": b"1 queued 0 0 1700000000000 7",
    "empty": b"",
}
METAS: Final[dict[str, bytes]] = {
    "an unknown priority": b'{"priority": 99}',
    "a negative priority": b'{"priority": -1}',
    "poisoned before": b'{"lost_leases": 1000000}',
    "negative counts": b'{"retry_count": -7, "lost_leases": -7, "unavailable_count": -7}',
    "an invalid policy": b'{"retry": {"max_retries": -1, "base_ms": -5, "multiplier": -1.0, "cap_ms": -1,'
    b' "jitter_ms": -1, "delays_ms": [], "unavailable_deadline_ms": null}}',
    "infinite delays": b'{"max_retries": 1, "retry": {"max_retries": 1, "base_ms": 1e300}}',
    "not an object": b"[]",
    "a long number": b'{"retry_count": ' + b"9" * 30 + b"}",
}


class Wire:
    """A plain Redis client of another program, and a site."""

    def __init__(self, site: Site, redis: Redis) -> None:
        self.site = site
        # The stubs allow text instead of bytes; this client returns bytes.
        self.redis: Any = redis
        self.keys = QueueKeys("default", KeyNames(namespace=str(site.settings["namespace"])))
        self.stream = self.keys.streams[1]

    async def write(self, fields: dict[str, bytes]) -> bytes:
        message_id: bytes = await self.redis.xadd(self.stream, fields)
        return message_id

    async def read_marker(self) -> str:
        """The queue's secret: a program that may also read the stream knows it."""

        async def read() -> bytes | None:
            marker: bytes | None = await self.redis.hget(self.keys.control, "marker")
            if marker is None:
                # With a ledger, only once both were compared.
                await self.site.app.engine.claim("w0", ["default"], 1, 0)
            return marker

        marker: bytes = await eventually(read, "a marker")
        return marker.decode()

    async def dead_letters(self) -> list[dict[str, str]]:
        entries = await self.redis.xrange(self.keys.dlq)
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in entries]

    async def results(self) -> list[dict[str, str]]:
        entries = await self.redis.xrange(self.keys.result)
        return [{name.decode(): value.decode("utf-8", "replace") for name, value in f.items()} for _, f in entries]

    async def is_empty(self) -> bool:
        """Return whether no job is open."""
        stats = await self.site.app.engine.stats("default")
        return not any(stats.states.values())

    async def assert_survived(self, messages: int) -> None:
        """Check that every message ended once, the worker still works, and the feed can be read to its end."""
        await eventually(self.is_empty, "the garbage to be handled", within_s=10)
        good = [await self.site.tasks.work.submit(number) for number in range(3)]
        flaky = await self.site.tasks.flaky.submit()
        assert [await job.result(60) for job in good] == [0, 1, 2]
        assert await flaky.result(60) == "now"
        assert await self.is_empty()
        own_ids = {flaky.id, *(job.id for job in good)}
        assert len([row for row in await self.results() if row["task_id"] not in own_ids]) == messages
        finals = [event for event in await self.site.events() if event.to_state in FINAL]
        assert len(finals) == messages + 4


@pytest.fixture
async def wire(redis_url: str, make_site: MakeSite) -> AsyncIterator[Wire]:
    redis = Redis.from_url(redis_url)
    # Garbage in `type` is an unknown task: a dead letter at once, instead of after ten minutes.
    yield Wire(make_site(redis_url, unknown_task_grace_s=0), redis)
    await redis.aclose()


def with_marker(message: dict[str, bytes], marker: str) -> dict[str, bytes]:
    return {marker if name == "holdfast" else name: value for name, value in message.items()}


@pytest.mark.parametrize("template", [FOREIGN, SHORT, LONG], ids=["foreign", "short", "long"])
@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_in_every_field(wire: Wire, template: dict[str, bytes], name: str) -> None:
    """One message for each field with a separate id, all ready at once between two valid jobs."""
    messages = []
    template = with_marker(template, await wire.read_marker())
    for number, field in enumerate(template):
        unique = {"task_id": b"j%d" % number, "idempotency_key": b"k%d" % number}
        unique_message = template | {key: value for key, value in unique.items() if key in template}
        messages.append(unique_message | {field: GARBAGE[name]})
    healthy = [await wire.site.tasks.work.submit(1)]
    for message in messages:
        await wire.write(message)
    healthy.append(await wire.site.tasks.work.submit(2))
    async with working(wire.site.app):
        await wire.assert_survived(len(messages) + len(healthy))
        assert [await job.state() for job in healthy] == [State.SUCCEEDED] * 2


async def test_garbage_in_the_names_and_the_number_of_fields(wire: Wire) -> None:
    marker = await wire.read_marker()
    messages: list[dict[Any, Any]] = [
        {"holdfast": b"1 queued 0 0 1700000000000"},
        {"holdfast": b""},
        {"holdfast": b"\xff"},
        {b"\xff\xfe": b"\xff"},
        {"": ""},
        {"task_id": b"only"},
        {marker: b"1 queued 0 0 1700000000000"},
        {marker: b"1 queued 0 0 0", "type": b"work", "payload": b"{}", "task_id": b"order"},
        {f"f{number}": b"x" for number in range(500)},
        with_marker(LONG, marker) | {"extra": b"x"},
    ]
    for message in messages:
        await wire.write(message)
    async with working(wire.site.app):
        await wire.assert_survived(len(messages))
    assert {dead_letter["error_code"] for dead_letter in await wire.dead_letters()} == {MESSAGE_MALFORMED}
    assert all(json.loads(dead_letter["payload"]) is not None for dead_letter in await wire.dead_letters())


@pytest.mark.parametrize("task", ["work", "flaky", "fail", "unknown"])
@pytest.mark.parametrize("forged", [*MARKERS, *METAS])
async def test_a_forged_holdfast_message(wire: Wire, forged: str, task: str) -> None:
    """It runs or is a dead letter, whatever its task does; it never stops the stream or upkeep."""
    message = LONG | {"type": task.encode(), "payload": b'{"number":1}' if task == "work" else b"{}"}
    message |= {"holdfast": MARKERS[forged]} if forged in MARKERS else {"meta": METAS[forged]}
    await wire.write(with_marker(message, await wire.read_marker()))
    async with working(wire.site.app):
        await wire.assert_survived(1)


@pytest.mark.parametrize("when", ["queued", "running", "ended"])
async def test_a_copied_message_ends_its_job_once(wire: Wire, when: str) -> None:
    """XRANGE, then XADD of the same fields while the job waits, while it runs, and after its end."""
    site, gate = wire.site, wire.site.gate()
    job = await site.tasks.hold.submit(str(gate))
    ((_, fields),) = await wire.redis.xrange(wire.stream)
    if when == "queued":
        for _ in range(3):
            await wire.redis.xadd(wire.stream, fields)
    async with working(site.app):
        await site.wait_running(job.id)
        if when == "running":
            for _ in range(3):
                await wire.redis.xadd(wire.stream, fields)
        gate.touch()
        assert await job.result(60) == "attempt 1"
        if when == "ended":
            for _ in range(3):
                await wire.redis.xadd(wire.stream, fields)
        await eventually(wire.is_empty, "the copies to end", within_s=10)
        assert (await site.final_events())[job.id] == 1
        assert [row["task_id"] for row in await wire.results()] == [job.id]
        assert await job.result(60) == "attempt 1"


async def test_deleting_the_entry_of_a_running_job_leaves_nothing_pending(wire: Wire) -> None:
    """XTRIM removes the message of a running job: its verdict is still applied, and nothing stays pending."""
    gate = wire.site.gate()
    job = await wire.site.tasks.hold.submit(str(gate))
    async with working(wire.site.app):
        await wire.site.wait_running(job.id)
        assert await wire.redis.xtrim(wire.stream, maxlen=0, approximate=False) == 1
        gate.touch()
        await wire.site.assert_all_ended([job.id])
        assert await job.result(60) == "attempt 1"


async def test_a_key_that_is_not_a_stream_is_a_clear_error(wire: Wire) -> None:
    """Another program uses the key. Once it is deleted, the worker continues."""
    work = wire.site.tasks.work
    async with working(wire.site.app):
        await (await work.submit(1)).result(60)
        await wire.redis.delete(wire.stream)
        await wire.redis.set(wire.stream, "not a stream")
        with pytest.raises(EngineUnavailable, match="WRONGTYPE"):
            await work.submit(2)
        await wire.redis.delete(wire.stream)
        job = await work.submit(3)
        assert await job.result(60) == 3
        await wire.site.assert_all_ended([job.id])
