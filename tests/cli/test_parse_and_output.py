"""Parts of the command line that do not need an engine."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.cli.command import ExitCode, exit_code, print_error
from holdfast.cli.job_view import timeline
from holdfast.cli.live_view import show_events
from holdfast.cli.output import (
    as_json,
    emit_rows,
    error_text,
    instant,
    job_document,
    number_of,
    priority_name,
    shorten,
    span,
)
from holdfast.cli.parse import duration, parse_instant, payload
from holdfast.cli.session import local_principal
from holdfast.clock import iso
from holdfast.core.job import EMPTY_META, Attempt, Event, Failure, JobInfo, Meta
from holdfast.core.states import State
from holdfast.errors import (
    EngineUnavailable,
    HoldfastError,
    IntakeRefused,
    InvalidOption,
    InvalidPayload,
    JobCancelled,
    JobFailed,
    TransitionInvalid,
    UnknownJob,
    UsageError,
    WaitTimeout,
)
from holdfast.observe.log_formats import JsonFormatter
from holdfast.observe.redact import redact


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no"), 2),
        (UnknownJob("j"), 2),
        (EngineUnavailable("down"), 3),
        (IntakeRefused("q", "paused"), 3),
        (TransitionInvalid("j", "succeeded", "cancelled"), 4),
        (WaitTimeout("j", "queued", timedelta(seconds=1)), 5),
        (JobFailed("j", "failed", "TASK_ERROR", "boom"), 1),
        (JobCancelled("j", "cancelled", None, None), 1),
        (HoldfastError("?"), 1),
    ],
)
def test_every_error_has_its_exit_code(error: HoldfastError, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_one_redacted_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = print_error(EngineUnavailable("redis://app:hunter2@cache:6379\ndoes not answer"), debug=False)
    assert code is ExitCode.UNAVAILABLE
    assert capsys.readouterr().err == "holdfast: ENGINE_UNAVAILABLE: redis://app:***@cache:6379 does not answer\n"


def test_debug_shows_the_traceback_without_the_password(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise EngineUnavailable("redis://app:hunter2@cache does not answer") from OSError("refused")
    except EngineUnavailable as exc:
        print_error(exc, debug=True)
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "refused" in shown
    assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://app:s3cret@cache:6379/0", "redis://app:***@cache:6379/0"),
        ("redis://:s3cret@cache", "redis://:***@cache"),
        ("at redis+sentinel://u:p@a:1,b:2/x now", "at redis+sentinel://u:***@a:1,b:2/x now"),
        ("rediss://u:p:a/s@s@host/1", "rediss://u:***@host/1"),
        ("redis://host/0?password=abc&db=1", "redis://host/0?password=***&db=1"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("ada@example.org at 10:30", "ada@example.org at 10:30"),
    ],
)
def test_passwords_are_redacted(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("5m", 300),
        ("5min", 300),
        ("1h30m", 5400),
        ("2d", 172_800),
    ],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert duration(text, "--delay") == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 m", "m5", "5x", "1h-3m", "nan", "inf"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="--delay"):
        duration(text, "--delay")


@pytest.mark.parametrize("text", ["-5", "-5m", "-0.5"])
def test_a_negative_duration_is_shown_as_it_was_typed(text: str) -> None:
    with pytest.raises(InvalidOption, match=f"--delay must not be negative, got {text}$"):
        duration(text, "--delay")


def test_a_date_without_a_time_gets_one_in_the_advice() -> None:
    with pytest.raises(InvalidOption, match="use 2030-01-31T08:00:00Z for UTC, or 2030-01-31T08:00:00\\+02:00"):
        parse_instant("2030-01-31", "--run-at")


def test_instants_need_a_time_zone() -> None:
    assert parse_instant("2030-01-31T08:00:00Z", "--run-at") == datetime(2030, 1, 31, 8, tzinfo=UTC)
    with pytest.raises(InvalidOption, match="no time zone"):
        parse_instant("2030-01-31T08:00:00", "--run-at")
    with pytest.raises(InvalidOption, match="is not an instant"):
        parse_instant("tomorrow", "--run-at")


def test_arguments_as_pairs_or_as_a_document() -> None:
    assert json.loads(payload(None, ["a=1", "b=text", 'c="7"', "d=[1]", "e=x=y", "f="])) == {
        "a": 1,
        "b": "text",
        "c": "7",
        "d": [1],
        "e": "x=y",
        "f": "",
    }
    assert payload(None, []) == b"{}"
    assert payload(' [12345678901234567890, {"a": 1}] ', []) == b'[12345678901234567890, {"a": 1}]'


def test_a_document_can_come_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"a": "ü"}\n'))
    assert json.loads(payload("-", [])) == {"a": "ü"}


@pytest.mark.parametrize(("document", "pairs"), [("{", []), ("3", []), ("{}", ["a=1"]), (None, ["a"]), (None, ["=1"])])
def test_invalid_arguments_are_refused(document: str | None, pairs: list[str]) -> None:
    with pytest.raises(InvalidPayload):
        payload(document, pairs)


def test_spans_and_instants() -> None:
    assert [span(ms) for ms in (0, 35, 1_250, 90_000, 5_400_000, 172_800_000)] == [
        "0 ms",
        "35 ms",
        "1.2 s",
        "1.5 min",
        "1.5 h",
        "2.0 d",
    ]
    assert instant(1_000_000_000_123) == "2001-09-09 01:46:40.123Z"
    assert iso(1_000_000_000_123) == "2001-09-09T01:46:40.123Z"
    assert (instant(0), iso(0)) == ("–", None)
    assert shorten("a\n" * 100, 10) == "a a a a a…"


def test_a_log_line_is_json_without_secrets() -> None:
    record = logging.makeLogRecord(
        {"name": "holdfast.x", "levelname": "INFO", "msg": "at %s", "args": ("redis://u:pw@h",)}
    )
    record.queue = "mail"
    record.strange = object
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("info", "holdfast.x", "at redis://u:***@h")
    assert line["queue"] == "mail"
    assert "stack" not in line


def make_info(state: State, meta: Meta = EMPTY_META, **changes: object) -> JobInfo:
    values: dict[str, object] = {
        "job_id": "j1",
        "task": "t",
        "queue": "q",
        "tenant_id": "default",
        "attempt": 0,
        "payload": b'{"n": 12345678901234567890}',
        "idempotency_key": "",
        "trace_id": "",
        "created_at_ms": 1_000,
    }
    return JobInfo(**(values | {"state": state, "meta": meta} | changes))  # type: ignore[arg-type]


def test_a_timeline_has_attempts_and_lost_leases() -> None:
    history = (
        Attempt(1, "w1", 1_100, 1_300, "retrying", Failure("TASK_ERROR", "boom", "ValueError")),
        Attempt(3, "w2", 9_000, 9_500, "succeeded"),
    )
    moments = timeline(
        make_info(State.SUCCEEDED, Meta(history=history, lost_leases=1), attempt=3, finished_at_ms=9_500)
    )
    assert [moment.what for moment in moments] == ["created", "attempt 1", "attempt 2", "attempt 3", "succeeded"]
    assert "retrying after 200 ms on w1: ValueError: boom" in moments[1].detail
    assert "lease lost" in moments[2].detail
    assert moments[-1].at_ms == 9_500


def test_a_timeline_shows_what_an_open_job_waits_for() -> None:
    waiting = timeline(make_info(State.QUEUED, Meta(run_at_ms=5_000), next_attempt_at_ms=5_000))
    assert [(moment.at_ms, moment.what) for moment in waiting] == [
        (1_000, "created"),
        (5_000, "due"),
        (5_000, "waiting until"),
    ]
    running = timeline(make_info(State.RUNNING, attempt=1, worker="w9"))
    assert running[-1].detail == "attempt 1 on w9"
    assert timeline(make_info(State.SUSPENDED))[-1].what == "suspended"


def test_a_job_for_programs_keeps_its_numbers() -> None:
    document = job_document(make_info(State.QUEUED))
    assert bytes(document["payload"]) == b'{"n": 12345678901234567890}'
    assert document["idempotency_key"] == "j1"
    assert as_json(b"\xff no json") == "\ufffd no json"


def test_arguments_that_are_not_kept_are_null() -> None:
    assert job_document(make_info(State.SUCCEEDED, payload=b""))["payload"] is None


def test_an_error_without_a_type_has_no_leading_colon() -> None:
    assert error_text(Failure("CANCELLED", "by cli")) == "CANCELLED: by cli"
    assert error_text(Failure("TASK_ERROR", "boom", "ValueError")) == "TASK_ERROR: ValueError: boom"
    assert error_text(Failure("CANCELLED", "")) == "CANCELLED"


def test_one_is_singular() -> None:
    assert [number_of(count, "worker") for count in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
    assert [number_of(count, "retry", "retries") for count in (1, 2)] == ["1 retry", "2 retries"]


def test_a_job_that_succeeded_without_a_history_has_a_short_timeline() -> None:
    moments = timeline(make_info(State.SUCCEEDED, attempt=1, finished_at_ms=1_500, idempotency_key="order-7"))
    assert [moment.what for moment in moments] == ["created", "succeeded"]
    assert moments[0].detail == "task t, queue q, key order-7"


def test_priorities_without_a_name_keep_their_number() -> None:
    assert [priority_name(number) for number in (0, 1, 2, 7)] == ["high", "normal", "low", "7"]


def test_a_log_line_has_the_stack_of_an_exception() -> None:
    try:
        raise ValueError("at redis://u:pw@h")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "broke", (), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert "ValueError: at redis://u:***@h" in line["stack"]


def test_without_a_user_name_the_local_principal_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_user() -> str:
        raise OSError("no user name")

    assert local_principal().name.startswith("local:")
    monkeypatch.setattr("getpass.getuser", raise_no_user)
    assert local_principal().name == "local:unknown"


def test_many_events_are_counted_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    events = [Event(type="task.created", job_id=str(number), at_ms=1_000) for number in range(41)]
    show_events([(event, "add") for event in events])
    assert capsys.readouterr().out == "1970-01-01 00:00:01.000Z 41 × task.created\n"
    show_events([(events[0], "add")])
    assert "add           task.created" in capsys.readouterr().out


def test_a_table_that_is_too_wide_does_not_break_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators copy ids from the terminal."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    columns = ("approval", "task", "tenant", "status", "age", "reason")
    row = ("01a1e0ab6d8a7e83b2c7891d6abf89eb", "pay.salaries", "default", "requested", "4.3 min ago", "more than 100")
    emit_rows(columns, [row, (*row[:5], "")], empty="")
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(row[0]) == 2
    assert all(len(line) <= 80 for line in lines)
    text = " ".join(" ".join(lines).split())
    assert text.count("task pay.salaries · tenant default · status requested") == 2
    assert text.count("reason") == 1
    emit_rows(("job", "note"), [(row[0], "a long text " * 20)], empty="")
    table = capsys.readouterr().out.splitlines()
    assert table[1].startswith(row[0] + "  a long text")
