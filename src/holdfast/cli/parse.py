"""Parsing of task arguments, durations, instants, and filters of dead letters and suspended jobs."""

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
    """Priority of a job."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


def payload(document: str | None, pairs: list[str]) -> bytes:
    """Encode a task's arguments as JSON, from a document (`-` reads stdin) or from `name=value` pairs."""
    if document is not None and pairs:
        raise InvalidPayload("JSON and --arg exclude each other; pass the arguments one way")
    if document is None:
        return encode_json(dict(_pair(pair) for pair in pairs), "the arguments")
    encoded = (sys.stdin.read() if document == "-" else document).encode()
    value = decode_json(encoded, "the arguments")
    if not isinstance(value, dict | list):
        raise InvalidPayload("the arguments must be a JSON object (by name) or array (by position)")
    # Unchanged: decoding and encoding could alter large numbers.
    return encoded.strip()


def edit_payload(original: str, file: str | None, pairs: list[str]) -> bytes:
    """Build a replacement payload from a file (`-` is stdin), or by changing arguments of the original."""
    if file is not None and pairs:
        raise InvalidPayload("--edit and --set exclude each other; pass one of them")
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as exc:
            raise InvalidPayload(f"--edit {file}: {exc}") from exc
        return text.strip().encode()
    before = decode_json(original.encode(), "the payload")
    if not isinstance(before, dict):
        raise InvalidPayload("--set needs a payload that is a JSON object, and this one is not; use --edit")
    return encode_json(before | dict(_pair(pair, "--set") for pair in pairs), "the payload")


def duration(text: str, name: str) -> timedelta:
    """Parse `90`, `90s`, `500ms`, `5m`, `1h30m` or `2d`; a bare number is seconds."""
    if text.startswith("-"):
        raise InvalidOption(f"{name} must not be negative, got {text}")
    try:
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        pass
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidOption(f"{name}={text!r} is not a duration; use seconds or a value like 500ms, 90s, 5m, 1h30m, 2d")
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError as exc:
        raise InvalidOption(f"{name}={text} is too long") from exc


def parse_instant(text: str, name: str) -> datetime:
    """Parse an instant in ISO 8601 with a UTC offset."""
    try:
        value = datetime.fromisoformat(text)
    except ValueError as exc:
        raise InvalidOption(f"{name}={text!r} is not an instant; use a value like 2030-01-31T08:00:00Z") from exc
    if value.tzinfo is None:
        whole = text if len(text) > _DATE_CHARACTERS else f"{value:%Y-%m-%d}T08:00:00"
        raise InvalidOption(f"{name}={text!r} has no time zone; use {whole}Z for UTC, or {whole}+02:00")
    try:
        return value.astimezone(UTC)
    except OverflowError as exc:
        raise InvalidOption(f"{name}={text!r} is outside the years 1 to 9999 in UTC") from exc


def parse_time_or_age(text: str, name: str, now_ms: int) -> datetime:
    """Parse an instant, or an age relative to `now_ms`."""
    try:
        ago = duration(text, name)
    except InvalidOption:
        return parse_instant(text, name)
    try:
        return to_datetime(now_ms) - ago
    except OverflowError as exc:
        raise InvalidOption(f"{name}={text} is too long ago") from exc


def _pair(text: str, option: str = "--arg") -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidPayload(f"{option} {text!r} must be name=value")
    try:
        return name, decode_json(value.encode(), "value")
    except InvalidPayload:
        return name, value


DlqIds = Annotated[
    list[str] | None, typer.Argument(metavar="DLQ_ID...", help="Ids of dead letters.", show_default=False)
]
DlqId = Annotated[str, typer.Argument(metavar="DLQ_ID", help="Id of the dead letter.")]
Task = Annotated[str | None, typer.Option("--task", "-t", metavar="TASK", help="Only this task.", show_default=False)]
OneOfQueues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="NAME", help="Only this queue; repeatable.", show_default=False),
]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant.", show_default=False)]
Code = Annotated[
    str | None, typer.Option("--code", metavar="CODE", help="Only with this error code.", show_default=False)
]
Fingerprint = Annotated[
    str | None,
    typer.Option(
        "--fingerprint", "-f", metavar="HEX", help="Only this fingerprint, from `dlq groups`.", show_default=False
    ),
]
Since = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Only failures since this instant or age (1h, 2d).", show_default=False),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Only failures before this instant or age.", show_default=False),
]
Words = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="TEXT", help="Only with this text in the error; case-insensitive.", show_default=False
    ),
]
Statuses = Annotated[
    list[DeadLetterStatus] | None,
    typer.Option("--status", "-s", help="Only in this status; repeatable. Default: all.", show_default=False),
]
Reason = Annotated[str, typer.Option(help="Reason for the audit log.")]
RequiredReason = Annotated[str, typer.Option(help="Reason for the audit log. Required.")]
AppName = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="APP",
        help="App with the tasks: checks payloads, and applies its guards to the new jobs on submit.",
        show_default=False,
    ),
]


async def dead_letter_filter(
    operations: Operations,
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
    """Build the ledger's filter from the command's options."""
    from holdfast.ledger.queries.operator_filters import DeadLetterFilter

    now_ms = await operations.engine.now_ms()
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
