"""`holdfast effects`: keys that are in doubt, and a person's word on what happened."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.output import emit_json, emit_rows, note, number_of, visible
from holdfast.cli.session import EngineTarget, open_operations
from holdfast.core.codec import decode_json, encode_json
from holdfast.core.job import DEFAULT_TENANT
from holdfast.core.principal import AuditEntry, Permission, Principal
from holdfast.core.states import OPERATOR_PREFIX
from holdfast.engine.port import Engine
from holdfast.errors import InvalidOption, NoLedger, UsageError
from holdfast.extras import require_drivers
from holdfast.ledger.port.effects import EffectOutcome, EffectState
from holdfast.ledger.port.ledger import Ledger
from holdfast.operations.effects import MANY, resume_waiting, with_lost_holders

if TYPE_CHECKING:
    from holdfast.ledger.queries.operators import EffectKeyRow, EffectQueries


effects = typer.Typer(help="Once-only effects: which are in doubt, and how they ended.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The effect's key, as the task gave it.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="The key's tenant.")]
AnyTenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant. Default: all.", show_default=False)
]
OnlyState = Annotated[
    str | None,
    typer.Option("--state", metavar="STATE", help="reserved or in_doubt. Default: both.", show_default=False),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")]
DoneAs = Annotated[
    str | None,
    typer.Option(
        "--done", metavar="JSON", help="It happened; this is its result ('null' if none).", show_default=False
    ),
]
NotDone = Annotated[bool, typer.Option("--not-done", help="It did not happen, and will not: the key is free again.")]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Send the jobs back to work that are suspended for it.")
]
Reason = Annotated[str, typer.Option(help="How you know; kept in the log.")]
Database = Annotated[
    str, typer.Option("--database", metavar="URL", help="postgresql://… or sqlite:///…: a database of your own.")
]


@command(
    effects,
    "list",
    examples=("holdfast effects list --state in_doubt", "holdfast effects list --tenant acme --json"),
)
async def list_effects(
    at: EngineTarget, tenant: AnyTenant = None, state: OnlyState = None, limit: Limit = 100, as_json: AsJson = False
) -> None:
    """Effects that are in doubt or under way, the oldest first."""
    if state is not None and state not in (EffectState.RESERVED, EffectState.IN_DOUBT):
        raise InvalidOption(f"--state must be reserved or in_doubt, not {state}")
    async with _opened(at) as (engine, ledger, person):
        keys = [row for row in await _keyring(ledger).unresolved(tenant, limit=MANY) if person.can_see(row.tenant_id)]
        found = await with_lost_holders(engine, keys)
    rows = [row for row in found if state in (None, row.state)][:limit]
    if as_json:
        emit_json([_document(row) for row in rows])
        return
    columns = ("tenant", "key", "state", "since", "function", "job", "attempt", "why")
    emit_rows(columns, [_line(row) for row in rows], empty="no effect is in doubt or under way")


@command(effects, "show", examples=("holdfast effects show publish:42", "holdfast effects show publish:42 --json"))
async def show(at: EngineTarget, key: Key, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """One key: its state, its result, and whose it is."""
    async with _opened(at) as (engine, ledger, person):
        (row,) = await with_lost_holders(engine, [await _found(ledger, person, tenant, key)])
    if as_json:
        emit_json(_document(row))
        return
    for name, value in _document(row).items():
        if value is not None:
            text = value if isinstance(value, str) else encode_json(value, name).decode()
            print(visible(f"{name}\t{text}"))


@command(
    effects,
    "resolve",
    examples=(
        """holdfast effects resolve publish:42 --done '{"url": "/42"}'""",
        "holdfast effects resolve publish:42 --not-done --reason 'the bank has no such payment'",
    ),
)
async def resolve(
    at: EngineTarget,
    key: Key,
    done: DoneAs = None,
    not_done: NotDone = False,
    resume: Resume = True,
    reason: Reason = "",
    tenant: Tenant = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Say what became of an effect in doubt, after you have looked. The jobs that are suspended for it go on.

    Your word is in the operators' log.

    An effect that is done already keeps its result; with --done the jobs that still wait for it go on.
    """
    if (done is None) == (not not_done):
        raise UsageError("say either --done JSON or --not-done")
    value = None if done is None else _json(done)
    async with _opened(at) as (engine, ledger, person):
        (row,) = await with_lost_holders(engine, [await _found(ledger, person, tenant, key)])
        person.require(Permission.OPERATE)
        was_done = row.state == EffectState.DONE
        if was_done and not_done:
            raise UsageError(
                f"the effect {key!r} is done already; `holdfast effects show {shlex.quote(key)}` has its result, and "
                "with --done jobs that still wait for it go on"
            )
        if row.state == EffectState.RESERVED:
            raise UsageError(
                f"the effect {key!r} is under way in job {row.job_id}; wait for its end, or cancel the job"
            )
        state = None if value is None else EffectState.DONE
        outcome = EffectOutcome(tenant_id=tenant, key=key, token=row.token, state=state, value=value)
        if not was_done:
            await ledger.operators.resolve_effect(outcome, _action(row, person, reason, state, value))
        jobs = await resume_waiting(engine, ledger.queries, row, person) if resume else []
    if as_json:
        emit_json(
            {
                "tenant_id": tenant,
                "key": key,
                "state": None if state is None else state.value,
                "job_id": row.job_id,
                "resumed": bool(jobs),
                "jobs": jobs,
            }
        )
        return
    became = "was done already, and its recorded result stays" if was_done else "is done" if state else "is free again"
    going = f"{number_of(len(jobs), 'job')} sent back to work: {', '.join(jobs)}" if jobs else "no job was resumed"
    note(f"{key} {became}; {going}")


@command(effects, "create-table", examples=("holdfast effects create-table --database postgresql://localhost/shop",))
async def create_table(at: EngineTarget, database: Database, as_json: AsJson = False) -> None:
    """Make the table of keys that `ctx.transaction` needs in a database of your own; harmless to repeat."""
    from sqlalchemy.exc import ArgumentError, DBAPIError
    from sqlalchemy.ext.asyncio import create_async_engine

    from holdfast.effects import create_keys_table

    scheme, _, rest = database.partition("://")
    drivers = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    driver = scheme if scheme in drivers.values() else drivers.get(scheme)
    if driver is None:
        raise UsageError(f"--database: PostgreSQL or SQLite only (postgresql://… or sqlite:///…), not {scheme!r}")
    require_drivers(database)
    try:
        engine = create_async_engine(f"{driver}://{rest}")
    except ArgumentError as exc:
        raise UsageError(f"--database: {exc}") from exc
    try:
        await create_keys_table(engine)
    except (DBAPIError, OSError) as exc:
        raise UsageError(f"the table could not be made: {exc}") from exc
    finally:
        await engine.dispose()
    if as_json:
        emit_json({"table": "idempotency_keys"})
    else:
        note("the table idempotency_keys is there")


@asynccontextmanager
async def _opened(at: EngineTarget) -> AsyncIterator[tuple[Engine, Ledger, Principal]]:
    async with open_operations(at) as (offices, person):
        if offices.ledger is None:
            raise NoLedger("an effect")
        person.require(Permission.READ)
        yield offices.engine, offices.ledger, person


def _keyring(ledger: Ledger) -> EffectQueries:
    from holdfast.ledger.queries.operators import EffectQueries

    return EffectQueries(ledger.queries.engine)


def _action(
    row: EffectKeyRow, person: Principal, reason: str, state: EffectState | None, value: bytes | None
) -> AuditEntry:
    after = {"state": None if state is None else state.value, "job_id": row.job_id}
    return AuditEntry(
        type=f"{OPERATOR_PREFIX}resolve_effect",
        actor=person.name,
        tenant_id=row.tenant_id,
        target="effect",
        target_id=row.key,
        queue=row.queue,
        reason=reason,
        before={"state": row.state, "reason": row.reason},
        after=after if value is None else after | {"value": decode_json(value, "the result")},
    )


async def _found(ledger: Ledger, person: Principal, tenant: str, key: str) -> EffectKeyRow:
    row = await _keyring(ledger).find(tenant, key) if person.can_see(tenant) else None
    if row is None:
        raise UsageError(f"tenant {tenant!r} has no effect under the key {key!r}; see `holdfast effects list`")
    return row


def _json(text: str) -> bytes:
    return encode_json(decode_json(text.encode("utf-8", "replace"), "--done"), "--done")


def _line(row: EffectKeyRow) -> tuple[str, ...]:
    since = row.updated_at.isoformat(timespec="seconds")
    return (
        row.tenant_id, row.key, row.state, since, row.function, row.job_id, str(row.attempt), row.reason or ""
    )  # fmt: skip


def _document(row: EffectKeyRow) -> dict[str, Any]:
    return {
        "tenant_id": row.tenant_id,
        "key": row.key,
        "state": row.state,
        "function": row.function,
        "queue": row.queue,
        "job_id": row.job_id,
        "attempt": row.attempt,
        "worker": row.worker,
        "reason": row.reason,
        "value": None if row.value is None else decode_json(row.value.encode(), "the result"),
        "created_at": row.created_at.isoformat(),
        "updated_at": row.updated_at.isoformat(),
        "expires_at": None if row.expires_at is None else row.expires_at.isoformat(),
    }
