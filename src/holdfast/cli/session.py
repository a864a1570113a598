"""App loading, and the engine, ledger, operations and principal of a command.

`load_app` resolves `module:app` or `file.py:app`; `:app` may be omitted if the module holds exactly one. An app that
cannot be loaded raises a `UsageError` that says what was tried.

`HOLDFAST_TOKEN` identifies the principal. Without it the local user is an unverified admin of all tenants, who may do
everything except what needs two principals: two terminals do not prove two different ones.

Commands that only read do not create a missing database or ledger.
"""

from __future__ import annotations

import getpass
import importlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.app import Holdfast
from holdfast.cli.output import note
from holdfast.cli.prefixes import with_whole_id
from holdfast.clock import SystemClock
from holdfast.core.job import JobInfo
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.core.states import State
from holdfast.engine.port import InspectionPort, PartialFailure
from holdfast.engine.port.jobs import EnginePart
from holdfast.engine.port.reads import ReadPort
from holdfast.errors import (
    InvalidOption,
    LedgerUnavailable,
    MissingExtra,
    NoLedger,
    SchemaMismatch,
    UnknownJob,
    UsageError,
)
from holdfast.execution.backend import backend_of
from holdfast.extras import require_drivers
from holdfast.factory import build_engine, build_ledger, sqlite_path
from holdfast.operations.jobs import find_in_queues
from holdfast.operations.operations import Operations
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.ledger.queries.jobs import Queries
    from holdfast.ledger.queries.records import JobDetail, StateCounts


def load_app(reference: str) -> Holdfast:
    """Load the app of a reference. Imports the user's module, from the working directory or its file."""
    source, _, attribute = reference.partition(":")
    if not source:
        raise _cannot(reference, "an app is module:app or file.py:app")
    by_file = source.endswith(".py") or os.sep in source
    module = _import_file(reference, Path(source)) if by_file else _import_module(reference, source)
    return _pick(reference, module, attribute) if attribute else _only_one(reference, module)


def _import_file(reference: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise _cannot(reference, f"file {path} not found in {Path.cwd()}")
    path = path.resolve()
    root, name = path.parent, path.stem
    # A file inside a package is imported as the package's module, so that its relative imports work.
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    module = _import(reference, name, root)
    if Path(module.__file__ or "").resolve() != path:
        raise _cannot(reference, f"the name {name!r} is taken by {module.__file__ or 'a built-in'}; rename the file")
    return module


def _import_module(reference: str, name: str) -> ModuleType:
    return _import(reference, name, Path.cwd())


def _import(reference: str, name: str, root: Path) -> ModuleType:
    # By its real name and from its real directory, so that child processes can import it.
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    except MissingExtra:
        # Its message says what to install.
        raise
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
            raise _cannot(reference, f"module {exc.name!r} not found in {root} or on the Python path") from exc
        raise _cannot(reference, f"module {name!r} imports {exc.name!r}, which is not installed") from exc
    except Exception as exc:
        raise _cannot(
            reference, f"importing {name!r} raised {type(exc).__name__}: {exc} (--debug shows where)"
        ) from exc


def _pick(reference: str, module: ModuleType, attribute: str) -> Holdfast:
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Holdfast):
        return found
    what = f"no {attribute!r}" if found is None else f"{attribute!r} is a {type(found).__name__}, not a Holdfast"
    raise _cannot(reference, f"module {module.__name__!r} from {module.__file__}: {what}; {_offer(module)}")


def _only_one(reference: str, module: ModuleType) -> Holdfast:
    apps = {id(value): value for value in vars(module).values() if isinstance(value, Holdfast)}
    if len(apps) != 1:
        raise _cannot(reference, f"module {module.__name__!r} from {module.__file__}: {_offer(module)}")
    return next(iter(apps.values()))


def _offer(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Holdfast)]
    if not names:
        return "it has no Holdfast object"
    return "it has " + ", ".join(f"{module.__name__}:{name}" for name in names)


def _cannot(reference: str, reason: str) -> UsageError:
    return UsageError(f"cannot load app {reference!r}: {reason}")


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """The engine that the shared options name."""

    url: str | None
    namespace: str | None

    def settings(self) -> Settings:
        """Load the settings, overridden by the options.

        Raises `MissingExtra` if a store's driver is not installed.
        """
        settings = Settings.load(url=self.url, namespace=self.namespace)
        require_drivers(settings.url, settings.ledger)
        return settings

    def app(self, reference: str) -> Holdfast:
        """Load the user's app, on the engine of the options if given, else on the app's."""
        app = load_app(reference)
        given: dict[str, Any] = {"url": self.url, "namespace": self.namespace}
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            app.configure(**given)
        return app

    def some_app(self, reference: str | None) -> Holdfast:
        """Load the user's app if named, else build one without tasks on the same engine."""
        return Holdfast(settings=self.settings()) if reference is None else self.app(reference)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[InspectionPort]:
        """Open the engine. Does not create a missing database."""
        settings = self.settings()
        must_exist(settings.url)
        engine = build_engine(settings, SystemClock())
        await engine.open()
        try:
            yield engine
        finally:
            await engine.close()


def must_exist(url: str) -> None:
    """Raise `UsageError` if the SQLite database does not exist."""
    if url.startswith("sqlite:") and (path := sqlite_path(url)) != ":memory:" and not Path(path).exists():
        raise UsageError(
            f"database {Path(path).absolute()} does not exist; submit a job first, or name another database "
            "with --url (HOLDFAST_URL)"
        )


def ledger_must_exist(settings: Settings) -> None:
    """Raise `UsageError` if the ledger's SQLite file does not exist."""
    url = settings.ledger or ""
    if url.startswith("sqlite:") and not Path(sqlite_path(url)).exists():
        raise UsageError(
            f"ledger {Path(sqlite_path(url)).absolute()} does not exist; start a worker, or check HOLDFAST_LEDGER"
        )


T = TypeVar("T")


async def find_job(engine: ReadPort, job_id: str, queue: str | None, principal: Principal) -> JobInfo:
    """Find the job in this queue or in any. Raises `UnknownJob`, also for a job of another tenant."""
    names = await queues_or_all(engine, [queue] if queue else None)
    if (view := await find_in_queues(engine, names, job_id, principal)) is None:
        raise UnknownJob(job_id)
    return view


async def queues_or_all(engine: ReadPort, queues: list[str] | None) -> list[str]:
    """Return the named queues, or every queue of the engine."""
    return list(dict.fromkeys(queues)) if queues else await engine.queues()


async def partial_result(answer: Awaitable[list[T]]) -> tuple[list[T], PartialFailure | None]:
    """Return a list, and the error to raise after printing it.

    The error is None unless a server is unreachable and part of the list is missing.
    """
    try:
        return await answer, None
    except PartialFailure as exc:
        return exc.completed, exc


@asynccontextmanager
async def open_operations(
    at: EngineTarget, reference: str | None = None, *, make: bool = False
) -> AsyncIterator[tuple[Operations, Principal]]:
    """Open engine and ledger; yield the operations on them and the current principal.

    With an app, its tasks check payloads and its guards review submissions; without one, the worker does both.
    A missing database is created if `make` is set, else it is an error.
    """
    app = at.some_app(reference)
    settings = backend_of(app).settings
    if not make:
        must_exist(settings.url)
        ledger_must_exist(settings)
    await app.open()
    try:
        operations = Operations.for_app(app)
        yield operations, await current_principal(settings, operations.ledger)
    finally:
        await app.close()


async def current_principal(settings: Settings, ledger: Ledger | None) -> Principal:
    """Return the principal of the token in the settings, else the unverified local user.

    Raises `Unauthorized` for an invalid token, `NoLedger` for a token without a ledger.
    """
    if settings.token is None:
        return local_principal()
    if ledger is None:
        raise NoLedger("a token (HOLDFAST_TOKEN)")
    from holdfast.operations.access import TokenOperations

    return await TokenOperations(ledger, SystemClock()).verify(settings.token.get_secret_value())


def local_principal() -> Principal:
    """The local user: an unverified admin, who may do all that needs only one principal."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return Principal(name=f"local:{user}", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}), verified=False)


@dataclass(frozen=True, slots=True)
class StoreSession:
    """An open engine and ledger; `queries` is None without a ledger."""

    settings: Settings
    engine: InspectionPort
    queries: Queries | None
    #: The caller; data of tenants that it may not see is treated as absent.
    principal: Principal

    def require_queries(self) -> Queries:
        """Return the ledger's queries. Raises `InvalidOption` without a ledger."""
        if self.queries is None:
            raise InvalidOption("there is no ledger; set HOLDFAST_LEDGER to postgresql://… or sqlite:///ledger.db")
        return self.queries

    async def with_job(self, text: str, tenant: str | None, queue: str | None, act: Callable[[str], Awaitable[T]]) -> T:
        """Call `act` with the full job id for an id or a prefix (see `cli.prefixes`)."""
        return await with_whole_id(self.queries, "job", self.principal, text, act, queue=queue, tenant=tenant)

    async def find_live(self, job_id: str, queue: str | None) -> JobInfo | None:
        """Return the job as the engine has it; None if it does not."""
        try:
            return await find_job(self.engine, job_id, queue, self.principal)
        except UnknownJob:
            return None

    def tenants(self, named: str | None) -> list[str | None]:
        """Tenants to query: the named one if the principal may see it, else all that the principal may see.

        None stands for all tenants.
        """
        if named is not None:
            return [named] if self.principal.can_see(named) else []
        return [None] if self.principal.sees_all_tenants else [*sorted(self.principal.tenants)]

    async def row(self, job_id: str, tenant: str | None, queue: str | None) -> JobDetail:
        """Return the job as the ledger has it. Raises `UnknownJob`, also for a job of another tenant."""
        for one in self.tenants(tenant):
            try:
                return await self.require_queries().job(job_id, one, queue)
            except UnknownJob:
                continue
        raise UnknownJob(job_id)

    async def counts(self, tenant: str | None, queue: str | None, *, exact: bool) -> StateCounts:
        """Count jobs by state, of the tenants that the principal may see."""
        from holdfast.ledger.queries.records import StateCounts

        states: dict[State, int] = dict.fromkeys(State, 0)
        estimated: frozenset[State] = frozenset()
        for one in self.tenants(tenant):
            part = await self.require_queries().counts(one, queue, exact=exact)
            estimated |= part.estimated
            for state, count in part.states.items():
                states[state] += count
        return StateCounts(states, estimated)


@asynccontextmanager
async def ledger_queries(settings: Settings, engine: EnginePart) -> AsyncIterator[Queries | None]:
    """Yield the ledger's queries; None if there is no ledger or it cannot be used now."""
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
        note(f"finished jobs are not counted: {exc}")
        return False
    return True


@asynccontextmanager
async def open_stores(at: EngineTarget) -> AsyncIterator[StoreSession]:
    """Open engine and ledger for the current principal. Creates neither."""
    settings = at.settings()
    async with at.engine() as engine:
        ledger = build_ledger(settings, engine)
        if ledger is None:
            yield StoreSession(settings, engine, None, await current_principal(settings, None))
            return
        ledger_must_exist(settings)
        await ledger.open()
        try:
            yield StoreSession(settings, engine, ledger.queries, await current_principal(settings, ledger))
        finally:
            await ledger.close()
