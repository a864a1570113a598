"""Reads of the embedded engine: live state, statistics, waiting for a job's end, notices."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from holdfast.core.announcement import AnnouncedTask, newest_first
from holdfast.core.job import JobInfo
from holdfast.core.states import FINAL, State
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import (
    CancelledNotice,
    ControlNotice,
    DueNotice,
    Finding,
    Notice,
    QueueStats,
    WorkerInfo,
    feed_finding,
)
from holdfast.engine.port.worker_ids import KEEP_REPLACED_MS, replaced_findings
from holdfast.engine.sqlite.diagnosis import diagnose
from holdfast.engine.sqlite.rows import CONTROL, NAMES, OWNERS, VIEW_ROWS
from holdfast.engine.sqlite.store import EngineContext, SqliteEngineStore
from holdfast.sqlite.transaction import json_list

_STATS: Final = msgspec.json.Decoder(
    tuple[list[tuple[State, int]], int, int, int, int, int, int, list[tuple[str, int]]]
)
_NOTICES: Final = msgspec.json.Decoder(list[tuple[int, str, str, str, int]])
_WORKERS: Final = msgspec.json.Decoder(list[tuple[str, str, int, int]])
_REPLACED: Final = msgspec.json.Decoder(list[tuple[str, str]])
_ANNOUNCED: Final = msgspec.json.Decoder(list[tuple[str, str, str, int, str, int]])


class SqliteReads:
    """The reading part of the engine; `SqliteEngine` initialises it."""

    options: EngineOptions
    _policy: EngineContext
    _store: SqliteEngineStore
    #: The number of the last notice read, by queue; for other queues the last one when the engine was opened.
    _last_notices: dict[str, int]
    _first_notice: int

    async def get_control(self, queue: str) -> QueueControl:
        return (await self._store.reader.rows("get_control", CONTROL, queue=queue)).as_control()

    async def get(self, queue: str, job_ids: Sequence[str]) -> list[JobInfo | None]:
        rows = await self._store.reader.rows(
            "get", VIEW_ROWS, queue=queue, ids=json_list(list(job_ids)), expired=self._expired_ms()
        )
        views = {row.job_id: row.to_info() for row in rows}
        return [views.get(job_id) for job_id in job_ids]

    async def find(self, queue: str, states: Collection[State], limit: int) -> list[JobInfo]:
        rows = await self._store.reader.rows(
            "find",
            VIEW_ROWS,
            queue=queue,
            states=json_list([state.value for state in states]),
            limit=max(0, limit),
            expired=self._expired_ms(),
        )
        return [row.to_info() for row in rows]

    def _expired_ms(self) -> int:
        return self._policy.clock.now_ms() - self.options.finished_ttl_ms

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        with self._store.waiters.for_final(queue, job_id) as wake:
            while True:
                wake.clear()
                (view,) = await self.get(queue, [job_id])
                if view is None or view.state in FINAL or loop.time() >= deadline:
                    return view
                await wake.wait(deadline - loop.time())

    async def stats(self, queue: str) -> QueueStats:
        now_ms = self._policy.clock.now_ms()
        states, delayed, workers, entries, dead, unread, pending, tenants = await self._store.reader.rows(
            "stats", _STATS, queue=queue, now=now_ms
        )
        counts: dict[State, int] = {}
        for state, count in states:
            counts[state] = counts.get(state, 0) + count
        return QueueStats(
            queue=queue,
            states=counts,
            delayed=delayed,
            control=await self.get_control(queue),
            workers=workers,
            feed_entries=entries,
            feed_share=unread / self.options.feed_max_bytes,
            dead_letters=dead,
            backlog=sum(count for _, count in tenants),
            pending=pending,
            tenants=dict(tenants),
        )

    async def workers(self, queues: Sequence[str]) -> list[WorkerInfo]:
        rows = await self._store.reader.rows("workers", _WORKERS, queues=json_list(list(queues)))
        return [
            WorkerInfo(worker=worker, queue=queue, seen_at_ms=seen_at, pending=pending)
            for worker, queue, seen_at, pending in rows
        ]

    async def queues(self) -> list[str]:
        return await self._store.reader.rows("queues", NAMES)

    async def queue_owners(self) -> dict[str, str]:
        return await self._store.reader.rows("queue_owners", OWNERS)

    async def announced_tasks(self) -> list[AnnouncedTask]:
        rows = await self._store.reader.rows("announced_tasks", _ANNOUNCED)
        return newest_first(
            AnnouncedTask(
                task=task, fingerprint=fingerprint, queue=queue, priority=priority, schema=schema, seen_at_ms=seen_at
            )
            for task, fingerprint, queue, priority, schema, seen_at in rows
        )

    async def listen(self, queues: Sequence[str], wait_ms: int) -> list[Notice]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        with self._store.waiters.for_notices(queues) as wake:
            while True:
                wake.clear()
                notices = await self._read_notices(queues)
                if notices or loop.time() >= deadline:
                    return notices
                await wake.wait(deadline - loop.time())

    async def _read_notices(self, queues: Sequence[str]) -> list[Notice]:
        last = {queue: self._last_notices.get(queue, self._first_notice) for queue in queues}
        after = min(last.values(), default=0)
        rows = await self._store.reader.rows("notices", _NOTICES, queues=json_list(list(queues)), after=after)
        new = [row for row in rows if row[0] > last[row[1]]]
        self._last_notices |= {queue: number for number, queue, *_ in new}
        return [_notice(queue, kind, job_id, at_ms) for _, queue, kind, job_id, at_ms in new]

    async def now_ms(self) -> int:
        return self._policy.clock.now_ms()

    async def diagnose(self, queues: Sequence[str]) -> list[Finding]:
        file = self._store.file
        findings = await self._store.reader.run(
            lambda connection: diagnose(connection, file.path, durable=not file.temporary)
        )
        findings += [feed_finding(await self.stats(queue)) for queue in queues]
        since, names = self._policy.clock.now_ms() - KEEP_REPLACED_MS, json_list(list(queues))
        replaced = await self._store.reader.rows("replaced_workers", _REPLACED, queues=names, since=since)
        return findings + replaced_findings(replaced)


def _notice(queue: str, kind: str, job_id: str, at_ms: int) -> Notice:
    if kind == "cancelled":
        return CancelledNotice(queue, job_id)
    if kind == "due":
        return DueNotice(queue, at_ms)
    return ControlNotice(queue)
