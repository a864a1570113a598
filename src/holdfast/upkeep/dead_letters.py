"""Dead letters that are in the ledger: tells the engine, which has kept the job in `dlq_pending` until now (rule 18).

    commit of the item, unacknowledged → dlq_recorded → failed → acknowledged

Every step may be repeated, so a crash between any two costs nothing: what is unacknowledged is sent again.

The other way round, a job may wait in the engine although the ledger has nothing to tell: the ledger was replaced, set
back to a backup, or switched off; or a replica of the engine took over that was behind, after the letter had been
acknowledged, or the job had ended. `strays` and `Unrecorded` see to those.
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
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry
from holdfast.errors import TransitionInvalid, Unavailable, UnknownJob
from holdfast.ledger.port.ledger import FeedPosition, Ledger, RecordedDeadLetter

_log: Final = logging.getLogger("holdfast.projector")

#: Letters told at a time.
_TOGETHER: Final = 50
_PAGE: Final = 500
#: One that could not be told is left alone for this long.
_LATER_S: Final = 4.0
#: Jobs that wait in the engine, looked at together.
_STRAYS: Final = 200

_ACTOR: Final = "ledger"
_REASON: Final = "the dead letter is recorded"
_NO_LEDGER: Final = "there is no ledger any more that would record the dead letter"
_STEPS: Final = ((State.DLQ_PENDING, State.DLQ_RECORDED), (State.DLQ_RECORDED, State.FAILED))
_WAITING: Final = frozenset({State.DLQ_PENDING, State.DLQ_RECORDED})


class DeadLetterConfirmer:
    """Tells one engine what its ledger has recorded."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        assert ledger.projection is not None
        self._engine = engine
        self._ledger = ledger
        self._projection = ledger.projection
        #: Those that could not be told, and when to try again.
        self._later: dict[RecordedDeadLetter, float] = {}
        #: Jobs that waited when we looked last, and where the feed ended after that.
        self._waited: dict[str, tuple[set[str], EngineSnapshot]] = {}

    async def confirm_all(self, queue: str) -> int:
        """Tell all that is to be told; how many were left, because their jobs are elsewhere at the moment."""
        left, last = 0, None
        now = time.monotonic()
        self._later = {letter: at for letter, at in self._later.items() if at > now}
        while letters := await self._projection.unacked_dead_letters(queue, _PAGE, last):
            fresh = [letter for letter in letters if letter not in self._later]
            left += len(letters) - len(fresh)
            for start in range(0, len(fresh), _TOGETHER):
                left += await self._send(fresh[start : start + _TOGETHER])
            last = letters[-1]
            if len(letters) < _PAGE:
                break
        return left

    async def _send(self, letters: Sequence[RecordedDeadLetter]) -> int:
        """How many were left. One that cannot be told hinders no other."""
        told = await asyncio.gather(*(self._tell(letter) for letter in letters), return_exceptions=True)
        done = [letter for letter, ended in zip(letters, told, strict=True) if ended is True]
        if done:
            await self._projection.ack_dead_letters(done)
        for letter, ended in zip(letters, told, strict=True):
            if ended is True:
                continue
            if isinstance(ended, Unavailable) or (
                isinstance(ended, BaseException) and not isinstance(ended, Exception)
            ):
                raise ended
            if isinstance(ended, Exception):
                _log.error("dead letter %s of job %s cannot be told", letter.dlq_id, letter.key.job_id, exc_info=ended)
            self._later[letter] = time.monotonic() + _LATER_S
        return len(letters) - len(done)

    async def _tell(self, letter: RecordedDeadLetter) -> bool:
        """Move the job to its end; whether the letter is done with."""
        key = letter.key
        for was, to in _STEPS:
            try:
                await self._engine.move(key.queue, key.job_id, to, actor=_ACTOR, reason=_REASON, expected=was)
            except TransitionInvalid:
                if not await self._is_past(letter, to):
                    return False
            except UnknownJob:
                return await self._is_over(letter)
        return True

    async def _is_past(self, letter: RecordedDeadLetter, to: State) -> bool:
        """Whether the engine had heard of it already."""
        (view,) = await self._engine.get(letter.key.queue, [letter.key.job_id])
        if view is None:
            return await self._is_over(letter)
        if view.state is to or view.state in FINAL:
            return True
        _log.warning(
            "job %s has a dead letter %s, but is %s: the engine went on from an earlier point; waiting for its end",
            view.job_id,
            letter.dlq_id,
            view.state,
        )
        return False

    async def _is_over(self, letter: RecordedDeadLetter) -> bool:
        """The engine does not know the job: it has ended long ago, or is lost and will be restored as it was."""
        if await self._ledger.recovery.still_open([letter.key]):
            return False
        _log.info("job %s of dead letter %s is gone from the engine; it had ended", letter.key.job_id, letter.dlq_id)
        return True

    # From the engine's side ------------------------------------------------------------------------

    async def find_orphans(self, queue: str, at: FeedPosition) -> list[Event]:
        """Events that the ledger, which is at `at`, has missed: of jobs that wait for it with their dead letter.

        A job that waited when we looked last and still does, while the ledger has come past the feed's end of then,
        will not be heard of again. Those whose letter the ledger has, or that have ended there, are moved on at once.
        """
        views = await self._engine.find(queue, _WAITING, _STRAYS)
        before = self._waited.pop(queue, None)
        if not views:
            return []
        self._waited[queue] = ({view.job_id for view in views}, await self._engine.snapshot(queue, []))
        if before is None or not await self._has(queue, at, before[1]):
            return []
        lost = {JobKey(view.tenant_id, queue, view.job_id): view for view in views if view.job_id in before[0]}
        letters = await self._projection.dead_letters(list(lost))
        for letter in letters:
            del lost[letter.key]
        events: list[Event] = []
        stories = await self._ledger.recovery.histories(list(lost)) if lost else {}
        for key, story in stories.items():
            if any(event.to_state in FINAL for event in story):
                letters.append(RecordedDeadLetter(key, lost[key].meta.dlq_id))
                continue
            _log.error("the ledger has missed the end of job %s in queue %s; it is told now", key.job_id, queue)
            events += [] if story else [_creation(lost[key])]
            events.append(_death(lost[key], await self._engine.now_ms()))
        for start in range(0, len(letters), _TOGETHER):
            await self._send(letters[start : start + _TOGETHER])
        return events

    def has_waiting(self, queue: str) -> bool:
        """Whether jobs waited at the last look for `strays`."""
        return queue in self._waited

    async def _has(self, queue: str, at: FeedPosition, end: EngineSnapshot) -> bool:
        if (at.position, at.nonce) == (end.position, end.nonce):
            return True
        return bool(await self._projection.already_written(queue, [FeedEntry(end.position, end.nonce, [])]))


class OrphanedDeadLetters:
    """Moves on what waits for a ledger that an engine no longer has. `stream:dlq` is the record then."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waited: dict[str, set[str]] = {}

    async def finish(self, queue: str) -> int:
        """End the jobs that waited when this was called last and still do: the ledger of another process would have
        seen to them meanwhile. How many were moved on."""
        if self._engine.options.ledger:
            return 0
        views = await self._engine.find(queue, _WAITING, _STRAYS)
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
            # Somebody was faster.
            return False
        return True


def _creation(view: JobInfo) -> Event:
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


def _death(view: JobInfo, now_ms: int) -> Event:
    """As the engine's record tells it."""
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
