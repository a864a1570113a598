"""The head of a queue's line: which jobs a claim gets next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

import msgspec

from holdfast.core.job import read_order
from holdfast.engine.port import MAX_TENANTS, TenantControl
from holdfast.engine.sqlite.rows import WORK_ROWS, WorkRow, tenant_controls
from holdfast.engine.sqlite.transaction import Transaction, Value, json_list
from holdfast.engine.sqlite.turns import Part, Pick, Turns, pick


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """A queue that is not paused, as an idle worker sees it."""

    queue: str
    in_line: bool
    #: In one priority, so that they have to take turns.
    several_tenants: bool
    tenants: str | None
    next_due_at: int | None


class Head(msgspec.Struct, frozen=True):
    """Jobs to lease, how many waiting ones were put in line for it, and whether a tenant's own limit held some back."""

    rows: list[WorkRow]
    promoted: int = 0
    held_back: bool = False


class _InLine(msgspec.Struct, array_like=True, frozen=True):
    turns: str | None
    parts: list[Part]
    leases: list[tuple[str, int]]


READY: Final = msgspec.json.Decoder(list[Ready])
_IN_LINE: Final = msgspec.json.Decoder(_InLine)
_SHARES: Final = msgspec.json.Decoder(list[list[WorkRow]])
_TURNS: Final = msgspec.json.Decoder(Turns)


def head_of_line(transaction: Transaction, ready: Ready, limit: int, turn: int, now_ms: int) -> Head:
    """The jobs to lease next. If the line is too short, as many as are due and find room in this claim join it.

    While a priority has jobs of one tenant only, there are no turns to take: one statement gives them.
    """
    controls = tenant_controls(ready.tenants)
    order = read_order(turn)
    limited = any(control.concurrency is not None for control in controls.values())
    fair = ready.several_tenants or limited
    read = _by_turns if fair else _as_they_stand
    head = read(transaction, ready.queue, limit, order, controls)
    if len(head.rows) == limit:
        return head
    promoted = transaction.run("promote", queue=ready.queue, now=now_ms, limit=limit - len(head.rows))
    if not promoted:
        return head
    # Whoever fell due finds room, so that there are no turns to take; but a tenant's limit is theirs, too.
    head = read(transaction, ready.queue, limit, order, controls)
    return Head(head.rows, promoted, head.held_back)


def _as_they_stand(
    transaction: Transaction,
    queue: str,
    limit: int,
    order: tuple[int, ...],
    controls: Mapping[str, TenantControl],
) -> Head:
    return Head(transaction.rows("claimable", WORK_ROWS, limit=limit, **_line(queue, order)))


def _by_turns(
    transaction: Transaction,
    queue: str,
    limit: int,
    order: tuple[int, ...],
    controls: Mapping[str, TenantControl],
) -> Head:
    capped = json_list([tenant for tenant, control in controls.items() if control.concurrency is not None])
    asked: dict[str, Value] = {**_line(queue, order), "limit": limit, "window": MAX_TENANTS, "capped": capped}
    seen = transaction.rows("in_line", _IN_LINE, after="", **asked)
    turns = _TURNS.decode(seen.turns) if seen.turns else Turns()
    parts, after = seen.parts, _last_of_window(seen.parts)
    if after and turns.after:
        # More tenants than one look takes in: go on after those of the last one, and round again.
        later = transaction.rows("in_line", _IN_LINE, **{**asked, "after": turns.after})
        after = _last_of_window(later.parts)
        known = {(part.place, part.tenant_id) for part in later.parts}
        parts = later.parts + ([] if after else [p for p in parts if (p.place, p.tenant_id) not in known])
    picked = pick(parts, limit, msgspec.structs.replace(turns, after=after), controls, dict(seen.leases))
    if not picked.parts:
        return Head([], held_back=picked.held_back)
    if len(parts) > 1 or seen.turns:
        transaction.run("turns", queue=queue, turns=msgspec.json.encode(picked.turns).decode())
    return Head(_rows(transaction, queue, order, picked), held_back=picked.held_back)


def _rows(transaction: Transaction, queue: str, order: tuple[int, ...], picked: Pick) -> list[WorkRow]:
    """In the order of the turns, so that a worker starts them fairly, too."""
    counts = Counter(picked.parts)
    shares = json_list([(order[place], tenant, count) for (place, tenant), count in counts.items()])
    heads = transaction.rows("in_turn", _SHARES, queue=queue, shares=shares, most=max(counts.values()))
    rows = {part: deque(head) for part, head in zip(counts, heads, strict=True)}
    return [rows[part].popleft() for part in picked.parts]


def _last_of_window(parts: list[Part]) -> str:
    """The last tenant of a line of which there may be more; empty if all have been seen."""
    sizes = Counter(part.place for part in parts)
    full = [part.tenant_id for part in parts if sizes[part.place] >= MAX_TENANTS]
    return max(full, default="")


def _line(queue: str, order: tuple[int, ...]) -> dict[str, Value]:
    first, second, third = order
    return {"queue": queue, "first": first, "second": second, "third": third}
