"""The SQL tables of the ledger (L6): one definition for PostgreSQL and SQLite."""

from holdfast.schema.jobs import anomalies as anomalies
from holdfast.schema.jobs import dlq_items as dlq_items
from holdfast.schema.jobs import feed_entries as feed_entries
from holdfast.schema.jobs import feed_positions as feed_positions
from holdfast.schema.jobs import idempotency_keys as idempotency_keys
from holdfast.schema.jobs import job_events as job_events
from holdfast.schema.jobs import job_steps as job_steps
from holdfast.schema.jobs import jobs as jobs
from holdfast.schema.jobs import ledger_owner as ledger_owner
from holdfast.schema.messages import outbox_events as outbox_events
from holdfast.schema.messages import outbox_lanes as outbox_lanes
from holdfast.schema.messages import queue_executions as queue_executions
from holdfast.schema.messages import trigger_pauses as trigger_pauses
from holdfast.schema.messages import trigger_presences as trigger_presences
from holdfast.schema.operators import alerts as alerts
from holdfast.schema.operators import announced_tasks as announced_tasks
from holdfast.schema.operators import approval_votes as approval_votes
from holdfast.schema.operators import approvals as approvals
from holdfast.schema.operators import operator_events as operator_events
from holdfast.schema.operators import tokens as tokens
