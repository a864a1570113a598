"""Recovery on Redis: restore what it has lost, and correct what it has from the past before a queue's gate opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.job import DEFAULT_TENANT, MAX_BATCH, JobInfo
from holdfast.core.states import FINAL, State
from holdfast.engine.port.feed import EngineSnapshot, SubmissionKey
from holdfast.engine.port.reads import QueueGate
from holdfast.engine.port.verification import JobName
from holdfast.engine.redis import wire
from holdfast.engine.redis.controls import gate_from
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
            _, feed_id, written = await self._write(queue, part, (new_nonce, position, nonce, ""))
            if feed_id:
                # The next part compares with this entry: a feed that was empty has one now.
                position, nonce = feed_id, new_nonce
            restored += written
        return restored

    async def correct(self, queue: str, epoch: str, jobs: Sequence[JobInfo]) -> list[bool] | None:
        corrected: list[bool] = []
        for start in range(0, len(jobs), MAX_BATCH):
            part = jobs[start : start + MAX_BATCH]
            status, _, written = await self._write(queue, part, (self._store.nonce(), "", "", epoch))
            if status == b"verified":
                return None
            corrected += written
        return corrected

    async def _write(
        self, queue: str, jobs: Sequence[JobInfo], condition: tuple[str, str, str, str]
    ) -> tuple[bytes, str, list[bool]]:
        """Write jobs; return the status, the id of the feed entry, and of each job whether it was written.

        `condition`: nonce of the entry, end of the snapshot's feed and its nonce, epoch of the verification.
        """
        store, keys = self._store, self._store.keys(queue)
        now_ms = await store.now_ms(queue)
        names = [*keys.streams, keys.feed, keys.retry, keys.suspended, keys.waiting_approval, keys.dlq_pending]
        names += [keys.delayed, keys.control, keys.notices, keys.wake, keys.lanes, keys.pending_retries, keys.waiters]
        names += [keys.job(job.job_id) for job in jobs]
        key_indexes: dict[bytes, int] = {}
        values: list[Any] = []
        for job in jobs:
            key_index = 0
            if job.idempotency_key not in ("", job.job_id):
                name = keys.idempotency(job.tenant_id, job.idempotency_key)
                key_index = key_indexes.setdefault(name, len(jobs) + len(key_indexes) + 1)
            window_ms = job.meta.key_window_ms or store.options.idempotency_window_ms
            values += (job.job_id, job.state.value, _due(job), key_index, job.attempt, job.tenant_id)
            values += (job.meta.key_fingerprint, max(1, job.created_at_ms + window_ms - now_ms))
        nonce, position, known_nonce, epoch = condition
        arguments = [
            nonce,
            store.feed_limit,
            position,
            known_nonce,
            len(jobs),
            wire.pack(values),
            epoch,
            store.options.finished_ttl_ms,
            *(wire.encode_record(wire.record_from_ledger(job)) for job in jobs),
            store.names.group,
        ]
        lanes = store.lanes(queue).all()
        status, *rest = await store.run_with_lanes(
            Purpose.OTHER, "restore", queue, [*names, *key_indexes], arguments, lanes
        )
        if status != b"ok":
            return status, "", [False] * len(jobs)
        written = set(rest[1:])
        return status, rest[0].decode(), [index in written for index in range(1, len(jobs) + 1)]

    async def restore_keys(self, queue: str, restored: Sequence[SubmissionKey]) -> None:
        keys = self._store.keys(queue)
        for start in range(0, len(restored), MAX_BATCH):
            part = restored[start : start + MAX_BATCH]
            names = [keys.idempotency(each.tenant_id, each.key) for each in part]
            arguments = [value for each in part for value in (each.job_id, each.fingerprint, each.expires_at_ms)]
            await self._store.run(Purpose.OTHER, "restore_keys", queue, names, arguments)

    # Verification ----------------------------------------------------------------------------------

    async def gate(self, queue: str) -> QueueGate:
        call, keys = self._store.client.call, self._store.keys(queue)
        epoch = await self._store.client.epoch(Purpose.OTHER, keys.control)
        names = (b"cleared", b"unverified")
        values = await call(Purpose.OTHER, b"HMGET", keys.control, *names)
        return gate_from(dict(zip(names, values, strict=True)), epoch if self._store.options.ledger else b"")

    async def job_names(self, queue: str, cursor: str, limit: int) -> tuple[list[JobName], str]:
        # Sets first: there are few of them, and lanes may be opened meanwhile.
        part, _, at = (cursor or "set-0 0").partition(" ")
        kind, _, number = part.partition("-")
        if kind == "set":
            return await self._names_in_set(queue, int(number), at, limit)
        return await self._names_in_stream(queue, int(number), at, limit)

    async def _names_in_set(self, queue: str, number: int, at: str, limit: int) -> tuple[list[JobName], str]:
        keys = self._store.keys(queue)
        # Retries in the pending list have messages.
        sets = (keys.delayed, keys.retry, keys.suspended, keys.waiting_approval, keys.dlq_pending)
        following, members = await self._store.client.call(Purpose.OTHER, b"ZSCAN", sets[number], at, b"COUNT", limit)
        names: list[JobName] = []
        ids = members[::2]
        if ids:
            records = await self._store.client.call(Purpose.OTHER, b"MGET", *map(keys.member_job, ids))
            for job_id, record in zip(ids, records, strict=True):
                body = wire.read_record((record or b"").partition(b"\n")[2])
                if body is not None:
                    names.append(JobName(wire.printable(job_id), body[0].tenant_id or DEFAULT_TENANT))
        if following != b"0":
            return names, f"set-{number} {following.decode()}"
        return names, f"set-{number + 1} 0" if number + 1 < len(sets) else "stream-0 -"

    async def _names_in_stream(self, queue: str, number: int, at: str, limit: int) -> tuple[list[JobName], str]:
        streams = dict(await self._store.streams_in_use(queue, Purpose.OTHER))
        index = min((each for each in streams if each >= number), default=None)
        if index is None:
            return [], ""
        at = at if index == number else "-"
        last, *found = await self._store.run(Purpose.OTHER, "job_names", queue, [streams[index]], [at, limit])
        names = [
            JobName(wire.printable(job_id), wire.printable(tenant) or DEFAULT_TENANT)
            for job_id, tenant in zip(found[::2], found[1::2], strict=True)
        ]
        return names, f"stream-{index} {last.decode()}" if last else f"stream-{index + 1} -"

    async def open_gate(self, queue: str, epoch: str, *, verified: bool, corrected: bool) -> bool:
        keys = self._store.keys(queue)
        arguments = [epoch, self._store.nonce(), self._store.feed_limit, int(verified), int(corrected)]
        reply = await self._store.run(
            Purpose.OTHER, "open_gate", queue, [keys.control, keys.feed, keys.wake], arguments
        )
        return bool(reply == b"ok")


def _due(job: JobInfo) -> int:
    """When the job is due; 0: now."""
    if job.state is State.QUEUED:
        return job.next_attempt_at_ms or job.meta.run_at_ms
    return job.next_attempt_at_ms if job.state is State.RETRYING else 0
