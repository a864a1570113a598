"""Hot queries use an index on PostgreSQL: the plans of the very statements that the code runs, told by auto_explain."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
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
from holdfast.ledger.port.operators import ApprovalStatus
from holdfast.ledger.postgres.ledger import PostgresLedger
from holdfast.ledger.postgres.retention import PRUNE_JOBS
from holdfast.ledger.postgres.store import Connection, PostgresStore
from holdfast.ledger.queries.job_list import JobFilter
from holdfast.ledger.queries.operator_filters import ApprovalFilter, AuditFilter, DeadLetterFilter
from holdfast.ledger.queries.prefixes import KINDS
from holdfast.verification.chaos.servers import PostgresServer
from tests.ledger.projection_rig import Feed, Scribe

pytestmark = pytest.mark.postgres

JOBS: Final = 40_000
#: Small tables may be read whole; these are the ones that grow.
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
_TELL: Final = """
LOAD 'auto_explain';
SET auto_explain.log_min_duration = 0;
SET auto_explain.log_analyze = off;
SET client_min_messages = log;
"""


class Plans(PostgresStore):
    """A store whose connections tell the plan of everything that they run."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.told: list[str] = []

    async def connect(self, *arguments: Any, **options: Any) -> asyncpg.Connection:
        connection = await super().connect(*arguments, **options)
        try:
            await connection.execute(_TELL)
        except BaseException:
            # Cancelled, say, because the store is closed.
            connection.terminate()
            raise
        return connection

    async def _connect_reader(self) -> asyncpg.Connection:
        connection = await super()._connect_reader()
        connection.add_log_listener(self._hear)
        return connection

    async def _acquire(self) -> Connection:
        connection = await super()._acquire()
        connection.add_log_listener(self._hear)
        return connection

    async def _release(self, connection: Connection) -> None:
        # The pool wants its connections back without listeners.
        connection.remove_log_listener(self._hear)
        await super()._release(connection)

    def _hear(self, _: Any, message: Any) -> None:
        self.told.append(message.message)

    def whole(self) -> list[str]:
        """Plans that read a growing table from end to end."""
        scan = re.compile(rf"Seq Scan on ({'|'.join(GROWING)})\b")
        return [plan for plan in self.told if scan.search(plan)]


@pytest.fixture(scope="module")
def filled(postgres_server: PostgresServer, make_postgres_database: Callable[[], str]) -> str:
    """One ledger for all plans: large enough that reading a table whole does not pay."""
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
    "the first page": lambda at: at.queries.jobs(JobFilter(), 50),
    "the first page of a tenant": lambda at: at.queries.jobs(JobFilter(tenant_id="acme"), 50),
    "by type": lambda at: at.queries.jobs(JobFilter(tenant_id="default", job_type="type-7"), 50),
    "by state": lambda at: at.queries.jobs(
        JobFilter(tenant_id="default", states=frozenset({State.SUSPENDED, State.FAILED})), 50
    ),
    "by trace": lambda at: at.queries.jobs(JobFilter(tenant_id="default", trace_id="trace-101"), 50),
    "by key": lambda at: at.queries.jobs(JobFilter(tenant_id="default", idempotency_key="key-110"), 50),
    "by time": lambda at: at.queries.jobs(
        JobFilter(tenant_id="default", since=NOW - timedelta(days=9), until=NOW - timedelta(days=8)), 50
    ),
    "by error": lambda at: at.queries.jobs(JobFilter(tenant_id="default", error="broken"), 50),
    "one job": lambda at: at.queries.job("job-777"),
    "jobs by the beginning of an id": lambda at: at.queries.by_prefix("job", "job-777", None, None, 11),
    "approvals by the beginning of an id": lambda at: at.queries.by_prefix("approval", "a-job-12", ["acme"], None, 11),
    "dead letters by the beginning of an id": lambda at: at.queries.by_prefix("dead letter", "d-job-1", None, "q", 11),
    "one job's story": lambda at: at.queries.events(KEY),
    "one job's dead letter": lambda at: at.queries.dead_letter_of(KEY),
    "one job's steps": lambda at: at.queries.steps(KEY),
    "one job's effects": lambda at: at.queries.effects(KEY),
    "open jobs": lambda at: _first(at.recovery.open_jobs("default", 100)),
    "which are still open": lambda at: at.recovery.still_open([KEY, JobKey("acme", "default", "job-50")]),
    "stories to restore": lambda at: at.recovery.histories([KEY]),
    "submission keys": lambda at: _first(at.recovery.submission_keys("default", 3_600_000, 100)),
    "dead letters to tell of": lambda at: at.projection.unacked_dead_letters("default", 100),
    "dead letters that are told of": lambda at: at.projection.ack_dead_letters([RecordedDeadLetter(KEY, "d-job-777")]),
    "the position": lambda at: at.projection.position("default"),
    "taking a feed": lambda at: at.projection.acquire("default", "me", 1_000),
    "releasing a feed": lambda at: at.projection.release("default", "me"),
    "entries after a fork": lambda at: at.projection.already_written("default", [FeedEntry("00000007-0", "n", [])]),
    "whether jobs are there": lambda at: at.projection.wait_recorded([KEY], 1_000),
    "a key's row": lambda at: at.effects.get([("default", "effect-job-777")]),
    "steps of a job": lambda at: at.effects.steps([KEY]),
    "approvals": lambda at: at.queries.approvals(ApprovalFilter()),
    "open approvals of a tenant": lambda at: at.queries.approvals(
        ApprovalFilter(tenants=["default"], statuses=frozenset({ApprovalStatus.REQUESTED}))
    ),
    "approvals of a job": lambda at: at.queries.approvals(ApprovalFilter(tenants=["default"], job_id="job-12")),
    "one approval": lambda at: at.queries.approval(None, "a-job-12"),
    "dead letters": lambda at: at.queries.dead_letters(DeadLetterFilter()),
    "dead letters by kind": lambda at: at.queries.dead_letters(
        DeadLetterFilter(tenants=["acme"], fingerprint="f-7", text="e")
    ),
    "one dead letter": lambda at: at.queries.dead_letter(None, "d-job-1000"),
    "the operators' log": lambda at: at.queries.audit_log(AuditFilter(actor="bob")),
    "approvals to tell of": lambda at: at.operators.undelivered_approvals(10),
    "approvals that nobody answered": lambda at: at.operators.expire_approvals(10),
    "replays to hand in": lambda at: at.operators.unsubmitted_replays(10),
    "lanes of the outbox": lambda at: at.outbox.acquire_lanes("me", ["kafka"], 64, 60_000),
    "due events": lambda at: _due(at),
    "the next retry": lambda at: at.outbox.next_due_ms(["kafka"], dead_blocks=True),
    "destinations that wait": lambda at: at.outbox.destinations(),
    "what waits": lambda at: at.outbox.backlog(),
    "events of the outbox": lambda at: at.outbox.find(None, limit=50),
    "dead events of a tenant": lambda at: at.outbox.find(["acme"], status=OutboxStatus.DEAD),
    "one event": lambda at: at.outbox.get("default", "job-17"),
    "reviving": lambda at: at.outbox.retry_events(None, ["job-9001"], "ann", ""),
    "sent events to drop": lambda at: at.outbox.prune(40 * 86_400_000, 10),
    "what became of messages": lambda at: at.triggers.executions(["default"], limit=10),
    "what became of a queue's": lambda at: at.triggers.executions(["default"], queue_name="orders", limit=10),
    "what became of one message": lambda at: at.triggers.executions(["acme", "default"], message_id="m-job-17"),
}


async def _due(ledger: PostgresLedger) -> None:
    outbox = ledger.outbox
    lanes = await outbox.acquire_lanes("me", ["kafka"], 64, 60_000)
    events = await outbox.due_events("me", lanes, ["kafka"], 100, dead_blocks=True)
    assert events
    marks = [
        PublishResult(tenant_id=event.tenant_id, id=event.id, status=OutboxStatus.SENT, attempt_count=1)
        for event in events[:3]
    ]
    assert await outbox.record_results("me", lanes, marks)


async def test_people_read_no_table_whole(ledger: PostgresLedger) -> None:
    people = ledger.operators
    row = await people.vote(None, "a-job-102", actor="bob", approve=True, reason="")
    await people.mark_delivered([row])
    await people.withdraw_approval("default", "a-job-202", "void")
    replay = await people.reserve_replay(None, "d-job-1000", actor="ann", reason="", payload=None)
    await people.mark_submitted([replay])
    await people.request_discard(None, "d-job-30", actor="ann", reason="")
    await people.confirm_discard(None, "d-job-30", actor="bob")
    feed, scribe = Feed("a"), Scribe(ledger, "asking")
    meta = msgspec.json.encode(Meta(approval_request=ApprovalRequest("a-new", "h"))).decode()
    await scribe.write(feed.entry(feed.created("asks", hold=True, meta=meta)))
    await scribe.write(feed.entry(feed.event("asks", State.WAITING_APPROVAL, State.CANCELLED, data={"actor": "ann"})))
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Update on approvals" in plan for plan in plans.told)
    assert any("Update on dlq_items" in plan for plan in plans.told)
    assert plans.whole() == [], "\n".join(plans.whole())


@pytest.mark.parametrize("name", READS)
async def test_looking_reads_no_table_whole(ledger: PostgresLedger, name: str) -> None:
    await READS[name](ledger)
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Scan" in plan or "Update on" in plan for plan in plans.told), plans.told
    assert plans.whole() == [], "\n".join(plans.whole())


async def test_projecting_reads_no_table_whole(ledger: PostgresLedger) -> None:
    feed, scribe = Feed("p"), Scribe(ledger, "plans")
    names = [f"new-{number}" for number in range(300)]
    await scribe.write(*(feed.entry(feed.created(name)) for name in names))
    await scribe.write(*(feed.entry(feed.claimed(name)) for name in names))
    await scribe.write(*(feed.entry(feed.succeeded(name)) for name in names))
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Update on jobs" in plan for plan in plans.told)
    assert any("Update on feed_positions" in plan for plan in plans.told)
    assert plans.whole() == [], "\n".join(plans.whole())


async def test_effects_read_no_table_whole(ledger: PostgresLedger) -> None:
    wish = Reservation(
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
    await ledger.effects.reserve([wish])
    await ledger.effects.conclude(
        [EffectOutcome(tenant_id="default", key="one more", token="t", state=EffectState.DONE, value=b"1")]
    )
    await ledger.effects.record_steps([Step(key=KEY, position=2, name="s", result=b"1", attempt=1)])
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("idempotency_keys" in plan for plan in plans.told)
    assert plans.whole() == [], "\n".join(plans.whole())


async def test_pruning_reads_no_table_whole(ledger: PostgresLedger) -> None:
    assert await ledger.prune(30 * 86_400_000, 1_000) > 500
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert any("Delete on job_events" in plan for plan in plans.told)
    assert plans.whole() == [], "\n".join(plans.whole())


async def test_a_batch_of_retention_looks_at_few_jobs(ledger: PostgresLedger) -> None:
    """However many are old: it would take longer with each day of a backlog else, and never be done with it."""
    beginning, keep, batch = datetime(1970, 1, 1, tzinfo=UTC), timedelta(days=30), 100
    statement = PRUNE_JOBS.format(jobs=batch, events=3 * batch)

    async def explain(connection: Connection) -> Any:
        return await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", "default", keep, beginning, "")

    (plan,) = msgspec.json.decode(await ledger.store.transact(explain))
    nodes = list(_nodes(plan["Plan"]))
    read = sum(node["Actual Rows"] * node["Actual Loops"] for node in nodes if node.get("Relation Name") == "jobs")
    assert batch <= read <= 6 * batch, msgspec.json.encode(plan).decode()


@pytest.mark.parametrize(("noun", "index"), PRIMARY_KEYS.items())
async def test_a_prefix_is_a_range_of_the_primary_key(ledger: PostgresLedger, noun: str, index: str) -> None:
    await ledger.queries.by_prefix(noun, f"{noun[0]}-job-7", ["default"], None, 11)
    plans = ledger.store
    assert isinstance(plans, Plans)
    (plan,) = [plan for plan in plans.told if "DISTINCT" in plan]
    assert re.search(rf"Index (Only )?Scan using {index}", plan), plan
    column = KINDS[noun].id
    assert re.search(rf"Index Cond: .*tenant_id = .* AND \({column} >= .* AND \({column} < ", plan), plan
    assert "Sort" not in plan, plan


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


async def test_a_table_that_is_read_whole_is_noticed(ledger: PostgresLedger) -> None:
    await ledger.store.fetch("SELECT count(*) FROM jobs WHERE payload = 'x'")
    plans = ledger.store
    assert isinstance(plans, Plans)
    assert plans.whole()


async def _first(pages: AsyncIterator[list[Any]]) -> list[Any]:
    async for page in pages:
        return page
    return []
