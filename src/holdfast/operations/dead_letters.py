"""Dead letters: list, replay as new jobs, keep, or discard with another principal's confirmation (D3–D5).

A replay is marked in the ledger, submitted to the engine under its own key, and then marked as submitted. After a
crash in between, `submit_pending` makes the same job from the same mark. Two concurrent replays of one dead letter make
one job; of a concurrent replay and discard, one wins.

`diff_payloads` lists what an edit changes in a payload.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from holdfast.core.codec import decode_json
from holdfast.core.job import Envelope, Meta, Receipt, ReplayOrigin
from holdfast.core.principal import Permission, Principal
from holdfast.engine.port import Engine
from holdfast.errors import (
    Conflict,
    EngineUnavailable,
    HoldfastError,
    IntakeRefused,
    InvalidPayload,
    PayloadTooLarge,
    Unavailable,
    UnknownJob,
    UsageError,
)
from holdfast.guard.decisions import PayloadDecoder
from holdfast.ledger.port.operators import DeadLetterStatus, ReplayReservation
from holdfast.operations.access import require_reason, require_verified, visible_tenants
from holdfast.operations.bulk import DEFAULT_RATE, BulkReport, BulkResult, Progress, no_progress, run_bulk

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.queries.operator_filters import (
        DeadLetterDetail,
        DeadLetterFilter,
        DeadLetterGroup,
        DeadLetterPage,
        DeadLetterRow,
    )


class _Absent(msgspec.Struct, frozen=True):
    """Stands where there is no value, since null is one."""


ABSENT: Final = _Absent()


class PayloadChange(msgspec.Struct, frozen=True):
    """One place that differs: its JSON pointer, and both values; `ABSENT` where there was or is none."""

    path: str
    before: Any
    after: Any

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON: without `before` for what is new, without `after` for what is gone."""
        sides = {"before": self.before, "after": self.after}
        return {"path": self.path} | {side: value for side, value in sides.items() if value is not ABSENT}


def diff_payloads(before: Any, after: Any, path: str = "") -> list[PayloadChange]:
    """All places that differ, in the order of the first document; nothing if they are equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [*before, *(name for name in after if name not in before)]
        pairs = [(str(name), before.get(name, ABSENT), after.get(name, ABSENT)) for name in names]
    elif isinstance(before, list) and isinstance(after, list):
        longest = range(max(len(before), len(after)))
        pairs = [(str(place), _item(before, place), _item(after, place)) for place in longest]
    else:
        # 1 and true are equal to Python, and not to JSON.
        same = type(before) is type(after) and before == after
        return [] if same else [PayloadChange(path, before, after)]
    return [change for name, old, new in pairs for change in diff_payloads(old, new, f"{path}/{_escaped(name)}")]


def _item(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else ABSENT


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_PAGE: Final = 200


class JobSubmitter(Protocol):
    """Where jobs are handed in, with the app's guards before it."""

    async def submit(self, envelope: Envelope) -> Receipt: ...


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The new job of a dead letter."""

    dlq_id: str
    tenant_id: str
    queue: str
    job_id: str
    #: The how manyeth replay of the letter it is.
    number: int


class DeadLetterOperations:
    """What people do with dead letters. All methods raise `Unknown` for what the person may not see."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        desk: JobSubmitter | None = None,
        plans: Mapping[str, PayloadDecoder] | None = None,
    ) -> None:
        """Without a desk the engine itself takes the jobs, and guards see them when they are run."""
        self._engine = engine
        self._ledger = ledger
        self._people = ledger.operators
        self._desk = desk or _EngineSubmitter(engine)
        self._plans = plans or {}

    # Looking ---------------------------------------------------------------------------------------

    async def list(
        self, person: Principal, wanted: DeadLetterFilter, limit: int = 50, cursor: str | None = None
    ) -> DeadLetterPage:
        """A page of letters, newest first."""
        person.require(Permission.READ)
        return await self._ledger.queries.dead_letters(_narrowed(person, wanted), limit, cursor)

    async def groups(self, person: Principal, wanted: DeadLetterFilter) -> Sequence[DeadLetterGroup]:
        """Letters by the kind of error that they died of, the most frequent first."""
        person.require(Permission.READ)
        return await self._ledger.queries.dead_letter_groups(_narrowed(person, wanted))

    async def count(self, person: Principal, wanted: DeadLetterFilter) -> int:
        """How many there are."""
        person.require(Permission.READ)
        return await self._ledger.queries.dead_letter_count(_narrowed(person, wanted))

    async def show(self, person: Principal, dlq_id: str) -> DeadLetterDetail:
        """One letter with all that is known of it: payload, error, stack, every attempt, every event of its job."""
        person.require(Permission.READ)
        return await self._ledger.queries.dead_letter(visible_tenants(person), dlq_id)

    async def diff(self, person: Principal, dlq_id: str, payload: bytes) -> Sequence[PayloadChange]:
        """What an edited payload changes. Raises `InvalidPayload` if it is none, or none for the letter's task."""
        letter = await self.show(person, dlq_id)
        after = self._checked(letter.job_type, payload)
        return diff_payloads(letter.payload.value, after)

    # Back to work ----------------------------------------------------------------------------------

    async def replay(
        self, person: Principal, dlq_id: str, *, reason: str, payload: bytes | None = None, expected: int | None = None
    ) -> ReplayResult:
        """The letter as a new job, with its payload as it was or as edited.

        `expected` is how often the caller has seen it replayed, else as it is now: of two who saw the same, the second
        gets the first one's job while that is on its way, and `Conflict` afterwards. Raises `Denied`, `IntakeRefused`
        and the like as any submission does, and the letter is open again then.
        """
        letter = await self.show(person, dlq_id)
        person.require(Permission.OPERATE)
        return await self._replay(
            person, letter, reason, payload, letter.replay_count if expected is None else expected
        )

    async def replay_many(
        self,
        person: Principal,
        wanted: DeadLetterFilter,
        *,
        reason: str,
        rate_per_s: float = DEFAULT_RATE,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Every open letter of the filter as a new job; those that were replayed before are left alone, so that a call
        that was broken off is just repeated."""

        async def act(letter: DeadLetterRow) -> BulkResult:
            # As it was seen: whoever was faster has made the job.
            done = await self._replay(person, letter, reason, None, letter.replay_count)
            return BulkResult(id=letter.dlq_id, done=True, job_id=done.job_id)

        return await self._many(person, wanted, DeadLetterStatus.OPEN, act, dry_run, rate_per_s, progress)

    async def submit_pending(self, limit: int = 100) -> int:
        """Hand in what is marked and was left behind, so many at a time; how many. Those that the engine refuses are
        tried again later, and hinder no others.

        Raises in the end if the engine did not answer for some of them.
        """
        count, last = 0, None
        away: dict[str, EngineUnavailable] = {}
        while True:
            rows = await self._people.unsubmitted_replays(limit, last)
            for row in rows:
                if row.queue in away:
                    continue
                try:
                    count += await self._hand_in(row)
                except EngineUnavailable as exc:
                    # Other queues may be on a part of the store that answers.
                    away[row.queue] = exc
            if len(rows) < limit:
                break
            last = rows[-1]
        for failure in away.values():
            raise failure
        return count

    async def _hand_in(self, row: ReplayReservation) -> bool:
        try:
            receipt = await self._desk.submit(await self._envelope(row))
            _check_own(row, receipt)
        except IntakeRefused:
            return False
        except Conflict as exc:
            await self._people.cancel_replay(row, person=row.actor, reason=str(exc))
            return False
        await self._people.mark_submitted([row])
        return True

    # Away with it ----------------------------------------------------------------------------------

    async def discard(self, person: Principal, dlq_id: str, reason: str) -> None:
        """Ask for a letter to be thrown away; somebody else has to confirm."""
        await self.show(person, dlq_id)
        self._check_discard(person, reason)
        await self._people.request_discard(visible_tenants(person), dlq_id, person=person.name, reason=reason)

    async def confirm(self, person: Principal, dlq_id: str) -> None:
        """Throw it away, as another person has asked for."""
        await self.show(person, dlq_id)
        self._check_confirm(person)
        await self._people.confirm_discard(visible_tenants(person), dlq_id, person=person.name)

    async def keep(self, person: Principal, dlq_id: str, reason: str = "") -> None:
        """Keep it after all."""
        await self.show(person, dlq_id)
        person.require(Permission.OPERATE)
        await self._people.keep(visible_tenants(person), dlq_id, person=person.name, reason=reason)

    async def discard_many(
        self,
        person: Principal,
        wanted: DeadLetterFilter,
        *,
        reason: str,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Ask for every open letter of the filter to be thrown away."""
        self._check_discard(person, reason)

        async def act(letter: DeadLetterRow) -> BulkResult:
            await self._people.request_discard([letter.tenant_id], letter.dlq_id, person=person.name, reason=reason)
            return BulkResult(id=letter.dlq_id, done=True)

        return await self._many(person, wanted, DeadLetterStatus.OPEN, act, dry_run, _FAST, progress)

    async def confirm_many(
        self, person: Principal, wanted: DeadLetterFilter, *, dry_run: bool = False, progress: Progress = no_progress
    ) -> BulkReport:
        """Throw every letter of the filter away that another person has asked for."""
        self._check_confirm(person)

        async def act(letter: DeadLetterRow) -> BulkResult:
            await self._people.confirm_discard([letter.tenant_id], letter.dlq_id, person=person.name)
            return BulkResult(id=letter.dlq_id, done=True)

        return await self._many(person, wanted, DeadLetterStatus.DISCARD_REQUESTED, act, dry_run, _FAST, progress)

    # Inside ----------------------------------------------------------------------------------------

    async def _replay(
        self, person: Principal, letter: DeadLetterRow, reason: str, payload: bytes | None, expected: int
    ) -> ReplayResult:
        self._checked(letter.job_type, letter.payload.text.encode() if payload is None else payload)
        row = await self._people.reserve_replay(
            [letter.tenant_id], letter.dlq_id, person=person.name, reason=reason, payload=payload, expected=expected
        )
        try:
            _check_own(row, await self._desk.submit(await self._envelope(row)))
        except EngineUnavailable as exc:
            # Nobody knows whether it got there. The mark stays, and the same job is handed in again.
            raise EngineUnavailable(
                f"the replay of {letter.dlq_id} is marked, and upkeep hands it in once the engine is back: {exc}"
            ) from exc
        except Unavailable:
            raise
        except HoldfastError as exc:
            # Refused: by a guard, by a queue that takes nothing. Then nobody must hand it in later.
            await self._people.cancel_replay(row, person=person.name, reason=str(exc))
            raise
        await self._people.mark_submitted([row])
        return ReplayResult(
            dlq_id=row.dlq_id, tenant_id=row.tenant_id, queue=row.queue, job_id=row.new_job_id, number=row.number
        )

    async def _envelope(self, row: ReplayReservation) -> Envelope:
        first = await self._first_meta(row)
        return Envelope(
            job_id=row.new_job_id,
            task=row.job_type,
            payload=row.payload,
            queue=row.queue,
            tenant_id=row.tenant_id,
            idempotency_key=f"dlq:{row.dlq_id}:{row.number}",
            trace_id=row.trace_id,
            meta=Meta(
                priority=row.priority,
                context=row.context or None,
                retry=first.retry,
                max_retries=first.max_retries,
                webhook=first.webhook,
                replay=ReplayOrigin(row.dlq_id, row.job_id, row.idempotency_key),
                # It is their wish, edited or not: where a guard wants it approved, by somebody else.
                submitted_by=row.actor,
            ),
        )

    async def _first_meta(self, row: ReplayReservation) -> Meta:
        """What the dead job was submitted with, as far as the ledger remembers."""
        try:
            job = await self._ledger.queries.job(row.job_id, row.tenant_id, row.queue)
        except UnknownJob:
            return Meta()
        try:
            return Meta() if job.meta is None else msgspec.json.decode(job.meta.text, type=Meta)
        except msgspec.DecodeError:
            return Meta()

    def _checked(self, task: str, payload: bytes) -> Any:
        """The payload's values, if its task can be called with it."""
        limit = self._engine.options.payload_limit
        if len(payload) > limit:
            raise PayloadTooLarge(f"the payload of task {task!r}", len(payload), limit)
        value = decode_json(payload, f"the payload of task {task!r}")
        if not isinstance(value, dict | list):
            raise InvalidPayload(f"the payload of task {task!r} must be a JSON object (by name) or array (by position)")
        if not task:
            raise UsageError("the message named no task; nothing can be made of it but a new submission")
        if (plan := self._plans.get(task)) is not None:
            plan.decode(payload)
        return value

    async def _many(
        self,
        person: Principal,
        wanted: DeadLetterFilter,
        status: DeadLetterStatus,
        act: Callable[[DeadLetterRow], Awaitable[BulkResult]],
        dry_run: bool,
        rate_per_s: float,
        progress: Progress,
    ) -> BulkReport:
        person.require(Permission.OPERATE)
        chosen = msgspec.structs.replace(_narrowed(person, wanted), statuses=frozenset({status}))
        matched = await self._ledger.queries.dead_letter_count(chosen)
        if dry_run:
            return BulkReport(matched=matched, dry_run=True)
        walk = self._walk(chosen)
        return await run_bulk(
            walk,
            act,
            lambda letter: letter.dlq_id,
            lambda letter: letter.queue,
            matched=matched,
            rate_per_s=rate_per_s,
            progress=progress,
        )

    async def _walk(self, chosen: DeadLetterFilter) -> AsyncIterator[DeadLetterRow]:
        cursor: str | None = None
        while True:
            page = await self._ledger.queries.dead_letters(chosen, _PAGE, cursor)
            for letter in page.dead_letters:
                yield letter
            cursor = page.cursor
            if cursor is None:
                return

    def _check_discard(self, person: Principal, reason: str) -> None:
        self._check_confirm(person)
        require_reason(reason)

    def _check_confirm(self, person: Principal) -> None:
        person.require(Permission.OPERATE)
        require_verified(person, "a discard")


class _EngineSubmitter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def submit(self, envelope: Envelope) -> Receipt:
        return (await self._engine.submit([envelope]))[0]


#: Marks in the ledger burden nobody else.
_FAST: Final = 10_000.0


def _check_own(row: ReplayReservation, receipt: Receipt) -> None:
    """A replay's key can be guessed: if another job has it, the letter has not become a job, and must not be gone."""
    if receipt.job_id != row.new_job_id:
        raise Conflict(
            f"the key of this replay is taken by job {receipt.job_id}, which somebody has submitted under it; try again"
        )


def _narrowed(person: Principal, wanted: DeadLetterFilter) -> DeadLetterFilter:
    """The filter, for what this person may see."""
    mine = visible_tenants(person)
    if mine is None:
        return wanted
    both = mine if wanted.tenants is None else tuple(tenant for tenant in wanted.tenants if tenant in mine)
    return msgspec.structs.replace(wanted, tenants=both)
