"""A run's schema in the ledger's database, and checks of the user's permissions there.

A ledger belongs to one namespace: in the deployment's own tables, a run and the deployment's projectors and reconcilers
would disturb each other. So a run has separate tables, in a schema that is the only search path of its connections. The
deployment's own tables are only read.
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
    # Last, so that it overrides options in the URL.
    query["options"] = f"{query.get('options', '')} -c search_path={schema}".strip()
    return urlunsplit(parts._replace(query=urlencode(query)))


class PostgresSandbox:
    """Access to the ledger's database for a run, with the same timeouts as a worker."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self._url = url
        self._options = options or StoreOptions()
        self._store = PostgresStore(url, self._options)

    async def close(self) -> None:
        await self._store.close()

    async def missing_permission(self) -> str:
        """The permission missing to create the schema, with the statement that grants it; or an empty string."""
        (found,) = await self._store.fetch(_MAY_CREATE)
        if found["allowed"]:
            return ""
        return (
            f"user {found['role']} may not create a schema in database {found['base']}, so the ledger was not "
            f'checked; run GRANT CREATE ON DATABASE "{found["base"]}" TO "{found["role"]}", '
            "or set another user in HOLDFAST_LEDGER"
        )

    async def make(self, name: str) -> str:
        """Create the run's schema with the ledger's tables. Returns its URL."""
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
        """Drop the schema with its contents. Does nothing if it does not exist."""
        # Checked first: a read-only database cannot have the schema, and would refuse the statement.
        if await self._store.fetch(_THERE, schema):
            await self._store.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')

    async def stale_schemas(self, now_ms: int) -> list[str]:
        """Schemas of runs that were killed before they removed everything."""
        return [row["name"] for row in await self._store.fetch(_SCHEMAS) if is_stale(row["name"], now_ms)]

    async def table_problem(self) -> str:
        """A problem with the deployment's tables, or the user's rights on them; empty if there is none."""
        try:
            found = await status(self._store)
        except HoldfastError as exc:
            return str(exc)
        if found.version is None:
            return "the database has no ledger; run `holdfast migrate up`"
        if found.version != found.required:
            return (
                f"tables have version {found.version}, this release needs {found.required}; run `holdfast migrate up`"
            )
        missing = await self._store.fetch(_MISSING, sorted(jobs.metadata.tables))
        if not missing:
            return ""
        first = missing[0]
        more = f", and {len(missing) - 1} more rights" if len(missing) > 1 else ""
        return (
            f"user {first['role']} may not {first['kind']} on table {first['name']}{more}; run "
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(sorted({row['name'] for row in missing}))} "
            f'TO "{first["role"]}"'
        )
