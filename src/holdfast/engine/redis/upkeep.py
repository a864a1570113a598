"""Recovery on Redis: snapshot, and restore of lost jobs and idempotency keys from the ledger (requirement L3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.job import MAX_BATCH, JobInfo
from holdfast.core.states import FINAL, State
from holdfast.engine.port.feed import EngineSnapshot, SubmissionKey
from holdfast.engine.redis import wire
from holdfast.engine.redis.keys import QueueKeys
from holdfast.engine.redis.net.client import Purpose
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import InvalidOption


class EngineRecovery:
    """Restores what one Redis has lost."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        if len(job_ids) > MAX_BATCH:
            raise InvalidOption(f"a snapshot takes at most {MAX_BATCH} jobs, got {len(job_ids)}")
        keys = self._store.keys(queue)
        names = [keys.feed, *(keys.job(job_id) for job_id in job_ids)]
        at_ms, position, nonce, *unknown = await self._store.run(Purpose.OTHER, "snapshot", queue, names, [])
        return EngineSnapshot([job_ids[index - 1] for index in unknown], position.decode(), nonce.decode(), int(at_ms))

    async def restore(self, queue: str, snapshot: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        ended = [job.job_id for job in jobs if job.state in FINAL]
        if ended:
            raise InvalidOption(f"job {ended[0]} has ended; only open jobs can be restored")
        await self._store.register_queue(queue, again=True)
        restored: list[bool] = []
        position, nonce = snapshot.position, snapshot.nonce
        for start in range(0, len(jobs), MAX_BATCH):
            part = jobs[start : start + MAX_BATCH]
            new_nonce = self._store.nonce()
            names, arguments = self._arguments(self._store.keys(queue), part)
            arguments = [new_nonce, self._store.feed_limit, position, nonce, *arguments, self._store.names.group]
            lanes = self._store.lanes(queue).all()
            status, *rest = await self._store.run_with_lanes(Purpose.OTHER, "restore", queue, names, arguments, lanes)
            applied: set[int] = set()
            if status == b"ok":
                feed_id, *indexes = rest
                applied.update(indexes)
                if feed_id:
                    # The next part compares with this entry: a feed that was empty has one now.
                    position, nonce = feed_id.decode(), new_nonce
            restored += [index in applied for index in range(1, len(part) + 1)]
        return restored

    def _arguments(self, keys: QueueKeys, jobs: Sequence[JobInfo]) -> tuple[list[bytes], list[Any]]:
        names = [
            *keys.streams,
            keys.feed,
            keys.retry,
            keys.suspended,
            keys.waiting_approval,
            keys.dlq_pending,
            keys.delayed,
        ]
        names += [keys.control, keys.notices, keys.wake, keys.lanes, *(keys.job(job.job_id) for job in jobs)]
        key_indexes: dict[bytes, int] = {}
        values: list[Any] = []
        bodies: list[bytes] = []
        for job in jobs:
            key_index = 0
            if job.idempotency_key not in ("", job.job_id):
                name = keys.idempotency(job.tenant_id, job.idempotency_key)
                key_index = key_indexes.setdefault(name, len(jobs) + len(key_indexes) + 1)
            values += (job.job_id, job.state.value, _due(job), key_index, job.attempt, job.tenant_id)
            failure = wire.encode_failure(job.failure) if job.failure else ""
            bodies.append(wire.encode_record(wire.record_from_info(job, job.meta, failure=failure)))
        return [*names, *key_indexes], [len(jobs), wire.pack(values), *bodies]

    async def restore_keys(self, queue: str, restored: Sequence[SubmissionKey]) -> None:
        keys = self._store.keys(queue)
        for start in range(0, len(restored), MAX_BATCH):
            part = restored[start : start + MAX_BATCH]
            names = [keys.idempotency(each.tenant_id, each.key) for each in part]
            arguments = [value for each in part for value in (each.job_id, each.expires_at_ms)]
            await self._store.run(Purpose.OTHER, "restore_keys", queue, names, arguments)


def _due(job: JobInfo) -> int:
    """When the job is due; 0: now."""
    if job.state is State.QUEUED:
        return job.next_attempt_at_ms or job.meta.run_at_ms
    return job.next_attempt_at_ms if job.state is State.RETRYING else 0
