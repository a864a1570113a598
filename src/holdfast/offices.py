"""All that people do with an app's jobs, in one place: built here and nowhere else, for HTTP and command line alike.

Each office checks what a `Person` may, shows nothing of other tenants, and leaves a line in the operators' log. What is
kept in the ledger raises `NoLedger` in a deployment without one; everything else works on the engine alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holdfast.clock import Clock, SystemClock
from holdfast.engine.port import Engine
from holdfast.errors import NoLedger
from holdfast.people.operating import Operating

if TYPE_CHECKING:
    # Queries load SQLAlchemy, which many programs never need; the rest is loaded by whoever asks for it.
    from holdfast.app import Holdfast
    from holdfast.dlq.letters import Desk, Letters, Plan
    from holdfast.dlq.suspended import Suspended
    from holdfast.guard.approvals import Approvals
    from holdfast.ledger.port import Ledger
    from holdfast.people.tokens import Tokens
    from holdfast.people.triggering import Triggering


class Offices:
    """An app's offices, for one event loop. Engine and ledger are the caller's, and open."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger | None,
        desk: Desk,
        plans: Mapping[str, Plan] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`plans` are the app's tasks, as far as it is known: edited payloads are checked against them."""
        self.engine = engine
        self.ledger = ledger
        self._desk = desk
        self._plans = plans or {}
        self._clock = clock or SystemClock()

    @classmethod
    def of(cls, app: Holdfast) -> Offices:
        """Those of an app, on the running event loop; its desk is opened when it is first used."""
        return cls(app.engine, app.ledger_port, _Desk(app), app.plans)

    @cached_property
    def operating(self) -> Operating:
        """Jobs and queues; works without a ledger."""
        return Operating(self.engine, self.ledger)

    @cached_property
    def suspended(self) -> Suspended:
        """Suspended jobs, one or many; works without a ledger."""
        from holdfast.dlq.suspended import Suspended

        return Suspended(self.engine, self.ledger)

    @cached_property
    def tokens(self) -> Tokens:
        """Who may come in."""
        from holdfast.people.tokens import Tokens

        return Tokens(self._remembers("a token"), self._clock)

    @cached_property
    def letters(self) -> Letters:
        """Dead letters."""
        from holdfast.dlq.letters import Letters

        return Letters(self.engine, self._remembers("the list of dead letters"), self._desk, self._plans)

    @cached_property
    def approvals(self) -> Approvals:
        """Questions to people."""
        from holdfast.guard.approvals import Approvals

        return Approvals(self.engine, self._remembers("an approval"))

    @cached_property
    def triggering(self) -> Triggering:
        """Triggers: who is there, what became of messages, pauses."""
        from holdfast.people.triggering import Triggering

        return Triggering(self._remembers("the list of triggers"), self._clock)

    def _remembers(self, what: str) -> Ledger:
        if self.ledger is None:
            raise NoLedger(what)
        return self.ledger


class _Desk:
    """The app's own way in, with its guards."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app

    async def submit(self, envelope: Any) -> Any:
        return await (await self._app.desk()).submit(envelope)
