"""`/metrics`: reads the stores' gauges and renders all metrics in Prometheus' text format.

If a store does not answer, its gauges are missing and the scrape takes a few seconds longer, but it does not fail: the
process's own counters are always included, and `…_engine_up` and `…_ledger_up` say which store was down.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from holdfast.core.key_names import configured_key
from holdfast.core.states import State
from holdfast.engine.port import InspectionPort
from holdfast.engine.port.jobs import UNOWNED
from holdfast.engine.port.reads import QueueStats
from holdfast.errors import EngineUnavailable, LedgerUnavailable, SchemaMismatch
from holdfast.execution.backend import BackendOwner, backend_of
from holdfast.ledger.port.ledger import LedgerReadPort
from holdfast.ledger.port.messages import OutboxOpener
from holdfast.observe.prometheus import MetricsCollector, QueueGauges, StoreGauges
from holdfast.operations.queues import TOGETHER
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.queries.operators import LedgerGauges


_log: Final = logging.getLogger("holdfast.metrics")

#: A store that has not answered by then is reported as down.
_TIMEOUT_S: Final = 5.0
#: Unread feed entries are counted one by one up to this; above it the feed's length is used.
_COUNTED: Final = 50
#: The queue that stands for all that are not named.
OTHER_QUEUES: Final = "other"
#: Queues whose lag is read at a time: each takes a connection to the ledger.
_TOGETHER: Final = 4
_WORK: Final = (State.QUEUED, State.RUNNING, State.RETRYING)


class MetricsBackend(Protocol):
    """The parts of an app's backend that metrics are read from."""

    @property
    def settings(self) -> Settings: ...
    @property
    def engine(self) -> InspectionPort: ...
    @property
    def ledger(self) -> LedgerReadPort | None: ...
    @property
    def outbox(self) -> OutboxOpener | None: ...


async def render_metrics(app: BackendOwner[MetricsBackend]) -> tuple[bytes, str]:
    """Return all metrics of an app and their content type."""
    backend = backend_of(app)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        MetricsCollector(backend.settings.metrics_prefix, backend.engine.counters, await collect_gauges(backend))
    )
    return generate_latest(registry), CONTENT_TYPE_LATEST


async def collect_gauges(backend: MetricsBackend) -> StoreGauges:
    """Read the gauges of all stores."""
    gauges = await _read_ledger(backend.ledger)
    queues = await _read_engine(backend)
    return StoreGauges(
        engine_up=queues is not None,
        queues=queues or [],
        ledger_up=None if backend.ledger is None else gauges is not None,
        dlq_pending={} if gauges is None else gauges.dlq_pending,
        approvals_waiting={} if gauges is None else gauges.approvals_waiting,
        alerts=backend.engine.counters.alerts if gauges is None else gauges.alerts,
        outbox_backlog=await _read_outbox(backend.outbox),
    )


async def _read_ledger(ledger: LedgerReadPort | None) -> LedgerGauges | None:
    if ledger is None:
        return None
    from holdfast.ledger.queries.operators import read_gauges

    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await read_gauges(ledger.queries)
    except (LedgerUnavailable, TimeoutError) as exc:
        _log.info("ledger did not answer a scrape: %s", exc)
        return None


async def _read_outbox(outbox: OutboxOpener | None) -> int | None:
    if outbox is None:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return (await (await outbox.open()).backlog()).waiting
    except (LedgerUnavailable, SchemaMismatch, TimeoutError) as exc:
        _log.info("outbox did not answer a scrape: %s", exc)
        return None


async def _read_engine(backend: MetricsBackend) -> list[QueueGauges] | None:
    engine, ledger = backend.engine, backend.ledger
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            queues = await engine.queues()
            named = select_queues(queues, await engine.queue_owners(), backend.settings.metrics_queue_limit)
            stats_by_queue, unreachable = await engine.for_each_queue(queues, engine.stats, together=TOGETHER)
    except (EngineUnavailable, TimeoutError) as exc:
        _log.info("engine did not answer a scrape: %s", exc)
        return None
    if unreachable:
        _log.info("engine did not answer a scrape for %s", ", ".join(sorted(unreachable)))
    shown = [stats for queue, stats in stats_by_queue.items() if queue in named]
    gauges: list[QueueGauges] = []
    for start in range(0, len(shown), _TOGETHER):
        part = shown[start : start + _TOGETHER]
        gauges += await asyncio.gather(*(_queue_gauges(backend.settings, engine, ledger, stats) for stats in part))
    others = [stats for queue, stats in stats_by_queue.items() if queue not in named]
    return [*gauges, _add_up(others, backend.settings)] if others else gauges


def select_queues(queues: Sequence[str], owners: Mapping[str, str], limit: int) -> set[str]:
    """The queues that metrics name: all, or of each tenant in turn the first by name.

    So a tenant with many queues does not displace those of others.
    """
    if len(queues) <= limit:
        return set(queues)
    counted: Counter[str] = Counter()
    ranked: list[tuple[int, str]] = []
    for queue in sorted(set(queues) - {OTHER_QUEUES}):
        # Queues that all tenants share come first.
        owner = owners.get(queue)
        ranked.append((0 if owner is None and queue in UNOWNED else counted[owner or ""], queue))
        counted[owner or ""] += 1
    return {queue for _, queue in sorted(ranked)[:limit]}


def _add_up(group: Sequence[QueueStats], settings: Settings) -> QueueGauges:
    """One set of gauges for all queues that are not named. Without limits and lags."""
    states: Counter[str] = Counter()
    for stats in group:
        states.update({state.value: number for state, number in stats.states.items()})
    running, backlog = states[State.RUNNING.value], sum(stats.backlog for stats in group)
    work, pending = sum(states[state.value] for state in _WORK), sum(stats.pending for stats in group)
    waiting = max(0, backlog - running)
    return QueueGauges(
        queue=OTHER_QUEUES,
        streams={OTHER_QUEUES: waiting + pending},
        task_stream=OTHER_QUEUES,
        group=settings.group,
        pending=pending,
        waiting=waiting,
        backlog=backlog,
        backlog_alert=None,
        states=dict(states),
        workers=max(stats.workers for stats in group),
        dead_letters=sum(stats.dead_letters for stats in group),
        retrying_ratio=states[State.RETRYING.value] / work if work else 0.0,
    )


async def _queue_gauges(
    settings: Settings, engine: InspectionPort, ledger: LedgerReadPort | None, stats: QueueStats
) -> QueueGauges:
    key = partial(configured_key, settings.namespace, stats.queue, tagged=settings.on_cluster)
    running = stats.states.get(State.RUNNING, 0)
    waiting = max(0, stats.backlog - running)
    task_stream = key(settings.stream_task)
    streams = {task_stream: waiting + stats.pending, key("stream:feed"): stats.feed_entries}
    if settings.stream_dlq:
        streams[key(settings.stream_dlq)] = stats.dead_letters
    work = sum(stats.states.get(state, 0) for state in _WORK)
    alert = stats.control.backlog_alert
    lag = await _feed_lag(engine, ledger, stats)
    return QueueGauges(
        queue=stats.queue,
        streams=streams,
        task_stream=task_stream,
        group=settings.group,
        pending=stats.pending,
        waiting=waiting,
        backlog=stats.backlog,
        backlog_alert=settings.backlog_alert if alert is None else alert,
        concurrency=stats.control.concurrency,
        states={state.value: number for state, number in stats.states.items()},
        workers=stats.workers,
        dead_letters=stats.dead_letters,
        retrying_ratio=stats.states.get(State.RETRYING, 0) / work if work else 0.0,
        feed_lag_entries=None if lag is None else lag[0],
        feed_lag_s=None if lag is None else lag[1],
        verified=int(stats.gate.is_open and not stats.gate.unverified_since_ms) if stats.gate.epoch else None,
    )


async def _feed_lag(
    engine: InspectionPort, ledger: LedgerReadPort | None, stats: QueueStats
) -> tuple[int, float] | None:
    """Return how many feed entries the ledger does not have, and the age of the oldest in seconds."""
    if ledger is None:
        return None
    if ledger.projection is None:
        # Engine and ledger share one transaction.
        return 0, 0.0
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            at = await ledger.projection.position(stats.queue)
            entries = await engine.read_feed(stats.queue, at.position, _COUNTED + 1)
            if entries and (entries[0].position, entries[0].nonce) == (at.position, at.nonce):
                entries = entries[1:]
            behind = len(entries)
            if behind >= _COUNTED:
                behind = max(behind, stats.feed_entries - engine.options.feed_tail - 1)
            oldest_ms = next((entry.events[0].at_ms for entry in entries if entry.events), None)
            if oldest_ms is None:
                return behind, 0.0
            return behind, max(0, await engine.now_ms() - oldest_ms) / 1000
    except (EngineUnavailable, LedgerUnavailable, TimeoutError) as exc:
        _log.info("lag of the ledger behind queue %s unknown: %s", stats.queue, exc)
        return None
