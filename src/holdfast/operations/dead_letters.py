"""Dead letters: list, replay as new jobs, keep, or discard with a second principal (D3–D5).

A replay is marked in the ledger, submitted to the engine under its own key, and then marked as submitted. After a
crash in between, `submit_pending` makes the same job from the same mark. Concurrent replays of one dead letter make one
job, and so do repeated ones with one idempotency key; of a concurrent replay and discard, one wins.

`diff_payloads` lists what an edit changes in a payload.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from holdfast.core.codec import decode_json
from holdfast.core.job import Envelope, JobKey, KeyReuse, Meta, Receipt, ReplayOrigin
from holdfast.core.principal import Permission, Principal
from holdfast.core.text import check_text
from holdfast.engine.port.jobs import JobPort
from holdfast.errors import (
    AlreadyReplayed,
    Conflict,
    EngineUnavailable,
    HoldfastError,
    IntakeRefused,
    InvalidOption,
    InvalidPayload,
    PayloadTooLarge,
    Unavailable,
    UsageError,
)
from holdfast.guard.decisions import PayloadDecoder
from holdfast.ledger.port.operators import DeadLetterStatus, ReplayKey, ReplayReservation
from holdfast.operations.access import require_reason, require_verified
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
    """Marks an absent value; null is a value."""


ABSENT: Final = _Absent()


class PayloadChange(msgspec.Struct, frozen=True):
    """One difference: its JSON pointer and both values; `ABSENT` for a missing one."""

    path: str
    before: Any
    after: Any

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON: without `before` for added values, without `after` for removed ones."""
        sides = {"before": self.before, "after": self.after}
        return {"path": self.path} | {side: value for side, value in sides.items() if value is not ABSENT}


def diff_payloads(before: Any, after: Any, path: str = "") -> list[PayloadChange]:
    """Return all differences, in the order of the first document."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [*before, *(name for name in after if name not in before)]
        pairs = [(str(name), before.get(name, ABSENT), after.get(name, ABSENT)) for name in names]
    elif isinstance(before, list) and isinstance(after, list):
        longest = range(max(len(before), len(after)))
        pairs = [(str(index), _item(before, index), _item(after, index)) for index in longest]
    else:
        # 1 and true are equal in Python, but not in JSON.
        same = type(before) is type(after) and before == after
        return [] if same else [PayloadChange(path, before, after)]
    return [change for name, old, new in pairs for change in diff_payloads(old, new, f"{path}/{_escape(name)}")]


def _item(values: list[Any], index: int) -> Any:
    return values[index] if index < len(values) else ABSENT


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_PAGE: Final = 200
#: How long a replay waits until the ledger has its job.
_RECORDED_MS: Final = 300


class JobSubmitter(Protocol):
    """Submits jobs, usually after the app's guards."""

    async def submit(self, envelope: Envelope) -> Receipt: ...


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The new job of a dead letter."""

    dlq_id: str
    tenant_id: str
    queue: str
    job_id: str
    #: Number of this replay of the dead letter, from 1.
    number: int
    #: Whether the idempotency key was known: the job is that of an earlier call.
    duplicate: bool = False


class DeadLetterOperations:
    """Operations on dead letters. All methods raise `NotFound` for what the principal may not see."""

    def __init__(
        self,
        engine: JobPort,
        ledger: Ledger,
        submitter: JobSubmitter | None = None,
        specs: Mapping[str, PayloadDecoder] | None = None,
    ) -> None:
        """Without a submitter, jobs go directly to the engine, and guards see them when they run."""
        self._engine = engine
        self._ledger = ledger
        self._operators = ledger.operators
        self._submitter = submitter or _EngineSubmitter(engine)
        self._specs = specs or {}

    # Reads -----------------------------------------------------------------------------------------

    async def list(
        self, principal: Principal, filters: DeadLetterFilter, limit: int = 50, cursor: str | None = None
    ) -> DeadLetterPage:
        """Return a page of dead letters, newest first."""
        principal.require(Permission.READ)
        return await self._ledger.queries.dead_letters(_restrict(principal, filters), limit, cursor)

    async def groups(self, principal: Principal, filters: DeadLetterFilter) -> Sequence[DeadLetterGroup]:
        """Group dead letters by kind of error, the most frequent first."""
        principal.require(Permission.READ)
        return await self._ledger.queries.dead_letter_groups(_restrict(principal, filters))

    async def count(self, principal: Principal, filters: DeadLetterFilter) -> int:
        """Count dead letters."""
        principal.require(Permission.READ)
        return await self._ledger.queries.dead_letter_count(_restrict(principal, filters))

    async def show(self, principal: Principal, dlq_id: str) -> DeadLetterDetail:
        """Return one dead letter: payload, error, stack, every attempt, every event of its job."""
        principal.require(Permission.READ)
        return await self._ledger.queries.dead_letter(principal.visible_tenants, dlq_id)

    async def diff(self, principal: Principal, dlq_id: str, payload: bytes) -> Sequence[PayloadChange]:
        """Return what an edited payload changes.

        Raises `InvalidPayload` if the task cannot be called with it.
        """
        dead_letter = await self.show(principal, dlq_id)
        after = self._check_payload(dead_letter.job_type, payload)
        return diff_payloads(dead_letter.payload.value, after)

    # Replay ----------------------------------------------------------------------------------------

    async def replay(
        self,
        principal: Principal,
        dlq_id: str,
        *,
        reason: str,
        payload: bytes | None = None,
        again: bool = False,
        idempotency_key: str | None = None,
        waits: bool = False,
    ) -> ReplayResult:
        """Submit the dead letter as a new job, with its original or an edited payload.

        If it `waits`, returns when the ledger has the job, or after a moment: until then the engine may lose it.

        With an `idempotency_key` the call can be repeated: the same key is the same replay, for the idempotency window
        of the engine. Raises `ReplayKeyReused` if the key was used with another dead letter, another payload or
        another `again`. Otherwise raises `AlreadyReplayed`, with the id of that job, if the latest replay is open or
        has succeeded; `again` replays all the same.

        Raises `Denied`, `IntakeRefused` and others like any submission; the dead letter is then as before, and the key
        can be used again.
        """
        principal.require(Permission.OPERATE)
        key = None if idempotency_key is None else self._replay_key(idempotency_key, dlq_id, payload, again)
        return await self._replay(
            principal, principal.visible_tenants, dlq_id, reason, payload, key, again, waits=waits
        )

    async def replay_many(
        self,
        principal: Principal,
        filters: DeadLetterFilter,
        *,
        reason: str,
        rate_per_s: float = DEFAULT_RATE,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Submit every open dead letter that matches as a new job.

        Dead letters that were already replayed are skipped and counted, so an interrupted call can be repeated.
        """

        async def act(dead_letter: DeadLetterRow) -> BulkResult:
            try:
                replayed = await self._replay(principal, [dead_letter.tenant_id], dead_letter.dlq_id, reason)
            except AlreadyReplayed as exc:
                # Another caller was faster.
                return BulkResult(
                    id=dead_letter.dlq_id, done=False, skipped=True, job_id=exc.job_id, code=exc.code, message=str(exc)
                )
            return BulkResult(id=dead_letter.dlq_id, done=True, job_id=replayed.job_id)

        # Before the others: those that this call replays are not skipped.
        replayed_before = await self.count(
            principal, msgspec.structs.replace(filters, statuses=frozenset({DeadLetterStatus.REPLAYED}))
        )
        report = await self._many(principal, filters, DeadLetterStatus.OPEN, act, dry_run, rate_per_s, progress)
        return msgspec.structs.replace(report, replayed_before=replayed_before)

    async def submit_pending(self, limit: int = 100) -> int:
        """Submit replays that were reserved and not submitted, in pages of `limit`; return how many.

        Those that the engine refuses are retried later and do not block others. Raises at the end if the engine did
        not answer for some of them.
        """
        count, last = 0, None
        unreachable: dict[str, EngineUnavailable] = {}
        while True:
            rows = await self._operators.unsubmitted_replays(limit, last)
            for row in rows:
                if row.queue in unreachable:
                    continue
                try:
                    count += await self._submit_reserved(row)
                except EngineUnavailable as exc:
                    # Other queues may be on a part of the store that answers.
                    unreachable[row.queue] = exc
            if len(rows) < limit:
                break
            last = rows[-1]
        for failure in unreachable.values():
            raise failure
        return count

    async def _submit_reserved(self, row: ReplayReservation) -> bool:
        try:
            receipt = await self._submitter.submit(_envelope(row))
            _check_receipt(row, receipt)
        except IntakeRefused:
            return False
        except Conflict as exc:
            await self._operators.cancel_replay(row, actor=row.actor, reason=str(exc))
            return False
        await self._operators.mark_submitted([row])
        return True

    # Discard ---------------------------------------------------------------------------------------

    async def discard(self, principal: Principal, dlq_id: str, reason: str) -> None:
        """Request the discard of a dead letter; another principal has to confirm it."""
        await self.show(principal, dlq_id)
        self._check_discard(principal, reason)
        await self._operators.request_discard(principal.visible_tenants, dlq_id, actor=principal.name, reason=reason)

    async def confirm(self, principal: Principal, dlq_id: str) -> None:
        """Discard a dead letter, as another principal has requested."""
        await self.show(principal, dlq_id)
        self._check_confirm(principal)
        await self._operators.confirm_discard(principal.visible_tenants, dlq_id, actor=principal.name)

    async def keep(self, principal: Principal, dlq_id: str, reason: str = "") -> None:
        """Withdraw a requested discard."""
        await self.show(principal, dlq_id)
        principal.require(Permission.OPERATE)
        await self._operators.keep(principal.visible_tenants, dlq_id, actor=principal.name, reason=reason)

    async def discard_many(
        self,
        principal: Principal,
        filters: DeadLetterFilter,
        *,
        reason: str,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Request the discard of every open dead letter that matches."""
        self._check_discard(principal, reason)

        async def act(dead_letter: DeadLetterRow) -> BulkResult:
            await self._operators.request_discard(
                [dead_letter.tenant_id], dead_letter.dlq_id, actor=principal.name, reason=reason
            )
            return BulkResult(id=dead_letter.dlq_id, done=True)

        return await self._many(principal, filters, DeadLetterStatus.OPEN, act, dry_run, _MARK_RATE, progress)

    async def confirm_many(
        self,
        principal: Principal,
        filters: DeadLetterFilter,
        *,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> BulkReport:
        """Discard every matching dead letter whose discard another principal has requested."""
        self._check_confirm(principal)

        async def act(dead_letter: DeadLetterRow) -> BulkResult:
            await self._operators.confirm_discard([dead_letter.tenant_id], dead_letter.dlq_id, actor=principal.name)
            return BulkResult(id=dead_letter.dlq_id, done=True)

        return await self._many(
            principal, filters, DeadLetterStatus.DISCARD_REQUESTED, act, dry_run, _MARK_RATE, progress
        )

    # Internals -------------------------------------------------------------------------------------

    async def _replay(
        self,
        principal: Principal,
        tenants: Sequence[str] | None,
        dlq_id: str,
        reason: str,
        payload: bytes | None = None,
        key: ReplayKey | None = None,
        again: bool = False,
        *,
        waits: bool = False,
    ) -> ReplayResult:
        row = await self._operators.reserve_replay(
            tenants,
            dlq_id,
            actor=principal.name,
            reason=reason,
            payload=payload,
            check=self._check_payload,
            key=key,
            again=again,
        )
        if row.pending:
            await self._submit_replay(principal, row, waits)
        return ReplayResult(
            dlq_id=row.dlq_id,
            tenant_id=row.tenant_id,
            queue=row.queue,
            job_id=row.new_job_id,
            number=row.number,
            duplicate=row.duplicate,
        )

    async def _submit_replay(self, principal: Principal, row: ReplayReservation, waits: bool) -> None:
        try:
            _check_receipt(row, await self._submitter.submit(_envelope(row)))
        except EngineUnavailable as exc:
            # It is unknown whether the engine has the job. The mark stays, and the same job is submitted again.
            raise EngineUnavailable(
                f"the replay of {row.dlq_id} is recorded, and upkeep submits it once the engine answers: {exc}"
            ) from exc
        except Unavailable:
            raise
        except HoldfastError as exc:
            # Refused by a guard or by the queue: it must not be submitted later.
            await self._operators.cancel_replay(row, actor=principal.name, reason=str(exc))
            raise
        if waits and self._ledger.projection is not None:
            # The mark lets upkeep submit it again.
            key = JobKey(row.tenant_id, row.queue, row.new_job_id)
            await self._ledger.projection.wait_recorded([key], _RECORDED_MS)
        await self._operators.mark_submitted([row])

    def _replay_key(self, key: str, dlq_id: str, payload: bytes | None, again: bool) -> ReplayKey:
        if not key:
            raise InvalidOption("an idempotency key must not be empty")
        key = check_text(key, "idempotency_key")
        # Spaces and the order of names in the payload do not matter.
        arguments = None if payload is None else decode_json(payload, "the payload")
        options = msgspec.json.encode([dlq_id, payload is None, arguments, again], order="sorted")
        return ReplayKey(key, hashlib.sha256(options).hexdigest()[:32], self._engine.options.idempotency_window_ms)

    def _check_payload(self, task: str, payload: bytes) -> Any:
        """Return the decoded payload. Raises `InvalidPayload` if its task cannot be called with it."""
        limit = self._engine.options.payload_limit
        if len(payload) > limit:
            raise PayloadTooLarge(f"the payload of task {task!r}", len(payload), limit)
        value = decode_json(payload, f"the payload of task {task!r}")
        if not isinstance(value, dict | list):
            raise InvalidPayload(f"the payload of task {task!r} must be a JSON object (by name) or array (by position)")
        if not task:
            raise UsageError("the message names no task and cannot be replayed; submit it as a new job")
        if (spec := self._specs.get(task)) is not None:
            spec.decode(payload)
        return value

    async def _many(
        self,
        principal: Principal,
        filters: DeadLetterFilter,
        status: DeadLetterStatus,
        act: Callable[[DeadLetterRow], Awaitable[BulkResult]],
        dry_run: bool,
        rate_per_s: float,
        progress: Progress,
    ) -> BulkReport:
        principal.require(Permission.OPERATE)
        selected = msgspec.structs.replace(_restrict(principal, filters), statuses=frozenset({status}))
        matched = await self._ledger.queries.dead_letter_count(selected)
        if dry_run:
            return BulkReport(matched=matched, dry_run=True)
        walk = self._walk(selected)
        return await run_bulk(
            walk,
            act,
            lambda dead_letter: dead_letter.dlq_id,
            lambda dead_letter: dead_letter.queue,
            matched=matched,
            rate_per_s=rate_per_s,
            progress=progress,
        )

    async def _walk(self, selected: DeadLetterFilter) -> AsyncIterator[DeadLetterRow]:
        cursor: str | None = None
        while True:
            page = await self._ledger.queries.dead_letters(selected, _PAGE, cursor)
            for dead_letter in page.dead_letters:
                yield dead_letter
            cursor = page.cursor
            if cursor is None:
                return

    def _check_discard(self, principal: Principal, reason: str) -> None:
        self._check_confirm(principal)
        require_reason(reason)

    def _check_confirm(self, principal: Principal) -> None:
        principal.require(Permission.OPERATE)
        require_verified(principal, "a discard")


class _EngineSubmitter:
    def __init__(self, engine: JobPort) -> None:
        self._engine = engine

    async def submit(self, envelope: Envelope) -> Receipt:
        return (await self._engine.submit([envelope]))[0]


#: Marks in the ledger need no rate limit.
_MARK_RATE: Final = 10_000.0


def _envelope(row: ReplayReservation) -> Envelope:
    return Envelope(
        job_id=row.new_job_id,
        task=row.job_type,
        payload=row.payload,
        queue=row.queue,
        tenant_id=row.tenant_id,
        idempotency_key=f"dlq:{row.dlq_id}:{row.number}",
        on_key_reuse=KeyReuse.RETURN,
        trace_id=row.trace_id,
        meta=Meta(
            priority=row.priority,
            context=row.context or None,
            retry=row.meta.retry,
            max_retries=row.meta.max_retries,
            webhook=row.meta.webhook,
            replay=ReplayOrigin(row.dlq_id, row.job_id, row.idempotency_key),
            # The operator counts as submitter, edited or not, so that another principal has to approve it.
            submitted_by=row.actor,
        ),
    )


def _check_receipt(row: ReplayReservation, receipt: Receipt) -> None:
    """Raise `Conflict` if another job has the replay's key: then no job was made.

    The key can be guessed, so that any submitter may have used it.
    """
    if receipt.job_id != row.new_job_id:
        raise Conflict(f"the idempotency key of this replay is already used by job {receipt.job_id}; retry")


def _restrict(principal: Principal, filters: DeadLetterFilter) -> DeadLetterFilter:
    """Return the filter restricted to tenants that the principal may see."""
    visible = principal.visible_tenants
    if visible is None:
        return filters
    tenants = visible if filters.tenants is None else tuple(tenant for tenant in filters.tenants if tenant in visible)
    return msgspec.structs.replace(filters, tenants=tenants)
