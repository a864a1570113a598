"""`RedisEngine`: the engine port on Redis, delegating to the modules of this package.

The Lua scripts in `lua/`, one per operation, make every decision. The modules only build the arguments of a script and
decode its reply.

    intake      submit, and adoption of foreign messages
    claims      claim, recover_claims, renew, deregister_worker
    settlement  settle
    operators   move, expedite, claim_job, set_control
    reads       get, find, get_control, stats, workers, queues, listen, wait_final
    feed        epoch, attach_reader, read_feed, wait_feed, trim_feed
    upkeep      promote, reclaim, prune
    recovery    snapshot, restore, restore_keys; gate, job_names, correct, open_gate
    worker_ids  next_generation, keep_worker_id
    diagnosis   diagnose
    store       scripts, lanes and versions, for all of them
    keys, wire  key names and the lanes in use; encoding of messages and records
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar, cast

from holdfast.core.announcement import AnnouncedTask
from holdfast.core.fingerprint import raw_fingerprint
from holdfast.core.job import Approval, Claim, Envelope, JobInfo, Lease, Receipt
from holdfast.core.states import State
from holdfast.core.verdict import Settlement, SettleResult
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry, SubmissionKey
from holdfast.engine.port.jobs import EngineOptions, JobRefused, LeaseFilter, Promotion
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import (
    Finding,
    Notice,
    QueueGate,
    QueueStats,
    WorkerInfo,
    feed_finding,
    gate_finding,
)
from holdfast.engine.port.verification import JobName
from holdfast.engine.port.worker_ids import WorkerIdStatus, WorkerStart, replaced_findings
from holdfast.engine.redis.announcements import Announcements
from holdfast.engine.redis.claims import Claims
from holdfast.engine.redis.controls import read_control
from holdfast.engine.redis.diagnosis import Diagnosis, unreachable_finding
from holdfast.engine.redis.feed import Feed
from holdfast.engine.redis.intake import EACH, WHOLE, Intake
from holdfast.engine.redis.keys import KeyNames
from holdfast.engine.redis.net.client import RedisClient
from holdfast.engine.redis.net.cluster import ClusterClient
from holdfast.engine.redis.net.connection import ClusterSeeds, SentinelAddresses, is_cluster, parse_url
from holdfast.engine.redis.net.sentinel import SentinelClient
from holdfast.engine.redis.operators import AuditContext, Controls, Operators
from holdfast.engine.redis.reads import CompletionWaiter, Reads
from holdfast.engine.redis.recovery import EngineRecovery
from holdfast.engine.redis.settlement import Settlements
from holdfast.engine.redis.store import RedisStore
from holdfast.engine.redis.upkeep import EngineUpkeep
from holdfast.engine.redis.worker_ids import WorkerIds
from holdfast.errors import EngineRefused, EngineUnavailable, QueueUnverified
from holdfast.observe.counters import Counters

if TYPE_CHECKING:
    from holdfast.settings import Settings


T = TypeVar("T")

_CONNECT_TIMEOUT_S: Final = 5.0
_REPLY_TIMEOUT_S: Final = 10.0
#: How long an operator waits for the verification of a queue.
_VERIFICATION_S: Final = 5.0


class RedisEngine(Engine):
    """The engine on Redis 6.0 or later: a single server, a master behind Sentinel, or a Cluster."""

    def __init__(
        self,
        url: str,
        names: KeyNames | None = None,
        options: EngineOptions | None = None,
        *,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
        reply_timeout_s: float = _REPLY_TIMEOUT_S,
        counters: Counters | None = None,
    ) -> None:
        self._url = url
        self.options = options or EngineOptions()
        self.counters = counters or Counters()
        names = names or KeyNames()
        self._names = replace(names, cluster=True) if is_cluster(url) else names
        self._timeouts = (connect_timeout_s, reply_timeout_s)
        client = _client(url, connect_timeout_s, reply_timeout_s)
        self._store = RedisStore(client, self._names, self.options, self.counters)
        self._intake = Intake(self._store)
        self._claims = Claims(self._store)
        self._settlements = Settlements(self._store)
        self._operators = Operators(self._store)
        self._controls = Controls(self._store)
        self._reads = Reads(self._store)
        self._announcements = Announcements(self._store)
        self._feed = Feed(self._store)
        self._upkeep = EngineUpkeep(self._store, self._claims, self._settlements)
        client.late_s = self._upkeep.watch.late_s
        self._recovery = EngineRecovery(self._store)
        self._worker_ids = WorkerIds(self._store)
        self._completion = CompletionWaiter(self._store, self._reads)

    @classmethod
    def from_settings(
        cls, settings: Settings, fingerprint: Callable[[str, bytes], str] = raw_fingerprint
    ) -> RedisEngine:
        """Create an engine from settings."""
        names = KeyNames(
            namespace=settings.namespace,
            stream_task=settings.stream_task,
            stream_result=settings.stream_result,
            stream_dlq=settings.stream_dlq,
            group=settings.group,
            queue_retry=settings.queue_retry,
            queue_suspended=settings.queue_suspended,
            cluster=settings.on_cluster,
        )
        return cls(
            settings.url,
            names,
            replace(settings.engine_options(), fingerprint=fingerprint),
            connect_timeout_s=settings.connect_timeout_s,
            reply_timeout_s=settings.reply_timeout_s,
        )

    # Open and close --------------------------------------------------------------------------------

    async def open(self) -> None:
        self._store.client.reopen()
        await self._store.detect_version()

    async def close(self) -> None:
        self._completion.close()
        self._store.outages.close()
        self._store.client.close()

    def clone(self) -> RedisEngine:
        connect_timeout_s, reply_timeout_s = self._timeouts
        clone = RedisEngine(
            self._url,
            self._names,
            self.options,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            counters=self.counters,
        )
        clone._store.outages.logged = self._store.outages.logged
        clone._upkeep.watch.ended = self._upkeep.watch.ended
        return clone

    # Jobs ------------------------------------------------------------------------------------------

    async def submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        return cast("list[Receipt]", await self._intake.submit(envelopes, WHOLE))

    async def submit_each(self, envelopes: Sequence[Envelope]) -> list[Receipt | JobRefused]:
        return await self._intake.submit(envelopes, EACH)

    def server_of(self, queue: str) -> object:
        return self._store.client.node_of(self._store.keys(queue).control) if self._names.cluster else None

    async def claim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        wait_ms: int,
        in_flight: Callable[[], Collection[Lease]] | None = None,
    ) -> list[Claim]:
        return await self._claims.claim(worker, queues, limit, wait_ms, in_flight)

    async def recover_claims(self, worker: str, queues: Sequence[str], in_flight: Collection[Lease]) -> list[Claim]:
        # The lost reply may be that of a reclaim, or of a settle that dead-letters a poison pill.
        return await self._upkeep.without_poison(await self._claims.recover(worker, queues, in_flight))

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        return await self._settlements.settle(settlements)

    async def renew(self, leases: Sequence[Lease], heartbeats: Collection[Lease] = ()) -> list[Lease]:
        return await self._claims.renew(leases, heartbeats)

    async def promote(self, queues: Sequence[str], limit: int) -> Promotion:
        return await self._upkeep.promote(queues, limit)

    async def reclaim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        only: LeaseFilter | None = None,
        retries: int | None = None,
    ) -> list[Claim]:
        return await self._upkeep.reclaim(worker, queues, limit, only, limit if retries is None else retries)

    def skip_first_wait(self) -> None:
        self._upkeep.watch.starts_settled = True

    def is_settling(self, queues: Sequence[str]) -> bool:
        return self._upkeep.watch.is_settling(queues)

    async def expire_leases(self, worker: str, queues: Sequence[str]) -> int:
        return await self._upkeep.expire_leases(worker, queues)

    async def deregister_worker(self, worker: str, queues: Sequence[str]) -> None:
        await self._claims.deregister_worker(worker, queues)

    async def announce_tasks(self, tasks: Sequence[AnnouncedTask]) -> None:
        await self._announcements.announce(tasks)

    # Identities of workers -------------------------------------------------------------------------

    async def next_generation(self, worker_id: str, queues: Sequence[str]) -> int:
        return await self._worker_ids.next_generation(worker_id, queues)

    async def keep_worker_id(self, start: WorkerStart, queues: Sequence[str]) -> WorkerIdStatus:
        return await self._worker_ids.keep(start, queues)

    # Operators -------------------------------------------------------------------------------------

    async def move(
        self,
        queue: str,
        job_id: str,
        to: State,
        *,
        actor: str,
        reason: str,
        expected: State | None = None,
        event: str = "",
        approval: Approval | None = None,
        approval_id: str = "",
        audit: str = "",
    ) -> State:
        context = AuditContext(actor, reason, audit)
        arguments = (queue, job_id, to, context, expected, event, approval, approval_id)
        return await self._when_verified(queue, lambda: self._operators.move(*arguments))

    async def set_control(
        self,
        queue: str,
        control: QueueControl,
        *,
        expected: QueueControl | None = None,
        actor: str = "",
        reason: str = "",
        audit: str = "",
    ) -> None:
        await self._controls.set(queue, control, expected, AuditContext(actor, reason, audit))

    async def expedite(self, queue: str, job_id: str, *, actor: str, reason: str, audit: str = "") -> None:
        context = AuditContext(actor, reason, audit)
        await self._when_verified(queue, lambda: self._operators.expedite(queue, job_id, context))

    async def claim_job(self, worker: str, queue: str, job_id: str) -> Claim:
        return await self._when_verified(queue, lambda: self._operators.claim_job(worker, queue, job_id))

    async def _when_verified(self, queue: str, step: Callable[[], Awaitable[T]]) -> T:
        """Run a step that an operator waits for, and again after a verification of the queue."""
        try:
            return await step()
        except QueueUnverified:
            verification = self._store.verify(queue)
            if verification is None:
                raise
            await asyncio.wait({verification}, timeout=_VERIFICATION_S)
            return await step()

    # Reads -----------------------------------------------------------------------------------------

    async def get(self, queue: str, job_ids: Sequence[str]) -> list[JobInfo | None]:
        return await self._reads.get(queue, job_ids)

    async def find(self, queue: str, states: Collection[State], limit: int) -> list[JobInfo]:
        return await self._reads.find(queue, states, limit)

    async def get_control(self, queue: str) -> QueueControl:
        return (await read_control(self._store, queue))[0]

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        return await self._completion.wait_final(queue, job_id, wait_ms)

    async def stats(self, queue: str) -> QueueStats:
        return await self._reads.stats(queue)

    async def workers(self, queues: Sequence[str]) -> list[WorkerInfo]:
        return await self._reads.workers(queues)

    async def queues(self) -> list[str]:
        return await self._reads.queues()

    async def queue_owners(self) -> dict[str, str]:
        return await self._reads.queue_owners()

    async def announced_tasks(self) -> list[AnnouncedTask]:
        return await self._announcements.read()

    async def for_each_queue(
        self, queues: Iterable[str], step: Callable[[str], Awaitable[T]], *, together: int = 1
    ) -> tuple[dict[str, T], dict[str, EngineUnavailable]]:
        refused: dict[str, EngineUnavailable] = {}

        async def run_step(queue: str) -> tuple[T] | None:
            try:
                return (await step(queue),)
            except EngineRefused as exc:
                # The keys of this queue are damaged.
                refused[queue] = exc
                self._store.outages.log_once(queue, exc)
                return None

        names, outages = list(queues), self._store.outages
        done = await outages.for_each(names, run_step, together)
        if refused and not done:
            raise next(iter(refused.values()))
        errors = {queue: refused.get(queue) or outages.first_error([queue]) for queue in names if queue not in done}
        return {queue: result for queue, (result,) in done.items()}, errors

    async def listen(self, queues: Sequence[str], wait_ms: int) -> list[Notice]:
        return await self._reads.listen(queues, wait_ms)

    async def now_ms(self) -> int:
        return await self._store.now_ms()

    async def diagnose(self, queues: Sequence[str]) -> list[Finding]:
        diagnosis, replaced = Diagnosis(self._store), list[tuple[str, str]]()

        async def check(queue: str) -> list[Finding]:
            stats = await self.stats(queue)
            findings = [await diagnosis.consumers(queue), feed_finding(stats)]
            if self.options.ledger:
                findings.append(gate_finding(queue, stats.gate))
            replaced.extend(await self._worker_ids.replaced(queue))
            return findings + await diagnosis.former_keys(queue)

        findings = await diagnosis.servers()
        found, errors = await self.for_each_queue(queues, check)
        findings += [finding for of_queue in found.values() for finding in of_queue] + replaced_findings(replaced)
        return findings + [unreachable_finding(queue, error) for queue, error in errors.items()]

    # Feed and recovery -----------------------------------------------------------------------------

    async def epoch(self, queue: str) -> str:
        return await self._feed.epoch(queue)

    async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
        await self._feed.attach_reader(queue, epoch, keys_restored=keys_restored)

    async def read_feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        return await self._feed.read(queue, start, limit)

    async def wait_feed(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        return await self._feed.wait(positions, wait_ms)

    async def seek_feeds(self, at_ms: int) -> str:
        # Positions begin with the server's time. `at_ms-0` itself may be one.
        return f"{max(0, at_ms - 1)}-0"

    async def is_feed_whole(self, queue: str, position: str) -> bool:
        return await self._feed.is_whole(queue, position)

    async def trim_feed(self, queue: str, position: str) -> None:
        await self._feed.trim(queue, position)

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        return await self._recovery.snapshot(queue, job_ids)

    async def restore(self, queue: str, snapshot: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        return await self._recovery.restore(queue, snapshot, jobs)

    def on_unverified(self, verify: Callable[[str], asyncio.Task[None]]) -> None:
        self._store.verify = verify

    async def gate(self, queue: str) -> QueueGate:
        return await self._recovery.gate(queue)

    async def job_names(self, queue: str, cursor: str, limit: int) -> tuple[list[JobName], str]:
        return await self._recovery.job_names(queue, cursor, limit)

    async def correct(self, queue: str, epoch: str, jobs: Sequence[JobInfo]) -> list[bool] | None:
        return await self._recovery.correct(queue, epoch, jobs)

    async def open_gate(self, queue: str, epoch: str, *, verified: bool = True, corrected: bool = False) -> bool:
        return await self._recovery.open_gate(queue, epoch, verified=verified, corrected=corrected)

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        await self._recovery.restore_keys(queue, keys)

    async def prune(self, queues: Sequence[str]) -> int:
        return await self._upkeep.prune(queues)


def _client(url: str, connect_timeout_s: float, reply_timeout_s: float) -> RedisClient:
    address = parse_url(url)
    if isinstance(address, SentinelAddresses):
        return SentinelClient(address, connect_timeout_s, reply_timeout_s)
    if isinstance(address, ClusterSeeds):
        return ClusterClient(address, connect_timeout_s, reply_timeout_s)
    return RedisClient(address, connect_timeout_s, reply_timeout_s)
