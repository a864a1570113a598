"""What goes to stdout: a table for a person at a terminal, plain lines for a pipe, JSON for a program.

stdout carries the answer and nothing else; notes and logs go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.redact import redact


def on_terminal() -> bool:
    """Whether a person looks at stdout."""
    return sys.stdout.isatty()


def console() -> Console:
    """A console on today's stdout (tests and pipes exchange it)."""
    return Console(highlight=False, soft_wrap=not on_terminal())


def emit_json(document: Any) -> None:
    """One JSON document, indented."""
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def emit_json_line(document: Any) -> None:
    """One JSON document on one line, at once."""
    print(msgspec.json.encode(document).decode(), flush=True)


def emit_rows(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, empty: str) -> None:
    """A table for a person; a header and tab-separated lines for a pipe; a note if there is nothing."""
    if not rows:
        note(empty)
        return
    if on_terminal():
        console().print(as_table(columns, rows))
        return
    print("\t".join(columns))
    for row in rows:
        print("\t".join(str(cell) for cell in row))


def as_table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, title: str | None = None) -> Table:
    """The same rows as rich shows them."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def note(message: str) -> None:
    """A remark for the person, on stderr."""
    print(redact(message), file=sys.stderr)
