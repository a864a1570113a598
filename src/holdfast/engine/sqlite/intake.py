"""Submission on SQLite: new jobs of one queue, in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from holdfast.core.codec import to_json
from holdfast.core.fingerprint import is_key_reused
from holdfast.core.job import Envelope, KeyReuse, Priority, Receipt
from holdfast.core.states import ARGUMENTS_DIFFER, DUPLICATE_EVENT, REQUEST_DROPPED, State
from holdfast.engine.port.jobs import (
    FEED_BEHIND,
    FEED_DETACHED,
    INTAKE_PAUSED,
    JobRefused,
    has_own_key,
    joins_backlog,
    possible_owners,
)
from holdfast.engine.sqlite.feed import FeedWriter, notify_due
from holdfast.engine.sqlite.moves import ApprovalRequestRow, insert_approval_requests
from holdfast.engine.sqlite.rows import NAMES, encode_meta, tenant_controls
from holdfast.engine.sqlite.store import EngineContext
from holdfast.errors import (
    FeedDetached,
    FeedFull,
    IdempotencyKeyReused,
    IntakeLimited,
    IntakeRefused,
    InvalidOption,
    InvalidPayload,
    QueueLimitReached,
)
from holdfast.sqlite.transaction import Transaction, Value, json_list, require_rows

_UNLIMITED: Final = 10**9
_PRIORITIES: Final = frozenset(int(priority) for priority in Priority)


class KnownJobRow(msgspec.Struct, array_like=True, frozen=True):
    job_id: str
    tenant_id: str
    keyless: bool
    expired: bool


class KnownKeyRow(msgspec.Struct, array_like=True, frozen=True):
    tenant_id: str
    key: str
    job_id: str
    fingerprint: str
    expired: bool


class IntakeControlRow(msgspec.Struct, array_like=True, frozen=True):
    intake_paused: int = 0
    intake_limit: int | None = None
    tenants: str | None = None
    has_jobs: int = 0


class IntakeState(msgspec.Struct, array_like=True, frozen=True):
    control: IntakeControlRow | None
    has_reader: int
    unread_bytes: int | None
    jobs: list[KnownJobRow]
    keys: list[KnownKeyRow]


_KNOWN: Final = msgspec.json.Decoder(IntakeState)
_BACKLOG: Final = msgspec.json.Decoder(tuple[int, list[tuple[str, int]]])


def submit(
    transaction: Transaction, policy: EngineContext, queue: str, envelopes: Sequence[Envelope], whole: bool
) -> list[Receipt | JobRefused]:
    """Accept new jobs; returns one receipt or refusal per envelope.

    Raises `IntakeRefused` and writes nothing if the queue refuses all of them. With `whole`, raises the first refusal
    and writes nothing.
    """
    now_ms = policy.clock.now_ms()
    known = _read_intake(transaction, policy, queue, envelopes, now_ms)
    _check_intake(known, policy, queue)
    limits = _Limits(transaction, known.control or IntakeControlRow(), queue, envelopes, whole)
    judged = _judge(known, envelopes, limits, queue)
    if whole and judged.refusal is not None:
        raise limits.with_fits(judged.refusal, len(judged.accepted))
    if judged.accepted and not (known.control and known.control.has_jobs):
        _add_queue(transaction, policy, queue, judged.accepted, is_new=known.control is None)
    if judged.accepted or judged.differing:
        _write(transaction, policy, queue, judged, now_ms)
    return judged.answers


def _add_queue(
    transaction: Transaction, policy: EngineContext, queue: str, envelopes: Sequence[Envelope], *, is_new: bool
) -> None:
    """Record the owner of a queue. One that is not new has controls, but no job yet."""
    tenants = possible_owners(queue, envelopes)
    limit = policy.options.tenant_queue_limit if is_new else _UNLIMITED
    owners = transaction.rows("first_tenant_with_room", NAMES, tenants=json_list(tenants), limit=limit)
    if tenants and not owners:
        raise QueueLimitReached(queue, tenants[0], limit)
    transaction.run("add_queue", queue=queue, owner=owners[0] if owners else None)


def text_of(payload: bytes) -> str:
    """A payload as stored: JSON is text. Raises `InvalidPayload`."""
    try:
        return payload.decode()
    except UnicodeDecodeError as exc:
        raise InvalidPayload(f"the payload is not JSON: it is not UTF-8 ({exc.reason} at byte {exc.start})") from exc


def prepare(envelope: Envelope, fingerprint: Callable[[str, bytes], str]) -> Envelope:
    """The envelope, with the fingerprint of its request if it has a key.

    Raises for an envelope that could not be stored or would never be claimed.
    """
    if envelope.meta.priority not in _PRIORITIES:
        raise InvalidOption(f"priority {envelope.meta.priority!r} is not one of {sorted(_PRIORITIES)}")
    text_of(envelope.payload)
    if not envelope.idempotency_key:
        return envelope
    if not has_own_key(envelope):
        return msgspec.structs.replace(envelope, idempotency_key="")
    meta = msgspec.structs.replace(envelope.meta, key_fingerprint=fingerprint(envelope.task, envelope.payload))
    return msgspec.structs.replace(envelope, meta=meta)


def _read_intake(
    transaction: Transaction, policy: EngineContext, queue: str, envelopes: Sequence[Envelope], now_ms: int
) -> IntakeState:
    names = [envelope.job_id for envelope in envelopes]
    names += [envelope.idempotency_key for envelope in envelopes if envelope.idempotency_key]
    return transaction.rows(
        "intake_state",
        _KNOWN,
        queue=queue,
        now=now_ms,
        ttl=policy.options.finished_ttl_ms,
        names=json_list(names),
        tenants=json_list(list({envelope.tenant_id for envelope in envelopes})),
    )


def _check_intake(known: IntakeState, policy: EngineContext, queue: str) -> None:
    if known.control is not None and known.control.intake_paused:
        raise IntakeRefused(queue, INTAKE_PAUSED)
    if policy.options.ledger and not known.has_reader:
        raise FeedDetached(queue, FEED_DETACHED)
    limit = policy.options.feed_max_bytes
    if known.unread_bytes is not None and known.unread_bytes > limit:
        raise FeedFull(queue, FEED_BEHIND)


class _Limits:
    """The intake limits of a queue and of the tenants of a batch, and what is left of them."""

    def __init__(
        self,
        transaction: Transaction,
        control: IntakeControlRow,
        queue: str,
        envelopes: Sequence[Envelope],
        whole: bool,
    ) -> None:
        self._transaction = transaction
        self._queue = queue
        self._count = len(envelopes)
        self._whole = whole
        self._limit = control.intake_limit
        self._limits: dict[str, int] = {}
        if control.tenants:
            controls = tenant_controls(control.tenants)
            for tenant in {envelope.tenant_id for envelope in envelopes}:
                if tenant in controls and (limit := controls[tenant].intake_limit) is not None:
                    self._limits[tenant] = limit
        #: Ready and running jobs, counted when the first new job needs it.
        self._backlogs: dict[str, int] | None = None
        #: What the batch adds to it; the empty tenant is the queue.
        self._added: Counter[str] = Counter()

    @property
    def none(self) -> bool:
        """Whether there are no limits."""
        return self._limit is None and not self._limits

    def refusal(self, envelope: Envelope) -> IntakeLimited | None:
        """Why a new job does not fit; None if it does. It then counts for those after it."""
        if self.none:
            return None
        backlogs = self._backlogs = self._backlogs or self._count_backlogs()
        tenant = envelope.tenant_id
        for scope, limit in (("", self._limit), (tenant, self._limits.get(tenant))):
            if limit is not None and (backlog := backlogs[scope]) + self._added[scope] >= limit:
                total = backlog if self._whole else backlog + self._added[scope]
                # Above the limit, the count is not complete.
                return IntakeLimited(self._queue, limit, total if total <= limit else None, scope)
        if joins_backlog(envelope):
            self._added.update(("", tenant))
        return None

    def with_fits(self, refusal: JobRefused, fits: int) -> JobRefused:
        """The refusal of the whole batch."""
        if isinstance(refusal, IntakeLimited):
            limit, backlog, tenant = refusal.limit, refusal.backlog, refusal.tenant_id
            return IntakeLimited(self._queue, limit, backlog, tenant, fits=fits, count=self._count)
        return refusal

    def _count_backlogs(self) -> dict[str, int]:
        count, tenants = self._transaction.rows(
            "count_backlog",
            _BACKLOG,
            queue=self._queue,
            most=0 if self._limit is None else self._limit + 1,
            tenants=json_list(list(self._limits)),
            most_each=max(self._limits.values(), default=0) + 1,
        )
        return {"": count, **dict(tenants)}


class _Judged(msgspec.Struct):
    """The outcome of a batch: an answer per envelope, new jobs, and the first jobs of requests that were dropped."""

    answers: list[Receipt | JobRefused]
    accepted: list[Envelope]
    #: Tenant and id of the first job, for each request with its key and other arguments.
    differing: list[tuple[str, str]]
    refusal: JobRefused | None = None


def _judge(known: IntakeState, envelopes: Sequence[Envelope], limits: _Limits, queue: str) -> _Judged:
    """Judge the envelopes in order: known by their id (a resend) or their key (a duplicate), refused, or new."""
    ids = {job.job_id for job in known.jobs}
    if not ids and limits.none and _are_plain(envelopes):
        return _Judged([Receipt(envelope.job_id) for envelope in envelopes], list(envelopes), [])
    #: By tenant and key: the first job, and the fingerprint of its request. A job without a key is known by its id.
    firsts = {(job.tenant_id, job.job_id): (job.job_id, "") for job in known.jobs if job.keyless and not job.expired}
    firsts |= {(key.tenant_id, key.key): (key.job_id, key.fingerprint) for key in known.keys if not key.expired}
    judged = _Judged([], [], [])
    for envelope in envelopes:
        job_id, key = envelope.job_id, (envelope.tenant_id, envelope.idempotency_key)
        fingerprint = envelope.meta.key_fingerprint
        first, request = firsts.get(key, ("", "")) if envelope.idempotency_key else ("", "")
        answer: Receipt | JobRefused
        if job_id in ids or first == job_id:
            answer = Receipt(job_id)
        elif first and is_key_reused(request, fingerprint):
            if envelope.on_key_reuse is KeyReuse.RETURN:
                judged.differing.append((envelope.tenant_id, first))
                answer = Receipt(first, duplicate=True)
            else:
                answer = IdempotencyKeyReused(queue, envelope.idempotency_key, first)
        elif first:
            answer = Receipt(first, duplicate=True)
        elif (refusal := limits.refusal(envelope)) is not None:
            answer = refusal
        else:
            ids.add(job_id)
            if envelope.idempotency_key:
                firsts[key] = (job_id, fingerprint)
            else:
                firsts.setdefault((envelope.tenant_id, job_id), (job_id, ""))
            judged.accepted.append(envelope)
            answer = Receipt(job_id)
        if not isinstance(answer, Receipt) and judged.refusal is None:
            judged.refusal = answer
        judged.answers.append(answer)
    return judged


def _are_plain(envelopes: Sequence[Envelope]) -> bool:
    """Whether none has a key, and no job id occurs twice."""
    ids = {envelope.job_id for envelope in envelopes if not envelope.idempotency_key}
    return len(ids) == len(envelopes)


def _write(transaction: Transaction, policy: EngineContext, queue: str, judged: _Judged, now_ms: int) -> None:
    envelopes = judged.accepted
    journal = FeedWriter(transaction, queue, policy.options, urgent=any(envelope.durable for envelope in envelopes))
    if envelopes:
        _write_jobs(transaction, policy, queue, envelopes, now_ms, journal)
    data = to_json({ARGUMENTS_DIFFER: True})
    for tenant, job_id in judged.differing:
        where: dict[str, Value] = {"queue": queue, "tenant": tenant, "job_id": job_id, "now": now_ms}
        event = {"type": DUPLICATE_EVENT, "message": REQUEST_DROPPED, "data": data}
        last, count = transaction.add("insert_duplicate_event", **where, **event)
        # The key may outlive the row of its job.
        if count:
            transaction.run("add_duplicate_seq", **where)
            journal.add_events(last, count)
    journal.close()


def _write_jobs(
    transaction: Transaction,
    policy: EngineContext,
    queue: str,
    envelopes: Sequence[Envelope],
    now_ms: int,
    journal: FeedWriter,
) -> None:
    rows = [_job_row(envelope, now_ms) for envelope in envelopes]
    last, count = transaction.bulk("insert_jobs", rows, before=(now_ms, now_ms, queue))
    require_rows(count, len(rows), "submit")
    window_ms = policy.options.idempotency_window_ms
    keys = [
        (
            each.tenant_id,
            each.idempotency_key,
            each.job_id,
            now_ms + (each.meta.key_window_ms or window_ms),
            each.meta.key_fingerprint,
        )
        for each in envelopes
        if each.idempotency_key
    ]
    if keys:
        transaction.bulk("insert_submission_keys", keys, before=(queue,))
    size = sum(len(envelope.payload) for envelope in envelopes)
    journal.add_events(*transaction.add("insert_created_events", first=last - count + 1, last=last), size)
    requests = [
        ApprovalRequestRow(each.tenant_id, each.job_id, each.task, each.meta.approval_request)
        for each in envelopes
        if each.hold and each.meta.approval_request is not None
    ]
    insert_approval_requests(transaction, policy, queue, requests)
    transaction.effects.ready.add(queue)
    # Element 10 of a row: when a delayed job is due.
    dues = [row[10] for row in rows if row[10] is not None]
    if dues:
        notify_due(transaction, queue, min(int(due) for due in dues))


def _job_row(envelope: Envelope, now_ms: int) -> tuple[Value, ...]:
    due_at_ms = max(envelope.run_at_ms, now_ms + envelope.delay_ms if envelope.delay_ms > 0 else 0)
    run_at = due_at_ms if due_at_ms > now_ms else None
    ready = not envelope.hold and run_at is None
    meta = envelope.meta
    return (
        envelope.job_id,
        envelope.tenant_id,
        envelope.task,
        State.WAITING_APPROVAL.value if envelope.hold else State.QUEUED.value,
        int(meta.priority),
        envelope.idempotency_key,
        envelope.trace_id,
        meta.dlq_id or None,
        run_at,
        now_ms if ready else None,
        None if envelope.hold else run_at,
        encode_meta(meta),
        envelope.payload.decode(),
        envelope.schema or None,
    )
