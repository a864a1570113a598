"""Engine and ledger together, for commands that look at both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli.command import Connection, ledger_must_exist
from holdfast.cli.lookup import find_job
from holdfast.cli.output import note
from holdfast.cli.prefixes import abbreviated
from holdfast.cli.who import who
from holdfast.core.job import JobView
from holdfast.core.person import Person
from holdfast.core.states import State
from holdfast.engine.port import Engine
from holdfast.errors import InvalidOption, LedgerUnavailable, SchemaMismatch, UnknownJob, UsageError
from holdfast.ledger.factory import build_ledger
from holdfast.settings import Settings

if TYPE_CHECKING:
    # Its queries load SQLAlchemy, which a look at Redis alone does not need.
    from holdfast.ledger.port import Ledger
    from holdfast.ledger.queries import Queries
    from holdfast.ledger.records import Counts, JobDetail


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stores:
    """Both, open; `queries` is None if there is no ledger."""

    settings: Settings
    engine: Engine
    queries: Queries | None
    #: Who looks: what is of other tenants is not there.
    person: Person

    def remembered(self) -> Queries:
        """The ledger's queries. Raises `InvalidOption` if there is no ledger."""
        if self.queries is None:
            raise InvalidOption(
                "there is no ledger: Redis keeps none; set HOLDFAST_LEDGER to postgresql://… or sqlite:///ledger.db"
            )
        return self.queries

    async def with_job(self, text: str, tenant: str | None, queue: str | None, act: Callable[[str], Awaitable[T]]) -> T:
        """What `act` gives for the job of this id, or of the only id that begins so (see `cli.prefixes`)."""
        return await abbreviated(self.queries, "job", self.person, text, act, queue=queue, tenant=tenant)

    async def live(self, job_id: str, queue: str | None) -> JobView | None:
        """The job as the engine has it, if it does."""
        try:
            return await find_job(self.engine, job_id, queue, self.person)
        except UnknownJob:
            return None

    def tenants(self, named: str | None) -> list[str | None]:
        """Whom to ask the ledger about: the tenant that was named, if there is one for this person, or each of theirs;
        None is all."""
        if named is not None:
            return [named] if self.person.sees(named) else []
        return [None] if self.person.sees_all else [*sorted(self.person.tenants)]

    async def row(self, job_id: str, tenant: str | None, queue: str | None) -> JobDetail:
        """The job as the ledger has it. Raises `UnknownJob`, also for one of another tenant."""
        for one in self.tenants(tenant):
            try:
                return await self.remembered().job(job_id, one, queue)
            except UnknownJob:
                continue
        raise UnknownJob(job_id)

    async def counts(self, tenant: str | None, queue: str | None, *, exact: bool) -> Counts:
        """Jobs by state, of whom this person sees."""
        from holdfast.ledger.records import Counts

        states: dict[State, int] = dict.fromkeys(State, 0)
        estimated: frozenset[State] = frozenset()
        for one in self.tenants(tenant):
            part = await self.remembered().counts(one, queue, exact=exact)
            estimated |= part.estimated
            for state, count in part.states.items():
                states[state] += count
        return Counts(states, estimated)


@asynccontextmanager
async def ledger_queries(settings: Settings, engine: Engine) -> AsyncIterator[Queries | None]:
    """The ledger's queries, or None: there is no ledger, or none that can be used now."""
    ledger = build_ledger(settings, engine)
    if ledger is None:
        yield None
        return
    try:
        yield ledger.queries if await _is_usable(settings, ledger) else None
    finally:
        await ledger.close()


async def _is_usable(settings: Settings, ledger: Ledger) -> bool:
    try:
        ledger_must_exist(settings)
        await ledger.open()
    except (UsageError, SchemaMismatch, LedgerUnavailable) as exc:
        note(f"ended jobs are not counted: {exc}")
        return False
    return True


@asynccontextmanager
async def stores(at: Connection) -> AsyncIterator[Stores]:
    """Engine and ledger of this command line, for who works at it. A look makes neither."""
    settings = at.settings()
    async with at.engine() as engine:
        ledger = build_ledger(settings, engine)
        if ledger is None:
            yield Stores(settings, engine, None, await who(settings, None))
            return
        ledger_must_exist(settings)
        await ledger.open()
        try:
            yield Stores(settings, engine, ledger.queries, await who(settings, ledger))
        finally:
            await ledger.close()
