"""Text from others is data: every command shows markup and control characters as text, on a terminal and in a pipe.

The commands are read from the program, so that a new one without a case fails.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import redis
import typer

from holdfast import Holdfast, State
from holdfast.cli.commands.chaos import _ChaosScreen
from holdfast.cli.commands.reconcile import _print as print_reconciled
from holdfast.cli.confirm import confirm, with_progress
from holdfast.cli.live_view import show_events
from holdfast.cli.output import note, progress_line, read_answer
from holdfast.cli.program import program
from holdfast.core.job import Event, JobKey
from holdfast.operations.bulk import BulkReport, BulkResult
from holdfast.upkeep.reconciler import LostJob, ReconcileReport
from holdfast.verification.chaos.run import Progress
from tests import forked
from tests.cli.harness import TIMEOUT_S, Shell
from tests.cli.hostile import COUNT, HOSTILE, HostileStore, Screen, escaped, run_in_pipe, run_program
from tests.cli.test_terminal import terminal

#: All numbers of hostile texts.
ALL: Final = tuple(range(COUNT))


@dataclass(frozen=True)
class Call:
    """Arguments of a command, with `{…}` for ids; `{number}` makes it one call for each hostile text."""

    words: str
    code: int = 0
    #: Whether the output has the hostile text.
    shows: bool = True

    def each(self) -> list[tuple[list[str], tuple[int, ...]]]:
        numbers = [(number,) for number in ALL] if "#" in self.words else [ALL]
        return [
            ([word.replace("#", str(one[0])) for word in self.words.split()], one if self.shows else ())
            for one in numbers
        ]


CALLS: Final[dict[str, list[Call]]] = {
    "submit": [Call("{hostile#}", 2), Call("--force task --key {hostile#} --queue new", shows=False)],
    "explain": [Call("{failed#}"), Call("{waiting#}"), Call("{suspended#}"), Call("{running#}", shows=False)],
    "reconcile": [Call("", shows=False)],
    "workers": [Call("")],
    "log": [Call("")],
    "doctor": [Call("")],
    "verify": [Call("--ledger", 1)],
    "jobs list": [Call("")],
    "jobs show": [Call("{failed#} --stack"), Call("{waiting#}"), Call("{suspended#}"), Call("{running#}")],
    "jobs counts": [Call("", shows=False)],
    "jobs watch": [Call("--timeout 0", 5)],
    "jobs cancel": [Call("{failed#} --reason {hostile#}", 4), Call("{delayed#}", shows=False), Call("{hostile#}", 2)],
    "jobs resume": [Call("{failed#}", 4)],
    "jobs retry": [Call("{failed#}", 4)],
    "queues list": [Call("")],
    "queues pause": [Call("{queue#}", 2), Call("default --new", shows=False)],
    "queues resume": [Call("{queue#}", 2)],
    "queues limit": [Call("default {hostile#} --new", 2)],
    "queues concurrency": [Call("default {hostile#} --new", 2)],
    "queues worker-concurrency": [Call("default {hostile#} --new", 2)],
    "queues alert": [Call("default {hostile#} --new", 2)],
    "queues tenant": [Call("default {tenant#} --weight 2 --new", 2)],
    "tasks list": [Call("")],
    "tasks show": [Call("fail.{hostile#}"), Call("{hostile#}", 2)],
    "dlq list": [Call("")],
    "dlq groups": [Call("")],
    "dlq show": [Call("{dead#}")],
    "dlq replay": [
        Call("{open#} --set what=other"),
        Call("{open#} --set what=other --dry-run"),
        Call("{open#}", shows=False),
        Call("--all", shows=False),
    ],
    "dlq discard": [Call("{open#} --reason {hostile#}", 6, shows=False), Call("{hostile#} --reason x", 2)],
    "dlq confirm": [Call("{hostile#}", 2), Call("{dead#}", 6, shows=False)],
    "dlq keep": [Call("{dead#} --reason {hostile#}", shows=False), Call("{hostile#} --reason x", 2)],
    "suspended list": [Call("")],
    "suspended show": [Call("{suspended#}"), Call("{failed#}", 4)],
    "suspended resume": [Call("{suspended#} --reason {hostile#}", shows=False), Call("{failed#}", 1)],
    "suspended discard": [Call("{failed#} --reason {hostile#}", 1)],
    "approvals list": [Call("")],
    "approvals show": [Call("{approval#}")],
    "approvals approve": [Call("{approval#}", 6, shows=False)],
    "approvals reject": [Call("{approval#} --reason {hostile#}", 6, shows=False)],
    "effects list": [Call("")],
    "effects show": [Call("done.{hostile#} --tenant tenant.{hostile#}"), Call("{hostile#}", 2)],
    "effects resolve": [Call("effect.{hostile#} --tenant tenant.{hostile#} --not-done")],
    "effects create-table": [Call("", 2, shows=False)],
    "outbox list": [Call("")],
    "outbox retry": [Call("{event#} --reason {hostile#}", shows=False)],
    "trigger check": [Call("{file}", 2)],
    "trigger status": [Call("")],
    "trigger executions": [Call("")],
    "trigger plan": [Call("--rate 1 --seconds-per-message 1 --message-bytes 1", shows=False)],
    "trigger pause": [Call("trigger.sick.{hostile#} --reason {hostile#}")],
    "trigger resume": [Call("trigger.{hostile#} --reason {hostile#}")],
    "trigger replay": [Call("{file} {hostile#} --all", 2, shows=False)],
    "token create": [Call("{hostile#} --role admin --all-tenants", 2)],
    "token list": [Call("")],
    "token revoke": [Call("{token#}"), Call("{hostile#}", 2)],
    "migrate up": [Call("", shows=False)],
    "migrate down": [Call("", 2, shows=False)],
    "migrate status": [Call("", shows=False)],
}
#: Commands that run until a signal; their output is tested below, except of those that run on their own stores.
UNTIL_SIGNALLED: Final = {"dev", "worker", "upkeep", "serve", "outbox relay", "trigger run"}
OWN_STORES: Final = {"demo", "chaos"}

#: Styles of our tables, and of usage errors. The hostile texts have others.
_STYLE: Final = re.compile(r"\x1b\[(?:0|(?:1;)?(?:2;)?3[1-6]|1|2)m")
#: Styles of the log on a terminal: neither reverse nor concealed.
_LOG_STYLE: Final = re.compile(r"\x1b\[(?:[0-4]|[349]\d)(?:;(?:[0-4]|[349]\d))*m")
#: Commands with a live view or a progress bar, their moves of the cursor and the colours of a bar.
_LIVE: Final = {"jobs watch", "suspended resume", "suspended discard", "dlq replay", "dlq discard"}
_MOVES: Final = re.compile(r"\x1b\[38;5;\d+m|\r|\x1b\[\?25[lh]|\x1b\[2?K|\x1b\[1A")
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e0fff]"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> HostileStore:
    store = HostileStore(tmp_path_factory.mktemp("hostile"))
    store.fill()
    return store


@pytest.fixture(scope="module")
def screen() -> Iterator[Screen]:
    screen = Screen()
    yield screen
    screen.close()


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_URL", f"sqlite:///{tmp_path}/jobs.db")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    # Live views show no more than fits.
    monkeypatch.setenv("LINES", "200")


@cache
def commands() -> dict[str, Any]:
    """The commands of the program by their names."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(path), command
            return
        for name, inner in command.commands.items():
            yield from walk(inner, (*path, name))

    return dict(walk(typer.main.get_command(program()), ()))


def has_json(name: str) -> bool:
    return any("--json" in option.opts for option in commands()[name].params)


def texts_in(document: Any) -> Iterator[str]:
    match document:
        case str():
            yield document
        case list():
            for inner in document:
                yield from texts_in(inner)
        case dict():
            yield from document
            yield from texts_in(list(document.values()))


def controls_in(text: str, *, live: bool = False) -> list[str]:
    """Control characters that the program itself does not send."""
    text = _STYLE.sub("", text)
    return [one[0] for one in _CONTROL.finditer(_MOVES.sub("", text) if live else text)]


def hidden_in(text: str, numbers: tuple[int, ...]) -> list[str]:
    """Words of these hostile texts that are not whole in one line."""
    lines = _STYLE.sub("", text).splitlines()
    words = [word for number in numbers for word in HOSTILE[number].split(" ")]
    # An error may have the text as Python's `repr`, and a payload is JSON.
    forms = [
        (escaped(word), escaped(repr(word)[1:-1]), escaped(json.dumps(word, ensure_ascii=False)[1:-1]))
        for word in words
    ]
    return [form[0] for form in forms if not any(one in line for line in lines for one in form)]


def test_every_command_has_a_case() -> None:
    assert set(commands()) == set(CALLS) | UNTIL_SIGNALLED | OWN_STORES


def prepare(store: HostileStore, name: str, words: list[str]) -> list[str]:
    """Copy the store into the working directory, since some commands change it. Returns the arguments."""
    for each in Path.cwd().glob("jobs.db*"):
        each.unlink()
    shutil.copy(store.path, "jobs.db")
    if name == "verify":
        with closing(sqlite3.connect("jobs.db")) as connection:
            connection.execute(
                "DELETE FROM events WHERE seq = 1 AND job_row IN (SELECT id FROM jobs WHERE state = 'failed')"
            )
            connection.commit()
    # YAML has no surrogate pairs.
    keys = json.dumps(dict.fromkeys(HOSTILE, 1)).replace("\\udb40\\udc41", "\\U000e0041")
    Path("triggers.yaml").write_text(keys)
    values = store.ids | {"file": "triggers.yaml"}
    for number, text in enumerate(HOSTILE):
        values |= {f"hostile{number}": text, f"queue{number}": f"queue.{text}", f"tenant{number}": f"tenant.{text}"}
    return [*name.split(), *(word.format(**values) for word in words)]


def calls(name: str) -> list[tuple[list[str], int, tuple[int, ...]]]:
    return [(words, call.code, numbers) for call in CALLS[name] for words, numbers in call.each()]


@pytest.mark.parametrize("name", CALLS)
def test_on_a_terminal(screen: Screen, store: HostileStore, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "jobs watch":
        # Live views crop what is wider.
        monkeypatch.setenv("COLUMNS", "200")
    for words, code, numbers in calls(name):
        shown = screen.run(*prepare(store, name, words))
        assert controls_in(shown.text, live=name in _LIVE) == [], words
        assert hidden_in(shown.text, numbers) == [], words
        assert shown.code == code, words


@pytest.mark.parametrize("name", CALLS)
def test_in_a_pipe_and_as_json(screen: Screen, store: HostileStore, name: str) -> None:
    for words, code, numbers in [each for each in calls(name) if 2 in each[2]]:
        piped = run_in_pipe(*prepare(store, name, words))
        assert set(controls_in(piped.text.replace("\t", ""))) == set(), words
        assert hidden_in(piped.text, numbers) == [], words
        assert piped.code == code, words
        if has_json(name):
            notes = io.StringIO()
            shown = screen.run(*prepare(store, name, words), "--json", errors=notes)
            assert controls_in(shown.text + notes.getvalue()) == [], words
            exact = [text for text in texts_in(json.loads(shown.text)) if HOSTILE[2] in text] if shown.raw else []
            assert exact or hidden_in(notes.getvalue(), (2,)) == [], words
            assert shown.code == code, words


# Not from a store ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("#",), ("jobs", "#"), ("jobs", "list", "--#"), ("jobs", "list", "--limit", "#"), ("workers", "#")]
)
def test_usage_errors(screen: Screen, words: tuple[str, ...]) -> None:
    for text, sign in zip(HOSTILE, ("\\x07", "\\x9b", "\\u202e", "\\x85"), strict=True):
        # What follows "=" is the value of an option.
        shown = screen.run(*(word.replace("#", text.replace("=", "")) for word in words))
        assert controls_in(shown.text) == []
        # Typer draws a box and breaks long words.
        assert sign in shown.text
        assert shown.code == 2


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_errors_that_no_command_expects(screen: Screen, error: type[BaseException]) -> None:
    with mock.patch("holdfast.cli.program.program", side_effect=error("".join(HOSTILE))):
        shown = screen.run("jobs", "list")
    assert controls_in(shown.text) == []
    assert hidden_in(shown.text, ALL) == []
    assert shown.code == 1


def test_warnings_of_drivers(screen: Screen) -> None:
    """They are logged although the command sets no handler."""

    def warn() -> None:
        root = logging.getLogger()
        with (
            mock.patch.object(root, "handlers", []),
            mock.patch.object(logging.lastResort, "_stderr", None, create=True),
        ):
            run_program(["jobs", "list", "--url", "sqlite:///missing.db"])
            logging.getLogger("driver").warning("row %s", "".join(HOSTILE) + "\nforged")

    shown = screen.call(warn)
    assert controls_in(shown.text) == []
    assert hidden_in(shown.text, ALL) == []
    assert "\nforged" not in shown.text


def test_progress_and_prompts(screen: Screen) -> None:
    text = "".join(HOSTILE)
    job = LostJob(JobKey(text, text, text), text, State.QUEUED, 1, 0)

    async def do(progress: Any) -> BulkReport:
        note(text)
        progress(BulkResult(id=text, done=True))
        return BulkReport(matched=1, dry_run=False)

    def show() -> None:
        with _ChaosScreen() as bars:
            bars.show(Progress(phase=text, message=text, open_jobs=text))
            bars.show(Progress(phase=text))
        asyncio.run(with_progress(text, 1, do))
        with pytest.raises(typer.Exit):
            confirm(text, yes=False)
        print_reconciled(ReconcileReport(jobs=[job], skipped={text: 1}), dry_run=True)
        progress_line(text)
        assert read_answer(text) == ""
        show_events([(Event(job_id=text, type=text, at_ms=1, message=text), text)])

    shown = screen.call(show)
    assert controls_in(shown.text, live=True) == []
    assert hidden_in(shown.text, ALL) == []


# Logs ------------------------------------------------------------------------------------------------

_APP: Final = """
import logging
from holdfast import Fatal, Holdfast

TEXT = {text!r}
app = Holdfast()

@app.task(name="[/nosuchtag]")
async def fail() -> None:
    logging.getLogger("mine").warning("log %s", TEXT + "\\nERROR forged")
    raise type(TEXT.replace("\\0", ""), (Fatal,), dict())(TEXT + "\\nERROR forged")
"""


@pytest.mark.parametrize("command", ["dev", "worker"])
def test_events_and_logs_on_a_terminal(shell: Shell, command: str) -> None:
    (shell.folder / "hostile_app.py").write_text(_APP.format(text="".join(HOSTILE)))
    shell.run("submit", "--force", "[/nosuchtag]", "[]")
    with terminal(shell, command, "hostile_app.py", start=forked.start) as output:
        output.read_until("failed for good" if command == "worker" else "task.failed")
        output.process.send_signal(signal.SIGTERM)
        output.read_all()
        assert output.process.wait(TIMEOUT_S) == 0
    text = _LOG_STYLE.sub("", output.raw.decode().replace("\r\n", "\n"))
    assert controls_in(text) == []
    # Rich breaks long lines of its log.
    assert {word for word in ("\\x1b]0;t", "\\u202e", "\\x9b31m", "[/nosuchtag]") if word not in text} == set()
    assert not re.search(r"^ERROR forged", text, re.MULTILINE)


def test_logs_in_a_pipe(shell: Shell) -> None:
    (shell.folder / "hostile_app.py").write_text(_APP.format(text="".join(HOSTILE)))
    shell.run("submit", "--force", "[/nosuchtag]", "[]")
    with shell.start("worker", "hostile_app.py") as worker:
        worker.wait_log("failed for good")
        assert worker.end() == 0
    text = worker.log.read_text()
    assert controls_in(text) == []
    messages = [json.loads(line)["message"] for line in text.splitlines()]
    assert f"log {''.join(HOSTILE)}\nERROR forged" in messages


# Redis -----------------------------------------------------------------------------------------------


@pytest.mark.redis
def test_messages_of_other_programs_on_redis(
    screen: Screen, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ledger, jobs are read from the engine. Other programs write to its streams and hashes."""
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    text = "".join(HOSTILE)
    fields = {"type": text, "tenant_id": text, "idempotency_key": text, "trace_id": text, "payload": "[]"}
    announced = {"task": text, "queue": text, "fingerprint": HOSTILE[0], "priority": 1, "schema": "{}", "seen_at_ms": 1}
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(f"{namespace}:stream:task", fields | {"task_id": "[/nosuchtag]"})
        client.xadd(f"{namespace}:stream:task", fields | {"task_id": "malformed", "payload": text})
        client.hset(f"{namespace}:announced:tasks", f"0123abcd {text}", json.dumps(announced))

    async def claim() -> None:
        async with Holdfast(redis_url, namespace=namespace) as app:
            (claim,) = await app.engine.claim(f"worker.{text}", ["default"], 2, 10_000)
            await app.engine.renew([claim.lease], [claim.lease])

    asyncio.run(claim())
    for words in (
        *(("jobs", "list"), ("jobs", "show", "[/nosuchtag]"), ("jobs", "show", "malformed"), ("workers",)),
        *(("tasks", "list"), ("queues", "list"), ("jobs", "watch", "--timeout", "0")),
    ):
        shown = screen.run(*words)
        assert controls_in(shown.text, live=words[1:2] == ("watch",)) == [], words
        assert shown.code == (5 if "watch" in words else 0), words
        if words[0] != "queues" and "watch" not in words:
            assert hidden_in(shown.text, ALL) == [], words
