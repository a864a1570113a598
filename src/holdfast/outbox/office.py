"""What people do with events of the outbox: look, and revive those that nobody tries any more. What is of another
tenant is not there; a revival leaves its line in the operators' log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from holdfast.core.person import Person, Right
from holdfast.ledger.outbox_store import OutboxEvent, OutboxStore, Status
from holdfast.people.scope import scope

#: Events of one call of the store.
_PAGE: Final = 500


class Door(Protocol):
    """Where the store is."""

    async def open(self) -> OutboxStore: ...


class Events:
    """An app's outbox, for people."""

    def __init__(self, outbox: Door) -> None:
        self._outbox = outbox

    async def list(
        self,
        person: Person,
        *,
        status: Status | None = None,
        destination: str = "",
        topic: str = "",
        key: str = "",
        after: int | None = None,
        limit: int = 50,
    ) -> list[OutboxEvent]:
        """The newest first, `after` a position."""
        person.check(Right.READ)
        store = await self._outbox.open()
        return await store.find(
            scope(person), status=status, destination=destination, topic=topic, key=key, after=after, limit=limit
        )

    async def retry(self, person: Person, ids: Sequence[str], *, reason: str) -> int:
        """DEAD and RETRYING events are tried again now, with all their attempts; how many there were."""
        person.check(Right.OPERATE)
        store = await self._outbox.open()
        return await store.revive(scope(person), list(dict.fromkeys(ids)), person.name, reason)

    async def retry_dead(self, person: Person, *, destination: str = "", reason: str) -> int:
        """All DEAD events, of one destination if that is named; how many there were."""
        person.check(Right.OPERATE)
        store = await self._outbox.open()
        revived, after = 0, None
        while True:
            page = await store.find(
                scope(person), status=Status.DEAD, destination=destination, after=after, limit=_PAGE
            )
            if not page:
                return revived
            revived += await store.revive(scope(person), [event.id for event in page], person.name, reason)
            after = page[-1].position
