"""Settlement on SQLite: end attempts of one queue, in one step.

A verdict from a worker that has lost its lease is stale and changes nothing (`LeaseRow.fence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, assert_never

import msgspec

from holdfast.core.job import Claim
from holdfast.core.states import State, event_for
from holdfast.core.verdict import (
    TARGETS,
    DeadLetter,
    Hold,
    Release,
    RetryLater,
    Settlement,
    SettleResult,
    Succeed,
    Suspend,
    advance,
)
from holdfast.engine.sqlite.feed import FeedWriter
from holdfast.engine.sqlite.intake import text_of
from holdfast.engine.sqlite.moves import JobMove, MoveBatch
from holdfast.engine.sqlite.rows import LEASE_ROWS, LeaseRow, encode_meta, row_id_of
from holdfast.engine.sqlite.store import EngineContext
from holdfast.sqlite.transaction import Transaction, Value, json_list, require_rows

_SUCCEEDED: Final = event_for(State.RUNNING, State.SUCCEEDED)


class LeasedJob(msgspec.Struct, frozen=True):
    """A leased job to be moved: its row and its claim."""

    row: LeaseRow
    claim: Claim

    @property
    def id(self) -> int:
        return self.row.id

    @property
    def job_id(self) -> str:
        return self.claim.job_id

    @property
    def job_type(self) -> str:
        return self.claim.task

    @property
    def tenant_id(self) -> str:
        return self.claim.tenant_id

    @property
    def trace_id(self) -> str:
        return self.claim.trace_id

    @property
    def state(self) -> State:
        return State.RUNNING

    @property
    def claim_seq(self) -> int:
        return self.row.claim_seq

    @property
    def deliveries(self) -> int:
        return self.row.deliveries

    @property
    def last_seq(self) -> int:
        return self.row.last_seq

    @property
    def payload(self) -> str:
        return text_of(self.claim.payload)


def settle(
    transaction: Transaction, policy: EngineContext, queue: str, settlements: Sequence[Settlement]
) -> list[SettleResult]:
    """End attempts; returns one result each. Only applied settlements are written."""
    ids = [row_id_of(settlement.claim.lease) for settlement in settlements]
    rows = {row.id: row for row in transaction.rows("leases_by_id", LEASE_ROWS, ids=json_list(ids))}
    answers: list[SettleResult] = []
    settled: set[str] = set()
    done: list[tuple[Value, ...]] = []
    moves = MoveBatch(transaction, policy, queue)
    for settlement, row_id in zip(settlements, ids, strict=True):
        lease, verdict = settlement.claim.lease, settlement.verdict
        token, row = lease.token, rows.get(row_id)
        answer = SettleResult.STALE if row is None else row.fence(lease, token)
        # A second copy in the same batch finds the first one settled.
        if answer is SettleResult.APPLIED and token in settled:
            answer = SettleResult.ALREADY
        answers.append(answer)
        if row is None or answer is not SettleResult.APPLIED:
            continue
        settled.add(token)
        if type(verdict) is Succeed:
            done.append(_success(row, token, settlement, verdict))
            transaction.effects.finished.append((queue, row.job_id))
        else:
            moves.add(_move(row, token, settlement, policy))
    journal = FeedWriter(transaction, queue, policy.options)
    if done:
        _succeed(transaction, policy, journal, done)
    moves.write(journal)
    journal.close()
    if done:
        transaction.effects.freed.add(queue)
    return answers


def _success(row: LeaseRow, token: str, settlement: Settlement, verdict: Succeed) -> tuple[Value, ...]:
    meta = encode_meta(advance(settlement.claim, verdict, settlement.finished_at_ms))
    return row.id, row.claim_seq, row.deliveries, row.worker, text_of(verdict.result), meta, token


def _succeed(
    transaction: Transaction, policy: EngineContext, journal: FeedWriter, done: Sequence[tuple[Value, ...]]
) -> None:
    now_ms = policy.clock.now_ms()
    ids = json_list([row[0] for row in done])
    size = sum(len(str(row[4])) for row in done)
    journal.add_events(*transaction.add("insert_succeeded_events", ids=ids, type=_SUCCEEDED, now=now_ms), size)
    _, changed = transaction.bulk("succeed", done, before=(now_ms, now_ms))
    require_rows(changed, len(done), "settle")


def _move(row: LeaseRow, token: str, settlement: Settlement, policy: EngineContext) -> JobMove:
    claim, verdict, now_ms = settlement.claim, settlement.verdict, policy.clock.now_ms()
    common: dict[str, Any] = {
        "job": LeasedJob(row, claim),
        "to": TARGETS[type(verdict)],
        "meta": advance(claim, verdict, settlement.finished_at_ms),
        "attempt": row.attempt,
        "worker": claim.lease.worker,
        "token": token,
    }
    match verdict:
        case RetryLater(delay_ms=delay_ms, failure=failure, counts=counts):
            pending = policy.retries_in_pending(claim.queue)
            rest_ms = max(delay_ms, policy.options.pending_idle_ms) if pending else delay_ms
            due_at_ms = now_ms + max(0, rest_ms)
            return JobMove(**common, failure=failure, due_at_ms=due_at_ms, pending=pending, data={"counted": counts})
        case DeadLetter(failure=failure) | Suspend(failure=failure):
            return JobMove(**common, failure=failure)
        case Hold(message=message, request=request):
            details = {} if request is None else {"approval_request": request}
            return JobMove(**common, message=message, data={"message": message, **details})
        case Release(message=message, delay_ms=delay_ms, started=started):
            # The number of an attempt that did not start is used again.
            common["attempt"] = row.attempt if started else row.attempt - 1
            later_ms = now_ms + delay_ms if delay_ms > 0 else None
            return JobMove(
                **common,
                event_attempt=row.attempt,
                message=message,
                data=verdict.data,
                ready=later_ms is None,
                due_at_ms=later_ms,
            )
        case Succeed():
            raise AssertionError("successes are written separately")
        case _:
            assert_never(verdict)
