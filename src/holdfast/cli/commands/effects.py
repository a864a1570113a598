"""`holdfast effects`: list effect keys that are in doubt, and resolve them."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.command import AsJson, command
from holdfast.cli.output import emit_json, emit_line, emit_rows, note, number_of
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


effects = typer.Typer(help="List, show and resolve effects.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="Key of the effect, as the task set it.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Tenant of the key.")]
AnyTenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant. Default: all.", show_default=False)
]
OnlyState = Annotated[
    str | None,
    typer.Option(
        "--state", metavar="STATE", help="Only this state: reserved or in_doubt. Default: both.", show_default=False
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Maximum number of rows.")]
DoneAs = Annotated[
    str | None,
    typer.Option(
        "--done", metavar="JSON", help="The effect happened, with this result ('null' if none).", show_default=False
    ),
]
NotDone = Annotated[bool, typer.Option("--not-done", help="The effect did not happen and will not; releases the key.")]
Resume = Annotated[bool, typer.Option("--resume/--no-resume", help="Resume the jobs that are suspended for it.")]
Reason = Annotated[str, typer.Option(help="Reason for the audit log: how you know.")]
Database = Annotated[
    str, typer.Option("--database", metavar="URL", help="Your database: postgresql://… or sqlite:///…")
]


@command(
    effects,
    "list",
    examples=("holdfast effects list --state in_doubt", "holdfast effects list --tenant acme --json"),
)
async def list_effects(
    at: EngineTarget, tenant: AnyTenant = None, state: OnlyState = None, limit: Limit = 100, as_json: AsJson = False
) -> None:
    """List effects that are in doubt or reserved, oldest first."""
    if state is not None and state not in (EffectState.RESERVED, EffectState.IN_DOUBT):
        raise InvalidOption(f"--state={state!r} is not valid; use reserved or in_doubt")
    async with _open_ledger(at) as (engine, ledger, principal):
        keys = [
            row
            for row in await _effect_queries(ledger).find_unresolved(tenant, limit=MANY)
            if principal.can_see(row.tenant_id)
        ]
        found = await with_lost_holders(engine, keys)
    rows = [row for row in found if state in (None, row.state)][:limit]
    if as_json:
        emit_json([_document(row) for row in rows])
        return
    columns = ("tenant", "key", "state", "since", "function", "job", "attempt", "reason")
    emit_rows(columns, [_row(row) for row in rows], empty="no effects in doubt or reserved")


@command(effects, "show", examples=("holdfast effects show publish:42", "holdfast effects show publish:42 --json"))
async def show(at: EngineTarget, key: Key, tenant: Tenant = DEFAULT_TENANT, as_json: AsJson = False) -> None:
    """Show one effect: state, result, job and worker."""
    async with _open_ledger(at) as (engine, ledger, principal):
        (row,) = await with_lost_holders(engine, [await _get_effect(ledger, principal, tenant, key)])
    if as_json:
        emit_json(_document(row))
        return
    for name, value in _document(row).items():
        if value is not None:
            text = value if isinstance(value, str) else encode_json(value, name).decode()
            emit_line(name, text)


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
    """Resolve an effect in doubt, after you have checked whether it happened. Resumes the jobs suspended for it.

    The resolution is recorded in the audit log.

    An effect that is already done keeps its result; --done then only resumes the jobs that still wait for it.
    """
    if (done is None) == (not not_done):
        raise UsageError("the outcome is missing or ambiguous; pass either --done JSON or --not-done")
    value = None if done is None else _encode_result(done)
    async with _open_ledger(at) as (engine, ledger, principal):
        (row,) = await with_lost_holders(engine, [await _get_effect(ledger, principal, tenant, key)])
        principal.require(Permission.OPERATE)
        was_done = row.state == EffectState.DONE
        if was_done and not_done:
            raise UsageError(
                f"effect {key!r} is already done; see its result with `holdfast effects show {shlex.quote(key)}`, or "
                "resume the jobs that still wait for it with --done"
            )
        if row.state == EffectState.RESERVED:
            raise UsageError(
                f"effect {key!r} is reserved by running job {row.job_id}; wait until it ends, or cancel it"
            )
        state = None if value is None else EffectState.DONE
        outcome = EffectOutcome(tenant_id=tenant, key=key, token=row.token, state=state, value=value)
        if not was_done:
            await ledger.operators.resolve_effect(outcome, _audit_entry(row, principal, reason, state, value))
        jobs = await resume_waiting(engine, ledger.queries, row, principal) if resume else []
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
    became = "was already done, its result is kept" if was_done else "is done" if state else "is released"
    going = f"{number_of(len(jobs), 'job')} resumed: {', '.join(jobs)}" if jobs else "no job was resumed"
    note(f"{key} {became}; {going}")


@command(effects, "create-table", examples=("holdfast effects create-table --database postgresql://localhost/shop",))
async def create_table(at: EngineTarget, database: Database, as_json: AsJson = False) -> None:
    """Create the table of keys that `ctx.transaction` needs in your database. Safe to repeat."""
    from sqlalchemy.exc import ArgumentError, DBAPIError
    from sqlalchemy.ext.asyncio import create_async_engine

    from holdfast.effects import create_keys_table

    scheme, _, rest = database.partition("://")
    drivers = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
    driver = scheme if scheme in drivers.values() else drivers.get(scheme)
    if driver is None:
        raise UsageError(f"--database: {scheme!r} is not supported; use postgresql://… or sqlite:///…")
    require_drivers(database)
    try:
        engine = create_async_engine(f"{driver}://{rest}")
    except ArgumentError as exc:
        raise UsageError(f"--database: {exc}") from exc
    try:
        await create_keys_table(engine)
    except (DBAPIError, OSError) as exc:
        raise UsageError(f"cannot create the table: {exc}") from exc
    finally:
        await engine.dispose()
    if as_json:
        emit_json({"table": "idempotency_keys"})
    else:
        note("table idempotency_keys exists")


@asynccontextmanager
async def _open_ledger(at: EngineTarget) -> AsyncIterator[tuple[Engine, Ledger, Principal]]:
    async with open_operations(at) as (operations, principal):
        if operations.ledger is None:
            raise NoLedger("an effect")
        principal.require(Permission.READ)
        yield operations.engine, operations.ledger, principal


def _effect_queries(ledger: Ledger) -> EffectQueries:
    from holdfast.ledger.queries.operators import EffectQueries

    return EffectQueries(ledger.queries.engine)


def _audit_entry(
    row: EffectKeyRow, principal: Principal, reason: str, state: EffectState | None, value: bytes | None
) -> AuditEntry:
    after = {"state": None if state is None else state.value, "job_id": row.job_id}
    return AuditEntry(
        type=f"{OPERATOR_PREFIX}resolve_effect",
        actor=principal.name,
        tenant_id=row.tenant_id,
        target="effect",
        target_id=row.key,
        queue=row.queue,
        reason=reason,
        before={"state": row.state, "reason": row.reason},
        after=after if value is None else after | {"value": decode_json(value, "the result")},
    )


async def _get_effect(ledger: Ledger, principal: Principal, tenant: str, key: str) -> EffectKeyRow:
    row = await _effect_queries(ledger).find(tenant, key) if principal.can_see(tenant) else None
    if row is None:
        raise UsageError(f"effect {key!r} of tenant {tenant!r} not found; see `holdfast effects list`")
    return row


def _encode_result(text: str) -> bytes:
    return encode_json(decode_json(text.encode("utf-8", "replace"), "--done"), "--done")


def _row(row: EffectKeyRow) -> tuple[str, ...]:
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
