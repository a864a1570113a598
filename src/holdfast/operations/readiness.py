"""Readiness of a process, for orchestrators: `/readyz` of the HTTP service, of workers and of upkeep.

A ledger that is down is a warning and does not make the process unready: jobs are accepted and run without it (L3).
Answers contain no address and no error text, which might contain a secret.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from holdfast.engine.port.reads import ReadPort
from holdfast.errors import HoldfastError
from holdfast.execution.backend import BackendOwner, backend_of

if TYPE_CHECKING:
    from holdfast.ledger.port.ledger import LedgerReadPort


OK: Final = "ok"
DOWN: Final = "down"
NONE: Final = "none"
STARTING: Final = "starting"
DRAINING: Final = "draining"

#: A store that takes longer counts as down.
_ANSWER_S: Final = 2.0


class ProcessReadiness(msgspec.Struct, frozen=True, kw_only=True):
    """Readiness of a worker or upkeep process. States: `ok`, `down`, `starting`, `draining` or `none`."""

    ready: bool
    engine: str
    ledger: str
    worker: str
    upkeep: str
    #: Why it is not ready.
    reasons: list[str]
    #: Problems that do not make it unready.
    warnings: list[str]


class ReadinessBackend(Protocol):
    """The parts of an app's backend that are checked."""

    @property
    def engine(self) -> ReadPort: ...
    @property
    def ledger(self) -> LedgerReadPort | None: ...


class ProcessPart(Protocol):
    """A worker, or upkeep."""

    @property
    def status(self) -> str:
        """`starting`, `ok`, `down` or `draining`."""
        ...


async def worker_readiness(
    app: BackendOwner[ReadinessBackend], worker: ProcessPart, *, upkeep: bool = True
) -> ProcessReadiness:
    """Check a process with a worker; `upkeep`: whether the worker also does upkeep."""
    return await _readiness(backend_of(app), worker.status, worker.status if upkeep else NONE)


async def upkeep_readiness(app: BackendOwner[ReadinessBackend], upkeep: ProcessPart) -> ProcessReadiness:
    """Check a process that does upkeep only."""
    return await _readiness(backend_of(app), NONE, upkeep.status)


async def _readiness(backend: ReadinessBackend, worker: str, upkeep: str) -> ProcessReadiness:
    engine, ledger = await asyncio.gather(engine_status(backend.engine), ledger_status(backend.ledger))
    reasons = [] if engine == OK else ["engine unreachable"]
    # A worker that is down because of the engine adds no second reason.
    states = {worker, upkeep} - {OK, NONE, *([DOWN] if reasons else [])}
    reasons += ["not claiming" if state == DOWN else state for state in sorted(states)]
    return ProcessReadiness(
        ready=not reasons,
        engine=engine,
        ledger=ledger,
        worker=worker,
        upkeep=upkeep,
        reasons=reasons,
        warnings=["ledger unreachable"] if ledger == DOWN else [],
    )


async def engine_status(engine: ReadPort) -> str:
    """Return `ok` or `down`."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await engine.now_ms()
            await engine.queues()
    except (HoldfastError, TimeoutError):
        return DOWN
    return OK


async def ledger_status(ledger: LedgerReadPort | None) -> str:
    """Return `ok`, `down` or `none`."""
    if ledger is None:
        return NONE
    try:
        async with asyncio.timeout(_ANSWER_S):
            await ledger.queries.tenants()
    except (HoldfastError, TimeoutError):
        return DOWN
    return OK
