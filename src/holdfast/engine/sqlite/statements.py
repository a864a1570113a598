"""The SQL files of this engine, read once, with what `core/states.py` says filled in (requirement S1).

A file holds one statement (`schema.sql`: all of them) under a header that says what it does, what it takes and what it
gives. Marks: `{{final}}` and the like stand for lists of state names, `{{into X}}` for the states that may move
to X, `{{event_data}}` for what an event says, `{{each priority}}` for rows of one priority each, `{{rows N}}` for the
rows of N values each that a bulk statement is run with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Final

from holdfast.core.job import Priority
from holdfast.core.states import FINAL, MOVES, State, event_for

#: A job in one of these is in the line, waits for a time, or is leased.
IN_MOTION: Final = frozenset({State.QUEUED, State.RUNNING, State.RETRYING})
#: Open, but nothing will happen before somebody acts.
ASIDE: Final = frozenset(State) - FINAL - IN_MOTION

#: Neither in line, nor leased, nor an ordinary success.
NOTED: Final = frozenset(State) - {State.QUEUED, State.RUNNING, State.SUCCEEDED}

#: A finished job goes unless a reader of the feed still needs it, somebody has yet to deal with its dead letter, or an
#: effect of it is not settled.
_UNNEEDED: Final = """(
       NOT EXISTS (SELECT 1 FROM feed_readers WHERE queue = :queue)
        OR coalesce((SELECT max(events.id) FROM events WHERE job = jobs.id), 0)
         < coalesce((SELECT min(first_event) FROM feed_entries WHERE queue = :queue), 9223372036854775807))
       AND NOT EXISTS (
           SELECT 1 FROM dlq_items AS letter
            WHERE letter.tenant_id = jobs.tenant_id AND letter.job_id = jobs.job_id AND letter.queue = jobs.queue
              AND (letter.status IN ('open', 'discard_requested') OR letter.replay_pending = 1))
       AND NOT EXISTS (
           SELECT 1 FROM idempotency_keys AS effect
            WHERE effect.tenant_id = jobs.tenant_id AND effect.job_id = jobs.job_id AND effect.queue = jobs.queue
              AND effect.state <> 'done')"""

#: An event's data, with what was not copied: of `event` (a row of events) and `jobs` (its job).
_EVENT_DATA: Final = """CASE
       WHEN event.from_state IS NULL AND event.to_state IS NOT NULL THEN json_patch(
           json_object(
               'task', jobs.job_type, 'payload', jobs.payload, 'tenant_id', jobs.tenant_id,
               'idempotency_key', iif(jobs.idempotency_key = '', jobs.job_id, jobs.idempotency_key),
               'trace_id', jobs.trace_id, 'priority', jobs.priority, 'context', json(jobs.context), 'run_at_ms', 0),
           coalesce(event.data, '{}'))
       WHEN event.to_state = 'succeeded' THEN json_object('result', jobs.result)
       ELSE event.data END"""

_COMMENT: Final = re.compile(r"^\s*--.*$", re.MULTILINE)
_MARK: Final = re.compile(r"\{\{(\w+)(?: (\w+))?\}\}")


@cache
def statement(name: str) -> str:
    """The statement of `sql/<name>.sql`, ready to run (a bulk statement still wants its rows)."""
    text = (files("holdfast.engine.sqlite") / "sql" / f"{name}.sql").read_text("utf-8")
    # Without its header: the driver tells INSERT and UPDATE by their first word.
    return _MARK.sub(_fill, _COMMENT.sub("", text)).strip()


@cache
def bulk_statement(name: str, rows: int) -> tuple[str, int]:
    """The statement for this many rows, and how many values a row has."""
    text = statement(name)
    mark = re.search(r"\{\{rows (\d+)\}\}", text)
    assert mark is not None, f"{name}.sql takes no rows"
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
        case "in_motion":
            return _names(IN_MOTION)
        case "aside":
            return _names(ASIDE)
        case "into":
            return _names(sources_of(State(argument)))
        case "event":
            return f"'{event_for(None, State(argument))}'"
        case "legal":
            return _legal_moves()
        case "noted":
            return " OR ".join(f"state = '{state}'" for state in sorted(NOTED))
        case "unneeded":
            return _UNNEEDED
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
    """Whether came_from → state is in the table."""
    arms = [f"WHEN '{state}' THEN state IN ({_names(to)})" for state, to in MOVES.items() if state and to]
    return f"CASE came_from {' '.join(arms)} ELSE came_from IS NULL AND state IN ({_names(MOVES[None])}) END"
