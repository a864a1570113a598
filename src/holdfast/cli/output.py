"""What goes to stdout: a table for a person at a terminal, plain lines for a pipe, JSON for a program.

stdout carries the answer and nothing else; notes and logs go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holdfast.cli.redact import redact

#: Between two columns of a table.
_GAP: Final = 2
#: Narrower than this, text is not readable any more.
_TEXT_WIDTH: Final = 24


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


def emit_rows(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, empty: str, texts: int = 1) -> None:
    """A table for a person (or, where it would have to break ids and numbers, an entry for each row); a header and
    tab-separated lines for a pipe; a note if there is nothing. The last `texts` columns are sentences, which may be
    broken into lines."""
    if not rows:
        note(empty)
        return
    if on_terminal():
        screen = console()
        if _fits(columns, rows, screen.width, texts):
            screen.print(as_table(columns, rows))
        else:
            _print_cards(screen, columns, rows)
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


def _fits(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int, texts: int) -> bool:
    """Whether the table can be shown with nothing broken but the texts in its last columns."""
    widths = [max(map(cell_len, map(str, column))) for column in zip(columns, *rows, strict=True)]
    widths[-texts:] = [min(text, _TEXT_WIDTH) for text in widths[-texts:]]
    return sum(widths) + _GAP * (len(widths) - 1) <= width


def _print_cards(screen: Console, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    for first, *others in rows:
        screen.print(Text(str(first), style="bold"), soft_wrap=True)
        told = [(name, cell) for name, cell in zip(columns[1:], others, strict=True) if str(cell)]
        line = Text(" · ").join(Text.assemble((f"{name} ", "dim"), cell) for name, cell in told)
        screen.print(Padding(line, (0, 0, 0, 2)))


def note(message: str) -> None:
    """A remark for the person, on stderr."""
    print(redact(message), file=sys.stderr)
