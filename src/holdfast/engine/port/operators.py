"""`OperatorPort`: operator changes to jobs, and the controls of a queue and its tenants."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from holdfast.core.job import Approval, Claim
from holdfast.core.states import State
from holdfast.engine.port.jobs import MAX_TENANTS, EnginePart
from holdfast.errors import InvalidOption

#: Largest weight of a tenant.
MAX_WEIGHT: Final = 100


class TenantControl(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an operator set for one tenant of a queue."""

    #: Its share of the claims, relative to other tenants with ready jobs.
    weight: int = 1
    #: How many of its jobs run at a time, over all workers; None: no limit.
    concurrency: int | None = None
    #: Backlog at which its submissions are refused; None: no limit.
    intake_limit: int | None = None


class QueueControl(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an operator set for a queue: pauses, limits, concurrency (requirement H5)."""

    #: Claims return nothing.
    paused: bool = False
    #: Submissions are refused.
    intake_paused: bool = False
    #: How many jobs of the queue run at a time, over all workers and tenants; None: no limit.
    concurrency: int | None = None
    #: How many jobs each worker process that serves the queue runs at a time; None: the worker's setting.
    worker_concurrency: int | None = None
    #: Backlog at which submissions are refused; None: no limit.
    intake_limit: int | None = None
    #: Backlog at which an alert is raised; None: as in the settings.
    backlog_alert: int | None = None
    tenants: dict[str, TenantControl] = {}


def check_control(control: QueueControl) -> None:
    """Raise `InvalidOption` for invalid controls. Both engines check before they store any."""
    if len(control.tenants) > MAX_TENANTS:
        raise InvalidOption(f"a queue has controls for at most {MAX_TENANTS} tenants, got {len(control.tenants)}")
    names = ("concurrency", "worker_concurrency", "intake_limit", "backlog_alert")
    limits = {name: getattr(control, name) for name in names}
    for tenant, each in control.tenants.items():
        if not 1 <= each.weight <= MAX_WEIGHT:
            raise InvalidOption(f"the weight of tenant {tenant!r} must be 1 to {MAX_WEIGHT}, got {each.weight}")
        limits |= {f"{name} of tenant {tenant!r}": getattr(each, name) for name in ("concurrency", "intake_limit")}
    for name, limit in limits.items():
        if limit is not None and limit < 0:
            raise InvalidOption(f"{name} must be at least 0, got {limit}")


class OperatorPort(EnginePart, Protocol):
    """Operator changes: a job's state, a queue's controls. `ReadPort` has what they are based on."""

    async def move(
        self,
        queue: str,
        job_id: str,
        to: State,
        *,
        actor: str,
        reason: str,
        expected: State | None = None,
        event: str = "",
        approval: Approval | None = None,
        approval_id: str = "",
        audit: str = "",
    ) -> State:
        """Move a job for an operator; return the previous state.

        Targets: `queued` (resume, approve), `suspended`, `waiting_approval`, `cancelled`, `dlq_pending`, `dlq_recorded`
        and `failed`. Moving a running job fences its worker immediately; a `CancelledNotice` informs the worker. Raises
        `UnknownJob`, or `TransitionInvalid` (also when the job is not in the `expected` state, or does not wait for
        that approval), and then changes nothing.

        `event` selects the event if the move can have several (`core.states.EVENT_CHOICES`). `approval` approves the
        request in the job's `meta.approval_request`, for a move from `waiting_approval` to `queued`
        (`core.verdict.with_approval`); without it, the next run requests approval again. With `approval_id`, the job
        moves only while it waits for that approval, so that a late decision cannot approve the next request. `audit` is
        the type of an `operator.…` event that the same atomic step appends to the feed, with actor, reason, and the
        states before and after in its data.
        """
        ...

    async def expedite(self, queue: str, job_id: str, *, actor: str, reason: str, audit: str = "") -> None:
        """Make a waiting job (delayed or retrying) due now; leaves a `task.expedited` event.

        Raises `UnknownJob`, or `TransitionInvalid` (to `running`) if the job has no due time to wait for.
        """
        ...

    async def claim_job(self, worker: str, queue: str, job_id: str) -> Claim:
        """Lease one queued or retrying job as `claim` does, due or not.

        Neither jobs that are ready before it matter, nor a pause, nor its tenant's limit. Raises `UnknownJob`,
        `TransitionInvalid` (to `running`) for a job in any other state, or `ConcurrencyLimited` if the queue runs as
        many jobs as its `concurrency` allows.
        """
        ...

    async def set_control(
        self,
        queue: str,
        control: QueueControl,
        *,
        expected: QueueControl | None = None,
        actor: str = "",
        reason: str = "",
        audit: str = "",
    ) -> None:
        """Set the queue's controls and notify all listeners.

        Raises `ControlChanged` and changes nothing if the controls differ from `expected`. `audit` as in `move`; before
        and after are the controls. Each named tenant gets its own lane; more than `MAX_TENANTS` raise `InvalidOption`.
        """
        ...
