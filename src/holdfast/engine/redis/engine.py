"""`RedisEngine`: the engine port on Redis, delegating to the modules of this package.

The Lua scripts in `lua/`, one per operation, make every decision. The modules only build the arguments of a script and
decode its reply.

    intake      submit, and adoption of foreign messages
    claims      claim, claim_job, recover_claims, renew, reclaim, deregister_worker
    settlement  settle
    operators   move, expedite, get_control, set_control
    reads       get, find, stats, workers, queues, listen, the feed, prune, wait_final
    upkeep      snapshot, restore, restore_keys
    keys        key names, and the lanes known to be in use
    diagnosis   diagnose
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.core.job import Approval, Claim, Envelope, Failure, JobInfo, Lease, Receipt
from holdfast.core.states import State
from holdfast.core.verdict import POISON_PILL, DeadLetter, Settlement, SettleResult
from holdfast.engine.port import Engine
from holdfast.engine.port.feed import EngineSnapshot, FeedEntry, SubmissionKey
from holdfast.engine.port.jobs import EngineOptions, Promotion
from holdfast.engine.port.operators import QueueControl
from holdfast.engine.port.reads import Finding, Notice, QueueStats, WorkerInfo, feed_finding
from holdfast.engine.redis.claims import Claims
from holdfast.engine.redis.diagnosis import Diagnosis, unreachable_finding
from holdfast.engine.redis.intake import Intake
from holdfast.engine.redis.keys import KeyNames
from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.connection import ClusterSeeds, SentinelAddresses, is_cluster, parse_url
from holdfast.engine.redis.net.topologies import ClusterClient, SentinelClient
from holdfast.engine.redis.operators import AuditContext, Controls, Operators
from holdfast.engine.redis.reads import CompletionWaiter, Reads
from holdfast.engine.redis.settlement import Settlements
from holdfast.engine.redis.store import RedisStore
from holdfast.engine.redis.upkeep import EngineRecovery
from holdfast.errors import EngineRefused, EngineUnavailable
from holdfast.observe.counters import Counters

if TYPE_CHECKING:
    from holdfast.settings import Settings


T = TypeVar("T")

_CONNECT_TIMEOUT_S: Final = 5.0
_REPLY_TIMEOUT_S: Final = 10.0


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
        counts: Counters | None = None,
    ) -> None:
        self._url = url
        self.options = options or EngineOptions()
        self.counts = counts or Counters()
        names = names or KeyNames()
        self._names = replace(names, cluster=True) if is_cluster(url) else names
        self._timeouts = (connect_timeout_s, reply_timeout_s)
        client = _client(url, connect_timeout_s, reply_timeout_s)
        self._store = RedisStore(client, self._names, self.options, self.counts)
        self._intake = Intake(self._store)
        self._leases = Claims(self._store)
        self._settling = Settlements(self._store)
        self._operators = Operators(self._store)
        self._controls = Controls(self._store)
        self._readers = Reads(self._store)
        self._recovery = EngineRecovery(self._store)
        self._completion = CompletionWaiter(self._store, self._readers)

    @classmethod
    def from_settings(cls, settings: Settings) -> RedisEngine:
        """Create an engine from settings."""
        names = KeyNames(
            namespace=settings.namespace,
            stream_task=settings.stream_task,
            stream_result=settings.stream_result,
            stream_dlq=settings.stream_dlq,
            group=settings.group,
            queue_retry=settings.queue_retry,
            queue_suspended=settings.queue_suspended,
        )
        return cls(
            settings.url,
            names,
            settings.engine_options(),
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
            counts=self.counts,
        )
        clone._store.outages.logged = self._store.outages.logged
        return clone

    # Jobs ------------------------------------------------------------------------------------------

    async def submit(self, envelopes: Sequence[Envelope]) -> list[Receipt]:
        return await self._intake.submit(envelopes)

    async def claim(
        self,
        worker: str,
        queues: Sequence[str],
        limit: int,
        wait_ms: int,
        in_flight: Callable[[], Collection[Lease]] | None = None,
    ) -> list[Claim]:
        return await self._leases.claim(worker, queues, limit, wait_ms, in_flight)

    async def recover_claims(self, worker: str, queues: Sequence[str], in_flight: Collection[Lease]) -> list[Claim]:
        # The lost reply may be that of a reclaim, or of a settle that dead-letters a poison pill.
        return await self._without_poison(await self._leases.resume(worker, queues, in_flight))

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        return await self._settling.settle(settlements)

    async def renew(self, leases: Sequence[Lease], heartbeats: Collection[Lease] = ()) -> list[Lease]:
        return await self._leases.renew(leases, heartbeats)

    async def promote(self, queues: Sequence[str], limit: int) -> Promotion:
        count, next_in_ms, now_ms = 0, -1, 0

        async def step(queue: str) -> bool:
            nonlocal count, next_in_ms, now_ms
            keys = self._store.keys(queue)
            now, due, *members = await self._store.run(
                Purpose.OTHER, "find_due", queue, [keys.delayed, keys.retry], [limit]
            )
            now_ms = int(now)
            # By the clock of the queue's node; on a Cluster the clocks differ slightly.
            if due and (next_in_ms < 0 or int(due) - now_ms < next_in_ms):
                next_in_ms = max(0, int(due) - now_ms)
            jobs = [(job_id, name) for ids, name in zip(members, ("delayed", "retry"), strict=True) for job_id in ids]
            if jobs:
                names = [*keys.streams, keys.delayed, keys.retry, keys.control, keys.wake, keys.lanes]
                names += [keys.job(job_id.decode()) for job_id, _ in jobs]
                arguments = [self._names.group, len(jobs), *(part for job in jobs for part in job)]
                lanes = self._store.lanes(queue).all()
                count += await self._store.run_with_lanes(Purpose.OTHER, "promote", queue, names, arguments, lanes)
            return True

        await self._store.outages.for_each(queues, step)
        self.counts.promoted += count
        return Promotion(count, now_ms + next_in_ms if next_in_ms >= 0 else 0, now_ms)

    async def reclaim(self, worker: str, queues: Sequence[str], limit: int) -> list[Claim]:
        claims: list[Claim] = []

        async def step(queue: str) -> bool | None:
            free = limit - len(claims)
            if free <= 0:
                return None
            # Regardless of the settings: another process, or this one before a change, may have left retries there.
            claims.extend(await self._leases.claim_due_retries(worker, queue, free))
            free = limit - len(claims)
            if free > 0:
                claims.extend(await self._without_poison(await self._leases.reclaim(worker, queue, free)))
            return True

        await self._store.outages.for_each(queues, step)
        return claims

    async def deregister_worker(self, worker: str, queues: Sequence[str]) -> None:
        await self._leases.remove_worker(worker, queues)

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
        return await self._operators.move(queue, job_id, to, context, expected, event, approval, approval_id)

    async def get_control(self, queue: str) -> QueueControl:
        return await self._controls.get(queue)

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
        await self._operators.expedite(queue, job_id, AuditContext(actor, reason, audit))

    async def claim_job(self, worker: str, queue: str, job_id: str) -> Claim:
        return await self._leases.claim_job(worker, queue, job_id)

    # Reads -----------------------------------------------------------------------------------------

    async def get(self, queue: str, job_ids: Sequence[str]) -> list[JobInfo | None]:
        return await self._readers.get(queue, job_ids)

    async def find(self, queue: str, states: Collection[State], limit: int) -> list[JobInfo]:
        return await self._readers.find(queue, states, limit)

    async def wait_final(self, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        return await self._completion.wait_final(queue, job_id, wait_ms)

    async def stats(self, queue: str) -> QueueStats:
        return await self._readers.stats(queue)

    async def workers(self, queues: Sequence[str]) -> list[WorkerInfo]:
        return await self._readers.workers(queues)

    async def queues(self) -> list[str]:
        return await self._readers.queues()

    async def for_each_queue(
        self, queues: Iterable[str], step: Callable[[str], Awaitable[T]]
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
        done = await outages.for_each(names, run_step)
        if refused and not done:
            raise next(iter(refused.values()))
        errors = {queue: refused.get(queue) or outages.first_error([queue]) for queue in names if queue not in done}
        return {queue: result for queue, (result,) in done.items()}, errors

    async def listen(self, queues: Sequence[str], wait_ms: int) -> list[Notice]:
        return await self._readers.listen(queues, wait_ms)

    async def now_ms(self) -> int:
        return await self._store.now_ms()

    async def diagnose(self, queues: Sequence[str]) -> list[Finding]:
        diagnosis = Diagnosis(self._store)

        async def check(queue: str) -> list[Finding]:
            return [await diagnosis.consumers(queue), feed_finding(await self.stats(queue))]

        findings = await diagnosis.servers()
        found, errors = await self.for_each_queue(queues, check)
        findings += [finding for of_queue in found.values() for finding in of_queue]
        return findings + [unreachable_finding(queue, error) for queue, error in errors.items()]

    # Feed and recovery -----------------------------------------------------------------------------

    async def epoch(self, queue: str) -> str:
        return await self._readers.incarnation(queue)

    async def attach_reader(self, queue: str, epoch: str = "", *, keys_restored: bool = False) -> None:
        await self._readers.register_reader(queue, epoch, keys_restored=keys_restored)

    async def read_feed(self, queue: str, start: str, limit: int) -> list[FeedEntry]:
        return await self._readers.feed(queue, start, limit)

    async def wait_feed(self, positions: Mapping[str, str], wait_ms: int) -> list[str]:
        return await self._readers.wait_feed(positions, wait_ms)

    async def trim_feed(self, queue: str, position: str) -> None:
        await self._readers.trim_feed(queue, position)

    async def snapshot(self, queue: str, job_ids: Sequence[str]) -> EngineSnapshot:
        return await self._recovery.snapshot(queue, job_ids)

    async def restore(self, queue: str, snapshot: EngineSnapshot, jobs: Sequence[JobInfo]) -> list[bool]:
        return await self._recovery.restore(queue, snapshot, jobs)

    async def restore_keys(self, queue: str, keys: Sequence[SubmissionKey]) -> None:
        await self._recovery.restore_keys(queue, keys)

    async def prune(self, queues: Sequence[str]) -> int:
        return await self._readers.prune(queues)

    async def _without_poison(self, claims: list[Claim]) -> list[Claim]:
        """Dead-letter poison pills (requirement Q7); return the other claims."""
        healthy, poison = [], []
        for claim in claims:
            lost = claim.meta.lost_leases + claim.lease.deliveries - 1
            if lost < self.options.max_deliveries:
                healthy.append(claim)
                continue
            failure = Failure(POISON_PILL, f"{lost} workers lost their lease on this job; it may be what kills them")
            poison.append(Settlement(claim, DeadLetter(failure), claim.claimed_at_ms))
        if poison:
            await self._settling.settle(poison)
            self.counts.poisoned += len(poison)
        return healthy


def _client(url: str, connect_timeout_s: float, reply_timeout_s: float) -> RedisClient:
    address = parse_url(url)
    if isinstance(address, SentinelAddresses):
        return SentinelClient(address, connect_timeout_s, reply_timeout_s)
    if isinstance(address, ClusterSeeds):
        return ClusterClient(address, connect_timeout_s, reply_timeout_s)
    return RedisClient(address, connect_timeout_s, reply_timeout_s)
