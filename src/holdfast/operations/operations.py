"""Operator actions on an app's jobs and queues, shared by HTTP and CLI.

Each group checks the permissions of a `Principal`, shows nothing of other tenants, and leaves audit entries. What is
kept in the ledger raises `NoLedger` in a deployment without one; everything else works on the engine alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holdfast.clock import Clock, SystemClock
from holdfast.engine.port import Engine
from holdfast.errors import NoLedger
from holdfast.execution.backend import backend_of
from holdfast.operations.jobs import JobOperations

if TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.client.backend import Backend
    from holdfast.guard.decisions import PayloadDecoder
    from holdfast.ledger.port.ledger import Ledger
    from holdfast.operations.access import AuditOperations, TokenOperations
    from holdfast.operations.approvals import ApprovalOperations
    from holdfast.operations.dead_letters import DeadLetterOperations, JobSubmitter
    from holdfast.operations.messages import TriggerOperations
    from holdfast.operations.queues import QueueOperations
    from holdfast.operations.suspended import SuspendedOperations
    from holdfast.operations.tasks import TaskOperations


class Operations:
    """An app's operations, for one event loop. Engine and ledger belong to the caller and are open."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger | None,
        submitter: JobSubmitter,
        specs: Mapping[str, PayloadDecoder] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`specs` are the app's tasks, as far as known: edited payloads are checked against them."""
        self.engine = engine
        self.ledger = ledger
        self._submitter = submitter
        self._specs = specs or {}
        self._clock = clock or SystemClock()

    @classmethod
    def for_app(cls, app: Holdfast) -> Operations:
        """Return the operations of an app on the running event loop; its submitter is opened on first use."""
        backend = backend_of(app)
        return cls(backend.engine, backend.ledger, _GuardedSubmitter(backend), backend.specs)

    @cached_property
    def jobs(self) -> JobOperations:
        """Single jobs; works without a ledger."""
        return JobOperations(self.engine, self.ledger)

    @cached_property
    def queues(self) -> QueueOperations:
        """Queues and their controls; works without a ledger."""
        from holdfast.operations.queues import QueueOperations

        return QueueOperations(self.engine, self.ledger)

    @cached_property
    def tasks(self) -> TaskOperations:
        """Tasks that workers have announced; works without a ledger."""
        from holdfast.operations.tasks import TaskOperations

        return TaskOperations(self.engine, self.ledger)

    @cached_property
    def audit(self) -> AuditOperations:
        """The audit log."""
        from holdfast.operations.access import AuditOperations

        return AuditOperations(self.ledger)

    @cached_property
    def suspended(self) -> SuspendedOperations:
        """Suspended jobs, one or many; works without a ledger."""
        from holdfast.operations.suspended import SuspendedOperations

        return SuspendedOperations(self.engine, self.ledger)

    @cached_property
    def tokens(self) -> TokenOperations:
        """Tokens."""
        from holdfast.operations.access import TokenOperations

        return TokenOperations(self._require_ledger("a token"), self._clock)

    @cached_property
    def dead_letters(self) -> DeadLetterOperations:
        """Dead letters."""
        from holdfast.operations.dead_letters import DeadLetterOperations

        return DeadLetterOperations(
            self.engine, self._require_ledger("the list of dead letters"), self._submitter, self._specs
        )

    @cached_property
    def approvals(self) -> ApprovalOperations:
        """Approvals."""
        from holdfast.operations.approvals import ApprovalOperations

        return ApprovalOperations(self.engine, self._require_ledger("an approval"))

    @cached_property
    def triggers(self) -> TriggerOperations:
        """Triggers: processes, executions, pauses."""
        from holdfast.operations.messages import TriggerOperations

        return TriggerOperations(self._require_ledger("the list of triggers"), self._clock)

    def _require_ledger(self, what: str) -> Ledger:
        if self.ledger is None:
            raise NoLedger(what)
        return self.ledger


class _GuardedSubmitter:
    """Submits as the app does, with its guards."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def submit(self, envelope: Any) -> Any:
        return await (await self._backend.connections.submitter()).submit(envelope)
