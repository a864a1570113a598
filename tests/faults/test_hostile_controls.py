"""Garbage in the controls, lanes, workers and records of a queue: workers, upkeep and readers continue.

`test_hostile_keys.py` has messages, due times and notices. Another program with write access can delete jobs; what it
writes must not stop the jobs that are there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec
import pytest
from redis.asyncio import Redis

from holdfast import State
from holdfast.core.verdict import MESSAGE_GONE, MESSAGE_MALFORMED
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.engine.redis.wire import encode_record
from tests.faults.conftest import MakeSite
from tests.faults.support import Site, eventually
from tests.faults.test_wire import Wire
from tests.fuzz import corpus
from tests.worker.support import working

pytestmark = [pytest.mark.faults, pytest.mark.redis]

pack: Final = msgspec.msgpack.Encoder().encode
#: Values of a hash, of a record, of a set.
GARBAGE: Final[list[bytes]] = [
    b"",
    b"\xff\xfe",
    b"nan",
    b"inf",
    b"-inf",
    b"-5",
    b"1e300",
    b"0x10",
    b"9" * 400,
    b"9" * 5_000,
    b"1.5",
    b"0",
    b"77",
    b"3 99999999999999999999",
    b"x y z",
    b"{",
    b'{"acme": ' + b"[" * 5_000,
    b'{"acme": {"weight": -1}}',
    b"[]",
    b"\x00",
    b"\x91" * 20_000,
    pack([1, 2]),
    pack(["a", "b", "c", "d"]),
    pack([1, float("nan"), float("inf"), -1, 2, 0, 0, 0]),
    pack([float("nan"), 1]),
    pack([1, float("inf"), "x", 1]),
    pack({"a": 1}),
    pack("text"),
    pack(7),
    b"\xdd\xff\xff\xff\xff",
]
#: Fields of `queue:control`. `paused` and `intake_paused` are set if they are "1", and `reader` is any text.
FIELDS: Final = [
    "limits",
    "lanes",
    "turns",
    "marker",
    "feed_read",
    "max_running",
    "concurrency",
    "intake_limit",
    "backlog_alert",
    "tenants",
    "paused",
    "intake_paused",
    "unknown",
]


@pytest.fixture
async def wire(redis_url: str, make_site: MakeSite) -> AsyncIterator[Wire]:
    redis = Redis.from_url(redis_url)
    yield Wire(make_site(redis_url, unknown_task_grace_s=0), redis)
    await redis.aclose()


async def _assert_works(site: Site, after: str) -> None:
    """Jobs of two tenants, a delayed one and one that is retried, succeed."""
    jobs = [
        await site.tasks.work.submit(1),
        await site.tasks.work.options(tenant_id="acme").submit(1),
        await site.tasks.work.options(delay=0.001).submit(1),
    ]
    try:
        assert [await job.result(5) for job in jobs] == [1, 1, 1]
    except TimeoutError:
        pytest.fail(f"jobs do not run after {after}")


@pytest.mark.parametrize("field", FIELDS)
async def test_garbage_in_a_control(wire: Wire, field: str) -> None:
    """The control counts as not set; operators can set it again."""
    site, engine = wire.site, wire.site.app.engine
    async with working(site.app):
        for value in GARBAGE:
            if (field, value) == ("intake_limit", b"0"):
                continue  # a valid limit, of 0
            await wire.redis.hset(wire.keys.control, field, value)
            await engine.stats("default")
            await engine.workers(["default"])
            await _assert_works(site, f"{field} was {value[:40]!r}")
        await wire.redis.hset(wire.keys.control, field, b"\xff")
        control = QueueControl(concurrency=5, intake_limit=1_000, backlog_alert=10)
        await engine.set_control("default", control, actor="ada", reason="repair", audit="operator.queue")
        assert await engine.get_control("default") == control


async def test_garbage_in_lanes_workers_and_records(wire: Wire) -> None:
    """Tenants get lanes, workers are listed, due jobs are promoted; unreadable records are reported, not run."""
    site, engine, keys = wire.site, wire.site.app.engine, wire.keys
    marker = await wire.read_marker()
    for value in GARBAGE:
        await wire.redis.hset(keys.lanes, b"t%d" % GARBAGE.index(value), value)
        await wire.redis.hset(keys.lanes, "acme", value)
    await wire.redis.zadd(keys.workers, {"inf": "inf", "-inf": "-inf", b"\xff\xfe": 1e300, "": 0})
    records = [value.replace(b"\0", b"") for value in GARBAGE]
    places = (b"-", b"1:1-1", b"9999:1-1", b"1:x")
    records += [b"%s queued -\n%s" % (place, body) for place in places for body in GARBAGE[:8]]
    for number, record in enumerate(records):
        await wire.redis.set(keys.job(f"bad{number}"), record)
        for key in (keys.delayed, keys.retry, keys.pending_retries, keys.suspended, keys.dlq_pending):
            await wire.redis.zadd(key, {f"bad{number}": number % 3})
    await wire.redis.xadd(keys.streams[1], {"task_id": "j1", marker: "1 queued 0 0 0"})
    names = [f"bad{number}" for number in range(len(records))]
    async with working(site.app):
        for tenant in ("acme", *(f"t{number}" for number in range(5))):
            assert await (await site.tasks.work.options(tenant_id=tenant).submit(1)).result(10) == 1
        await _assert_works(site, "records were garbage")

        async def is_clean() -> bool:
            left: list[int] = [await wire.redis.zcard(key) for key in (keys.delayed, keys.retry, keys.pending_retries)]
            return not any(left)

        await eventually(is_clean, "members whose records cannot be read to be removed")
        assert engine.counters.unreadable_values > 0
        found = await engine.get("default", names)
        assert all(view is None or view.job_id in names for view in found)
        codes = {view.failure.code for view in found if view is not None and view.failure}
        assert codes <= {MESSAGE_MALFORMED, MESSAGE_GONE}
        await engine.find("default", list(State), 1_000)
        assert {each.worker for each in await engine.workers(["default"])} >= {"inf"}


#: Keys of a queue; another program replaces one by a key of another type.
KEYS: Final = ["stream", "feed", "control", "delayed", "notices", "result"]


def _key(keys: QueueKeys, name: str) -> bytes:
    return keys.streams[1] if name == "stream" else getattr(keys, name)


@pytest.mark.parametrize("name", KEYS)
async def test_a_key_of_another_type_affects_its_queue_only(wire: Wire, name: str) -> None:
    """Another queue of the same worker continues; the queue continues when its key is deleted."""
    site, app = wire.site, wire.site.app
    broken = QueueKeys("broken", KeyNames(namespace=str(site.settings["namespace"])))
    await (await site.tasks.work.options(queue="broken").submit(1)).info()
    key = _key(broken, name)
    await wire.redis.delete(key)
    await wire.redis.rpush(key, "not what it was")
    async with working(app, queues=["broken", "default"]):
        jobs = [await site.tasks.work.submit(1), await site.tasks.work.options(delay=0.01).submit(2)]
        assert [await job.result(15) for job in jobs] == [1, 2]
        flaky = await site.tasks.flaky.submit()
        assert await flaky.result(15) == "now"
        found, refused = await app.engine.for_each_queue(["broken", "default"], app.engine.stats)
        assert "default" in found
        assert refused.keys() <= {"broken"}
        await wire.redis.delete(key)
        repaired = await site.tasks.work.options(queue="broken").submit(3)
        assert await repaired.result(30) == 3


@pytest.mark.parametrize("value", [b"\xff\xfe", b"\xff\xfe\n" + b"0" * 16])
async def test_an_unreadable_idempotency_key_does_not_fail_a_submission(wire: Wire, value: bytes) -> None:
    await wire.site.tasks.work.submit(1)
    await wire.redis.set(wire.keys.idempotency("default", "k"), value)
    job = await wire.site.tasks.work.options(idempotency_key="k", on_key_reuse="return").submit(1)
    assert job.id


async def test_a_due_job_with_unreadable_meta_is_a_dead_letter(wire: Wire) -> None:
    """Its message is native, and its record has the position of the message."""
    await wire.read_marker()
    body = msgspec.structs.replace(corpus.BODY, meta="{", run_at="1", tenant_id="default")
    await wire.redis.set(wire.keys.job("bad"), b"- queued -\n" + encode_record(body))
    await wire.redis.zadd(wire.keys.delayed, {"bad": 1})
    async with working(wire.site.app):
        await eventually(wire.dead_letters, "the dead letter")
