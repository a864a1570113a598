"""Hot queries use an index on PostgreSQL: auto_explain logs the plans of the statements that the code runs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import asyncpg
import msgspec
import pytest

from holdfast.core.job import ApprovalRequest, JobKey, Meta
from holdfast.core.states import State
from holdfast.engine.port.feed import FeedEntry
from holdfast.ledger.port.effects import EffectOutcome, EffectState, Reservation, Step
from holdfast.ledger.port.ledger import RecordedDeadLetter
from holdfast.ledger.port.messages import OutboxStatus, PublishResult
from holdfast.ledger.port.operators import ApprovalStatus, ReplayKey
from holdfast.ledger.postgres.ledger import PostgresLedger
from holdfast.ledger.postgres.retention import PRUNE_JOBS
from holdfast.ledger.postgres.store import Connection, PostgresStore
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.ledger.queries.operator_filters import ApprovalFilter, AuditFilter, DeadLetterFilter
from holdfast.ledger.queries.prefixes import KINDS
from holdfast.verification.chaos.servers import PostgresServer
from tests.ledger.projection_rig import Feed, FeedWriter

pytestmark = pytest.mark.postgres

JOBS: Final = 40_000
#: Tables that grow; small ones may be scanned.
GROWING: Final = (
    *("jobs", "job_events", "dlq_items", "idempotency_keys", "job_steps", "feed_entries", "anomalies"),
    *("approvals", "approval_votes", "operator_events", "outbox_events", "queue_executions"),
)

_FILL: Final = f"""
INSERT INTO jobs (tenant_id, job_id, queue, job_type, state, priority, last_seq, idempotency_key, trace_id, payload,
                  last_error, dlq_id, created_at, updated_at, finished_at)
SELECT CASE WHEN n % 50 = 0 THEN 'acme' ELSE 'default' END, 'job-' || n, 'default', 'type-' || n % 40,
       CASE WHEN n % 500 = 0 THEN 'failed' WHEN n % 400 = 1 THEN 'queued' WHEN n % 400 = 2 THEN 'suspended'
            ELSE 'succeeded' END,
       1, 3, CASE WHEN n % 10 = 0 THEN 'key-' || n ELSE 'job-' || n END,
       CASE WHEN n % 5 = 0 THEN 'trace-' || n / 10 ELSE '' END, '{{"a": 1}}',
       CASE WHEN n % 500 = 0 THEN 'ValueError: broken' END, CASE WHEN n % 500 = 0 THEN 'dlq-' || n END,
       now() - n * interval '2 minutes', now(),
       CASE WHEN n % 400 NOT IN (1, 2) THEN now() - n * interval '2 minutes' END
FROM generate_series(1, {JOBS}) n;
INSERT INTO job_events (tenant_id, job_id, queue, seq, type, attempt, retry_count, at)
SELECT tenant_id, job_id, queue, seq, 'task.created', 1, 0, created_at FROM jobs, generate_series(1, 3) seq;
INSERT INTO dlq_items (tenant_id, dlq_id, job_id, queue, job_type, payload, error_code, error, retry_count, history,
                       failed_at, acked_at)
SELECT tenant_id, 'd-' || job_id, job_id, queue, job_type, payload, 'E', 'e', 0, '[]', created_at,
       CASE WHEN job_id <> 'job-500' THEN now() END FROM jobs WHERE job_id LIKE '%0';
INSERT INTO idempotency_keys (tenant_id, key, state, value, created_at, expires_at, function, fingerprint, token, queue,
                              job_id, attempt, worker, updated_at)
SELECT tenant_id, 'effect-' || job_id, 'done', '1', created_at, CASE WHEN job_id LIKE '%7' THEN created_at END,
       'f', '', job_id, queue, job_id, 1, 'w', created_at FROM jobs;
INSERT INTO job_steps (tenant_id, job_id, queue, position, name, result, attempt, at)
SELECT tenant_id, job_id, queue, 1, 's', '1', 1, created_at FROM jobs;
INSERT INTO anomalies (tenant_id, id, job_id, queue, reason, event, at)
SELECT tenant_id, job_id, job_id, queue, 'odd', '{{}}', created_at FROM jobs WHERE job_id LIKE '%3';
UPDATE dlq_items SET fingerprint = 'f-' || length(job_id),
       replay_pending = CASE WHEN job_id = 'job-1000' THEN 1 ELSE 0 END,
       replayed_as = 'new', requested_by = 'ann';
INSERT INTO approvals (tenant_id, approval_id, job_id, queue, job_type, status, payload_hash, requested_by,
                       requested_at, deadline, decided_at, acked_at)
SELECT tenant_id, 'a-' || job_id, job_id, queue, job_type,
       CASE WHEN job_id LIKE '%02' THEN 'requested' ELSE 'approved' END, 'h', '', created_at,
       CASE WHEN job_id LIKE '%102' THEN now() + interval '1 day' END,
       CASE WHEN job_id NOT LIKE '%02' THEN created_at END,
       CASE WHEN job_id NOT LIKE '%02' AND job_id NOT LIKE '%112' THEN created_at END
  FROM jobs WHERE job_id LIKE '%2';
INSERT INTO approval_votes (tenant_id, approval_id, voter, approve, at)
SELECT tenant_id, approval_id, 'ann', 1, requested_at FROM approvals;
INSERT INTO operator_events (tenant_id, id, type, actor, target, target_id, at)
SELECT tenant_id, job_id, 'operator.cancel', 'ann', 'job', job_id, created_at FROM jobs;
INSERT INTO feed_positions (feed, position, nonce, updated_at) VALUES ('default', '{JOBS:08d}-0', 'n', now());
INSERT INTO feed_entries (feed, position, nonce, at)
SELECT 'default', lpad(n::text, 8, '0') || '-0', 'n', now() - ({JOBS} - n) * interval '1 minute'
FROM generate_series(1, {JOBS}) n;
INSERT INTO outbox_events (tenant_id, id, destination, topic, key, lane, payload, status, next_retry_at, created_at,
                           sent_at)
SELECT tenant_id, job_id, 'kafka', 'orders', CASE WHEN job_id LIKE '%5' THEN 'a' ELSE 'k' || job_id END,
       CASE WHEN job_id LIKE '%5' THEN 7 ELSE length(job_id) * 5 END, '{{}}',
       CASE WHEN job_id IN ('job-5', 'job-31', 'job-1001') THEN 'RETRYING' WHEN job_id LIKE '%5' OR job_id LIKE '%17'
            THEN 'NEW' WHEN job_id LIKE '%001' THEN 'DEAD' ELSE 'SENT' END,
       CASE WHEN job_id IN ('job-5', 'job-31', 'job-1001') THEN now() + interval '1 hour' END, created_at,
       CASE WHEN job_id NOT IN ('job-5', 'job-31', 'job-1001') AND job_id NOT LIKE '%5' AND job_id NOT LIKE '%17'
             AND job_id NOT LIKE '%001' THEN created_at END
  FROM jobs ORDER BY job_id = 'job-5' DESC;
INSERT INTO queue_executions (tenant_id, id, message_id, queue_name, status, started_at)
SELECT tenant_id, job_id, 'm-' || job_id, 'orders', 'success', created_at FROM jobs;
ANALYZE;
"""
_LOG_PLANS: Final = """
LOAD 'auto_explain';
SET auto_explain.log_min_duration = 0;
SET auto_explain.log_analyze = off;
SET client_min_messages = log;
"""


class Plans(PostgresStore):
    """A store that collects the plan of every statement."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.collected: list[str] = []

    async def connect(self, *arguments: Any, **options: Any) -> asyncpg.Connection:
        connection = await super().connect(*arguments, **options)
        try:
            await connection.execute(_LOG_PLANS)
        except BaseException:
            # For example cancelled because the store is closed.
            connection.terminate()
            raise
        return connection

    async def _connect_reader(self) -> asyncpg.Connection:
        connection = await super()._connect_reader()
        connection.add_log_listener(self._on_log)
        return connection

    async def _acquire(self) -> Connection:
        connection = await super()._acquire()
        connection.add_log_listener(self._on_log)
        return connection

    async def _release(self, connection: Connection) -> None:
        # The pool warns of connections that still have listeners.
        connection.remove_log_listener(self._on_log)
        await super()._release(connection)

    def _on_log(self, _: Any, message: Any) -> None:
        self.collected.append(message.message)

    def find_scans(self) -> list[str]:
        """Plans with a sequential scan of a growing table."""
        scan = re.compile(rf"Seq Scan on ({'|'.join(GROWING)})\b")
        return [plan for plan in self.collected if scan.search(plan)]


@pytest.fixture(scope="module")
def filled(postgres_server: PostgresServer, make_postgres_database: Callable[[], str]) -> str:
    """One ledger for all plans, large enough that a sequential scan is never cheaper."""
    url = make_postgres_database()
    postgres_server.execute(_FILL, url.rpartition("/")[2])
    return url


@pytest.fixture
async def ledger(filled: str) -> AsyncIterator[PostgresLedger]:
    ledger = PostgresLedger(Plans(filled))
    await ledger.store.execute("SELECT 1")
    yield ledger
    await ledger.close()


KEY: Final = JobKey("default", "default", "job-777")
NOW: Final = datetime.now(UTC)
PRIMARY_KEYS: Final = {"job": "jobs_pk", "approval": "approvals_pk", "dead letter": "dlq_items_pk"}

READS: Final[dict[str, Callable[[PostgresLedger], Awaitable[Any]]]] = {
    "the first page": lambda ledger: ledger.queries.jobs(JobFilter(), 50),
    "the first page of a tenant": lambda ledger: ledger.queries.jobs(JobFilter(tenant_id="acme"), 50),
    "by type": lambda ledger: ledger.queries.jobs(JobFilter(tenant_id="default", job_type="type-7"), 50),
    "by state": lambda ledger: ledger.queries.jobs(
        JobFilter(tenant_id="default", states=frozenset({State.SUSPENDED, State.FAILED})), 50
    ),
    "by trace": lambda ledger: ledger.queries.jobs(JobFilter(tenant_id="default", trace_id="trace-101"), 50),
    "by key": lambda ledger: ledger.queries.jobs(JobFilter(tenant_id="default", idempotency_key="key-110"), 50),
    "by time": lambda ledger: ledger.queries.jobs(
        JobFilter(tenant_id="default", since=NOW - timedelta(days=9), until=NOW - timedelta(days=8)), 50
    ),
    "by error": lambda ledger: ledger.queries.jobs(JobFilter(tenant_id="default", error="broken"), 50),
    "one job": lambda ledger: ledger.queries.job("job-777"),
    "jobs by id prefix": lambda ledger: ledger.queries.find_by_prefix("job", "job-777", None, None, 11),
    "approvals by id prefix": lambda ledger: ledger.queries.find_by_prefix("approval", "a-job-12", ["acme"], None, 11),
    "dead letters by id prefix": lambda ledger: ledger.queries.find_by_prefix("dead letter", "d-job-1", None, "q", 11),
    "one job's events": lambda ledger: ledger.queries.events(KEY),
    "one job's dead letter": lambda ledger: ledger.queries.dead_letter_of(KEY),
    "one job's steps": lambda ledger: ledger.queries.steps(KEY),
    "one job's effects": lambda ledger: ledger.queries.effects(KEY),
    "open jobs": lambda ledger: _first(ledger.recovery.open_jobs("default", 100)),
    "jobs that are still open": lambda ledger: ledger.recovery.still_open([KEY, JobKey("acme", "default", "job-50")]),
    "histories to restore": lambda ledger: ledger.recovery.histories([KEY]),
    "submission keys": lambda ledger: _first(ledger.recovery.submission_keys("default", 3_600_000, 100)),
    "dead letters to confirm": lambda ledger: ledger.projection.unacked_dead_letters("default", 100),
    "acknowledging dead letters": lambda ledger: ledger.projection.ack_dead_letters(
        [RecordedDeadLetter(KEY, "d-job-777")]
    ),
    "the position": lambda ledger: ledger.projection.position("default"),
    "acquiring a feed": lambda ledger: ledger.projection.acquire("default", "me", 1_000),
    "releasing a feed": lambda ledger: ledger.projection.release("default", "me"),
    "entries after a fork": lambda ledger: ledger.projection.already_written(
        "default", [FeedEntry("00000007-0", "n", [])]
    ),
    "whether jobs are recorded": lambda ledger: ledger.projection.wait_recorded([KEY], 1_000),
    "one effect": lambda ledger: ledger.effects.get([("default", "effect-job-777")]),
    "steps of a job": lambda ledger: ledger.effects.steps([KEY]),
    "approvals": lambda ledger: ledger.queries.approvals(ApprovalFilter()),
    "open approvals of a tenant": lambda ledger: ledger.queries.approvals(
        ApprovalFilter(tenants=["default"], statuses=frozenset({ApprovalStatus.REQUESTED}))
    ),
    "approvals of a job": lambda ledger: ledger.queries.approvals(ApprovalFilter(tenants=["default"], job_id="job-12")),
    "one approval": lambda ledger: ledger.queries.approval(None, "a-job-12"),
    "dead letters": lambda ledger: ledger.queries.dead_letters(DeadLetterFilter()),
    "dead letters by fingerprint": lambda ledger: ledger.queries.dead_letters(
        DeadLetterFilter(tenants=["acme"], fingerprint="f-7", text="e")
    ),
    "one dead letter": lambda ledger: ledger.queries.dead_letter(None, "d-job-1000"),
    "the audit log": lambda ledger: ledger.queries.audit_log(AuditFilter(actor="bob")),
    "undelivered approvals": lambda ledger: ledger.operators.undelivered_approvals(10),
    "overdue approvals": lambda ledger: ledger.operators.expire_approvals(10),
    "unsubmitted replays": lambda ledger: ledger.operators.unsubmitted_replays(10),
    "lanes of the outbox": lambda ledger: ledger.outbox.acquire_lanes("me", ["kafka"], 64, 60_000),
    "due events": lambda ledger: _publish_due(ledger),
    "the next retry": lambda ledger: ledger.outbox.next_due_ms(["kafka"], dead_blocks=True),
    "destinations with a backlog": lambda ledger: ledger.outbox.destinations(),
    "the backlog of the outbox": lambda ledger: ledger.outbox.backlog(),
    "events of the outbox": lambda ledger: ledger.outbox.find(None, limit=50),
    "dead outbox events of a tenant": lambda ledger: ledger.outbox.find(["acme"], status=OutboxStatus.DEAD),
    "one event": lambda ledger: ledger.outbox.get("default", "job-17"),
    "retrying events": lambda ledger: ledger.outbox.retry_events(None, ["job-9001"], "ann", ""),
    "pruning sent events": lambda ledger: ledger.outbox.prune(40 * 86_400_000, 10),
    "executions": lambda ledger: ledger.triggers.executions(["default"], limit=10),
    "executions of a queue": lambda ledger: ledger.triggers.executions(["default"], queue_name="orders", limit=10),
    "executions of one message": lambda ledger: ledger.triggers.executions(["acme", "default"], message_id="m-job-17"),
}


async def _publish_due(ledger: PostgresLedger) -> None:
    outbox = ledger.outbox
    lanes = await outbox.acquire_lanes("me", ["kafka"], 64, 60_000)
    events = await outbox.due_events("me", lanes, ["kafka"], 100, dead_blocks=True)
    assert events
    results = [
        PublishResult(tenant_id=event.tenant_id, id=event.id, status=OutboxStatus.SENT, attempt_count=1)
        for event in events[:3]
    ]
    assert await outbox.record_results("me", lanes, results)


async def test_operator_writes_scan_no_table(ledger: PostgresLedger) -> None:
    operators = ledger.operators
    row = await operators.vote(None, "a-job-102", actor="bob", approve=True, reason="")
    await operators.mark_delivered([row])
    await operators.withdraw_approval("default", "a-job-202", "void")
    key = ReplayKey("k", "ab", 60_000)
    reserve = partial(operators.reserve_replay, None, "d-job-60", actor="ann", reason="", payload=None, again=True)
    replay = await reserve(key=key)
    assert (await reserve(key=key)).duplicate
    await operators.mark_submitted([replay])
    refused = await reserve()
    await operators.cancel_replay(refused, actor="ann", reason="refused")
    await operators.request_discard(None, "d-job-30", actor="ann", reason="")
    await operators.confirm_discard(None, "d-job-30", actor="bob")
    feed, writer = Feed("a"), FeedWriter(ledger, "approvals")
    meta = msgspec.json.encode(Meta(approval_request=ApprovalRequest("a-new", "h"))).decode()
    await writer.write(feed.entry(feed.created("held", hold=True, meta=meta)))
    await writer.write(feed.entry(feed.event("held", State.WAITING_APPROVAL, State.CANCELLED, data={"actor": "ann"})))
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Update on approvals" in plan for plan in plans.collected)
    assert any("Update on dlq_items" in plan for plan in plans.collected)
    assert plans.find_scans() == [], "\n".join(plans.find_scans())


@pytest.mark.parametrize("name", READS)
async def test_queries_scan_no_table(ledger: PostgresLedger, name: str) -> None:
    await READS[name](ledger)
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Scan" in plan or "Update on" in plan for plan in plans.collected), plans.collected
    assert plans.find_scans() == [], "\n".join(plans.find_scans())


async def test_projection_scans_no_table(ledger: PostgresLedger) -> None:
    feed, writer = Feed("p"), FeedWriter(ledger, "plans")
    names = [f"new-{number}" for number in range(300)]
    await writer.write(*(feed.entry(feed.created(name)) for name in names))
    await writer.write(*(feed.entry(feed.claimed(name)) for name in names))
    await writer.write(*(feed.entry(feed.succeeded(name)) for name in names))
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Update on jobs" in plan for plan in plans.collected)
    assert any("Update on feed_positions" in plan for plan in plans.collected)
    assert plans.find_scans() == [], "\n".join(plans.find_scans())


async def test_effects_scan_no_table(ledger: PostgresLedger) -> None:
    reservation = Reservation(
        tenant_id="default",
        key="one more",
        function="f",
        fingerprint="",
        token="t",
        queue="default",
        job_id="job-777",
        attempt=1,
        worker="w",
    )
    await ledger.effects.reserve([reservation])
    await ledger.effects.conclude(
        [EffectOutcome(tenant_id="default", key="one more", token="t", state=EffectState.DONE, value=b"1")]
    )
    await ledger.effects.record_steps([Step(key=KEY, position=2, name="s", result=b"1", attempt=1)])
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("idempotency_keys" in plan for plan in plans.collected)
    assert plans.find_scans() == [], "\n".join(plans.find_scans())


async def test_pruning_scans_no_table(ledger: PostgresLedger) -> None:
    assert await ledger.prune(30 * 86_400_000, 1_000) > 500
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Delete on job_events" in plan for plan in plans.collected)
    assert plans.find_scans() == [], "\n".join(plans.find_scans())


async def test_a_prune_batch_reads_a_bounded_number_of_jobs(ledger: PostgresLedger) -> None:
    """The cost does not depend on the number of expired jobs; otherwise a backlog would slow down each batch."""
    beginning, keep, batch = datetime(1970, 1, 1, tzinfo=UTC), timedelta(days=30), 100
    statement = PRUNE_JOBS.format(jobs=batch, events=3 * batch)

    async def explain(connection: Connection) -> Any:
        return await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", "default", keep, beginning, "")

    (plan,) = msgspec.json.decode(await ledger.store.transact(explain))
    nodes = list(_nodes(plan["Plan"]))
    read = sum(node["Actual Rows"] * node["Actual Loops"] for node in nodes if node.get("Relation Name") == "jobs")
    assert batch <= read <= 6 * batch, msgspec.json.encode(plan).decode()


@pytest.mark.parametrize(("noun", "index"), PRIMARY_KEYS.items())
async def test_a_prefix_search_reads_a_range_of_the_primary_key(ledger: PostgresLedger, noun: str, index: str) -> None:
    await ledger.queries.find_by_prefix(noun, f"{noun[0]}-job-7", ["default"], None, 11)
    plans = ledger.store
    assert isinstance(plans, Plans)
    (plan,) = [plan for plan in plans.collected if "DISTINCT" in plan]
    assert re.search(rf"Index (Only )?Scan using {index}", plan), plan
    column = KINDS[noun].id
    assert re.search(rf"Index Cond: .*tenant_id = .* AND \({column} >= .* AND \({column} < ", plan), plan
    assert "Sort" not in plan, plan


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


async def test_a_sequential_scan_is_detected(ledger: PostgresLedger) -> None:
    await ledger.store.fetch("SELECT count(*) FROM jobs WHERE payload = 'x'")
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert plans.find_scans()


async def _first(pages: AsyncIterator[list[Any]]) -> list[Any]:
    async for page in pages:
        return page
    return []
