"""What goes to stdout: a table for a person at a terminal, plain lines for a pipe, JSON for a program.

stdout carries the answer and nothing else; notes and logs go to stderr. At a terminal no word is broken in two: an
identifier can be copied whole, whatever the width. Control characters are shown, never sent to the terminal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TextIO

import msgspec
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from holdfast.cli.redact import redact

Cell = str | Text

#: Between two columns of a table.
_GAP: Final = 2
#: Narrower than this, text is not readable any more.
_TEXT_WIDTH: Final = 24
_INDENT: Final = "  "
#: All controls but tab and newline, and the characters that reorder text.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def on_terminal() -> bool:
    """Whether a person looks at stdout."""
    return sys.stdout.isatty()


def console(out: TextIO | None = None) -> Console:
    """A console on today's stdout (tests and pipes exchange it), or on this stream."""
    out = out or sys.stdout
    return Console(file=out, highlight=False, soft_wrap=not out.isatty())


def visible(text: str) -> str:
    """The text with control characters written out: text from outside must not steer the terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def emit_json(document: Any) -> None:
    """One JSON document, indented."""
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def emit_json_line(document: Any) -> None:
    """One JSON document on one line, at once."""
    print(msgspec.json.encode(document).decode(), flush=True)


def emit_facts(facts: Iterable[tuple[str, Cell | None]], width: int = 10) -> None:
    """A line for each that is not empty: name, value. The terminal wraps long ones, so that they are copied whole."""
    screen = console()
    for name, value in facts:
        if value:
            label = (f"{name:<{width}} ", "bold" if on_terminal() else "")
            screen.print(Text.assemble(label, value if isinstance(value, Text) else visible(value)), soft_wrap=True)


def emit_rows(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, empty: str, texts: int = 1, out: TextIO | None = None
) -> None:
    """A table for a person (or, where it would have to break a word, an entry for each row); a header and
    tab-separated lines for a pipe; a note if there is nothing. The last `texts` columns are sentences, which may be
    broken between words."""
    if not rows:
        note(empty)
        return
    out = out or sys.stdout
    shown = [[_one_line(cell) for cell in row] for row in rows]
    if not out.isatty():
        for line in (columns, *shown):
            print("\t".join(str(cell) for cell in line), file=out)
        return
    screen = console(out)
    screen.print(
        as_table(columns, shown, screen.width, texts=texts) or as_cards(columns, shown, screen.width), soft_wrap=True
    )


def as_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    texts: int = 1,
) -> Table | None:
    """The rows as rich shows them; None if that would break a word, or leave too little room for a sentence."""
    widths = _widths(columns, rows, width, texts)
    if widths is None:
        return None
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column, fitting in zip(columns, widths, strict=True):
        # Not an ellipsis: rich counts a blank at the end of a line that has wide characters, and would cut the word.
        table.add_column(Text(column), width=fitting, overflow="fold")
    for row in rows:
        # As text: rich would take brackets in a string for markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def as_cards(columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> Group:
    """Each row as an entry of its own: the first cell, and below it the others with their names."""
    return Group(*(line for row in rows for line in _card(columns, row, width)))


def note(message: str) -> None:
    """A remark for the person, on stderr."""
    print(visible(redact(message)), file=sys.stderr)


# Widths --------------------------------------------------------------------------------------------


def _widths(columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, texts: int) -> list[int] | None:
    """How wide each column is to be; the sentences share what the others leave."""
    cells = [[str(cell) for cell in column] for column in zip(columns, *rows, strict=True)]
    whole = [max(map(cell_len, column)) for column in cells]
    names = len(columns) - texts
    least = whole[:names] + [
        max(min(natural, _TEXT_WIDTH), *(cell_len(word) for cell in column for word in (cell.split() or [""])))
        for natural, column in zip(whole[names:], cells[names:], strict=True)
    ]
    spare = width - sum(least) - _GAP * (len(least) - 1)
    if spare < 0:
        return None
    wanted = sum(whole) - sum(least)
    return [
        low + (high - low if wanted <= spare else (high - low) * spare // wanted)
        for low, high in zip(least, whole, strict=True)
    ]


def _card(columns: Sequence[str], row: Sequence[Cell], width: int) -> Iterator[Text]:
    first, *others = row
    for line in _flow(Text(str(first), style="bold").split(" "), " ", width):
        yield _unbroken(line)
    items = [
        Text.assemble((f"{name} ", "dim"), cell) for name, cell in zip(columns[1:], others, strict=True) if str(cell)
    ]
    room = width - len(_INDENT)
    for line in _flow(items, " · ", room):
        # Longer than the room only if it is one item alone.
        for part in _flow(line.split(" "), " ", room) if line.cell_len > room else [line]:
            yield _unbroken(Text.assemble(_INDENT, part))


def _flow(parts: Iterable[Text], joint: str, room: int) -> Iterator[Text]:
    """Lines of whole parts. One that has no room stays whole, and the terminal breaks it."""
    line = Text()
    for part in parts:
        longer = Text(joint).join([line, part]) if line else part
        if line and longer.cell_len > room:
            yield line
            longer = part
        line = longer
    if line:
        yield line


def _unbroken(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _one_line(cell: Cell) -> Cell:
    return cell if isinstance(cell, Text) else visible(" ".join(cell.split()) if "\n" in cell or "\t" in cell else cell)
