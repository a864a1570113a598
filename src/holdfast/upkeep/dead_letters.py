"""Confirm recorded dead letters to the engine (rule 18), which keeps their jobs in `dlq_pending`.

    commit of the dead letter, unacknowledged → dlq_recorded → failed → acknowledged

Every step can be repeated: after a crash, unacknowledged dead letters are confirmed again.

A job may also wait in the engine for a confirmation that will never come: the ledger was replaced, restored from a
backup or switched off, or a stale replica of the engine took over after the dead letter was acknowledged or the job had
ended. `find_orphans` and `OrphanedDeadLetters` handle those.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import EMPTY_META, Event, JobInfo, JobKey
from holdfast.core.states import FINAL, State, event_for
from holdfast.engine.port import Engine, OperationsPort
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry
from holdfast.errors import TransitionInvalid, Unavailable, UnknownJob
from holdfast.ledger.port.ledger import FeedPosition, Ledger, RecordedDeadLetter

_log: Final = logging.getLogger("holdfast.projector")

#: Dead letters confirmed at a time.
_CONFIRM_BATCH: Final = 50
_PAGE: Final = 500
#: Pause before a dead letter that could not be confirmed is tried again.
_RETRY_S: Final = 4.0
#: Jobs waiting in the engine for a confirmation, read at a time.
_ORPHAN_BATCH: Final = 200

_ACTOR: Final = "ledger"
_REASON: Final = "the dead letter is recorded"
_NO_LEDGER: Final = "the engine no longer has a ledger that would record the dead letter"
_STEPS: Final = ((State.DLQ_PENDING, State.DLQ_RECORDED), (State.DLQ_RECORDED, State.FAILED))
_WAITING: Final = frozenset({State.DLQ_PENDING, State.DLQ_RECORDED})


class DeadLetterConfirmer:
    """Confirms to one engine the dead letters that its ledger has recorded."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        assert ledger.projection is not None
        self._engine = engine
        self._ledger = ledger
        self._projection = ledger.projection
        #: Dead letters that could not be confirmed, and when to try again.
        self._retry_at: dict[RecordedDeadLetter, float] = {}
        #: Jobs that waited at the last orphan check, and where the feed ended after it.
        self._waited: dict[str, tuple[set[str], EngineSnapshot]] = {}

    async def confirm_all(self, queue: str) -> int:
        """Confirm all unacknowledged dead letters; returns how many could not be confirmed."""
        left, last = 0, None
        now = time.monotonic()
        self._retry_at = {dead_letter: at for dead_letter, at in self._retry_at.items() if at > now}
        while dead_letters := await self._projection.unacked_dead_letters(queue, _PAGE, last):
            fresh = [dead_letter for dead_letter in dead_letters if dead_letter not in self._retry_at]
            left += len(dead_letters) - len(fresh)
            for start in range(0, len(fresh), _CONFIRM_BATCH):
                left += await self._confirm_batch(fresh[start : start + _CONFIRM_BATCH])
            last = dead_letters[-1]
            if len(dead_letters) < _PAGE:
                break
        return left

    async def _confirm_batch(self, dead_letters: Sequence[RecordedDeadLetter]) -> int:
        """Confirm some; returns how many could not be confirmed. Those do not block the others."""
        results = await asyncio.gather(*map(self._confirm, dead_letters), return_exceptions=True)
        done = [dead_letter for dead_letter, result in zip(dead_letters, results, strict=True) if result is True]
        if done:
            await self._projection.ack_dead_letters(done)
        for dead_letter, result in zip(dead_letters, results, strict=True):
            if result is True:
                continue
            if isinstance(result, Unavailable) or (
                isinstance(result, BaseException) and not isinstance(result, Exception)
            ):
                raise result
            if isinstance(result, Exception):
                ids = dead_letter.dlq_id, dead_letter.key.job_id
                _log.error("dead letter %s of job %s cannot be confirmed", *ids, exc_info=result)
            self._retry_at[dead_letter] = time.monotonic() + _RETRY_S
        return len(dead_letters) - len(done)

    async def _confirm(self, dead_letter: RecordedDeadLetter) -> bool:
        """Move the job to its final state; returns whether the dead letter can be acknowledged."""
        key = dead_letter.key
        for was, to in _STEPS:
            try:
                await self._engine.move(key.queue, key.job_id, to, actor=_ACTOR, reason=_REASON, expected=was)
            except TransitionInvalid:
                if not await self._is_past(dead_letter, to):
                    return False
            except UnknownJob:
                return await self._has_ended(dead_letter)
        return True

    async def _is_past(self, dead_letter: RecordedDeadLetter, to: State) -> bool:
        """Whether the engine has already made this move."""
        (view,) = await self._engine.get(dead_letter.key.queue, [dead_letter.key.job_id])
        if view is None:
            return await self._has_ended(dead_letter)
        if view.state is to or view.state in FINAL:
            return True
        _log.warning(
            "job %s has dead letter %s but is %s: the engine continued from an earlier point; waiting for its end",
            view.job_id,
            dead_letter.dlq_id,
            view.state,
        )
        return False

    async def _has_ended(self, dead_letter: RecordedDeadLetter) -> bool:
        """Whether a job that the engine does not know has ended. If not, it is lost and will be restored."""
        if await self._ledger.recovery.still_open([dead_letter.key]):
            return False
        ids = dead_letter.key.job_id, dead_letter.dlq_id
        _log.info("job %s of dead letter %s has ended and is no longer in the engine", *ids)
        return True

    # Orphans in the engine -----------------------------------------------------------------------------

    async def find_orphans(self, queue: str, at: FeedPosition) -> list[Event]:
        """Find events that the ledger, which is at `at`, has missed: of jobs that wait for a confirmation.

        If a job waited at the last check and still waits, and the ledger has passed the position where the feed ended
        then, the feed has no further event of it. If the ledger has its dead letter or its end, the job is finished
        here.
        """
        views = await self._engine.find(queue, _WAITING, _ORPHAN_BATCH)
        before = self._waited.pop(queue, None)
        if not views:
            return []
        self._waited[queue] = ({view.job_id for view in views}, await self._engine.snapshot(queue, []))
        if before is None or not await self._has(queue, at, before[1]):
            return []
        lost = {JobKey(view.tenant_id, queue, view.job_id): view for view in views if view.job_id in before[0]}
        dead_letters = await self._projection.dead_letters(list(lost))
        for dead_letter in dead_letters:
            del lost[dead_letter.key]
        events: list[Event] = []
        histories = await self._ledger.recovery.histories(list(lost)) if lost else {}
        for key, history in histories.items():
            if any(event.to_state in FINAL for event in history):
                dead_letters.append(RecordedDeadLetter(key, lost[key].meta.dlq_id))
                continue
            _log.error("ledger missed the end of job %s in queue %s; writing it now", key.job_id, queue)
            events += [] if history else [_created_event(lost[key])]
            events.append(_dead_letter_event(lost[key], await self._engine.now_ms()))
        for start in range(0, len(dead_letters), _CONFIRM_BATCH):
            await self._confirm_batch(dead_letters[start : start + _CONFIRM_BATCH])
        return events

    def has_waiting(self, queue: str) -> bool:
        """Whether jobs waited at the last call of `find_orphans`."""
        return queue in self._waited

    async def _has(self, queue: str, at: FeedPosition, end: EngineSnapshot) -> bool:
        if (at.position, at.nonce) == (end.position, end.nonce):
            return True
        return bool(await self._projection.already_written(queue, [FeedEntry(end.position, end.nonce, [])]))


class OrphanedDeadLetters:
    """Ends jobs that wait for a ledger which the engine no longer has. `stream:dlq` is the record then."""

    def __init__(self, engine: OperationsPort) -> None:
        self._engine = engine
        self._waited: dict[str, set[str]] = {}

    async def finish(self, queue: str) -> int:
        """End the jobs that waited at the last call and still do; returns how many.

        The ledger of another process would have confirmed them in between.
        """
        if self._engine.options.ledger:
            return 0
        views = await self._engine.find(queue, _WAITING, _ORPHAN_BATCH)
        before = self._waited.get(queue, set())
        self._waited[queue] = {view.job_id for view in views}
        count = 0
        for view in views:
            count += view.job_id in before and await self._end(view)
        return count

    async def _end(self, view: JobInfo) -> bool:
        try:
            for was, to in _STEPS if view.state is State.DLQ_PENDING else _STEPS[1:]:
                await self._engine.move(view.queue, view.job_id, to, actor="upkeep", reason=_NO_LEDGER, expected=was)
        except (TransitionInvalid, UnknownJob):
            # Another process was faster.
            return False
        return True


def _created_event(view: JobInfo) -> Event:
    data: dict[str, Any] = {
        "task": view.task,
        "payload": view.payload.decode("utf-8", "replace"),
        "tenant_id": view.tenant_id,
        "idempotency_key": view.idempotency_key or view.job_id,
        "trace_id": view.trace_id,
        "priority": int(view.meta.priority),
        "context": view.meta.context,
        "run_at_ms": view.meta.run_at_ms,
    }
    if view.meta != EMPTY_META:
        data["meta"] = msgspec.json.encode(view.meta).decode()
    return Event(
        type=event_for(None, State.QUEUED),
        job_id=view.job_id,
        at_ms=view.created_at_ms,
        tenant_id=view.tenant_id,
        to_state=State.QUEUED,
        data=data,
    )


def _dead_letter_event(view: JobInfo, now_ms: int) -> Event:
    """The move to `dlq_pending`, rebuilt from the engine's record."""
    history = view.meta.history
    data: dict[str, Any] = {"dlq_id": view.meta.dlq_id, "history": msgspec.to_builtins(history)}
    if view.failure is not None:
        data |= msgspec.structs.asdict(view.failure)
    return Event(
        type=event_for(State.RUNNING, State.DLQ_PENDING),
        job_id=view.job_id,
        at_ms=history[-1].finished_at_ms if history else now_ms,
        tenant_id=view.tenant_id,
        from_state=State.RUNNING,
        to_state=State.DLQ_PENDING,
        attempt=view.attempt,
        retry_count=view.meta.retry_count,
        message=view.failure.message if view.failure else "",
        data=data,
    )
