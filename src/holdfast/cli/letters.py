"""Dead letters as people and programs read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast.cli.format import as_json, joined, shorten, span
from holdfast.cli.story import event_document, moment
from holdfast.core.codec import encode_json
from holdfast.dlq.difference import ABSENT, Change

if TYPE_CHECKING:
    from holdfast.ledger.letters import LetterDetail, LetterGroup, LetterRow


def letter_row(letter: LetterRow, now_ms: int) -> tuple[str, ...]:
    """A row of a list."""
    return (
        letter.dlq_id,
        letter.job_type,
        letter.queue,
        letter.tenant_id,
        f"{_ago(letter.failed_at, now_ms)} ago",
        letter.status,
        joined(letter.error_code, shorten(letter.error)),
    )


def group_row(group: LetterGroup, now_ms: int) -> tuple[str, ...]:
    """A kind of error."""
    return (
        group.fingerprint,
        group.job_type,
        str(group.count),
        f"{_ago(group.first, now_ms)} ago",
        f"{_ago(group.last, now_ms)} ago",
        joined(group.error_code, shorten(group.error)),
    )


def letter_facts(letter: LetterRow) -> Iterator[tuple[str, str]]:
    """What is known of one, a line each."""
    facts = {
        "letter": letter.dlq_id,
        "status": letter.status,
        "job": letter.job_id,
        "task": letter.job_type,
        "queue": letter.queue,
        "tenant": letter.tenant_id,
        "trace": letter.trace_id,
        "failed": moment(letter.failed_at),
        "error": joined(letter.error_code, letter.error),
        "fingerprint": letter.fingerprint,
        "retries": str(letter.retry_count),
        "payload": shorten(letter.payload.text, 2_000),
        "asked by": letter.requested_by,
        "confirmed by": letter.confirmed_by,
        "reason": letter.reason,
        "replays": str(letter.replay_count) if letter.replay_count else "",
        "replayed as": letter.replayed_as,
    }
    return ((name, value) for name, value in facts.items() if value)


def changes_text(changes: Sequence[Change]) -> str:
    """What an edit changes, a line for each place: - what was, + what will be."""
    if not changes:
        return "the payload is as it was"
    lines = []
    for change in changes:
        for sign, value in (("-", change.before), ("+", change.after)):
            if value is not ABSENT:
                lines.append(f"{sign} {change.path or '/'}: {shorten(encode_json(value, 'a value').decode(), 400)}")
    return "\n".join(lines)


def letter_document(letter: LetterRow) -> dict[str, Any]:
    """A letter for programs."""
    return {
        "dlq_id": letter.dlq_id,
        "status": letter.status,
        "job_id": letter.job_id,
        "task": letter.job_type,
        "queue": letter.queue,
        "tenant_id": letter.tenant_id,
        "trace_id": letter.trace_id,
        "error_code": letter.error_code,
        "error": letter.error,
        "fingerprint": letter.fingerprint,
        "retry_count": letter.retry_count,
        "failed_at": moment(letter.failed_at),
        "requested_by": letter.requested_by,
        "confirmed_by": letter.confirmed_by,
        "reason": letter.reason,
        "replay_count": letter.replay_count,
        "replayed_as": letter.replayed_as,
    }


def whole_document(letter: LetterDetail) -> dict[str, Any]:
    """A letter with all that is known of it."""
    return letter_document(letter) | {
        "payload": as_json(letter.payload.text.encode()),
        "stack": letter.stack,
        "history": as_json(letter.history.text.encode()),
        "events": [event_document(event) for event in letter.events],
    }


def group_document(group: LetterGroup) -> dict[str, Any]:
    """A kind of error for programs."""
    return {
        "fingerprint": group.fingerprint,
        "task": group.job_type,
        "error_code": group.error_code,
        "error": group.error,
        "count": group.count,
        "first": moment(group.first),
        "last": moment(group.last),
    }


def _ago(at: datetime, now_ms: int) -> str:
    return span(max(0, now_ms - round(at.timestamp() * 1000)))
