"""From a trigger as it stands in a file to the trigger that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.brokers.factory import build_adapter
from holdfast.brokers.port import QueueAdapter
from holdfast.clock import SystemClock
from holdfast.errors import BrokerRefused, BrokerUnavailable, InvalidOption, NoLedger, UsageError
from holdfast.guard.gate import Gate
from holdfast.triggers.callables import CallableRuntime
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.dedup import Dedup, LedgerDedup
from holdfast.triggers.loading import load_callable
from holdfast.triggers.runtime import Runtime
from holdfast.triggers.tasks import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger

if TYPE_CHECKING:
    from holdfast.app import Holdfast


@dataclass(frozen=True, slots=True)
class Built:
    """A trigger and what it is made of. Not connected yet."""

    entry: TriggerEntry
    trigger: QueueTrigger
    runtime: Runtime

    async def close(self) -> None:
        """Give back what the runtime holds; the trigger closes its adapter itself."""
        close: Callable[[], Awaitable[None]] | None = getattr(self.runtime, "close", None)
        if close is not None:
            await close()


def build(app: Holdfast, entry: TriggerEntry) -> Built:
    """`UsageError` for a task that the app does not have, a function that is not there, a broker whose package is not
    installed; `NoLedger` if it would need one."""
    runtime = _runtime(app, entry)
    ledger, at_desk = app.ledger_port, entry.runtime.kind == "task"
    trigger = QueueTrigger(
        entry,
        _adapter(entry),
        runtime,
        # An event is no task, even if it has the name of one: the gate knows none.
        gate=None if at_desk else Gate(app.guard, {}, SystemClock(), ledger),
        book=None if ledger is None else ledger.triggers,
        dedup=None if at_desk or not entry.enable_dedup else _dedup(app, entry),
        payload_limit=app.settings.payload_limit,
    )
    return Built(entry, trigger, runtime)


async def check_entries(app: Holdfast, entries: Sequence[TriggerEntry], *, connect: bool) -> None:
    """Raise one error for all that is wrong with these beside their configuration: tasks that an app with tasks does
    not have, functions that are not there, and, if `connect`, brokers that do not answer or say no."""
    failed: dict[str, Exception] = {}
    for entry in entries:
        try:
            runtime = _runtime(app, entry)
            if (close := getattr(runtime, "close", None)) is not None:
                await close()
        except UsageError as exc:
            failed[entry.name] = exc
    if connect:
        answers = await asyncio.gather(*(_connect(entry) for entry in entries), return_exceptions=True)
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, Exception):
                failed.setdefault(entry.name, answer)
    if failed:
        raise told_together(failed)


def told_together(failed: dict[str, Exception]) -> Exception:
    """One error with the words of all: a wrong call if one of them is, else the broker's no, else its silence."""
    for error in failed.values():
        if not isinstance(error, UsageError | BrokerUnavailable):
            return error
    text = "; ".join(f"trigger {name}: {error}" for name, error in failed.items())
    if any(isinstance(error, UsageError) for error in failed.values()):
        return InvalidOption(text)
    refused = any(isinstance(error, BrokerRefused) for error in failed.values())
    return BrokerRefused(text) if refused else BrokerUnavailable(text)


async def _connect(entry: TriggerEntry) -> None:
    adapter = _adapter(entry)
    try:
        await adapter.connect()
    finally:
        await adapter.close()


def _adapter(entry: TriggerEntry) -> QueueAdapter:
    return build_adapter(
        entry.adapter.type,
        entry.adapter.connection,
        entry.queue_name,
        entry.consumer_group,
        entry.prefetch,
        dlq_name=entry.dlq_name,
    )


def _runtime(app: Holdfast, entry: TriggerEntry) -> Runtime:
    told = entry.runtime
    if told.task is not None:
        return TaskRuntime(app, told.task)
    if told.callable is not None:
        return CallableRuntime(load_callable(told.callable))
    from holdfast.triggers.http_runtime import HttpRuntime

    assert told.url is not None
    options: dict[str, Any] = {} if told.token is None else {"token": told.token.get_secret_value()}
    return HttpRuntime(told.url, timeout_s=told.timeout, connections=entry.concurrency, **options)


def _dedup(app: Holdfast, entry: TriggerEntry) -> Dedup:
    if app.ledger_port is None:
        raise NoLedger("enable_dedup with a callable or a url")
    return LedgerDedup(app.ledger_port.effects, entry.queue_name)
