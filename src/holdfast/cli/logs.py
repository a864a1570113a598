"""Logs of the long-running commands: to stderr, for a person or as one JSON object a line, never a secret.

A line that is written in a job's run, by the user's code too, names the job.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

import msgspec
from rich.console import Console
from rich.logging import RichHandler

from holdfast.cli.format import iso
from holdfast.observe.current import about, current
from holdfast.observe.redact import redact, redacted

#: What every record has; the rest was given by the caller with `extra=`.
#: `color_message` is uvicorn's, for terminals.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the job at hand, then what the caller added."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": iso(round(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (claim := current.get()) is not None:
            line |= about(claim)
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack_info"] = self.formatStack(record.stack_info)
        # Before it is JSON: what looks for secrets must not meet quotes and escapes that are ours.
        return msgspec.json.encode(redacted(line)).decode()


class Plain(logging.Formatter):
    """The message alone, redacted; rich adds time and level."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Send all logs there; JSON unless a person looks, or if told so."""
    handler: logging.Handler
    if as_json or not sys.stderr.isatty():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
    else:
        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False, rich_tracebacks=False)
        handler.setFormatter(Plain("%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
