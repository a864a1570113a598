"""Parsing of task arguments, durations and instants, and the filter options of dead letters and suspended jobs."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.clock import to_datetime
from holdfast.core.codec import decode_json, encode_json
from holdfast.errors import InvalidOption, InvalidPayload
from holdfast.ledger.port.operators import DeadLetterStatus

if TYPE_CHECKING:
    from holdfast.ledger.queries.operator_filters import DeadLetterFilter
    from holdfast.operations.operations import Operations


_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_DATE_CHARACTERS: Final = len("2030-01-31")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|min|s|m|h|d)")


class PriorityName(StrEnum):
    """Which line a job waits in."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


def payload(document: str | None, pairs: list[str]) -> bytes:
    """A task's arguments as JSON: a document (`-` reads stdin), or `name=value` pairs, or none at all."""
    if document is not None and pairs:
        raise InvalidPayload("give the arguments as one JSON document or as --arg, not both")
    if document is None:
        return encode_json(dict(_pair(pair) for pair in pairs), "the arguments")
    encoded = (sys.stdin.read() if document == "-" else document).encode()
    value = decode_json(encoded, "the arguments")
    if not isinstance(value, dict | list):
        raise InvalidPayload("the arguments must be a JSON object (by name) or array (by position)")
    # As it was written: decoding and encoding again could change large numbers.
    return encoded.strip()


def edit_payload(original: str, file: str | None, pairs: list[str]) -> bytes:
    """A payload instead of another: from a file (`-` is stdin), or the original with some arguments changed."""
    if file is not None and pairs:
        raise InvalidPayload("give --edit or --set, not both")
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as exc:
            raise InvalidPayload(f"--edit {file}: {exc}") from exc
        return text.strip().encode()
    before = decode_json(original.encode(), "the payload")
    if not isinstance(before, dict):
        raise InvalidPayload("--set changes arguments that have names, and this payload is no object; use --edit")
    return encode_json(before | dict(_pair(pair, "--set") for pair in pairs), "the payload")


def duration(text: str, name: str) -> timedelta:
    """`90`, `90s`, `500ms`, `5m`, `1h30m`, `2d`; a bare number is seconds."""
    if text.startswith("-"):
        raise InvalidOption(f"{name} must not be negative, got {text}")
    try:
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        pass
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidOption(f"{name}={text!r} is no duration; write seconds, or such as 500ms, 90s, 5m, 1h30m, 2d")
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError as exc:
        raise InvalidOption(f"{name}={text} is too long") from exc


def parse_instant(text: str, name: str) -> datetime:
    """An instant in ISO 8601 with its offset from UTC."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidOption(f"{name}={text!r} is no instant; write such as 2030-01-31T08:00:00Z") from exc
    if value.tzinfo is None:
        whole = text if len(text) > _DATE_CHARACTERS else f"{value:%Y-%m-%d}T08:00:00"
        raise InvalidOption(f"{name}={text!r} has no time zone; write {whole}Z for UTC, or {whole}+02:00")
    try:
        return value.astimezone(UTC)
    except OverflowError as exc:
        raise InvalidOption(f"{name}={text!r} is outside of the years 1 to 9999 in UTC") from exc


def parse_time_or_age(text: str, name: str, now_ms: int) -> datetime:
    """An instant, or how long ago."""
    try:
        ago = duration(text, name)
    except InvalidOption:
        return parse_instant(text, name)
    try:
        return to_datetime(now_ms) - ago
    except OverflowError as exc:
        raise InvalidOption(f"{name}={text} is longer ago than there are years") from exc


def _pair(text: str, option: str = "--arg") -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidPayload(f"{option} {text!r} must be name=value")
    try:
        return name, decode_json(value.encode(), "value")
    except InvalidPayload:
        return name, value


DlqIds = Annotated[
    list[str] | None, typer.Argument(metavar="LETTER...", help="Ids of dead letters.", show_default=False)
]
DlqId = Annotated[str, typer.Argument(metavar="LETTER", help="The dead letter's id.")]
Task = Annotated[
    str | None, typer.Option("--task", "-t", metavar="TASK", help="Only of this task.", show_default=False)
]
OneOfQueues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="NAME", help="Only of this queue; repeatable.", show_default=False),
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Only of this tenant.", show_default=False)
]
Code = Annotated[
    str | None, typer.Option("--code", metavar="CODE", help="Only with this error code.", show_default=False)
]
Fingerprint = Annotated[
    str | None,
    typer.Option(
        "--fingerprint", "-f", metavar="HEX", help="Only of this kind, as `dlq groups` shows it.", show_default=False
    ),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Failed at this instant or later, or so long ago (1h, 2d).", show_default=False),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Failed before this instant, or longer ago than this.", show_default=False),
]
Words = Annotated[
    str | None, typer.Option("--text", metavar="TEXT", help="Text in the error, in any case.", show_default=False)
]
Statuses = Annotated[
    list[DeadLetterStatus] | None,
    typer.Option("--status", "-s", help="Only in this status; repeatable. Default: all.", show_default=False),
]
Reason = Annotated[str, typer.Option(help="Why; kept in the log.")]
RequiredReason = Annotated[str, typer.Option(help="Why; needed, and kept in the log.")]
AppName = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="APP",
        help="The app that has the tasks: payloads are checked, and its guards see the new jobs at once.",
        show_default=False,
    ),
]


async def dead_letter_filter(
    offices: Operations,
    task: str | None,
    queue: list[str] | None,
    tenant: str | None,
    code: str | None,
    fingerprint: str | None,
    since: str | None,
    until: str | None,
    text: str | None,
    status: list[DeadLetterStatus] | None,
) -> DeadLetterFilter:
    """What was given, as the ledger takes it."""
    from holdfast.ledger.queries.operator_filters import DeadLetterFilter

    now_ms = await offices.engine.now_ms()
    return DeadLetterFilter(
        job_type=task,
        queues=frozenset(queue or ()),
        tenants=None if tenant is None else (tenant,),
        error_code=code,
        fingerprint=fingerprint,
        since=None if since is None else parse_time_or_age(since, "--since", now_ms),
        until=None if until is None else parse_time_or_age(until, "--until", now_ms),
        text=text,
        statuses=frozenset(status or ()),
    )
