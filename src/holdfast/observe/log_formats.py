"""Log formatters of the command line: JSON or plain lines, without control characters or secrets.

In a plain log each message is one line, whatever it contains; only tracebacks and stacks below it have more.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.clock import iso
from holdfast.observe.logs import current_claim, log_fields
from holdfast.observe.redact import redact, redact_and_truncate, redact_value
from holdfast.observe.visible import escape_newlines, visible, visible_json

#: Maximum length of a traceback, in characters.
_STACK_LIMIT: Final = 16_000

#: Attributes of every record; others were passed with `extra=`. Uvicorn adds `color_message` for terminals.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class SafeFormatter(logging.Formatter):  # noqa: TID251 - the base of those to use
    """Formats tracebacks with a limited length, even if the exception's own code fails."""

    def formatException(self, exc_info: Any) -> str:
        try:
            text = super().formatException(exc_info)
        except Exception as exc:  # noqa: BLE001 - formatting calls user code
            return f"(the traceback cannot be formatted: {type(exc).__name__})"
        if len(text) <= _STACK_LIMIT:
            return text
        # Keep both ends: a huge message would otherwise displace the frames.
        half = _STACK_LIMIT // 2
        first, last = redact_and_truncate(text, half), redact_and_truncate(text, half, end=True)
        return f"{first}\n… {len(text) - _STACK_LIMIT} characters …\n{last}"


class JsonFormatter(SafeFormatter):
    """One JSON object per line: time, level, logger, message, the current job, then the caller's `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": iso(round(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (claim := current_claim.get()) is not None:
            line |= log_fields(claim)
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack_info"] = self.formatStack(record.stack_info)
        # Redact before encoding, so that JSON quotes and escapes do not disturb the patterns.
        return _encode(redact_value(line))


class PlainFormatter(SafeFormatter):
    """Plain text; by default only the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Redact first: secrets of several lines are found by their newlines.
        return escape_newlines(redact(super().formatMessage(record)))

    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


def _encode(line: Any) -> str:
    try:
        return visible_json(msgspec.json.encode(line).decode())
    except UnicodeEncodeError:
        # A lone surrogate, which JSON in UTF-8 cannot hold.
        return json.dumps(line)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Send all logs to stderr, as JSON if `as_json` is set or stderr is not a terminal."""
    handler: logging.Handler
    if as_json or not sys.stderr.isatty():
        handler = logging.StreamHandler(sys.stderr)  # noqa: TID251 - with a safe formatter
        handler.setFormatter(JsonFormatter())
    else:
        # Commands that do not log should not wait for the import.
        from rich.logging import RichHandler  # noqa: TID251 - with a safe formatter and console

        from holdfast.observe.terminal import SafeConsole

        handler = RichHandler(console=SafeConsole(stderr=True), show_path=False, markup=False, rich_tracebacks=False)
        handler.setFormatter(PlainFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)  # noqa: TID251 - as above


def format_unhandled_logs() -> None:
    """Format warnings and errors that are logged while no handler is set, for example by a driver."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())


@contextmanager
def log_to_file(name: str, path: Path) -> Iterator[None]:
    """Send the logs of this logger to a file, and nowhere else."""
    log, handler = logging.getLogger(name), logging.FileHandler(path, encoding="utf-8")  # noqa: TID251 - as above
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True
        handler.close()
