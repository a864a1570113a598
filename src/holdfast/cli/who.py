"""Who works at this terminal, and the offices where they work.

`HOLDFAST_TOKEN` says who someone is. Without it somebody who holds the stores' addresses may do all that one person may
do, but nothing that takes two: nobody knows that two people at two terminals are two.
"""

from __future__ import annotations

import getpass
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from holdfast.cli.command import Connection, ledger_must_exist, must_exist
from holdfast.clock import SystemClock
from holdfast.core.person import ALL_TENANTS, Person, Role
from holdfast.errors import NoLedger
from holdfast.offices import Offices

if TYPE_CHECKING:
    from holdfast.ledger.port import Ledger
    from holdfast.settings import Settings


@asynccontextmanager
async def at_work(
    at: Connection, reference: str | None = None, *, make: bool = False
) -> AsyncIterator[tuple[Offices, Person]]:
    """The offices of the engine and ledger that were named, open, and who came in.

    With an app its tasks check payloads and its guards see what is submitted; without one the worker will judge.
    A database that is not there is made if `make` says so, else it is an error.
    """
    app = at.some_app(reference)
    if not make:
        must_exist(app.settings.url)
        ledger_must_exist(app.settings)
    await app.open()
    try:
        offices = Offices.of(app)
        yield offices, await who(app.settings, app.ledger_port)
    finally:
        await app.close()


async def who(settings: Settings, ledger: Ledger | None) -> Person:
    """The person of the token in the settings, else an unproven one of this machine. Raises `Unauthorized`."""
    if settings.token is None:
        return local_person()
    if ledger is None:
        raise NoLedger("a token (HOLDFAST_TOKEN)")
    from holdfast.people.tokens import Tokens

    return await Tokens(ledger, SystemClock()).verify(settings.token.get_secret_value())


def local_person() -> Person:
    """Whoever is logged in here: may do what one person may do alone."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return Person(name=f"local:{user}", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}), proven=False)
