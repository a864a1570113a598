"""A separate rig for each example: a memory broker, a trigger, and a virtual clock.

Time is virtual: once the loop is idle, its clock jumps to the next timer. An hour of retries takes a millisecond, and
every run of an example is the same. `until` checks its condition only when the loop is idle, before time moves.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final, TypeVar

import msgspec
from hypothesis import HealthCheck, settings

from holdfast.brokers.memory import MemoryBroker, MemoryConfig
from holdfast.brokers.port import OutgoingMessage, RawMessage
from holdfast.guard.registry import GuardRegistry
from holdfast.guard.runner import GuardRunner
from holdfast.ledger.port.messages import Execution, TriggerStore
from holdfast.triggers.config import QueueTriggerConfig
from holdfast.triggers.dedup import IdempotencyStore, InMemoryIdempotencyStore
from holdfast.triggers.runtime import Runtime, RuntimeCall, RuntimeResult
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.rig import MemoryTriggerStore, RecordingAdapter

T = TypeVar("T")

#: Hypothesis settings of every property.
PROPERTY: Final = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

#: The start time of every example.
START: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
_START_MS: Final = int(START.timestamp() * 1000)
#: A condition that does not hold after this number of clock moves is considered false.
_MAX_CHECKS: Final = 20_000
#: How long to wait for a thread or a server while no timer runs.
_SILENCE_S: Final = 10.0
_numbers: Final = count(1)


# Time ----------------------------------------------------------------------------------------------------


class _Selector(selectors.DefaultSelector):
    """Moves the loop's clock to the next timer instead of waiting. Not for loops with sockets or threads."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0) or self.loop.wake_watchers():
            return events
        if timeout is None:
            events = super().select(_SILENCE_S)
            assert events, "the loop has nothing to wait for"
            return events
        self.loop.moved_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time begins at 0 and moves only when it is idle."""

    def __init__(self) -> None:
        self.moved_s = 0.0
        self._watchers: list[tuple[Callable[[], object], asyncio.Future[None]]] = []
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        # Timers due within this interval are due now, so that rounding does not cause a busy loop.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self.moved_s

    def watch(self, condition: Callable[[], object]) -> asyncio.Future[None]:
        """Return a future that is done when the condition holds and the loop is idle."""
        watcher = self.create_future()
        self._watchers.append((condition, watcher))
        return watcher

    def wake_watchers(self) -> bool:
        """Wake the watchers whose condition holds. Return whether there were any."""
        self._watchers = [(condition, watcher) for condition, watcher in self._watchers if not watcher.done()]
        woken = [watcher for condition, watcher in self._watchers if condition()]
        for watcher in woken:
            watcher.set_result(None)
        return bool(woken)


class LoopClock:
    """A clock that follows the loop's time."""

    def now_ms(self) -> int:
        return _START_MS + round(asyncio.get_running_loop().time() * 1000)


def now() -> datetime:
    """Return the current virtual time."""
    return START + timedelta(seconds=asyncio.get_running_loop().time())


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until the condition holds while the loop is idle. Time moves from timer to timer meanwhile."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    checks = 0

    def check() -> bool:
        nonlocal checks
        checks += 1
        return bool(condition()) or checks > _MAX_CHECKS

    await loop.watch(check)
    assert checks <= _MAX_CHECKS, f"{what} did not come true"


async def wait_idle() -> None:
    """Wait until the loop is idle."""
    await until(lambda: True)


def run_example(scenario: Coroutine[Any, Any, T]) -> T:
    """Run one example in a separate loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


# The rig -------------------------------------------------------------------------------------------------


class VirtualTimeAdapter(RecordingAdapter):
    """A memory adapter whose messages have timestamps of the virtual clock."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written: dict[str, datetime] = {}
        #: The delivery counts of each message.
        self.delivered: dict[str, list[int]] = {}

    def _next(self) -> RawMessage | None:
        received = super()._next()
        if received is None:
            return None
        message = msgspec.structs.replace(received, timestamp=self.written.get(received.message_id, START))
        self._deliveries[message] = self._deliveries.pop(received)
        self.delivered.setdefault(message.message_id, []).append(message.deliveries)
        return message


class MemoryRig:
    """One queue with one trigger. Create it inside of `run_example`.

    `slept` has every wait of the trigger for a retry or an outage, `rows` the recorded executions,
    `adapter.settle_calls` how each message was settled.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        dedup: IdempotencyStore | None = None,
        gate: GuardRunner | None = None,
        book: TriggerStore | None = None,
        full_config: QueueTriggerConfig | None = None,
        broker: str = "",
        payload_limit: int = 1024 * 1024,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        **config: Any,
    ) -> None:
        """`broker`: the name of a broker shared with another rig. `config`: fields of the trigger's configuration,
        unless `full_config` is given."""
        self.name = broker or f"rig-{next(_numbers)}"
        self.broker = MemoryBroker.named(self.name)
        self.config = full_config or QueueTriggerConfig(
            **({"queue_name": "orders", "consumer_group": "workers"} | config)
        )
        self.adapter = VirtualTimeAdapter(
            MemoryConfig(name=self.name),
            self.config.queue_name,
            self.config.consumer_group,
            prefetch=self.config.prefetch,
            dlq_name=self.config.dlq_name,
        )
        self.book = MemoryTriggerStore()
        self.clock = LoopClock()
        self.slept: list[float] = []
        self.trigger = QueueTrigger(
            self.config,
            self.adapter,
            runtime,
            guards=gate,
            book=book or self.book,
            dedup=dedup or InMemoryIdempotencyStore(self.clock),
            clock=self.clock,
            sleep=sleep or self._sleep,
            payload_limit=payload_limit,
        )
        self.counts = self.trigger.counts

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(seconds)

    def write(self, body: Any, key: str = "", headers: dict[str, str] | None = None) -> str:
        """Publish bytes as they are, other values as JSON. Return the message id."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        message_id = self.broker.write(self.config.queue_name, encoded, headers, key)
        self.adapter.written[message_id] = now()
        return message_id

    async def wait_handled(self, messages: int) -> None:
        """Wait until `messages` messages are handled and the loop is idle."""
        await until(lambda: self.handled >= messages, f"the handling of {messages} messages")

    async def run(self, messages: int) -> None:
        """Start, wait until `messages` messages are handled, stop."""
        async with self.trigger:
            await self.wait_handled(messages)

    def close(self) -> None:
        """Remove the broker."""
        MemoryBroker.reset(self.name)

    @property
    def handled(self) -> int:
        """Number of handled messages."""
        return sum(self.counts.consumed.values())

    @property
    def dead_letters(self) -> list[OutgoingMessage]:
        return self.broker.messages(self.config.dlq_name or f"{self.config.queue_name}.dlq")

    @property
    def rows(self) -> list[Execution]:
        return list(self.book.rows.values())

    def settle_actions(self, message_id: str) -> list[str]:
        """Return how this message was settled, without the acknowledgement of a dead letter."""
        actions = [action for action, settled_id in self.adapter.settle_calls if settled_id == message_id]
        return [action for action in actions if action != "ack"] if "dlq" in actions else actions


class Script(Runtime):
    """Raises the scripted errors of each payload, one per attempt, then succeeds. Records its calls."""

    submits_jobs = False

    def __init__(self, scripts: Mapping[Any, Sequence[BaseException]] | None = None) -> None:
        self.scripts = {payload: list(errors) for payload, errors in (scripts or {}).items()}
        self.calls: list[RuntimeCall] = []
        #: Virtual times of the attempts of each payload, in seconds; and the payloads that succeeded, in order.
        self.tries: dict[Any, list[float]] = {}
        self.ran: list[Any] = []

    async def run_call(self, call: RuntimeCall) -> RuntimeResult:
        self.calls.append(call)
        return RuntimeResult(await self.trigger_event(call.event_name, call.context, call.focus, call.tenant_id))

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        payload = context["message"]
        self.tries.setdefault(payload, []).append(asyncio.get_running_loop().time())
        # Yields to other tasks, as a runtime with I/O does.
        await asyncio.sleep(0)
        if self.scripts.get(payload):
            raise self.scripts[payload].pop(0)
        self.ran.append(payload)
        return f"run-{len(self.ran)}"


def make_gate(guard: Callable[..., Any]) -> GuardRunner:
    """Return a gate with one guard, for triggers whose runtime does not submit jobs."""
    guards = GuardRegistry(lambda: 5.0)
    guards(guard)
    return GuardRunner(guards, {}, LoopClock(), None, can_request_approval=True)


def get_history(dead_letter: OutgoingMessage) -> Sequence[str]:
    """Return the attempts in the headers of a dead letter."""
    history: list[str] = json.loads(dead_letter.headers["x-dead-history"])
    return history
