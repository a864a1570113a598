"""settle: attempts end, fenced by their leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import new_job_ids
from holdfast.core.verdict import (
    TARGETS,
    Answer,
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    Settlement,
    Succeed,
    Suspend,
    advance,
)
from holdfast.engine.port import MAX_BATCH
from holdfast.engine.redis import wire
from holdfast.engine.redis.client import Lane
from holdfast.engine.redis.keys import Keys
from holdfast.engine.redis.store import Store

_ANSWERS: Final = {b"applied": Answer.APPLIED, b"already": Answer.ALREADY, b"stale": Answer.STALE}
#: Which counter each verdict raises.
_COUNTERS: Final[dict[type, str]] = {
    Succeed: "succeeded",
    RetryLater: "retried",
    DeadLetter: "dead",
    Suspend: "suspended",
    Hold: "held",
    Release: "released",
}


class Settling:
    """Sends verdicts, one script call per queue, worker and batch."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        groups: dict[tuple[str, str], list[int]] = {}
        for index, settlement in enumerate(settlements):
            lease = settlement.claim.lease
            groups.setdefault((lease.queue, lease.worker), []).append(index)
        answers: dict[int, Answer] = {}
        for (queue, worker), indexes in groups.items():
            for start in range(0, len(indexes), MAX_BATCH):
                part = indexes[start : start + MAX_BATCH]
                words = await self._settle(queue, worker, [settlements[index] for index in part])
                answers.update(zip(part, words, strict=True))
        return [answers[index] for index in range(len(settlements))]

    async def _settle(self, queue: str, worker: str, settlements: Sequence[Settlement]) -> list[Answer]:
        names, arguments = self._arguments(self._store.keys(queue), queue, worker, settlements)
        words = await self._store.run(Lane.SETTLE, "settle", queue, names, arguments)
        answers = [_ANSWERS[word] for word in words]
        self._count(settlements, answers)
        return answers

    def _arguments(
        self, keys: Keys, queue: str, worker: str, settlements: Sequence[Settlement]
    ) -> tuple[list[bytes], list[Any]]:
        store, options = self._store, self._store.options
        count = len(settlements)
        records: list[bytes] = []
        expiring: list[bytes] = []
        per_job: list[Any] = []
        ids: tuple[list[str], ...] = tuple([] for _ in keys.streams)
        for settlement in settlements:
            claim = settlement.claim
            lease = claim.lease
            line, _, message_id = lease.place.partition(":")
            ids[int(line)].append(message_id)
            records.append(keys.job(lease.job_id))
            key_index, keep_ms = 0, 0
            if claim.idempotency_key != lease.job_id:
                expiring.append(keys.idempotency(claim.tenant_id, claim.idempotency_key))
                key_index = count + len(expiring)
                age_ms = settlement.finished_at_ms - claim.created_at_ms
                keep_ms = max(1, options.idempotency_window_ms - age_ms)
            *verdict, dead_letter = _verdict_arguments(settlement)
            per_job += (line, message_id, lease.deliveries, lease.job_id)
            per_job += verdict
            per_job += (key_index, keep_ms, dead_letter)
        arguments = [
            store.names.group,
            worker,
            store.nonce(),
            options.feed_limit,
            count,
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
            store.parking(queue),
            options.pending_idle_ms,
        ]
        for of_line in ids:
            arguments += _span(of_line)
        return [*fixed_keys(keys), *records, *expiring], arguments + per_job

    def _count(self, settlements: Sequence[Settlement], answers: Sequence[Answer]) -> None:
        counts = self._store.counts
        kinds = Counter(
            type(settlement.verdict)
            for settlement, answer in zip(settlements, answers, strict=True)
            if answer is Answer.APPLIED
        )
        for kind, number in kinds.items():
            name = _COUNTERS[kind]
            setattr(counts, name, getattr(counts, name) + number)
        counts.stale_settles += answers.count(Answer.STALE)


def fixed_keys(keys: Keys) -> tuple[bytes, ...]:
    """KEYS 1 to 15 of `settle` and `move`."""
    return (
        *keys.streams,
        keys.feed,
        keys.result,
        keys.dlq,
        keys.retry,
        keys.waiting,
        keys.suspended,
        keys.held,
        keys.dead,
        keys.delayed,
        keys.control,
        keys.waiters,
        keys.notices,
    )


def _span(ids: Sequence[str]) -> tuple[str, str]:
    """Lowest and highest instant of message ids. Thirteen digits compare as text; what a text comparison
    gets wrong (ids that somebody chose by hand) the script finds one by one."""
    if not ids:
        return "", ""
    return min(ids).partition("-")[0], max(ids).partition("-")[0]


def _verdict_arguments(settlement: Settlement) -> tuple[Any, ...]:
    """Target, body, data, delay, attempt, retry count, dead letter."""
    claim, verdict = settlement.claim, settlement.verdict
    if type(verdict) is Succeed:
        # The hot path: the payload has done its duty, and the last attempt is told by four fields.
        body = wire.encode_body(
            wire.Body(
                claim.task,
                "",
                claim.tenant_id,
                claim.idempotency_key,
                claim.trace_id,
                wire.meta_text(claim.meta).decode(),
                str(claim.attempt),
                str(claim.meta.retry_count),
                str(claim.created_at_ms),
                str(int(claim.meta.priority)),
                verdict.result.decode(),
                "",
                str(settlement.finished_at_ms),
                claim.lease.worker,
                str(claim.claimed_at_ms),
                str(claim.lease.deliveries),
            )
        )
        return "succeeded", body, verdict.result, 0, claim.attempt, claim.meta.retry_count, b""
    return _other_verdict_arguments(settlement)


def _other_verdict_arguments(settlement: Settlement) -> tuple[Any, ...]:
    claim, verdict = settlement.claim, settlement.verdict
    meta = advance(claim, verdict, settlement.finished_at_ms)
    attempts = claim.attempt
    data, delay_ms, dead_letter, failure = b"", 0, b"", ""
    if isinstance(verdict, RetryLater | DeadLetter | Suspend):
        failure = wire.failure_text(verdict.failure)
        data = failure.encode()
    elif not isinstance(verdict, Succeed):
        data = msgspec.json.encode({"message": verdict.message})
    if isinstance(verdict, RetryLater | Release):
        delay_ms = verdict.delay_ms
    if isinstance(verdict, Release) and not verdict.started:
        attempts -= 1
    if isinstance(verdict, DeadLetter):
        meta = msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    body = wire.claim_body(
        claim,
        meta,
        attempts,
        failure=failure,
        finished_at=str(settlement.finished_at_ms),
        deliveries=str(claim.lease.deliveries),
    )
    if isinstance(verdict, DeadLetter):
        dead_letter = wire.dead_letter_fields(claim.job_id, body, verdict.failure, meta.dlq_id)
    target = TARGETS[type(verdict)].value
    return target, wire.encode_body(body), data, delay_ms, claim.attempt, meta.retry_count, dead_letter
