"""Build the triggers of a configuration file and run them in one process: `holdfast trigger run`.

`load_callable` resolves `module:function` or `file.py:function`; `build_trigger` makes a `QueueTrigger` of an entry.

If a trigger cannot connect at the start, `TriggerService.run` ends and raises one error with the reasons of all that
failed. Later, each trigger reconnects to its broker by itself. Heartbeats with the health of each trigger are written
to the ledger, and operators' pauses are read from it. While the ledger is unreachable, triggers keep running or stay
paused. Triggers also run without a ledger; only `holdfast trigger status`, `pause` and `resume` need one.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.brokers.factory import build_adapter
from holdfast.brokers.port import QueueAdapter
from holdfast.clock import Clock, SystemClock
from holdfast.errors import (
    BrokerRefused,
    BrokerUnavailable,
    HoldfastError,
    InvalidOption,
    MissingExtra,
    NoLedger,
    UsageError,
)
from holdfast.execution.backend import backend_of
from holdfast.guard.runner import GuardRunner
from holdfast.identity import new_identity
from holdfast.ledger.port.messages import TriggerHeartbeat, TriggerStore
from holdfast.triggers.config import TriggerEntry
from holdfast.triggers.dedup import IdempotencyStore, LedgerIdempotencyStore
from holdfast.triggers.runtime import CallableRuntime, Runtime
from holdfast.triggers.task_runtime import TaskRuntime
from holdfast.triggers.trigger import QueueTrigger

if TYPE_CHECKING:
    from holdfast.app import Holdfast


def load_callable(reference: str) -> Callable[..., Any]:
    """Resolve a reference to a function. Modules are searched in the working directory first.

    Raises `InvalidOption` with the reason.
    """
    source, _, name = reference.rpartition(":")
    by_file = source.endswith(".py") or os.sep in source
    module = _import(reference, *(_module_of(reference, Path(source)) if by_file else (source, Path.cwd())))
    found = getattr(module, name, None)
    if not callable(found):
        cause = f"has no {name!r}" if found is None else f"has {name!r}, which is not callable"
        raise _cannot(reference, f"module {module.__name__!r} {cause}")
    return found  # type: ignore[no-any-return]


def _module_of(reference: str, path: Path) -> tuple[str, Path]:
    """Module name of a file, and the directory to import it from."""
    if not path.is_file():
        raise _cannot(reference, f"file {path} not found in {Path.cwd()}")
    path = path.resolve()
    root, name = path.parent, path.stem
    # A file inside a package is imported as the package's module, so that its relative imports work.
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    return name, root


def _import(reference: str, name: str, root: Path) -> ModuleType:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    except MissingExtra:
        raise
    except ModuleNotFoundError as exc:
        raise _cannot(reference, f"module {exc.name!r} not found") from exc
    except Exception as exc:
        raise _cannot(reference, f"importing {name!r} raised {type(exc).__name__}: {exc}") from exc


def _cannot(reference: str, reason: str) -> InvalidOption:
    return InvalidOption(f"cannot load {reference!r}: {reason}")


@dataclass(frozen=True, slots=True)
class BuiltTrigger:
    """A trigger with its entry and runtime, not yet connected."""

    entry: TriggerEntry
    trigger: QueueTrigger
    runtime: Runtime

    async def close(self) -> None:
        """Close the runtime. The trigger closes its adapter itself."""
        close: Callable[[], Awaitable[None]] | None = getattr(self.runtime, "close", None)
        if close is not None:
            await close()


def build_trigger(app: Holdfast, entry: TriggerEntry) -> BuiltTrigger:
    """Build the trigger of an entry.

    Raises `UsageError` for an unknown task, a missing function or a broker package that is not installed, and
    `NoLedger` if the trigger needs a ledger.
    """
    runtime = _runtime(app, entry)
    ledger, submits_jobs = backend_of(app).ledger, entry.runtime.kind == "task"
    trigger = QueueTrigger(
        entry,
        _adapter(entry),
        runtime,
        # Without tasks: an event is not a task, even if it has the name of one.
        guards=None if submits_jobs else GuardRunner(app.guard, {}, SystemClock(), ledger),
        book=None if ledger is None else ledger.triggers,
        dedup=None if submits_jobs or not entry.enable_dedup else _dedup(app, entry),
        payload_limit=app.settings.payload_limit,
    )
    return BuiltTrigger(entry, trigger, runtime)


async def check_entries(app: Holdfast, entries: Sequence[TriggerEntry], *, connect: bool) -> None:
    """Check what the configuration alone does not show, and raise one error for all entries.

    Finds unknown tasks (if the app has tasks) and missing functions; with `connect`, also brokers that do not answer or
    refuse.
    """
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
        raise combined_error(failed)


def combined_error(failed: dict[str, Exception]) -> Exception:
    """Combine errors into one.

    An error that is neither a usage nor a broker error is returned unchanged. Otherwise the result is `InvalidOption`
    if any is a usage error, else `BrokerRefused` if any is one, else `BrokerUnavailable`.
    """
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
    config = entry.runtime
    if config.task is not None:
        return TaskRuntime(app, config.task)
    if config.callable is not None:
        return CallableRuntime(load_callable(config.callable))
    from holdfast.triggers.http_runtime import HttpRuntime

    assert config.url is not None
    options: dict[str, Any] = {} if config.token is None else {"token": config.token.get_secret_value()}
    return HttpRuntime(config.url, timeout_s=config.timeout, connections=entry.concurrency, **options)


def _dedup(app: Holdfast, entry: TriggerEntry) -> IdempotencyStore:
    ledger = backend_of(app).ledger
    if ledger is None:
        raise NoLedger("enable_dedup with a callable or a url")
    return LedgerIdempotencyStore(ledger.effects, entry.queue_name)


_log: Final = logging.getLogger("holdfast.triggers")

#: Interval of heartbeats, which also return pauses.
REPORT_S: Final = 2.0
#: Processes without a heartbeat for this time are removed from the list.
_EXPIRE_MS: Final = 60_000
#: Timeout of one ledger call; it is repeated at the next interval.
_LEDGER_TIMEOUT_S: Final = 5.0


class TriggersReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether all triggers can handle messages."""

    ready: bool
    #: Names of triggers that cannot.
    failing: list[str]


class TriggerService:
    """Runs the triggers of one process. Use it in one event loop; the app must be open."""

    def __init__(
        self,
        app: Holdfast,
        entries: Sequence[TriggerEntry],
        *,
        report_s: float = REPORT_S,
        clock: Clock | None = None,
    ) -> None:
        """Raises `InvalidOption` with all errors: unknown tasks, missing functions."""
        ledger = backend_of(app).ledger
        self._book: TriggerStore | None = None if ledger is None else ledger.triggers
        self._built = _build_all(app, entries)
        self._report_s = report_s
        self._clock = clock or SystemClock()
        self.process = new_identity()
        self._stopping = asyncio.Event()
        self._stop_now_requested = asyncio.Event()
        #: Names of paused triggers, as last applied.
        self._paused: set[str] = set()
        self._running = False
        app.engine.counters.triggers.update(
            (each.entry.name, each.trigger.counts) for each in self._built if each.entry.metrics.enabled
        )

    @property
    def ready(self) -> bool:
        """Whether every trigger can handle messages. False before the start and after `stop`."""
        return self._running and not self._stopping.is_set() and all(each.trigger.ready for each in self._built)

    async def readiness(self) -> TriggersReadiness:
        """For `/readyz`."""
        return TriggersReadiness(
            ready=self.ready, failing=[each.entry.name for each in self._built if not each.trigger.ready]
        )

    def stop(self) -> None:
        """Drain: receive nothing more and finish messages in flight. A second call does not wait for them."""
        if self._stopping.is_set():
            _log.info("triggers stop now, without waiting for messages in flight")
            self._stop_now_requested.set()
        else:
            _log.info("triggers stop; %d messages in flight", sum(each.trigger.in_flight for each in self._built))
        self._stopping.set()

    async def run(self) -> None:
        """Run until stopped. If triggers cannot connect at the start, raises one error with all reasons."""
        await self._load_pauses()
        try:
            await self._start()
            self._running = True
            async with asyncio.TaskGroup() as group:
                reporting = group.create_task(self._report())
                await self._stopping.wait()
                reporting.cancel()
        finally:
            self._running = False
            await self._stop()

    # Start -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        started = await asyncio.gather(*(self._start_one(each) for each in self._built), return_exceptions=True)
        failed = {
            each.entry.name: error
            for each, error in zip(self._built, started, strict=True)
            if isinstance(error, Exception)
        }
        if failed:
            raise combined_error(failed)

    async def _start_one(self, built: BuiltTrigger) -> None:
        entry = built.entry
        await built.trigger.start()
        if entry.name in self._paused:
            # No other task has run since `start`, so it has not handled anything.
            await built.trigger.pause()
        _log.info(
            "trigger %s started: %s queue %s, group %s, to %s, %d at a time%s",
            entry.name,
            entry.adapter.type,
            entry.queue_name,
            entry.consumer_group,
            entry.runtime.kind,
            entry.concurrency,
            " (paused)" if entry.name in self._paused else "",
        )

    # While they run ----------------------------------------------------------------------------------

    async def _report(self) -> None:
        if self._book is None:
            return
        while True:
            # Concurrently: each queries its broker, and a broker that does not answer takes seconds.
            heartbeats = await asyncio.gather(*(self._heartbeat(each) for each in self._built))
            try:
                async with asyncio.timeout(_LEDGER_TIMEOUT_S):
                    paused = await self._book.heartbeat(heartbeats, expire_after_ms=_EXPIRE_MS)
                await self._apply_pauses(paused)
            except (HoldfastError, TimeoutError) as exc:
                _log.warning("trigger heartbeat not written to the ledger: %s", str(exc) or "no answer in time")
            await asyncio.sleep(self._report_s)

    async def _heartbeat(self, built: BuiltTrigger) -> TriggerHeartbeat:
        return TriggerHeartbeat(
            name=built.entry.name,
            process=self.process,
            queue_name=built.entry.queue_name,
            adapter=built.entry.adapter.type,
            health=msgspec.to_builtins(await built.trigger.health()),
            seen_at_ms=self._clock.now_ms(),
        )

    async def _apply_pauses(self, paused: set[str]) -> None:
        """Apply pauses and resumes that operators requested. Failed ones are retried at the next heartbeat."""
        for built in self._built:
            name, trigger = built.entry.name, built.trigger
            if (name in paused) == (name in self._paused):
                continue
            _log.info("trigger %s %s by an operator", name, "paused" if name in paused else "resumed")
            try:
                await (trigger.pause() if name in paused else trigger.resume())
            except BrokerUnavailable as exc:
                _log.warning("trigger %s: pause or resume failed, retrying: %s", name, exc)
                continue
            self._paused ^= {name}

    async def _load_pauses(self) -> None:
        """Read the pauses before the start: a paused trigger must not consume."""
        if self._book is None:
            return
        try:
            async with asyncio.timeout(_LEDGER_TIMEOUT_S):
                self._paused = {pause.name for pause in await self._book.pauses()}
        except (HoldfastError, TimeoutError) as exc:
            _log.warning("cannot read which triggers are paused, starting all: %s", str(exc) or "no answer in time")

    # Stop --------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        stops = [asyncio.create_task(each.trigger.stop()) for each in self._built]
        stop_now = asyncio.create_task(self._stop_now())
        try:
            for each, outcome in zip(self._built, await asyncio.gather(*stops, return_exceptions=True), strict=True):
                if isinstance(outcome, Exception):
                    _log.error("trigger %s failed to stop: %s", each.entry.name, outcome)
        finally:
            stop_now.cancel()
        for each in self._built:
            await each.close()
        if self._book is not None:
            with suppress(HoldfastError, TimeoutError):
                async with asyncio.timeout(_LEDGER_TIMEOUT_S):
                    await self._book.remove_process(self.process)

    async def _stop_now(self) -> None:
        await self._stop_now_requested.wait()
        for each in self._built:
            each.trigger.stop_now()


def _build_all(app: Holdfast, entries: Sequence[TriggerEntry]) -> list[BuiltTrigger]:
    built: list[BuiltTrigger] = []
    failed: dict[str, Exception] = {}
    for entry in entries:
        try:
            built.append(build_trigger(app, entry))
        except HoldfastError as exc:
            failed[entry.name] = exc
    if failed:
        raise combined_error(failed)
    return built
