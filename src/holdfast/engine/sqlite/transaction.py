"""One transaction, as the operations see it: named statements, few steps, and a note of what to tell others.

Every step of SQLite gives up the interpreter's lock and has to win it back, which costs up to 5 ms while user code
keeps another thread busy. Row by row (`executemany`, or fetching) a batch of 500 takes seconds then; so all
statements here are one step each: rows go in as one long VALUES list and come out as one JSON text.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import msgspec

from holdfast.engine.port import MAX_BATCH
from holdfast.engine.sqlite.statements import bulk_statement, statement
from holdfast.errors import EngineUnavailable

T = TypeVar("T")

#: What a statement may be given.
Value = str | int | None


@dataclass(slots=True)
class Effects:
    """What a commit means for those who wait."""

    #: Queues in which work became ready.
    ready: set[str] = field(default_factory=set)
    #: Queues with notices for listeners.
    noticed: set[str] = field(default_factory=set)
    #: Queue and id of jobs that ended.
    ended: list[tuple[str, str]] = field(default_factory=list)
    #: Queues in which leases ended: a tenant may run one more.
    freed: set[str] = field(default_factory=set)
    #: Queues whose feed has a new entry.
    fed: set[str] = field(default_factory=set)
    #: Queues whose story a ledger's file has more of.
    recorded: set[str] = field(default_factory=set)
    #: Another process wrote: anything may have happened.
    foreign: bool = False

    def __bool__(self) -> bool:
        told = (self.ready, self.ended, self.noticed, self.freed, self.fed, self.recorded)
        return self.foreign or any(told)


class Transaction:
    """Begun when the first operation wants to write; each operation is a savepoint in it. The writer commits it."""

    def __init__(
        self, connection: sqlite3.Connection, enter: Callable[[], None], untrimmed: dict[str, int], *, alone: bool
    ) -> None:
        self._connection = connection
        self._enter = enter
        #: With a single operation the whole transaction is its savepoint.
        self._alone = alone
        #: How many entries each queue's feed has got since it was last trimmed; outlives the transaction.
        self.untrimmed = untrimmed
        self.begun = False
        self.effects = Effects()

    def begin(self) -> None:
        """From here on nobody else writes. What was read before must be read again."""
        if not self.begun:
            self._enter()
            self.begun = True
            self._connection.execute("BEGIN IMMEDIATE")
            self.open_savepoint()

    def open_savepoint(self) -> None:
        """The next operation starts here."""
        if self.begun and not self._alone:
            self._connection.execute("SAVEPOINT operation")

    def keep(self) -> None:
        """The operation is done."""
        if self.begun and not self._alone:
            self._connection.execute("RELEASE operation")

    def undo(self) -> bool:
        """Take the operation back, and it alone; False if SQLite has thrown away the whole transaction."""
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
        """Run SQL that is not this package's: the ledger's. One step for many rows is best, see above."""
        return self._connection.execute(text, values)

    def rows(self, name: str, decoder: msgspec.json.Decoder[T], **values: Value) -> T:
        """What a statement with one JSON text as its answer says."""
        return read_rows(self._connection, name, decoder, **values)

    def run(self, name: str, **values: Value) -> int:
        """Run a writing statement; how many rows it changed."""
        return self._connection.execute(statement(name), values).rowcount

    def add(self, name: str, **values: Value) -> tuple[int, int]:
        """Run an INSERT … SELECT; the last row's id and how many there are. Ids are consecutive."""
        cursor = self._connection.execute(statement(name), values)
        return cursor.lastrowid or 0, cursor.rowcount

    def bulk(
        self, name: str, rows: Sequence[Sequence[Value]], before: Sequence[Value] = (), after: Sequence[Value] = ()
    ) -> tuple[int, int]:
        """Run a bulk statement with values before and after its rows; the last row's id and how many changed."""
        text, width = bulk_statement(name, _size_for(len(rows)))
        padding = (_size_for(len(rows)) - len(rows)) * width
        cursor = self._connection.execute(text, [*before, *chain.from_iterable(rows), *[None] * padding, *after])
        return cursor.lastrowid or 0, cursor.rowcount


def read_rows(connection: sqlite3.Connection, name: str, decoder: msgspec.json.Decoder[T], **values: Value) -> T:
    """Outside of a transaction: what a statement with one JSON text as its answer says."""
    row: tuple[str] = connection.execute(statement(name), values).fetchone()
    return decoder.decode(row[0])


def expect(changed: int, wanted: int, what: str) -> None:
    """A statement repeats the checks of the code before it. If they disagree nothing may be written."""
    if changed != wanted:
        raise EngineUnavailable(f"{what}: {changed} rows instead of {wanted}; nothing was changed; please report this")


def json_list(values: Sequence[Any]) -> str:
    """A list of ids as a statement takes it."""
    return msgspec.json.encode(values).decode()


def _size_for(rows: int) -> int:
    """The next power of two, so that few statements are ever compiled; rows of NULL fill it up."""
    return 1 << (rows - 1).bit_length() if rows else 1


# SQLite takes 32,766 values in one statement. The longest has three events of ten values for each job of a batch.
assert _size_for(3 * MAX_BATCH) * 10 < 32_766
