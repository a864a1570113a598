"""Log formatters of the command line: JSON or plain lines, without control characters or secrets."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.logging import RichHandler

from holdfast.clock import iso
from holdfast.observe.logs import current_claim, log_fields
from holdfast.observe.redact import redact, redact_and_truncate, redact_value

#: Maximum length of a traceback, in characters.
_STACK_LIMIT: Final = 16_000
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

#: Attributes of every record; others were passed with `extra=`. Uvicorn adds `color_message` for terminals.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class SafeFormatter(logging.Formatter):
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
    """Only the redacted message; rich adds time and level."""

    def format(self, record: logging.LogRecord) -> str:
        # Escape codes in an exception's message must not reach the terminal.
        return _CONTROL.sub(lambda found: repr(found[0])[1:-1], redact(super().format(record)))


def _encode(line: Any) -> str:
    try:
        return msgspec.json.encode(line).decode()
    except UnicodeEncodeError:
        # A lone surrogate, which JSON in UTF-8 cannot hold.
        return json.dumps(line)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Send all logs to stderr, as JSON if `as_json` is set or stderr is not a terminal."""
    handler: logging.Handler
    if as_json or not sys.stderr.isatty():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
    else:
        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False, rich_tracebacks=False)
        handler.setFormatter(PlainFormatter("%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
