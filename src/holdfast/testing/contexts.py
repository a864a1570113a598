"""A `Context` for unit tests of a task function, without app, job or store.

    ctx = make_context(attempt=2, tenant_id="acme", approvals=["refund"])
    assert await refund(ctx, "order-7") == "refunded"

Effects and steps are kept in memory and shared with the contexts that `next_attempt` returns. `sleep` advances the
context's clock and returns. Nothing is retried: the test gets what the function raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from holdfast.aio import BlockingPortal
from holdfast.core.codec import PAYLOAD_LIMIT
from holdfast.core.job import DEFAULT_QUEUE, DEFAULT_TENANT, Approval, Claim, JobInfo, Lease, Meta, new_job_ids
from holdfast.core.retry import Duration
from holdfast.effects.api import Steps
from holdfast.effects.runtime import EffectRuntime, RunScope
from holdfast.execution.context import Context
from holdfast.guard.decisions import ApprovalInterrupt
from holdfast.observe.counters import Counters
from holdfast.testing.effects import MemoryLedger
from holdfast.testing.inline import ManualClock

_WORKER: Final = "test"
_LEASE_S: Final = 5.0
#: The event loop of `ctx.blocking` in tests that have no loop.
_portal: Final = BlockingPortal()


def make_context(
    *,
    task: str = "task",
    job_id: str | None = None,
    queue: str = DEFAULT_QUEUE,
    tenant_id: str = DEFAULT_TENANT,
    attempt: int = 1,
    retry_count: int | None = None,
    idempotency_key: str | None = None,
    trace_id: str = "",
    context: Mapping[str, Any] | None = None,
    approvals: Collection[str] | Mapping[str, str] = (),
    cancelled: bool = False,
    clock: ManualClock | None = None,
) -> UnitContext:
    """Create a context for one call of a task's function.

    `retry_count` defaults to `attempt - 1`. `approvals` has the names of the approved requests, or maps each name to
    its approver; other requests raise `ApprovalInterrupt`. With `cancelled` the run has ended, and effects and steps
    raise.
    """
    clock = clock or ManualClock()
    chosen_id = job_id or new_job_ids(1)[0]
    claim = Claim(
        lease=Lease(queue, chosen_id, f"test-{attempt}", 1, _WORKER),
        task=task,
        payload=b"{}",
        tenant_id=tenant_id,
        idempotency_key=idempotency_key or chosen_id,
        trace_id=trace_id,
        attempt=attempt,
        created_at_ms=clock.now_ms(),
        claimed_at_ms=clock.now_ms(),
        meta=Meta(
            retry_count=attempt - 1 if retry_count is None else retry_count,
            context=dict(context) if context else None,
        ),
    )
    ctx = UnitContext(claim, _Memory(clock, approvals))
    if cancelled:
        ctx._end()
    return ctx


class UnitContext(Context):
    """The context that `make_context` returns."""

    __slots__ = ("_memory",)

    def __init__(self, claim: Claim, memory: _Memory) -> None:
        super().__init__(claim)
        self._memory = memory
        self._own_scope = RunScope(claim, memory.tools())

    def next_attempt(self) -> UnitContext:
        """Return the context of the job's next attempt: same effects and steps, retry count plus 1."""
        claim, attempt = self._claim, self._claim.attempt + 1
        meta = msgspec.structs.replace(claim.meta, retry_count=claim.meta.retry_count + 1)
        lease = Lease(claim.queue, claim.job_id, f"test-{attempt}", 1, _WORKER)
        now_ms = self._memory.clock.now_ms()
        following = msgspec.structs.replace(claim, lease=lease, attempt=attempt, meta=meta, claimed_at_ms=now_ms)
        return UnitContext(following, self._memory)

    def _scope(self, what: str) -> RunScope:
        scope = super()._scope(what)
        # The runtime of the loop that runs now: the context may be older than the loop.
        scope.tools = self._memory.tools()
        return scope

    def _own_steps(self) -> Steps:
        if self._steps is None:
            self._steps = _UnitSteps(self._scope("step"), self._memory.clock)
        return self._steps

    def _request_approval(
        self, name: str, details: Any, *, reason: str, quorum: int, deadline: Duration | None
    ) -> Approval:
        try:
            return super()._request_approval(name, details, reason=reason, quorum=quorum, deadline=deadline)
        except ApprovalInterrupt as exc:
            approvals = self._memory.approvals
            if name not in approvals:
                raise
            by = approvals[name] if isinstance(approvals, Mapping) else _WORKER
            request, now_ms = exc.request, self._memory.clock.now_ms()
            return Approval(approval_id=request.approval_id, by=(by,), at_ms=now_ms, payload_hash=request.payload_hash)


class _UnitSteps(Steps):
    """Steps that sleep by advancing the clock."""

    def __init__(self, scope: RunScope, clock: ManualClock) -> None:
        super().__init__(scope)
        self._clock = clock

    async def rest(self, left_ms: int) -> None:
        self._clock.advance(left_ms / 1000)


class _Memory:
    """State that the contexts of one job share."""

    def __init__(self, clock: ManualClock, approvals: Collection[str] | Mapping[str, str]) -> None:
        self.clock = clock
        self.approvals = {approvals: _WORKER} if isinstance(approvals, str) else approvals
        self._ledger = MemoryLedger(clock)
        self._tools: dict[asyncio.AbstractEventLoop, EffectRuntime] = {}

    def tools(self) -> EffectRuntime:
        """Return the runtime of the running event loop, or of a loop in a thread if none runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return _portal.call("make_context", self._on_loop, "make_context(…)")
        if loop not in self._tools:
            self._tools[loop] = EffectRuntime(
                self._open, _find, self.clock.now_ms, Counters(), lease_s=_LEASE_S, payload_limit=PAYLOAD_LIMIT
            )
        return self._tools[loop]

    async def _on_loop(self) -> EffectRuntime:
        return self.tools()

    async def _open(self) -> MemoryLedger:
        return self._ledger


async def _find(_queue: str, _job_id: str) -> JobInfo | None:
    """Return None: a unit test has no other jobs."""
    return None
