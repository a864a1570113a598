"""A place for a run in the ledger's database, and what its user may do there.

A ledger belongs to one namespace: a run in the deployment's own tables would be disturbed by its projectors and
reconcilers, and disturb them. So a run has tables of its own: in PostgreSQL a schema that every connection of the run
has as its only search path. The deployment's own tables are only looked at.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from holdfast.errors import HoldfastError
from holdfast.ledger.migrate import status, up
from holdfast.ledger.postgres.store import PostgresStore, StoreOptions
from holdfast.schema import jobs
from holdfast.verification.acceptance.sandbox import is_stale, schema_of

_MAY_CREATE: Final = """
SELECT current_user AS role, current_database() AS base,
       has_database_privilege(current_database(), 'CREATE') AS allowed
"""
_SCHEMAS: Final = "SELECT nspname AS name FROM pg_namespace WHERE pg_has_role(nspowner, 'MEMBER')"
_THERE: Final = "SELECT 1 FROM pg_namespace WHERE nspname = $1"
_MISSING: Final = """
SELECT wanted.name AS name, wanted.kind AS kind, current_user AS role
FROM unnest($1::text[]) AS tables (name), LATERAL (
    SELECT tables.name, kind FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS kinds (kind)
) AS wanted
WHERE to_regclass(wanted.name) IS NOT NULL AND NOT has_table_privilege(to_regclass(wanted.name), wanted.kind)
ORDER BY 1, 2
"""


def with_schema(url: str, schema: str) -> str:
    """The ledger's URL with this schema as the only search path."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    # Last, so that it goes before what the URL itself may say.
    query["options"] = f"{query.get('options', '')} -c search_path={schema}".strip()
    return urlunsplit(parts._replace(query=urlencode(query)))


class PostgresSandbox:
    """A run's hand on the ledger's database. A server that is silent counts as down here, as it does for a worker."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self._url = url
        self._options = options or StoreOptions()
        self._store = PostgresStore(url, self._options)

    async def close(self) -> None:
        await self._store.close()

    async def missing_permission(self) -> str:
        """What keeps a run from making its schema, and the statement that allows it; empty if nothing does."""
        (found,) = await self._store.fetch(_MAY_CREATE)
        if found["allowed"]:
            return ""
        return (
            f"user {found['role']} may not create a schema in database {found['base']}, so the ledger could not be "
            f'checked; allow it for the check: GRANT CREATE ON DATABASE "{found["base"]}" TO "{found["role"]}"; '
            "or name a user in HOLDFAST_LEDGER who may"
        )

    async def make(self, name: str) -> str:
        """The run's own schema with the ledger's tables; the URL that leads there."""
        schema = schema_of(name)
        await self._store.execute(f'CREATE SCHEMA "{schema}"')
        url = with_schema(self._url, schema)
        store = PostgresStore(url, self._options)
        try:
            await up(store)
        finally:
            await store.close()
        return url

    async def remove(self, schema: str) -> None:
        """Drop it with all that is in it; nothing happens if it is not there."""
        # Asked first: a database that lets nobody write has nothing of ours, and would refuse the statement.
        if await self._store.fetch(_THERE, schema):
            await self._store.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')

    async def stale_schemas(self, now_ms: int) -> list[str]:
        """Schemas of runs that were killed before they had removed everything."""
        return [row["name"] for row in await self._store.fetch(_SCHEMAS) if is_stale(row["name"], now_ms)]

    async def table_problem(self) -> str:
        """What is wrong with the deployment's own tables, or its user's rights on them; empty if nothing is."""
        try:
            found = await status(self._store)
        except HoldfastError as exc:
            return str(exc)
        if found.version is None:
            return "the database has no ledger yet; run `holdfast migrate up`"
        if found.version != found.wanted:
            return f"its tables have version {found.version}, this release wants {found.wanted}; `holdfast migrate up`"
        missing = await self._store.fetch(_MISSING, sorted(jobs.metadata.tables))
        if not missing:
            return ""
        first = missing[0]
        more = f", and {len(missing) - 1} more rights" if len(missing) > 1 else ""
        return (
            f"user {first['role']} may not {first['kind']} on table {first['name']}{more}; allow it: "
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(sorted({row['name'] for row in missing}))} "
            f'TO "{first["role"]}"'
        )
