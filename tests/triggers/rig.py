"""A trigger on the memory broker, with a runtime, an adapter and a store that record their calls."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from holdfast.brokers.memory import MemoryBroker, MemoryConfig, MockQueueAdapter
from holdfast.brokers.port import OutgoingMessage, RawMessage
from holdfast.core.principal import AuditEntry
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat, TriggerPause, TriggerStore
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.dedup import IdempotencyStore, InMemoryIdempotencyStore
from holdfast.triggers.runtime import Runtime
from holdfast.triggers.trigger import QueueTrigger

QUEUE: Final = "orders"
GROUP: Final = "workers"
_TIMEOUT_S: Final = 60.0


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Poll the condition until it holds, with a deadline."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        await asyncio.sleep(0.001)


class Recorder(Runtime):
    """A runtime that records its calls and runs `act`."""

    def __init__(self, act: Callable[[Mapping[str, Any]], Awaitable[str] | str] | None = None) -> None:
        self.calls: list[tuple[str, Mapping[str, Any], str | None, str]] = []
        self._act = act

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        self.calls.append((event_name, context, focus, tenant_id))
        if self._act is None:
            return f"run-{len(self.calls)}"
        answer = self._act(context)
        return answer if isinstance(answer, str) else await answer

    @property
    def messages(self) -> list[Any]:
        return [context["message"] for _, context, _, _ in self.calls]


class MemoryTriggerStore(TriggerStore):
    """Keeps records in memory; fails while `down` is set."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Execution] = {}
        self.down = False
        self.failures = 0
        self.batches: list[int] = []

    async def record_executions(self, executions: Sequence[Execution]) -> None:
        if self.down:
            self.failures += 1
            raise LedgerUnavailable("the ledger is down")
        self.batches.append(len(executions))
        for execution in executions:
            self.rows.setdefault((execution.tenant_id, execution.id), execution)

    async def executions(
        self,
        tenants: Sequence[str] | None,
        *,
        queue_name: str = "",
        message_id: str = "",
        statuses: Collection[ExecutionStatus] = (),
        limit: int = 100,
    ) -> list[Execution]:
        return list(self.rows.values())[:limit]

    async def heartbeat(self, presences: Sequence[TriggerHeartbeat], *, expire_after_ms: int) -> set[str]:
        return set()

    async def remove_process(self, process: str) -> None:
        return

    async def processes(self) -> list[TriggerHeartbeat]:
        return []

    async def pauses(self) -> list[TriggerPause]:
        return []

    async def set_paused(self, name: str, paused: bool, action: AuditEntry) -> bool:
        return False


class RecordingAdapter(MockQueueAdapter):
    """Records how each message was settled, and pauses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.settle_calls: list[tuple[str, str]] = []
        self.pauses: list[str] = []

    async def ack(self, message: RawMessage) -> None:
        self.settle_calls.append(("ack", message.message_id))
        await super().ack(message)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        self.settle_calls.append(("requeue" if requeue else "nack", message.message_id))
        await super().nack(message, requeue)

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        await super().send_to_dlq(message, reason, history)
        self.settle_calls.append(("dlq", message.message_id))

    async def pause(self) -> None:
        self.pauses.append("pause")
        await super().pause()

    async def resume(self) -> None:
        self.pauses.append("resume")
        await super().resume()

    @property
    def settle_actions(self) -> list[str]:
        """Settle actions in order, without the acknowledgements of dead letters."""
        dead_lettered = {message_id for action, message_id in self.settle_calls if action == "dlq"}
        return [
            action for action, message_id in self.settle_calls if action == "dlq" or message_id not in dead_lettered
        ]


class Rig:
    """One queue with one trigger. Waits for retries take no time; `slept` records them."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        dedup: IdempotencyStore | None = None,
        gate: Any = None,
        clock: Any = None,
        payload_limit: int = 1024 * 1024,
        broker: str = "",
        sleep: Callable[[float], Awaitable[None]] | None = None,
        **config: Any,
    ) -> None:
        name = broker or secrets.token_hex(6)
        self.broker = MemoryBroker.named(name)
        self.config = QueueTriggerConfig(**({"queue_name": QUEUE, "consumer_group": GROUP} | config))
        self.adapter = RecordingAdapter(
            MemoryConfig(name=name),
            self.config.queue_name,
            self.config.consumer_group,
            prefetch=self.config.prefetch,
        )
        self.book = MemoryTriggerStore()
        self.slept: list[float] = []
        self.trigger = QueueTrigger(
            self.config,
            self.adapter,
            runtime,
            guards=gate,
            book=self.book,
            dedup=dedup or InMemoryIdempotencyStore(clock),
            clock=clock,
            sleep=sleep or self._sleep,
            payload_limit=payload_limit,
        )
        self.counts = self.trigger.counts

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def write(self, body: Any, key: str = "", **headers: str) -> str:
        """Publish bytes as they are, other values as JSON. `event_name="x"` sets the header `x-event-name`."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        named_headers = {f"x-{name.replace('_', '-')}": value for name, value in headers.items()}
        return self.broker.write(self.config.queue_name, encoded, named_headers, key)

    async def wait_handled(self, count: int) -> None:
        """Wait until `count` messages are handled."""
        await until(lambda: sum(self.counts.consumed.values()) >= count, f"the handling of {count} messages")

    async def run(self, count: int) -> None:
        """Start, wait until `count` messages are handled, stop."""
        async with self.trigger:
            await self.wait_handled(count)

    @property
    def dead_letters(self) -> list[OutgoingMessage]:
        return self.broker.messages(f"{self.config.queue_name}.dlq")

    @property
    def rows(self) -> list[Execution]:
        return list(self.book.rows.values())


async def ignore_errors(work: Awaitable[Any]) -> None:
    """Await `work` and ignore its errors."""
    with suppress(Exception):
        await work
