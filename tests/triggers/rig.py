"""A trigger on a broker in memory: what went in, what the runtime saw, what came out."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from holdfast.brokers.memory import MemoryAdapter, MemoryBroker, MemoryConfig
from holdfast.brokers.port import OutgoingMessage, RawMessage
from holdfast.core.principal import AuditEntry
from holdfast.errors import LedgerUnavailable
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat, TriggerPause, TriggerStore
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.dedup import DedupStore, InMemoryDedupStore
from holdfast.triggers.runtime import Runtime
from holdfast.triggers.trigger import QueueTrigger

QUEUE: Final = "orders"
GROUP: Final = "workers"
_PATIENCE_S: Final = 60.0


async def until(holds: Callable[[], object], what: str = "it") -> None:
    """Wait for a condition, with a deadline."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, f"{what} did not come true"
        await asyncio.sleep(0.001)


class Recorder(Runtime):
    """A runtime that remembers its calls and does as it is told."""

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


class MemoryBook(TriggerStore):
    """Records in a list; `down` makes it fail."""

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


class WatchedAdapter(MemoryAdapter):
    """Remembers what it was told about each message."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told: list[tuple[str, str]] = []
        self.pauses: list[str] = []

    async def ack(self, message: RawMessage) -> None:
        self.told.append(("ack", message.message_id))
        await super().ack(message)

    async def nack(self, message: RawMessage, requeue: bool = False) -> None:
        self.told.append(("requeue" if requeue else "nack", message.message_id))
        await super().nack(message, requeue)

    async def send_to_dlq(self, message: RawMessage, reason: str, history: Sequence[str] = ()) -> None:
        await super().send_to_dlq(message, reason, history)
        self.told.append(("dlq", message.message_id))

    async def pause(self) -> None:
        self.pauses.append("pause")
        await super().pause()

    async def resume(self) -> None:
        self.pauses.append("resume")
        await super().resume()

    @property
    def words(self) -> list[str]:
        """The dead letters' own acknowledgements left out."""
        dead = {message_id for word, message_id in self.told if word == "dlq"}
        return [word for word, message_id in self.told if word == "dlq" or message_id not in dead]


class Rig:
    """One queue, one trigger; retries take no time, and are written down."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        dedup: DedupStore | None = None,
        gate: Any = None,
        clock: Any = None,
        payload_limit: int = 1024 * 1024,
        broker: str = "",
        sleep: Callable[[float], Awaitable[None]] | None = None,
        **config: Any,
    ) -> None:
        name = broker or secrets.token_hex(6)
        self.broker = MemoryBroker.named(name)
        self.config = TriggerConfig(**({"queue_name": QUEUE, "consumer_group": GROUP} | config))
        self.adapter = WatchedAdapter(
            MemoryConfig(name=name),
            self.config.queue_name,
            self.config.consumer_group,
            prefetch=self.config.prefetch,
        )
        self.book = MemoryBook()
        self.slept: list[float] = []
        self.trigger = QueueTrigger(
            self.config,
            self.adapter,
            runtime,
            guard_runner=gate,
            book=self.book,
            dedup=dedup or InMemoryDedupStore(clock),
            clock=clock,
            sleep=sleep or self._sleep,
            payload_limit=payload_limit,
        )
        self.counts = self.trigger.counts

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def write(self, body: Any, key: str = "", **headers: str) -> str:
        """Publish; bytes as they are, everything else as JSON. `event_name="x"` is the header `x-event-name`."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {f"x-{name.replace('_', '-')}": value for name, value in headers.items()}
        return self.broker.write(self.config.queue_name, encoded, named, key)

    async def off(self, count: int) -> None:
        """Until so many messages are off."""
        await until(lambda: sum(self.counts.consumed.values()) >= count, f"{count} messages off")

    async def run(self, count: int) -> None:
        """Start, wait until so many messages are off, stop."""
        async with self.trigger:
            await self.off(count)

    @property
    def dead(self) -> list[OutgoingMessage]:
        return self.broker.messages(f"{self.config.queue_name}.dlq")

    @property
    def rows(self) -> list[Execution]:
        return list(self.book.rows.values())


async def quietly(work: Awaitable[Any]) -> None:
    """Whatever it raises is of no interest."""
    with suppress(Exception):
        await work
