"""Id prefixes: matches, their order, and the SQLite index that is used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.ledger.queries.jobs import Queries
from holdfast.ledger.queries.prefixes import KINDS, matching_ids
from holdfast.ledger.sqlite.embedded import EmbeddedLedger
from holdfast.ledger.sqlite.ledger import SqliteLedger
from tests.ledger.conftest import AnyLedger
from tests.ledger.histories import History, S, open_engine, write

ID: Final = "01a1e55a882077db"


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[AsyncEngine]:
    async with open_engine(ledger_url) as engine:
        yield engine


def history(job_id: str, **more: Any) -> History:
    return History(S.QUEUED, job_id=job_id, **more)


async def test_only_ids_with_the_prefix_match(ledger: AsyncEngine) -> None:
    await write(
        ledger,
        history(ID),
        history(ID + "0", queue="other"),
        history(ID + "\U0001f600"),
        history(ID, queue="other"),
        history(ID[:-1] + "c"),
        history(ID.upper()),
        history("x" + ID),
        history(ID + "1", tenant_id="acme"),
    )
    queries = Queries(ledger)

    async def ids(prefix: str, tenants: list[str] | None = None, queue: str | None = None, limit: int = 9) -> list[str]:
        return [match.id for match in await queries.find_by_prefix("job", prefix, tenants, queue, limit)]

    assert await ids(ID) == [ID, ID + "0", ID + "1", ID + "\U0001f600"]
    assert await ids(ID, limit=2) == [ID, ID + "0"]
    assert await ids(ID, ["default"]) == [ID, ID + "0", ID + "\U0001f600"]
    assert await ids(ID, ["acme"]) == [ID + "1"]
    assert await ids(ID, ["unknown"]) == []
    assert await ids(ID, []) == []
    assert await ids(ID, None, "other") == [ID, ID + "0"]
    assert await ids(ID + "0") == [ID + "0"]
    for prefix in ("%" + ID[1:], ID[:-1] + "_", ID + "\0", ID + "\ud800"):
        assert await ids(prefix) == []


PLANS: Final[dict[type, dict[str, str]]] = {
    SqliteLedger: {
        "job": "sqlite_autoindex_jobs_1 (tenant_id=? AND job_id>? AND job_id<?)",
        "approval": "sqlite_autoindex_approvals_1 (tenant_id=? AND approval_id>? AND approval_id<?)",
        "dead letter": "sqlite_autoindex_dlq_items_1 (tenant_id=? AND dlq_id>? AND dlq_id<?)",
    },
    # Job ids of one engine are unique across tenants.
    EmbeddedLedger: {
        "job": "jobs_by_job_id (job_id>? AND job_id<?)",
        "approval": "sqlite_autoindex_approvals_1 (tenant_id=? AND approval_id>? AND approval_id<?)",
        "dead letter": "PRIMARY KEY (tenant_id=? AND dlq_id>? AND dlq_id<?)",
    },
}


@pytest.mark.parametrize("any_ledger", ["sqlite", "embedded"], indirect=True)
async def test_sqlite_reads_a_range_of_the_index(any_ledger: AnyLedger) -> None:
    engine = any_ledger.queries.engine
    for noun, index in PLANS[type(any_ledger)].items():
        statement = matching_ids(KINDS[noun], "default", ID, None, engine.dialect).limit(11)
        sql = str(statement.compile(dialect=engine.dialect, compile_kwargs={"literal_binds": True}))
        async with engine.connect() as connection:
            rows = (await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}")).all()
        plan = " ".join(str(row[-1]) for row in rows)
        assert index in plan
        assert "SCAN" not in plan
        assert "TEMP B-TREE" not in plan
