"""Settlement on Redis: end attempts with a verdict, fenced by their leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import DEFAULT_TENANT, MAX_BATCH, Claim, new_job_ids
from holdfast.core.states import State
from holdfast.core.verdict import (
    TARGETS,
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    Settlement,
    SettleResult,
    Succeed,
    Suspend,
    advance,
)
from holdfast.engine.port import PartialFailure
from holdfast.engine.redis import wire
from holdfast.engine.redis.keys import QueueKeys, lanes_of
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import EngineRefused, EngineUnavailable
from holdfast.observe.counters import count_settlements

_RESULTS: Final = {b"already": SettleResult.ALREADY, b"stale": SettleResult.STALE}


class Settlements:
    """Sends verdicts, one script call per queue, worker and batch."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        groups: dict[tuple[str, str], list[int]] = {}
        for index, settlement in enumerate(settlements):
            lease = settlement.claim.lease
            groups.setdefault((lease.queue, lease.worker), []).append(index)
        if self._store.outages.apart or len(groups) > 1:
            return await self._settle_reachable(settlements, groups)
        results: dict[int, SettleResult] = {}
        for (queue, worker), indexes in groups.items():
            for start in range(0, len(indexes), MAX_BATCH):
                part = indexes[start : start + MAX_BATCH]
                batch = await self._settle(queue, worker, [settlements[index] for index in part])
                results.update(zip(part, batch, strict=True))
        return [results[index] for index in range(len(settlements))]

    async def _settle_reachable(
        self, settlements: Sequence[Settlement], groups: Mapping[tuple[str, str], Sequence[int]]
    ) -> list[SettleResult]:
        """Settle in the queues that the store serves. Raises `PartialFailure` if it does not serve all."""
        results: dict[int, SettleResult] = {}

        async def step(queue: str) -> bool:
            for (name, worker), indexes in groups.items():
                for start in range(0, len(indexes) if name == queue else 0, MAX_BATCH):
                    part = indexes[start : start + MAX_BATCH]
                    batch = await self._settle(queue, worker, [settlements[index] for index in part])
                    results.update(zip(part, batch, strict=True))
            return True

        queues = dict.fromkeys(queue for queue, _ in groups)
        try:
            # The caller sends the rest again, and other verdicts meanwhile.
            done = await self._store.outages.for_each(queues, step, waits=False)
        except EngineUnavailable as exc:
            if isinstance(exc, EngineRefused) or not self._store.outages.apart:
                raise
            raise PartialFailure(exc, [results.get(index) for index in range(len(settlements))]) from exc
        if len(done) < len(queues):
            error = self._store.outages.first_error(queue for queue in queues if queue not in done)
            raise PartialFailure(error, [results.get(index) for index in range(len(settlements))])
        return [results[index] for index in range(len(settlements))]

    async def _settle(self, queue: str, worker: str, settlements: Sequence[Settlement]) -> list[SettleResult]:
        names, arguments = self._arguments(self._store.keys(queue), queue, worker, settlements)
        lanes = self._lanes(queue, settlements)
        refused = await self._store.run_with_lanes(Purpose.SETTLE, "settle", queue, names, arguments, lanes)
        results = [SettleResult.APPLIED] * len(settlements)
        for position, status in zip(refused[::2], refused[1::2], strict=True):
            results[position - 1] = _RESULTS[status]
        count_settlements(self._store.counters, settlements, results)
        return results

    def _lanes(self, queue: str, settlements: Sequence[Settlement]) -> set[int]:
        """The lanes of the leases, and the lanes that released jobs go to."""
        lanes = lanes_of(settlement.claim.lease.position for settlement in settlements)
        released = {each.claim.tenant_id for each in settlements if type(each.verdict) is Release}
        return lanes | self._store.lanes(queue).find_lanes(released) if released else lanes

    def _arguments(
        self, keys: QueueKeys, queue: str, worker: str, settlements: Sequence[Settlement]
    ) -> tuple[list[bytes], list[Any]]:
        store, options = self._store, self._store.options
        count, parking = len(settlements), store.retry_consumer(queue)
        records: list[bytes] = []
        expiring: list[bytes] = []
        jobs: list[Any] = []
        bodies: list[bytes] = []
        ids: dict[int, list[str]] = {}
        for settlement in settlements:
            claim = settlement.claim
            lease = claim.lease
            stream, _, message_id = lease.position.partition(":")
            index = int(stream)
            in_stream = ids.get(index)
            if in_stream is None:
                in_stream = ids[index] = []
            in_stream.append(message_id)
            records.append(keys.job(lease.job_id))
            key_index, keep_ms = 0, 0
            if claim.idempotency_key != lease.job_id:
                expiring.append(keys.idempotency(claim.tenant_id, claim.idempotency_key))
                key_index = count + len(expiring)
                age_ms = settlement.finished_at_ms - claim.created_at_ms
                window_ms = claim.meta.key_window_ms or options.idempotency_window_ms
                keep_ms = min(window_ms, max(1, window_ms - age_ms))
            tenant = "" if claim.tenant_id == DEFAULT_TENANT else claim.tenant_id
            if type(settlement.verdict) is Succeed:
                target, body, data, retries = _success(claim, settlement.verdict.result, settlement.finished_at_ms)
                more: Any = (0, key_index, keep_ms, 0, tenant) if key_index or tenant else 0
            else:
                target, body, data, retries, delay_ms, dead_letter = _other_verdict(settlement, options.ledger)
                if parking and target == State.RETRYING:
                    delay_ms = max(delay_ms, options.pending_idle_ms)
                more = (delay_ms, key_index, keep_ms, dead_letter, tenant)
            bodies.append(body)
            jobs += (index, message_id, lease.deliveries, lease.token, lease.job_id, target, data)
            jobs += (claim.attempt, retries, more)
        arguments = [
            store.names.group,
            worker,
            store.nonce(),
            store.feed_limit,
            count,
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
            parking,
            wire.pack([part for index, in_stream in ids.items() for part in (index, *_span(in_stream))]),
            wire.pack(jobs),
        ]
        return [*fixed_keys(keys), *records, *expiring], [*arguments, *bodies]


def fixed_keys(keys: QueueKeys) -> tuple[bytes, ...]:
    """KEYS 1 to 18 of `settle` and `move`."""
    return (
        *keys.streams,
        keys.feed,
        keys.result,
        keys.dlq,
        keys.retry,
        keys.pending_retries,
        keys.suspended,
        keys.waiting_approval,
        keys.dlq_pending,
        keys.delayed,
        keys.control,
        keys.waiters,
        keys.notices,
        keys.wake,
        keys.lanes,
    )


def _span(ids: Sequence[str]) -> tuple[int, str, str]:
    """Count of message ids, and their lowest and highest instant.

    Instants are compared as numbers, because other programs may choose ids.
    """
    instants = [int(message_id.partition("-")[0]) for message_id in ids]
    return len(ids), str(min(instants)), str(max(instants))


def _success(claim: Claim, result: bytes, finished_at_ms: int) -> tuple[Any, ...]:
    """Target, body, data, retry count.

    The hot path: the payload is dropped, and four fields describe the last attempt instead of a history.
    """
    meta, text = claim.meta, result.decode()
    retries = str(meta.retry_count)
    body = wire.JobBody(
        claim.task,
        "",
        claim.tenant_id,
        claim.idempotency_key,
        claim.trace_id,
        wire.encode_meta(meta),
        str(claim.attempt),
        retries,
        str(claim.created_at_ms),
        str(int(meta.priority)),
        "0",
        text,
        "",
        finished_at_ms,
        claim.lease.worker,
        claim.claimed_at_ms,
        claim.lease.deliveries,
    )
    return "succeeded", wire.encode_record(body), text, retries


def _other_verdict(settlement: Settlement, ledger: bool) -> tuple[Any, ...]:
    """Target, body, data, retry count, delay and dead letter fields.

    With a ledger, only those dead letter fields that the feed needs.
    """
    claim, verdict = settlement.claim, settlement.verdict
    meta = advance(claim, verdict, settlement.finished_at_ms)
    attempts, delay_ms, failure, data, dead_letter = claim.attempt, 0, "", "", []
    match verdict:
        case RetryLater():
            failure = wire.encode_failure(verdict.failure)
            data = wire.encode_json(wire.failure_fields(verdict.failure) | {"counted": verdict.counts}).decode()
        case DeadLetter() | Suspend():
            data = failure = wire.encode_failure(verdict.failure)
        case Hold():
            data = wire.encode_json(
                {"message": verdict.message} | ({"approval_request": verdict.request} if verdict.request else {})
            ).decode()
        case Release():
            data = wire.encode_json(verdict.data).decode()
    if isinstance(verdict, RetryLater | Release):
        delay_ms = verdict.delay_ms
    if isinstance(verdict, Release) and not verdict.started:
        attempts -= 1
    if isinstance(verdict, DeadLetter):
        meta = msgspec.structs.replace(meta, dlq_id=new_job_ids(1)[0])
    body = wire.record_from_claim(
        claim,
        meta,
        attempts,
        failure=failure,
        finished_at_ms=settlement.finished_at_ms,
        deliveries=claim.lease.deliveries,
    )
    if isinstance(verdict, DeadLetter):
        dead_letter = (
            ["dlq_id", meta.dlq_id, "history", wire.encode_history(meta)]
            if ledger
            else wire.dead_letter_fields(claim.job_id, body, verdict.failure, meta.dlq_id)
        )
    target = TARGETS[type(verdict)].value
    return target, wire.encode_record(body), data, str(meta.retry_count), delay_ms, dead_letter
