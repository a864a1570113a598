"""Runtimes of triggers: tasks on both engines, callables, HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast import Deny, Fatal, Holdfast, RequireApproval
from holdfast.aio import serve_tcp
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import EngineUnavailable, InvalidOption, InvalidPayload, PayloadTooLarge, UnknownTask
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import ExecutionStatus
from holdfast.testing import drain
from holdfast.triggers.dedup import InMemoryIdempotencyStore
from holdfast.triggers.http_runtime import HttpRuntime, RuntimeFailed
from holdfast.triggers.runtime import CallableRuntime, RuntimeCall
from holdfast.triggers.state import TriggerState
from holdfast.triggers.task_runtime import TaskRuntime
from tests.triggers.rig import Rig, until

_W3C = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _call(message: Any = None, message_json: bytes | None = None, **fields: Any) -> RuntimeCall:
    context = {"message": message, "headers": {}, "source": "q", "message_id": "m", "received_at": "now"}
    defaults: dict[str, Any] = {"event_name": "e", "focus": None, "tenant_id": "default", "trace_id": "t"}
    return RuntimeCall(context=context, message_json=message_json, **(defaults | fields))


@pytest.fixture
async def app(engine_url: str, namespace: str) -> AsyncIterator[Holdfast]:
    app = Holdfast(engine_url, namespace=namespace)
    async with app:
        yield app


class Order(BaseModel):
    number: int


# Tasks ---------------------------------------------------------------------------------------------------


async def test_a_message_becomes_a_job(app: Holdfast) -> None:
    received: list[Any] = []

    @app.task
    async def handle(
        message: dict[str, int], headers: dict[str, str], source: str, message_id: str, received_at: str,
        event_name: str, focus: str | None,
    ) -> None:  # fmt: skip
        received.append((message, headers, source, message_id, received_at, event_name, focus))

    rig = Rig(TaskRuntime(app, "handle"), focus="billing")
    message_id = rig.broker.write(
        "orders",
        b'{"n": 1}',
        {"x-event-name": "paid", "x-tenant-id": "acme", "traceparent": _W3C, "x-dedup-key": "k"},
    )
    await rig.run(1)
    (row,) = rig.rows
    assert (row.status, row.tenant_id, row.trace_id) == ("success", "acme", _W3C.split("-")[1])
    info = await (await backend_of(app).connections.submitter()).get("default", row.agent_run_id)
    assert info is not None
    assert (info.tenant_id, info.trace_id, info.task) == ("acme", row.trace_id, "handle")
    assert (info.meta.traceparent, info.meta.key_window_ms) == (_W3C, 3_600_000)
    assert (info.idempotency_key, info.meta.submitted_by) == ("orders:workers:k", "trigger:orders")
    await drain(app)
    ((message, headers, source, received_id, received_at, event_name, focus),) = received
    assert (message, headers["x-event-name"], source, received_id) == ({"n": 1}, "paid", "orders", message_id)
    assert (event_name, focus) == ("paid", "billing")
    assert received_at.endswith("+00:00")


async def test_duplicates_are_one_job_and_all_acknowledged(app: Holdfast) -> None:
    ran: list[int] = []

    @app.task
    async def handle(message: int) -> None:
        ran.append(message)

    rig = Rig(TaskRuntime(app, "handle"), concurrency=8)
    for number in range(40):
        rig.write(number % 4, dedup_key=str(number % 4))
    await rig.run(40)
    await drain(app)
    assert sorted(ran) == [0, 1, 2, 3]
    assert rig.adapter.settle_actions == ["ack"] * 40
    assert (rig.counts.dedup_hits, rig.counts.consumed[ExecutionStatus.SUCCESS]) == (36, 4)


async def test_keys_are_separate_per_tenant_and_group(app: Holdfast) -> None:
    ran: list[str] = []

    @app.task
    async def handle(event_name: str) -> None:
        ran.append(event_name)

    first = Rig(TaskRuntime(app, "handle"), broker="fan-out", consumer_group="billing")
    second = Rig(TaskRuntime(app, "handle"), broker="fan-out", consumer_group="shipping")
    first.write(1, event_name="a", tenant_id="acme", dedup_key="k")
    first.write(1, event_name="b", tenant_id="zeta", dedup_key="k")
    await first.run(2)
    await second.run(2)
    await drain(app)
    assert sorted(ran) == ["a", "a", "b", "b"]


async def test_another_message_with_a_known_key_is_recorded(app: Holdfast) -> None:
    @app.task
    async def handle(message: int) -> None: ...

    rig = Rig(TaskRuntime(app, "handle"))
    for number in (1, 1, 2):
        rig.write(number, dedup_key="k")
        await asyncio.sleep(0)
    await rig.run(3)
    assert rig.adapter.settle_actions == ["ack"] * 3
    entries = await app.engine.read_feed("default", "", 100)
    events = [event for entry in entries for event in entry.events]
    assert [event.data for event in events if event.type == "task.duplicate"] == [{"arguments_differ": True}]


async def test_a_trigger_submits_what_fits_and_repeats_the_rest(app: Holdfast) -> None:
    ran: list[int] = []

    @app.task
    async def handle(message: int) -> None:
        ran.append(message)

    await app.engine.set_control("default", QueueControl(intake_limit=3))
    rig = Rig(TaskRuntime(app, "handle"), concurrency=8, max_retries=0)
    for number in range(8):
        rig.write(number)
    async with rig.trigger:
        await until(lambda: rig.counts.acknowledged == 3, "three accepted messages")
        for accepted in (6, 8):
            await drain(app)
            await until(lambda: rig.counts.acknowledged >= accepted, f"{accepted} accepted messages")  # noqa: B023
    await drain(app)
    assert sorted(ran) == list(range(8))
    assert (rig.dead_letters, rig.counts.retries) == ([], 0)


async def test_a_tenant_at_its_limit_does_not_hold_the_trigger(app: Holdfast) -> None:
    @app.task
    async def handle(message: int) -> None: ...

    await app.engine.set_control("default", QueueControl(tenants={"acme": TenantControl(intake_limit=0)}))
    rig = Rig(TaskRuntime(app, "handle"), concurrency=4, max_retries=0)
    for number in range(3):
        rig.write(number, tenant_id="acme")
    for number in range(10):
        rig.write(number, tenant_id="zeta")
    async with rig.trigger:
        await until(lambda: rig.counts.acknowledged == 10, "the messages of the other tenant")
        assert rig.trigger.state is TriggerState.RUNNING
        await app.engine.set_control("default", QueueControl())
        await until(lambda: rig.counts.acknowledged == 13, "all messages")
    assert (rig.dead_letters, rig.counts.retries) == ([], 0)


async def test_a_tenant_with_all_its_queues_does_not_hold_the_trigger(engine_url: str, namespace: str) -> None:
    """Its messages for a new queue wait until another tenant has made the queue."""
    async with Holdfast(engine_url, namespace=namespace, tenant_queue_limit=1) as app:

        @app.task(queue="own")
        async def first() -> None: ...

        @app.task(queue="new")
        async def handle(message: int) -> None: ...

        await first.options(tenant_id="acme").submit()
        rig = Rig(TaskRuntime(app, "handle"), concurrency=4, max_retries=0)
        for number in range(3):
            rig.write(number, tenant_id="acme")
        async with rig.trigger:
            await until(lambda: app.engine.counters.intake_refused > 0, "the refusal")
            assert (rig.trigger.state, rig.counts.acknowledged) == (TriggerState.RUNNING, 0)
            rig.write(3, tenant_id="zeta")
            await until(lambda: rig.counts.acknowledged == 4, "all messages")
        assert (rig.dead_letters, rig.counts.retries) == ([], 0)
        assert await app.engine.queue_owners() == {"own": "acme", "new": "zeta"}


async def test_without_dedup_every_delivery_is_a_job(app: Holdfast) -> None:
    ran: list[int] = []

    @app.task
    async def handle(message: int) -> None:
        ran.append(message)

    rig = Rig(TaskRuntime(app, "handle"), enable_dedup=False)
    for _ in range(3):
        rig.write(1, dedup_key="k")
    await rig.run(3)
    await drain(app)
    assert ran == [1, 1, 1]


async def test_a_denied_job_follows_the_policy(app: Holdfast) -> None:
    @app.task
    async def pay(message: dict[str, int]) -> None: ...

    app.guard.rule("budget", when=lambda arguments: arguments["message"]["n"] > 1, then=Deny("too much"))
    rig = Rig(TaskRuntime(app, "pay"), ack_policy="dlq")
    rig.write({"n": 1})
    rig.write({"n": 2})
    await rig.run(2)
    (dead_letter,) = rig.dead_letters
    assert "too much (policy budget)" in dead_letter.headers["x-dead-reason"]
    assert sorted(row.status for row in rig.rows) == ["rejected", "success"]


async def test_a_job_can_require_approval(tmp_path: Any) -> None:
    app = Holdfast(f"sqlite:///{tmp_path / 'x.db'}")

    @app.task
    async def pay(message: int) -> None: ...

    app.guard.rule("budget", then=RequireApproval("check the amount"))
    async with app:
        rig = Rig(TaskRuntime(app, "pay"))
        rig.write(1)
        await rig.run(1)
        info = await (await backend_of(app).connections.submitter()).get("default", rig.rows[0].agent_run_id)
        assert info is not None
        assert info.state == "waiting_approval"
        assert rig.rows[0].status == "success"


@pytest.mark.faults
async def test_an_unreachable_engine_holds_the_trigger(make_redis: Any, namespace: str) -> None:
    server = make_redis()
    app = Holdfast(server.url, namespace=namespace)

    @app.task
    async def handle(message: int) -> None: ...

    async with app:
        rig = Rig(TaskRuntime(app, "handle"), max_retries=0, sleep=asyncio.sleep, concurrency=4)
        async with rig.trigger:
            rig.write(1)
            await rig.wait_handled(1)
            server.kill()
            for number in range(4):
                rig.write(number)
            await until(lambda: rig.trigger.state is TriggerState.HOLDING, "holding")
            assert not rig.trigger.ready
            assert rig.adapter.settle_actions == ["ack"]
            server.start()
            await rig.wait_handled(5)
            await until(lambda: rig.trigger.ready, "ready")
        assert not rig.dead_letters
        assert {row.status for row in rig.rows} == {ExecutionStatus.SUCCESS}


async def test_arguments_of_a_task() -> None:
    app = Holdfast("sqlite://:memory:")
    received: dict[str, bytes] = {}

    class RecordingSubmitter:
        async def submit(self, envelope: Any) -> Any:
            received[envelope.task] = envelope.payload
            return type("Receipt", (), {"job_id": "j", "duplicate": False})

    backend_of(app).connections.inline_submitter = RecordingSubmitter()  # type: ignore[assignment]

    @app.task
    def by_name(message_id: str, message: Any, extra: int = 1) -> None: ...

    @app.task
    def one(order: Order) -> None: ...

    @app.task
    def several(number: int, note: str = "") -> None: ...

    @app.task
    def nothing() -> None: ...

    @app.task
    def impossible(message: Any, other: int) -> None: ...

    big = b'{"number": 123456789012345678901234567890}'
    call = _call({"number": 1}, b'{"number": 1}')
    for name in ("by_name", "one", "several"):
        await TaskRuntime(app, name).run_call(call)
    assert json.loads(received["by_name"]) == {"message_id": "m", "message": {"number": 1}}
    assert json.loads(received["one"]) == {"order": {"number": 1}}
    assert received["several"] == b'{"number": 1}'
    await TaskRuntime(app, "by_name").run_call(_call(None, big))
    assert b"123456789012345678901234567890" in received["by_name"]
    await TaskRuntime(app).run_call(_call(b"\x00\xff", event_name="by_name"))
    assert json.loads(received["by_name"])["message"] == "AP8="
    with pytest.raises(InvalidOption, match="'other' that no message can fill"):
        TaskRuntime(app, "impossible")
    with pytest.raises(UnknownTask):
        TaskRuntime(app, "unknown")
    with pytest.raises(UnknownTask):
        await TaskRuntime(app).run_call(call)
    with pytest.raises(InvalidPayload):
        await TaskRuntime(app, "one").run_call(_call("x", b'"x"'))
    for odd in (_call([1, "x"], b'[1, "x"]'), _call("x")):
        with pytest.raises(InvalidPayload, match="must be JSON objects"):
            await TaskRuntime(app, "several").run_call(odd)
    large = json.dumps({"number": 1, "note": "x" * 2_000_000}).encode()
    with pytest.raises(PayloadTooLarge):
        await TaskRuntime(app, "several").run_call(_call({}, large))
    assert await TaskRuntime(app, "one").trigger_event("e", call.context, None, "default") == "j"


async def test_an_app_without_tasks_passes_all_fields() -> None:
    app = Holdfast("sqlite://:memory:")
    received: list[Any] = []

    class RecordingSubmitter:
        async def submit(self, envelope: Any) -> Any:
            received.append(json.loads(envelope.payload))
            return type("Receipt", (), {"job_id": "j", "duplicate": False})

    backend_of(app).connections.inline_submitter = RecordingSubmitter()  # type: ignore[assignment]
    await TaskRuntime(app).run_call(_call(1, b"1"))
    assert received[0].keys() == {"event_name", "message", "headers", "source", "message_id", "received_at", "focus"}


async def test_a_closed_app_is_unavailable(app: Holdfast) -> None:
    @app.task
    async def handle(message: int) -> None: ...

    runtime = TaskRuntime(app, "handle")

    class Closed:
        async def submit(self, envelope: Any) -> Any:
            raise asyncio.CancelledError

    backend_of(app).connections.inline_submitter = Closed()  # type: ignore[assignment]
    with pytest.raises(EngineUnavailable, match="was closed"):
        await runtime.run_call(_call(1, b"1"))


async def test_an_unknown_event_fails_permanently(app: Holdfast) -> None:
    @app.task
    async def known(message: int) -> None: ...

    rig = Rig(TaskRuntime(app), ack_policy="dlq")
    rig.write(1, event_name="known")
    rig.write(1, event_name="unknown")
    await rig.run(2)
    assert "no task named 'unknown'" in rig.dead_letters[0].headers["x-dead-reason"]
    assert not rig.slept


# Callables -----------------------------------------------------------------------------------------------


@dataclass
class _Answer:
    returned: Any
    run_id: str


@pytest.mark.parametrize(
    "answer",
    [_Answer("r-1", "r-1"), _Answer({"run_id": "r"}, "r"), _Answer({"id": 7}, "7"), _Answer(None, ""), _Answer([], "")],
)
async def test_results_of_callables(answer: _Answer) -> None:
    threads: list[str] = []

    def plain(event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str) -> Any:
        threads.append(threading.current_thread().name)
        return answer.returned

    async def on_loop(event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str) -> Any:
        threads.append(threading.current_thread().name)
        return answer.returned

    assert (await CallableRuntime(plain).run_call(_call(1))).run_id == answer.run_id
    assert (await CallableRuntime(on_loop).run_call(_call(1))).run_id == answer.run_id
    assert threads[0] != threads[1] == threading.current_thread().name


async def test_a_callable_gets_bytes_unchanged() -> None:
    received: list[Any] = []

    async def act(event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str) -> None:
        received.append(context["message"])

    rig = Rig(CallableRuntime(act), parser_type="binary")
    rig.write(b"\x00\xff")
    await rig.run(1)
    assert received == [b"\x00\xff"]
    with pytest.raises(InvalidOption, match="must be a function"):
        CallableRuntime("nope")  # type: ignore[arg-type]


# HTTP ----------------------------------------------------------------------------------------------------


class _Agent:
    """An HTTP runtime on a real socket with scripted responses."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.answers: list[tuple[int, bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers["content-length"]))
                self.requests.append((headers, json.loads(body)))
                status, answer = self.answers.pop(0) if self.answers else (200, b'{"run_id": "r-1"}')
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)
                await writer.drain()
        except asyncio.IncompleteReadError:
            return


@asynccontextmanager
async def _agent() -> AsyncIterator[_Agent]:
    agent = _Agent()
    async with serve_tcp(agent.serve, "127.0.0.1") as port:
        agent.url = f"http://127.0.0.1:{port}/events"
        yield agent


async def test_a_call_over_http() -> None:
    async with _agent() as agent:
        runtime = HttpRuntime(agent.url, token="tok-1")
        rig = Rig(runtime, focus="billing")
        rig.write({"n": 1}, event_name="paid", tenant_id="acme", dedup_key="k-1")
        await rig.run(1)
        await runtime.close()
    ((headers, body),) = agent.requests
    assert headers["idempotency-key"] == "orders:workers:k-1"
    assert headers["authorization"] == "bearer tok-1"
    assert (body["event_name"], body["focus"], body["tenant_id"]) == ("paid", "billing", "acme")
    assert body["context"]["message"] == {"n": 1}
    assert (rig.rows[0].agent_run_id, rig.rows[0].status) == ("r-1", "success")
    assert "tok-1" not in repr(runtime)


async def test_http_responses() -> None:
    async with _agent() as agent:
        runtime = HttpRuntime(agent.url)
        for status in (400, 401, 404, 409, 422, 301):
            agent.answers.append((status, b""))
            with pytest.raises(Fatal, match=f"answered {status}"):
                await runtime.run_call(_call(1))
        for status in (408, 429, 500, 503):
            agent.answers.append((status, b""))
            with pytest.raises(RuntimeFailed, match=f"answered {status}"):
                await runtime.run_call(_call(1))
        for answer, run_id in ((b'{"id": 5}', "5"), (b"", ""), (b"no json", ""), (b"[]", "")):
            agent.answers.append((201, answer))
            assert (await runtime.run_call(_call(1))).run_id == run_id
        await runtime.run_call(_call(1, key="ü" * 400, traceparent=_W3C))
        assert agent.requests[-1][0]["idempotency-key"].startswith("sha256-")
        assert agent.requests[-1][0]["traceparent"] == _W3C
        assert await runtime.trigger_event("e", _call(b"\xff").context, None, "default") == "r-1"
        assert agent.requests[-1][1]["context"]["message"] == "/w=="
        await runtime.close()


async def test_http_failures_are_retried_then_dead_lettered() -> None:
    async with _agent() as agent:
        agent.answers = [(503, b""), (500, b"")]
        runtime = HttpRuntime(agent.url)
        rig = Rig(runtime)
        rig.write(1)
        await rig.run(1)
        assert rig.slept == [1, 2]
        assert rig.rows[0].retry_count == 2
        assert len({headers["idempotency-key"] for headers, _ in agent.requests}) == 1
        await runtime.close()
    closed = HttpRuntime(agent.url, timeout_s=2)
    unreachable = Rig(closed, max_retries=1, dedup=InMemoryIdempotencyStore())
    unreachable.write(1)
    await unreachable.run(1)
    await closed.close()
    assert "did not answer: ConnectError" in unreachable.dead_letters[0].headers["x-dead-reason"]


async def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(InvalidOption, match="must start with"):
        HttpRuntime("ftp://x")
