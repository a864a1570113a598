"""The state of the model: engine, ledger, processes, and facts by which an observer judges them.

A state is one flat tuple, because millions of states are stored and compared. A step copies the tuple into a list, the
*draft* of the next state, changes some of its fields and makes a tuple again.

An *epoch* numbers the starts of a store. A store that comes back has a new epoch and no connections; a call therefore
always has the epoch of the server that answers it.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

# Values ----------------------------------------------------------------------------------------------------------

State: TypeAlias = tuple[Any, ...]
Draft: TypeAlias = list[Any]
#: A job in the engine: UNKNOWN, QUEUED, (RUNNING, worker, deliveries), SUSPENDED or (FINAL, outcome).
#: An outcome is the number of the run that ended the job.
Record: TypeAlias = Any
#: A job in the ledger: UNKNOWN, (OPEN, events), (SUSPENDED, events) or (FINAL, outcome).
Row: TypeAlias = Any
#: Id, event, job, value. An outcome is the value of "ended", a record that of "reported".
Entry: TypeAlias = tuple[int, str, int, Any]
Batch: TypeAlias = tuple[Entry, ...]
Rows: TypeAlias = tuple[Row, ...]
Numbers: TypeAlias = tuple[int, ...]

UNKNOWN: Final = 0
QUEUED: Final = 1
OPEN: Final = 1
RUNNING: Final = 2
SUSPENDED: Final = 3
FINAL: Final = 9

#: The only idempotency key. A reservation is (RESERVED, worker, run, job, deliveries). After a recovery, a key whose
#: reservation is lost is IN_DOUBT as a bare number.
ABSENT: Final = 0
RESERVED: Final = 1
DONE: Final = 2
IN_DOUBT: Final = 3

#: Of a process that is between two pieces of work.
IDLE: Final = 0
#: Instead of a job, in an entry that is not about a job.
NO_JOB: Final = -1
#: Entry ids are `ENTRIES_PER_EPOCH * epoch + index`, so ids of different epochs differ.
ENTRIES_PER_EPOCH: Final = 16

# Fields ----------------------------------------------------------------------------------------------------------

# Engine: what a snapshot contains.
RECORDS: Final = 0  # record of each job
FEED: Final = 1  # batch of the entries that are not trimmed
NEXT_INDEX: Final = 2  # of the next feed entry
CLEARED: Final = 3  # engine epoch of the last verification
VERIFIED_LEDGER: Final = 4  # its ledger epoch; negative while a verification has closed the ledger's gate
MARK: Final = 5  # position that the ledger has confirmed
ACTS: Final = 6  # of each worker: its last marked reservation
ENGINE_GENERATION: Final = 7  # number of the last recovery
COMPARED: Final = 8  # epoch of a comparison, and the jobs that it has compared as bits

# Ledger: what a backup contains.
ROWS: Final = 9  # row of each job
POSITION: Final = 10  # last entry that was read; 0 at the beginning
ENTRIES: Final = 11  # entries that were written, as bits
KEY: Final = 12
RESERVATIONS: Final = 13  # of each worker: its last reservation
FENCE: Final = 14  # engine epoch whose batches are accepted
PROJECTED: Final = 15  # engine epoch of the last written batch; -1 while a recovery is unfinished
PROJECTED_SERVER: Final = 16  # identity of the server that wrote it
GENERATION: Final = 17  # number of the last recovery

# Servers, processes and copies.
ENGINE_EPOCH: Final = 18
LEDGER_EPOCH: Final = 19
SERVER: Final = 20  # identity of the ledger's server
WORKERS: Final = 21  # of each worker: IDLE or its run
PROJECTOR: Final = 22  # IDLE or its task
RECONCILER: Final = 23  # IDLE or its task
VERIFICATIONS: Final = 24  # of each verifier: IDLE or its stage
SNAPSHOT: Final = 25  # copy of the engine
BACKUP: Final = 26  # copy of the ledger

# Facts that no fault changes. Of these, processes read only BORN, RUNS and WITNESS.
ACCEPTED: Final = 27  # of each job: 0, or 1 + recoveries before its submission
BORN: Final = 28  # of each job: the generation in which it was created
RUNS: Final = 29  # of each job: runs that have begun; does not count past MAX_RUNS
REACHED: Final = 30  # of each job: 1 if the ledger ever had it, 2 if it ever had its end
END_RECORDED: Final = 31  # of each job: 1 if the ledger has had its end, and no operator resumed it since
EXECUTED: Final = 32  # ACCEPTED of the job that executed the effect last, or 0
EFFECT_LOST: Final = 33  # 1 if the ledger lost the key of an executed effect
WENT_BACK: Final = 34  # whether engine and ledger went back and do not agree again yet
RECOVERIES: Final = 35  # that finished
WITNESS: Final = 36  # what a surviving process saw confirmed: a position, and reservations as in ACTS
BUDGET: Final = 37  # faults that may still happen

FIELDS: Final = 38
ENGINE: Final = slice(RECORDS, ROWS)
LEDGER: Final = slice(ROWS, ENGINE_EPOCH)

MAX_RUNS: Final = 3


class Budget(NamedTuple):
    """How often each fault may happen."""

    snapshots: int = 0
    backups: int = 0
    engine_losses: int = 0
    ledger_losses: int = 0
    engine_restarts: int = 0
    ledger_restarts: int = 0
    kills: int = 0


#: Their indices in BUDGET, which is a plain tuple.
SNAPSHOTS, BACKUPS, ENGINE_LOSSES, LEDGER_LOSSES, ENGINE_RESTARTS, LEDGER_RESTARTS, KILLS = range(len(Budget._fields))

# Steps -----------------------------------------------------------------------------------------------------------

Invariant: TypeAlias = Literal["I1", "I2", "I3", "I4", "I5", "I6"]

INVARIANTS: Final[dict[Invariant, str]] = {
    "I1": "no run begins of a job that ended in the ledger; engine and ledger never have different ends of a job",
    "I2": "an executed effect is not executed again, unless an operator decided so",
    "I3": "a calm run ends each job that engine or ledger has, and the ledger has its end",
    "I4": "a verification finds that a store went back only if one did",
    "I5": "a calm run comes to rest, with both gates open",
    "I6": "no gate opens automatically while the ledger lacks data that the feed no longer has",
}


class Violation(NamedTuple):
    """An invariant that a step would break. Stands for the next state."""

    invariant: Invariant
    text: str


#: What processes and operators do as long as they are not at rest.
WORK: Final = False
#: What may happen or not: submissions, expiry of records, faults. A *calm* run has none of these.
CHANCE: Final = True

#: Name; next state; WORK or CHANCE.
Step: TypeAlias = tuple[str, "State | Violation", bool]


def kind(value: Any) -> int:
    """The first value of a record, row or key, which may be a bare number."""
    first: int = value if isinstance(value, int) else value[0]
    return first


def replace(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """A copy with another value at one index."""
    copy = list(values)
    copy[index] = value
    return tuple(copy)


def draft_fault(state: State, fault: int) -> Draft:
    """The draft of a state after one more fault."""
    draft = list(state)
    draft[BUDGET] = replace(state[BUDGET], fault, state[BUDGET][fault] - 1)
    return draft


def append_entry(draft: Draft, event: str, job: int = NO_JOB, value: Any = 0) -> None:
    """Append an entry to the engine's feed."""
    index = draft[NEXT_INDEX]
    assert index + 1 < ENTRIES_PER_EPOCH, "the ids of two epochs would overlap"
    draft[FEED] += ((ENTRIES_PER_EPOCH * draft[ENGINE_EPOCH] + index, event, job, value),)
    draft[NEXT_INDEX] = index + 1


def describe_batch(batch: Batch) -> str:
    return ", ".join(event if job == NO_JOB else f"{event} {job}" for _, event, job, _ in batch) or "nothing new"


# Steps of the stores that several processes use ------------------------------------------------------------------


def write_batch(draft: Draft, batch: Batch, position: int) -> Violation | None:
    """Write rows and position of the ledger in one transaction."""
    for entry_id, event, job, value in batch:
        draft[ENTRIES] |= 1 << entry_id
        # A final row stays: in the ledger, another event of the job is an anomaly.
        if job == NO_JOB or kind(draft[ROWS][job]) == FINAL:
            continue
        violation = _write_event(draft, event, job, value)
        if violation is not None:
            return violation
    draft[POSITION] = position
    if position:
        draft[ENTRIES] |= 1 << position
    return None


def _write_event(draft: Draft, event: str, job: int, value: Any) -> Violation | None:
    row, record = draft[ROWS][job], draft[RECORDS][job]
    events = row[1] + 1 if row else 1
    if event == "reported":
        event, value = _event_of(value)
    if event == "ended":
        if kind(record) == FINAL and record[1] != value:
            return Violation("I1", f"the ledger gets outcome {value} of job {job}, callers got {record[1]}")
        draft[END_RECORDED] = replace(draft[END_RECORDED], job, 1)
        row = (FINAL, value)
    else:
        row = (SUSPENDED if event == "suspended" else OPEN, events)
    draft[ROWS] = replace(draft[ROWS], job, row)
    draft[REACHED] = replace(draft[REACHED], job, max(draft[REACHED][job], 2 if event == "ended" else 1))
    return None


def _event_of(record: Record) -> tuple[str, int]:
    """The event that leads to a reported record."""
    if kind(record) == FINAL:
        return "ended", record[1]
    return ("suspended" if record == SUSPENDED else "created"), 0


def retire_jobs(draft: Draft, rows: Rows) -> None:
    """End the engine's open jobs that have ended in the ledger, with the ledger's outcome and without an event."""
    for job, row in enumerate(rows):
        record = draft[RECORDS][job]
        if kind(row) == FINAL and record != UNKNOWN and kind(record) != FINAL:
            draft[RECORDS] = replace(draft[RECORDS], job, row)


def find_loss(state: State) -> str:
    """What the ledger has had, does not have, and cannot get from the feed."""
    if state[EFFECT_LOST]:
        return "an effect that was executed"
    for job, reached in enumerate(state[REACHED]):
        if not reached:
            continue
        row, events = state[ROWS][job], [entry[1] for entry in state[FEED] if entry[2] == job]
        if not row and not events:
            return f"job {job}"
        if reached == 2 and kind(row) != FINAL and "ended" not in events:
            return f"the end of job {job}"
    return ""
