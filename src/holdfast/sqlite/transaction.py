"""One SQLite transaction: named statements, one step each, and notices for after the commit.

Every SQLite step releases the interpreter's lock and has to reacquire it, which takes up to 5 ms while user code keeps
another thread busy. Row by row (`executemany`, or fetching), a batch of 500 would take seconds. So every statement here
is one step: rows go in as one long VALUES list and come out as one JSON text.

Statements are in the engine's SQL files, one file per family, read once, with what `core/states.py` defines filled in
(requirement S1). A statement starts with `-- name:` and a header: what it does, takes and returns. Marks:
`{{final}}` and similar stand for lists of state names, `{{into X}}` for the states that may move to X,
`{{event_data}}` for an event's data, `{{each priority}}` for one row per priority, `{{rows N}}` for the rows of N
values each that a bulk statement is run with.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any, Final, TypeVar

import msgspec

from holdfast.core.job import MAX_BATCH, Priority
from holdfast.core.states import FINAL, MOVES, State, event_for
from holdfast.errors import EngineUnavailable

#: A job in one of these is ready, delayed, or leased.
ACTIVE_STATES: Final = frozenset({State.QUEUED, State.RUNNING, State.RETRYING})
#: Open, but waiting for an operator or the ledger.
PARKED_STATES: Final = frozenset(State) - FINAL - ACTIVE_STATES

#: Not queued, leased or succeeded.
INDEXED_STATES: Final = frozenset(State) - {State.QUEUED, State.RUNNING, State.SUCCEEDED}

#: A finished job is deleted unless a reader of the feed still needs it, its dead letter is still to be handled, or one
#: of its effects is not done.
_PRUNABLE: Final = """(
       NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
        OR coalesce((SELECT max(events.id) FROM events WHERE job_row = jobs.id), 0)
         < coalesce((SELECT min(first_event) FROM feed_entries WHERE queue = :queue), 9223372036854775807))
       AND NOT EXISTS (
           SELECT 1 FROM dlq_items AS item
            WHERE item.tenant_id = jobs.tenant_id AND item.job_id = jobs.job_id AND item.queue = jobs.queue
              AND (item.status IN ('open', 'discard_requested') OR item.replay_pending = 1))
       AND NOT EXISTS (
           SELECT 1 FROM idempotency_keys AS effect
            WHERE effect.tenant_id = jobs.tenant_id AND effect.job_id = jobs.job_id AND effect.queue = jobs.queue
              AND effect.state <> 'done')"""

#: An event's complete data, from `event` (a row of `events`) and `jobs` (its job). Events do not repeat what the job's
#: row has.
_EVENT_DATA: Final = """CASE
       WHEN event.from_state IS NULL AND event.to_state IS NOT NULL THEN json_patch(
           json_object(
               'task', jobs.job_type, 'payload', jobs.payload, 'tenant_id', jobs.tenant_id,
               'idempotency_key', iif(jobs.idempotency_key = '', jobs.job_id, jobs.idempotency_key),
               'trace_id', jobs.trace_id, 'priority', jobs.priority, 'context', json(jobs.context), 'run_at_ms', 0),
           coalesce(event.data, '{}'))
       WHEN event.to_state = 'succeeded' THEN json_object('result', jobs.result)
       ELSE event.data END"""

_FAMILIES: Final = ("intake", "claims", "settlement", "moves", "operators", "reads", "feed", "upkeep")

_COMMENT: Final = re.compile(r"^\s*--.*$", re.MULTILINE)
_MARK: Final = re.compile(r"\{\{(\w+)(?: (\w+))?\}\}")


@cache
def statement(name: str) -> str:
    """The named statement, with its marks filled in; the rows of a bulk statement are still missing."""
    # Without its header: the driver recognises INSERT and UPDATE by their first word.
    return _MARK.sub(_fill, _COMMENT.sub("", statement_texts()[name])).strip()


@cache
def statement_texts() -> dict[str, str]:
    """Every statement of the engine's SQL files by its name."""
    folder = files("holdfast.engine.sqlite") / "sql"
    found = {"schema": (folder / "schema.sql").read_text("utf-8")}
    for family in _FAMILIES:
        for part in (folder / f"{family}.sql").read_text("utf-8").split("-- name: ")[1:]:
            name, _, text = part.partition("\n")
            assert name not in found, f"two statements are named {name}"
            found[name] = text
    return found


@cache
def bulk_statement(name: str, rows: int) -> tuple[str, int]:
    """The statement for this number of rows, and the number of values per row."""
    text = statement(name)
    mark = re.search(r"\{\{rows (\d+)\}\}", text)
    assert mark is not None, f"{name} takes no rows"
    width = int(mark[1])
    row = f"({', '.join('?' * width)})"
    return text.replace(mark[0], ", ".join([row] * rows)), width


def sources_of(target: State) -> list[State]:
    """The states from which a job may move to `target`."""
    return [state for state, targets in MOVES.items() if state is not None and target in targets]


def _fill(mark: re.Match[str]) -> str:
    word, argument = mark[1], mark[2]
    match word:
        case "final":
            return _names(FINAL)
        case "active":
            return _names(ACTIVE_STATES)
        case "parked":
            return _names(PARKED_STATES)
        case "into":
            return _names(sources_of(State(argument)))
        case "event":
            return f"'{event_for(None, State(argument))}'"
        case "legal":
            return _legal_moves()
        case "indexed":
            return " OR ".join(f"state = '{state}'" for state in sorted(INDEXED_STATES))
        case "prunable":
            return _PRUNABLE
        case "event_data":
            return _EVENT_DATA
        case "each":
            return ", ".join(f"({int(priority)})" for priority in Priority)
        case "priorities":
            return ", ".join(str(int(priority)) for priority in Priority)
        case _:
            return mark[0]


def _names(states: Iterable[State]) -> str:
    return ", ".join(f"'{state}'" for state in sorted(states))


def _legal_moves() -> str:
    """SQL that is true if previous_state → state is in the table."""
    arms = [f"WHEN '{state}' THEN state IN ({_names(to)})" for state, to in MOVES.items() if state and to]
    return f"CASE previous_state {' '.join(arms)} ELSE previous_state IS NULL AND state IN ({_names(MOVES[None])}) END"


T = TypeVar("T")

#: Types of a statement's parameters.
Value = str | int | None


@dataclass(slots=True)
class CommitNotices:
    """What a commit means for waiters."""

    #: Queues in which jobs became ready.
    ready: set[str] = field(default_factory=set)
    #: Queues with notices for listeners.
    notices: set[str] = field(default_factory=set)
    #: Queue and id of jobs that ended.
    finished: list[tuple[str, str]] = field(default_factory=list)
    #: Queues in which leases ended, so that a tenant at its limit may run one more.
    freed: set[str] = field(default_factory=set)
    #: Queues whose feed has a new entry.
    feeds: set[str] = field(default_factory=set)
    #: Queues of which a ledger's file has new events.
    recorded: set[str] = field(default_factory=set)
    #: Another process wrote: anything may have happened.
    external: bool = False

    def __bool__(self) -> bool:
        notices = (self.ready, self.finished, self.notices, self.freed, self.feeds, self.recorded)
        return self.external or any(notices)


class Transaction:
    """A transaction of the writer, with one savepoint per operation.

    It begins with the first operation that writes. The writer commits it.
    """

    def __init__(
        self, connection: sqlite3.Connection, enter: Callable[[], None], untrimmed: dict[str, int], *, alone: bool
    ) -> None:
        self._connection = connection
        self._enter = enter
        #: A single operation needs no savepoint: the whole transaction is rolled back.
        self._alone = alone
        #: Entries added to each queue's feed since it was last trimmed; outlives the transaction.
        self.untrimmed = untrimmed
        self.begun = False
        self.effects = CommitNotices()

    def begin(self) -> None:
        """Acquire the write lock and begin. Everything read before must be read again."""
        if not self.begun:
            self._enter()
            self.begun = True
            self._connection.execute("BEGIN IMMEDIATE")
            self.open_savepoint()

    def open_savepoint(self) -> None:
        """Start the next operation."""
        if self.begun and not self._alone:
            self._connection.execute("SAVEPOINT operation")

    def keep(self) -> None:
        """End the operation and keep its writes."""
        if self.begun and not self._alone:
            self._connection.execute("RELEASE operation")

    def undo(self) -> bool:
        """Roll back this operation only; False if SQLite has already rolled back the whole transaction."""
        if not self.begun:
            return True
        if not self._connection.in_transaction:
            return False
        if self._alone:
            self._connection.execute("ROLLBACK")
        else:
            self._connection.execute("ROLLBACK TO operation")
            self._connection.execute("RELEASE operation")
        return True

    def commit(self) -> None:
        if self.begun and self._connection.in_transaction:
            self._connection.execute("COMMIT")

    def execute(self, text: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        """Run the ledger's SQL, which is not among the named statements.

        Pass many rows in one step, for the reason given in the module docstring.
        """
        return self._connection.execute(text, values)

    def rows(self, name: str, decoder: msgspec.json.Decoder[T], **values: Value) -> T:
        """Run a statement that returns one JSON text, and decode it."""
        return read_rows(self._connection, name, decoder, **values)

    def run(self, name: str, **values: Value) -> int:
        """Run a writing statement; returns how many rows it changed."""
        return self._connection.execute(statement(name), values).rowcount

    def add(self, name: str, **values: Value) -> tuple[int, int]:
        """Run an INSERT … SELECT; returns the last row's id and the number of rows. Ids are consecutive."""
        cursor = self._connection.execute(statement(name), values)
        return cursor.lastrowid or 0, cursor.rowcount

    def bulk(
        self, name: str, rows: Sequence[Sequence[Value]], before: Sequence[Value] = (), after: Sequence[Value] = ()
    ) -> tuple[int, int]:
        """Run a bulk statement; returns the last row's id and the row count.

        `before` and `after` are values before and after those of the rows.
        """
        text, width = bulk_statement(name, _size_for(len(rows)))
        padding = (_size_for(len(rows)) - len(rows)) * width
        cursor = self._connection.execute(text, [*before, *chain.from_iterable(rows), *[None] * padding, *after])
        return cursor.lastrowid or 0, cursor.rowcount


def read_rows(connection: sqlite3.Connection, name: str, decoder: msgspec.json.Decoder[T], **values: Value) -> T:
    """Run a statement that returns one JSON text, outside of a `Transaction`."""
    row: tuple[str] = connection.execute(statement(name), values).fetchone()
    return decoder.decode(row[0])


def require_rows(changed: int, expected: int, what: str) -> None:
    """Raise if a statement changed another number of rows than the code before it expects.

    The statements repeat the checks of the code, so a difference is a bug.
    """
    if changed != expected:
        raise EngineUnavailable(
            f"{what}: {changed} rows instead of {expected}, nothing was changed; report this as a bug"
        )


def json_list(values: Sequence[Any]) -> str:
    """Encode a list as a statement's parameter."""
    return msgspec.json.encode(values).decode()


def _size_for(rows: int) -> int:
    """The next power of two, so that few statements are compiled; rows of NULL fill it up."""
    return 1 << (rows - 1).bit_length() if rows else 1


# SQLite takes 32,766 values in one statement. The longest has three events of ten values for each job of a batch.
assert _size_for(3 * MAX_BATCH) * 10 < 32_766
