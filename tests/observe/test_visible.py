"""What is written out before a text reaches a terminal or a log."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from typing import Final

import msgspec
import pytest
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from holdfast.observe.log_formats import JsonFormatter, PlainFormatter
from holdfast.observe.terminal import SafeConsole, progress_bars
from holdfast.observe.visible import escape_newlines, flatten, visible, visible_json

#: Format characters that are drawn: signs before numbers, in Arabic, Syriac, Kaithi.
_DRAWN: Final = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
_HOSTILE: Final = "[/nosuchtag][red]x\x1b]0;t\x07\x1b[2J\x9b31m\r\x08\u202e\x7f"
_SHOWN: Final = "[/nosuchtag][red]x\\x1b]0;t\\x07\\x1b[2J\\x9b31m\\r\\x08\\u202e\\x7f"


def test_every_character_that_is_not_text_is_written_out() -> None:
    hidden = {
        code
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in _DRAWN
    } - {ord("\t"), ord("\n")}
    assert {code for code in hidden if visible(chr(code)) == chr(code)} == set()
    for code in hidden:
        shown = visible(chr(code))
        assert shown.isascii()
        assert shown.isprintable()


@pytest.mark.parametrize(
    "text", ["", "plain", "tab\tand\nline", "Zürich 漢字 ❤️ עברית العربية \N{GRINNING FACE}", "\\x1b"]
)
def test_text_stays(text: str) -> None:
    assert visible(text) == text


def test_lines() -> None:
    assert visible("a\r\nb\x00\ud800") == "a\\r\nb\\x00\\ud800"
    assert flatten(" a\r\nb\t\tc\rd\u2028e\x85 ") == "a b c\\rd\\u2028e\\x85"
    assert escape_newlines("a\nERROR forged\r") == "a\\nERROR forged\\r"


def test_json_keeps_its_value() -> None:
    document = {"a\u202e": ["\x9b31m\x7f\x1b", "\U000e0041é", "\u2028"]}
    text = visible_json(msgspec.json.encode(document).decode())
    assert visible(text) == text
    assert "é" in text
    assert json.loads(text) == document


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_sends_only_its_own_styles(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    console = SafeConsole(out)
    table = Table(_HOSTILE, title=_HOSTILE)
    table.add_row(_HOSTILE)
    for one in (_HOSTILE, table, Panel(_HOSTILE, title=Text(visible(_HOSTILE)))):
        console.print(one, markup=True, emoji=True, highlight=True)
    console.print("bold", style="bold")
    with Live(_HOSTILE, console=console, auto_refresh=False) as live:
        live.update(Text(_HOSTILE.replace("\x07", "").replace("\r", "").replace("\x08", "")), refresh=True)
    with progress_bars(console, "{task.description}", BarColumn(), transient=True) as bars:
        bars.add_task(visible(_HOSTILE), total=1)
    text = out.getvalue()
    assert text.count(_SHOWN) >= 4
    assert ("\x1b[1mbold\x1b[0m" in text) is terminal
    for hostile in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07", "\x08", "\x7f"):
        assert hostile not in text


def test_a_link_tag_is_text() -> None:
    out = io.StringIO()
    SafeConsole(out).print("[link=https://e.example]x[/link]", style=Style(bold=True))
    assert out.getvalue() == "[link=https://e.example]x[/link]\n"


def _record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("holdfast", logging.ERROR, "", 0, message, arguments, None)


def test_a_log_line_cannot_be_forged() -> None:
    record = _record("job %s failed", "x\nERROR forged\x1b[2J\u202e")
    assert PlainFormatter().format(record) == "job x\\nERROR forged\\x1b[2J\\u202e failed"
    line = JsonFormatter().format(record)
    assert visible(line) == line
    assert "\n" not in line
    assert json.loads(line)["message"] == "job x\nERROR forged\x1b[2J\u202e failed"


def test_a_secret_of_several_lines_is_masked_before_newlines_are_written_out() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIBVgIBADANBgkqhkiG9w0BAQEFAASCAUAwggE8\n-----END PRIVATE KEY-----"
    assert "MIIBVg" not in PlainFormatter().format(_record("cannot use %s", key))


def test_tracebacks_keep_their_lines() -> None:
    record = _record("failed")
    try:
        raise ValueError("first\nsecond\x1b[2J")
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = PlainFormatter().format(record).splitlines()
    assert lines[:2] == ["failed", "Traceback (most recent call last):"]
    assert lines[-2:] == ["ValueError: first", "second\\x1b[2J"]
