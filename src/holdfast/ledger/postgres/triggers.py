"""What triggers need of a PostgreSQL ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.ledger.acts.triggers import EXECUTION_COLUMNS, SqlTriggerBook, execution_row
from holdfast.ledger.postgres.acts import PostgresActs
from holdfast.ledger.trigger_book import Execution

_RECORD: Final = f"""
INSERT INTO queue_executions ({", ".join(EXECUTION_COLUMNS)})
SELECT tenant_id, id, message_id, queue_name, event_name, status,
       to_timestamp(started_at / 1000.0), to_timestamp(completed_at / 1000.0), duration_ms,
       agent_run_id, error_message, retry_count, trace_id
  FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bigint[],
              $9::int[], $10::text[], $11::text[], $12::int[], $13::text[])
       AS row ({", ".join(EXECUTION_COLUMNS)})
ON CONFLICT DO NOTHING"""  # noqa: S608 - constants


class PostgresTriggers(PostgresActs, SqlTriggerBook):
    """Times of presence are the server's."""

    async def record(self, executions: Sequence[Execution]) -> None:
        if executions:
            columns = zip(*map(execution_row, executions), strict=True)
            await self._store.execute(_RECORD, *map(list, columns))
