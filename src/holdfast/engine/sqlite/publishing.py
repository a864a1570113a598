"""Events of jobs for the outbox, where the engine's file is the ledger: in the transaction in which they happen."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.core.job import Event
from holdfast.core.states import State
from holdfast.engine.sqlite.transaction import Transaction, json_list
from holdfast.ledger.publishing import OUTBOX_NEWS, Publishing

_decoder: Final = msgspec.json.Decoder(list[tuple[Any, ...]])


def publish(transaction: Transaction, publishing: Publishing, queue: str, first: int, last: int) -> None:
    """Those of the events with these ids that are wanted."""
    rows = [
        publishing.row(queue, seq, _event(*told), _as_it_is)
        for seq, *told in transaction.rows("told", _decoder, first=first, last=last)
        if publishing.wants(told[0])
    ]
    if rows:
        transaction.run("publish", rows=json_list(rows))
        transaction.effects.recorded.add(OUTBOX_NEWS)


def _as_it_is(ms: int) -> int:
    return ms


def _event(kind: str, job_id: str, tenant_id: str, at_ms: int, *rest: Any) -> Event:
    from_state, to_state, attempt, retry_count, worker, message, data = rest
    return Event(
        type=kind,
        job_id=job_id,
        tenant_id=tenant_id,
        at_ms=at_ms,
        from_state=State(from_state) if from_state else None,
        to_state=State(to_state) if to_state else None,
        attempt=attempt,
        retry_count=retry_count,
        worker=worker or "",
        message=message or "",
        data=msgspec.json.decode(data) if data else None,
    )
