"""`OperatorPort`: what operators change, and the controls of a queue and its tenants."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from holdfast.core.job import Approval, Claim
from holdfast.core.states import State
from holdfast.engine.port.jobs import MAX_TENANTS
from holdfast.errors import InvalidOption

#: A tenant's share can be so many times another's.
MAX_WEIGHT: Final = 100


class TenantControl(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's hand on one tenant's part of a queue."""

    #: Its share of the claims beside other tenants that have jobs in line.
    weight: int = 1
    #: How many of its jobs run at a time, all workers together; None: no limit.
    concurrency: int | None = None
    #: Submissions are refused while it has so many jobs in line or running; None: no limit.
    intake_limit: int | None = None


class QueueControl(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's hand on a queue (requirement H5)."""

    #: Claims get nothing.
    paused: bool = False
    #: Submissions are refused.
    intake_paused: bool = False
    #: How many jobs a worker process runs at a time; None leaves it to the worker.
    concurrency: int | None = None
    #: Submissions are refused while so many jobs are in line or running; None: no limit.
    intake_limit: int | None = None
    #: So many jobs in line or running raise an alert; None leaves it to the settings.
    backlog_alert: int | None = None
    tenants: dict[str, TenantControl] = {}


def check_control(control: QueueControl) -> None:
    """Raise `InvalidOption` for controls that cannot be: both engines ask this before they keep any."""
    if len(control.tenants) > MAX_TENANTS:
        raise InvalidOption(f"a queue has controls for at most {MAX_TENANTS} tenants, got {len(control.tenants)}")
    limits = {name: getattr(control, name) for name in ("concurrency", "intake_limit", "backlog_alert")}
    for tenant, hand in control.tenants.items():
        if not 1 <= hand.weight <= MAX_WEIGHT:
            raise InvalidOption(f"the weight of tenant {tenant!r} must be 1 to {MAX_WEIGHT}, got {hand.weight}")
        limits |= {f"{name} of tenant {tenant!r}": getattr(hand, name) for name in ("concurrency", "intake_limit")}
    for name, limit in limits.items():
        if limit is not None and limit < 0:
            raise InvalidOption(f"{name} must be at least 0, got {limit}")


class OperatorPort(Protocol):
    """What operators change: a job's state, a queue's controls."""

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
        consent: Approval | None = None,
        approval_id: str = "",
        audit: str = "",
    ) -> State:
        """An operator's move; returns the state it came from.

        `event` is what the move means where it can mean several things (`core.states.EVENT_CHOICES`). `consent` is
        people's yes to the job's `ask`, and goes with a move from `waiting_approval` to `queued`
        (`core.verdict.answered`); such a move without one asks again when the job is run. With an `approval_id` the job
        moves only while it waits for that approval: a decision that arrives late must not answer the next request.
        `audit` is the type of an `operator.…` event that the same atomic step leaves in the feed beside the move, with
        actor, reason, and the states before and after in its data.

        To `queued` (resume, approve), `suspended`, `waiting_approval`, `cancelled`, `dlq_pending`,
        `dlq_recorded` or `failed`. A running job that is moved is fenced off from its worker at once, which
        learns of it by a `Cancelled` notice. Raises `UnknownJob`, or `TransitionInvalid` (also when the
        job is not in the `expected` state, or does not wait for that approval) and changes nothing.
        """
        ...

    async def expedite(self, queue: str, job_id: str, *, actor: str, reason: str, audit: str = "") -> None:
        """A job that waits for its time (delayed, or for a retry) is due now; leaves a `task.expedited` event.

        Raises `UnknownJob`, or `TransitionInvalid` (to `running`) if it waits for no time.
        """
        ...

    async def claim_job(self, worker: str, queue: str, job_id: str) -> Claim:
        """Lease this one job, whether it is due or not and whoever is before it in line, as `claim` would.

        For a queued or retrying job. Raises `UnknownJob`, or `TransitionInvalid` (to `running`) for any other.
        """
        ...

    async def get_control(self, queue: str) -> QueueControl:
        """The queue's controls."""
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
        """Set them, and tell everyone who listens.

        Raises `ControlChanged` and changes nothing if they are no longer as `expected`. `audit` as in `move`; before
        and after are the controls. Tenants that are named get a part of the queue of their own, of which there are
        `MAX_TENANTS`: more are `InvalidOption`.
        """
        ...
