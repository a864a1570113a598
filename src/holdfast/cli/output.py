"""Output to stdout as a table, plain lines or JSON; formats of instants, durations, states and jobs.

stdout carries only the answer; notes and logs go to stderr. On a terminal no word is broken, so that identifiers can be
copied whole at any width. Commands print only through this module: text from others is never markup, and its control
characters are written out (`observe.visible`).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdfast.clock import iso, to_datetime
from holdfast.core.job import Attempt, Failure, JobInfo, Priority
from holdfast.core.states import State
from holdfast.observe.redact import redact
from holdfast.observe.terminal import SafeConsole
from holdfast.observe.visible import collapse, flatten, fold, visible, visible_json

Cell = str | Text

#: Blanks between two columns of a table.
_GAP: Final = 2
#: Minimum width of a column of sentences; a narrower one is unreadable.
_TEXT_WIDTH: Final = 24
_INDENT: Final = "  "


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def console(out: TextIO | None = None) -> SafeConsole:
    """Return a console on the current `sys.stdout` (tests replace it), or on this stream."""
    out = out or sys.stdout
    return SafeConsole(out, soft_wrap=not out.isatty())


def emit_text(text: str = "", *, out: TextIO | None = None, flush: bool = False) -> None:
    """Print text of any number of lines, for example a stack."""
    print(visible(text), file=out or sys.stdout, flush=flush)


def emit_line(*cells: str, out: TextIO | None = None, flush: bool = False) -> None:
    """Print one line of cells, separated by tabs."""
    emit_text("\t".join(map(flatten, cells)), out=out, flush=flush)


def emit_json(document: Any) -> None:
    """Print one JSON document, indented."""
    emit_text(visible_json(msgspec.json.format(msgspec.json.encode(document), indent=2).decode()))


def emit_json_line(document: Any) -> None:
    """Print one JSON document on one line and flush."""
    emit_text(visible_json(msgspec.json.encode(document).decode()), flush=True)


def emit_facts(facts: Iterable[tuple[str, Cell | None]], width: int = 10) -> None:
    """Print name and value, one line per non-empty value; further lines of a value are indented.

    The terminal wraps long values, so that they can be copied.
    """
    screen = console()
    for name, value in facts:
        if value:
            label = (f"{name:<{width}} ", "bold" if on_terminal() else "")
            if isinstance(value, str):
                value = Text(visible(value).replace("\n", "\n" + " " * (width + 1)))
            screen.print(Text.assemble(label, value), soft_wrap=True)


def emit_rows(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, empty: str, texts: int = 1, out: TextIO | None = None
) -> None:
    """Print rows: a table on a terminal, otherwise a header and tab-separated lines.

    Without rows it prints the note `empty`. Where a table would break a word, the terminal gets one card per row. The
    last `texts` columns are sentences, which may be broken between words.
    """
    if not rows:
        note(empty)
        return
    out = out or sys.stdout
    if not out.isatty():
        for line in (columns, *rows):
            emit_line(*map(str, line), out=out)
        return
    screen = console(out)
    screen.print(
        as_table(columns, rows, screen.width, texts=texts) or as_cards(columns, rows, screen.width), soft_wrap=True
    )


def as_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    texts: int = 1,
) -> Table | None:
    """Build a table; None if that would break a word, or leave too little width for a sentence."""
    names, *lines = ([_to_text(cell) for cell in row] for row in (columns, *rows))
    widths = _widths(names, lines, width, texts)
    if widths is None:
        return None
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name, fitting in zip(names, widths, strict=True):
        # No ellipsis: rich counts a blank at the end of a line that has wide characters, and would cut the word.
        table.add_column(name, width=fitting, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def as_cards(columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> Group:
    """Format each row as a card: the first cell, and below it the others with their names."""
    return Group(*(line for row in rows for line in _card(columns, [_to_text(cell) for cell in row], width)))


def note(message: str) -> None:
    """Print a note on stderr, in one line and with secrets redacted."""
    emit_line(redact(message), out=sys.stderr)


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error on stderr, with secrets redacted."""
    emit_text(redact("".join(traceback.format_exception(error))).removesuffix("\n"), out=sys.stderr)


def progress_line(text: str = "") -> None:
    """Replace the last line of stderr, which must be a terminal, by this text."""
    print(f"\r\033[K{flatten(text)}", end="", file=sys.stderr, flush=True)  # noqa: T201


def read_answer(text: str) -> str:
    """Print a prompt on stderr and return the line that is typed; empty if stdin is closed."""
    print(flatten(text), end=" ", file=sys.stderr, flush=True)  # noqa: T201
    return sys.stdin.readline()


# Widths --------------------------------------------------------------------------------------------


def _widths(columns: Sequence[Cell], rows: Sequence[Sequence[Cell]], width: int, texts: int) -> list[int] | None:
    """Width of each column; the sentences share what the others leave. None if the words do not fit."""
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
    missing = sum(whole) - sum(least)
    return [
        low + (high - low if missing <= spare else (high - low) * spare // missing)
        for low, high in zip(least, whole, strict=True)
    ]


def _card(columns: Sequence[str], row: Sequence[Text], width: int) -> Iterator[Text]:
    first, *others = row
    for line in _flow(Text(str(first), style="bold").split(" "), " ", width):
        yield _keep_unbroken(line)
    items = [
        Text.assemble((f"{name} ", "dim"), cell) for name, cell in zip(columns[1:], others, strict=True) if str(cell)
    ]
    inner = width - len(_INDENT)
    for line in _flow(items, " · ", inner):
        # Longer than `inner` only if it is a single item.
        for part in _flow(line.split(" "), " ", inner) if line.cell_len > inner else [line]:
            yield _keep_unbroken(Text.assemble(_INDENT, part))


def _flow(parts: Iterable[Text], joint: str, width: int) -> Iterator[Text]:
    """Join parts into lines. A part longer than `width` stays whole, and the terminal wraps it."""
    line = Text()
    for part in parts:
        longer = Text(joint).join([line, part]) if line else part
        if line and longer.cell_len > width:
            yield line
            longer = part
        line = longer
    if line:
        yield line


def _keep_unbroken(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _to_text(cell: Cell) -> Text:
    # `Text` drops some control characters silently.
    return cell if isinstance(cell, Text) else Text(flatten(cell))


_STYLES: Final[dict[State, str]] = {
    State.QUEUED: "cyan",
    State.WAITING_APPROVAL: "magenta",
    State.RUNNING: "blue",
    State.RETRYING: "yellow",
    State.SUSPENDED: "magenta",
    State.SUCCEEDED: "green",
    State.DLQ_PENDING: "red",
    State.DLQ_RECORDED: "red",
    State.FAILED: "bold red",
    State.CANCELLED: "dim",
}

_SPANS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"))


def state_text(state: State) -> Text:
    """Format a state in its colour."""
    return Text(state.value, style=_STYLES[state])


def instant(at_ms: int) -> str:
    """Format an instant in UTC, to the millisecond; 0 is a dash."""
    if not at_ms:
        return "–"
    return to_datetime(at_ms).strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def span(duration_ms: int) -> str:
    """Format a duration: `35 ms`, `1.2 s`, `3.5 min`, `2.0 d`."""
    for size_ms, unit in _SPANS:
        if abs(duration_ms) >= size_ms:
            return f"{duration_ms / size_ms:.1f} {unit}"
    return f"{duration_ms / 1000:.1f} s" if abs(duration_ms) >= 1000 else f"{duration_ms} ms"


def shorten(text: str, width: int = 60) -> str:
    """Shorten to one line of at most `width` characters."""
    line = collapse(fold(text))
    return line if len(line) <= width else line[: width - 1] + "…"


def error_text(failure: Failure) -> str:
    """Format a failure: `TASK_ERROR: ValueError: boom`."""
    return join_parts(failure.code, failure.type, failure.message)


def join_parts(*parts: str) -> str:
    """Join the non-empty parts with colons."""
    return ": ".join(part for part in parts if part)


def number_of(count: int, one: str, many: str = "") -> str:
    """Format a count: `1 worker`, `2 workers`; `many` for an irregular plural."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def priority_name(priority: int) -> str:
    """Return `high`, `normal` or `low`, or the number of a priority without a name."""
    try:
        return Priority(priority).name.lower()
    except ValueError:
        return str(priority)


def job_document(view: JobInfo) -> dict[str, Any]:
    """Build a job's document for `--json`; the keys are the ledger's where it has them."""
    meta = view.meta
    return {
        "job_id": view.job_id,
        "task": view.task,
        "queue": view.queue,
        "tenant_id": view.tenant_id,
        "state": view.state.value,
        "priority": priority_name(meta.priority),
        "attempt": view.attempt,
        "retry_count": meta.retry_count,
        "lost_leases": meta.lost_leases,
        "idempotency_key": view.idempotency_key or view.job_id,
        "trace_id": view.trace_id,
        "worker": view.worker or None,
        # Without a ledger, Redis keeps no arguments of a job that succeeded.
        "payload": as_json(view.payload) if view.payload else None,
        "context": meta.context,
        "result": None if view.result is None else as_json(view.result),
        "failure": failure_document(view.failure),
        "created_at": iso(view.created_at_ms),
        "run_at": iso(meta.run_at_ms),
        "next_attempt_at": iso(view.next_attempt_at_ms),
        "finished_at": iso(view.finished_at_ms),
        "dlq_id": meta.dlq_id or None,
        "history": [attempt_document(attempt) for attempt in meta.history],
    }


def attempt_document(attempt: Attempt) -> dict[str, Any]:
    """Build the document of one attempt."""
    return {
        "attempt": attempt.number,
        "worker": attempt.worker,
        "started_at": iso(attempt.started_at_ms),
        "finished_at": iso(attempt.finished_at_ms),
        "duration_ms": attempt.finished_at_ms - attempt.started_at_ms,
        "outcome": attempt.outcome,
        "failure": failure_document(attempt.failure),
    }


def failure_document(failure: Failure | None) -> dict[str, str] | None:
    """Build the document of a failure."""
    if failure is None:
        return None
    return {"code": failure.code, "type": failure.type, "message": failure.message, "stack": failure.stack}


def as_json(encoded: bytes) -> Any:
    """Return JSON unchanged, anything else as text: a foreign message may carry any bytes."""
    try:
        msgspec.json.decode(encoded)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return encoded.decode("utf-8", "replace")
    return msgspec.Raw(encoded)


def now_ms() -> int:
    """This machine's clock, for displayed ages only."""
    return round(datetime.now(UTC).timestamp() * 1000)
