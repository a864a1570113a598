"""A world of its own for each example: a broker in memory, a trigger, and a clock that moves by itself.

Time is virtual: once nothing is left to do at a moment, the loop goes straight to the next timer. An hour of retries
takes a millisecond, and every run of an example is the same. `until` looks only when all is at rest, before time moves.
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
from holdfast.triggers.config import TriggerConfig
from holdfast.triggers.dedup import DedupStore, InMemoryDedupStore
from holdfast.triggers.runtime import Runtime, RuntimeCall, RuntimeResult
from holdfast.triggers.trigger import QueueTrigger
from tests.triggers.rig import MemoryBook, WatchedAdapter

T = TypeVar("T")

#: For each of the properties.
PROPERTY: Final = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

#: When every world begins.
START: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)
_START_MS: Final = int(START.timestamp() * 1000)
#: A condition that is not true after so many moves of the clock will not be.
_PATIENCE: Final = 20_000
#: For a thread or a server, while no timer runs.
_SILENCE_S: Final = 10.0
_numbers: Final = count(1)


# Time ----------------------------------------------------------------------------------------------------


class _Selector(selectors.DefaultSelector):
    """Does not wait for a timer: moves the loop's clock to it. Not for loops with sockets or threads."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0) or self.loop.look():
            return found
        if timeout is None:
            found = super().select(_SILENCE_S)
            assert found, "nothing will ever happen"
            return found
        self.loop.moved_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time begins at 0 and moves only when nothing is left to do."""

    def __init__(self) -> None:
        self.moved_s = 0.0
        self._watchers: list[tuple[Callable[[], object], asyncio.Future[None]]] = []
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        # Timers that are due within this are due now: rounding must not make it turn in circles.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self.moved_s

    def watch(self, holds: Callable[[], object]) -> asyncio.Future[None]:
        """Done when it holds and all is at rest."""
        watcher = self.create_future()
        self._watchers.append((holds, watcher))
        return watcher

    def look(self) -> bool:
        """Whether somebody has waited for this moment."""
        self._watchers = [(holds, watcher) for holds, watcher in self._watchers if not watcher.done()]
        woken = [watcher for holds, watcher in self._watchers if holds()]
        for watcher in woken:
            watcher.set_result(None)
        return bool(woken)


class LoopClock:
    """The loop's time as the world's."""

    def now_ms(self) -> int:
        return _START_MS + round(asyncio.get_running_loop().time() * 1000)


def now() -> datetime:
    """In this world."""
    return START + timedelta(seconds=asyncio.get_running_loop().time())


async def until(holds: Callable[[], object], what: str = "it") -> None:
    """Wait until it holds, at rest. Time moves on meanwhile, from timer to timer."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return bool(holds()) or looks > _PATIENCE

    await loop.watch(look)
    assert looks <= _PATIENCE, f"{what} did not come true"


async def rest() -> None:
    """Until nothing is left to do at this moment."""
    await until(lambda: True)


def play(story: Coroutine[Any, Any, T]) -> T:
    """Run one example in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)


# The world -----------------------------------------------------------------------------------------------


class WorldAdapter(WatchedAdapter):
    """On the memory broker; messages were written when this world's clock said so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written: dict[str, datetime] = {}
        #: Of each message, the numbers of its deliveries.
        self.delivered: dict[str, list[int]] = {}

    def _next(self) -> RawMessage | None:
        taken = super()._next()
        if taken is None:
            return None
        message = msgspec.structs.replace(taken, timestamp=self.written.get(taken.message_id, START))
        self._deliveries[message] = self._deliveries.pop(taken)
        self.delivered.setdefault(message.message_id, []).append(message.deliveries)
        return message


class World:
    """One queue, one trigger. Make it inside of `play`.

    `slept` has every wait of the trigger for a retry or an outage, `rows` what was recorded, `adapter.told` what the
    broker was told of each message, `dead` the dead letters.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        dedup: DedupStore | None = None,
        gate: GuardRunner | None = None,
        book: TriggerStore | None = None,
        told: TriggerConfig | None = None,
        broker: str = "",
        payload_limit: int = 1024 * 1024,
        sleep: Callable[[float], Awaitable[None]] | None = None,
        **config: Any,
    ) -> None:
        """`broker`: the name of one that this world shares with another one; `config`: of the trigger, unless it is
        `told` as a whole."""
        self.name = broker or f"world-{next(_numbers)}"
        self.broker = MemoryBroker.named(self.name)
        self.config = told or TriggerConfig(**({"queue_name": "orders", "consumer_group": "workers"} | config))
        self.adapter = WorldAdapter(
            MemoryConfig(name=self.name),
            self.config.queue_name,
            self.config.consumer_group,
            prefetch=self.config.prefetch,
            dlq_name=self.config.dlq_name,
        )
        self.book = MemoryBook()
        self.clock = LoopClock()
        self.slept: list[float] = []
        self.trigger = QueueTrigger(
            self.config,
            self.adapter,
            runtime,
            guard_runner=gate,
            book=book or self.book,
            dedup=dedup or InMemoryDedupStore(self.clock),
            clock=self.clock,
            sleep=sleep or self._sleep,
            payload_limit=payload_limit,
        )
        self.counts = self.trigger.counts

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(seconds)

    def write(self, body: Any, key: str = "", headers: dict[str, str] | None = None) -> str:
        """Publish now; bytes as they are, everything else as JSON. The message's id."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        message_id = self.broker.write(self.config.queue_name, encoded, headers, key)
        self.adapter.written[message_id] = now()
        return message_id

    async def off(self, messages: int) -> None:
        """Until so many messages are off, and all is at rest."""
        await until(lambda: self.taken_care_of >= messages, f"{messages} messages off")

    async def run(self, messages: int) -> None:
        """Start, wait until so many messages are off, stop."""
        async with self.trigger:
            await self.off(messages)

    def close(self) -> None:
        """Forget the broker."""
        MemoryBroker.reset(self.name)

    @property
    def taken_care_of(self) -> int:
        """Messages that are off."""
        return sum(self.counts.consumed.values())

    @property
    def dead(self) -> list[OutgoingMessage]:
        return self.broker.messages(self.config.dlq_name or f"{self.config.queue_name}.dlq")

    @property
    def rows(self) -> list[Execution]:
        return list(self.book.rows.values())

    def words(self, message_id: str) -> list[str]:
        """What the broker was told of this one; the acknowledgement within a dead letter left out."""
        told = [word for word, of in self.adapter.told if of == message_id]
        return [word for word in told if word != "ack"] if "dlq" in told else told


class Script(Runtime):
    """Raises, for each payload, what its script says, try after try; then it runs. Remembers all of it."""

    submits_jobs = False

    def __init__(self, scripts: Mapping[Any, Sequence[BaseException]] | None = None) -> None:
        self.scripts = {payload: list(errors) for payload, errors in (scripts or {}).items()}
        self.calls: list[RuntimeCall] = []
        #: When each payload was tried, in seconds of the world; and those that have run, in order.
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
        # As a runtime does that asks somebody else: others get their turn.
        await asyncio.sleep(0)
        if self.scripts.get(payload):
            raise self.scripts[payload].pop(0)
        self.ran.append(payload)
        return f"run-{len(self.ran)}"


def gate_of(guard: Callable[..., Any]) -> GuardRunner:
    """A gate with one guard, for triggers whose runtime submits to no desk."""
    guards = GuardRegistry(lambda: 5.0)
    guards(guard)
    return GuardRunner(guards, {}, LoopClock(), None, can_request_approval=True)


def history_of(letter: OutgoingMessage) -> Sequence[str]:
    """The tries that its headers tell of."""
    history: list[str] = json.loads(letter.headers["x-dead-history"])
    return history
