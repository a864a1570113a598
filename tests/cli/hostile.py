"""A store with hostile text in every free-text field, and the program in this process on a pseudo-terminal.

The store is filled with the placeholders `hostile0`, `hostile1`, … through the public API. `poison` then replaces them
by `HOSTILE` in every text of the file, as any program that can write to the store can.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import sqlite3
import sys
import threading
import tty
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO
from unittest import mock

from holdfast import Context, Fatal, Holdfast, Job, Retry
from holdfast.cli import main
from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat
from holdfast.operations.operations import Operations
from holdfast.outbox.writer import NewOutboxEvent, Outbox
from holdfast.settings import Settings
from holdfast.testing import drain
from tests.operations.deployment import principal

#: Name → characters that must not reach a terminal, or markup that must not be interpreted. Without blanks, so that
#: none may be broken; short, because lists shorten texts.
PAYLOADS: Final = {
    "closing tag": "[/nosuchtag]",
    "style tag": "[red]x[/red]",
    "style tag of three words": "[bold red on white]",
    "link tag": "[link=https://e.example]y",
    "emoji code": ":boom:",
    "title": "\x1b]0;t\x07",
    "title, ended by ST": "\x1b]2;t\x1b\\",
    "clipboard": "\x1b]52;c;aA==\x07",
    "screen clear": "\x1b[2J",
    "report request": "\x1b[6n",
    "concealed": "\x1b[8mc",
    "reverse": "\x1b[7mr",
    "DCS": "\x1bP$qm\x1b\\",
    "C1 CSI": "\x9b31m",
    "C1 DCS": "\x90q\x9c",
    "next line": "n\x85l",
    "alarm": "b\x07",
    "backspace": "s\x08\x08",
    "carriage return": "c\rE",
    "form feed": "f\x0cv\x0b",
    "separators": "s\x1c\x1f",
    "delete": "d\x7f",
    "override": "o\u202ed",
    "isolate": "i\u2066\u2069",
    "mark": "m\u200e\u200f\u061c",
    "line separator": "l\u2028p\u2029",
    "zero width": "z\u200b\u2060\ufeff",
    "tag characters": "t\U000e0041",
}
_BY_NAME: Final = dict(PAYLOADS)
#: The texts of the placeholders. Each fits what a list leaves of a text.
HOSTILE: Final = (
    "".join(_BY_NAME[name] for name in ("closing tag", "title", "clipboard", "screen clear", "alarm")),
    "".join(
        _BY_NAME[name]
        for name in ("style tag of three words", "report request", "DCS", "C1 CSI", "C1 DCS", "title, ended by ST")
    ),
    "".join(
        _BY_NAME[name]
        for name in (
            *("link tag", "override", "isolate", "mark", "line separator", "zero width", "tag characters"),
            *("carriage return", "backspace", "delete"),
        )
    ),
    "".join(
        _BY_NAME[name]
        for name in (*("style tag", "emoji code", "concealed", "reverse", "next line", "form feed", "separators"),)
    ),
)
COUNT: Final = len(HOSTILE)
LONG: Final = 100_000
NUL: Final = "n\x00l"
NAMES: Final = tuple(f"hostile{number}" for number in range(COUNT))


def escaped(text: str) -> str:
    """The text as a view must show it, in Python's notation."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class HostileStore:
    """An SQLite store: of each kind of thing one for each of `NAMES`, and their ids by `<kind><number>`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "jobs.db"
        self.ids: dict[str, str] = {}

    def fill(self) -> None:
        asyncio.run(self._fill())
        self._add_outbox_events()
        self.poison()

    async def _fill(self) -> None:
        app = Holdfast(f"sqlite:///{self.path}", retry=Retry(max_retries=0))
        async with app:
            for number, name in enumerate(NAMES):
                await self._add_jobs(app, number, name)
            await drain(app, sorted(f"queue.{name}" for name in NAMES))
            for number, name in enumerate(NAMES):
                await self._wait_and_operate(app, number, name)

    async def _add_jobs(self, app: Holdfast, number: int, name: str) -> None:
        kind = type(f"Error{name}", (Fatal,), {})

        async def fail(what: str) -> None:
            raise kind(f"message {what}{('long', '', '', 'NUL')[number]}\nline 2\trow 3")

        async def wait(ctx: Context, what: str) -> None:
            await ctx.step(f"step.{what}", lambda: what)
            await ctx.effect(f"done.{what}", self._succeed, what)
            await ctx.approval(f"approval.{what}", {"details": what}, reason=f"reason {what}", quorum=2)

        async def lose(ctx: Context, what: str) -> None:
            await ctx.effect(f"effect.{what}", self._lose, what)

        tasks = {
            "failed": app.task(name=f"fail.{name}")(fail),
            "waiting": app.task(name=f"wait.{name}")(wait),
            "suspended": app.task(name=f"lose.{name}", on_exhausted="suspend")(lose),
        }
        for state, task in tasks.items():
            self.ids[f"{state}{number}"] = (await task.options(**self._options(state, name)).submit(name)).id
        self.ids[f"broken{number}"] = (await tasks["failed"].options(**self._options("broken", name)).submit(name)).id
        later = tasks["failed"].options(**self._options("delayed", name), delay=86_400)
        self.ids[f"delayed{number}"] = (await later.submit(name)).id

    @staticmethod
    def _options(state: str, name: str) -> Any:
        return {
            "queue": f"queue.{name}",
            "tenant_id": f"tenant.{name}",
            "idempotency_key": f"{state}.key.{name}",
            "trace_id": f"trace.{name}",
            "context": {"note": f"context {name}"},
        }

    async def _succeed(self, what: str) -> str:
        return f"result {what}"

    async def _lose(self, what: str) -> None:
        raise ConnectionError(f"lost {what}")

    async def _wait_and_operate(self, app: Holdfast, number: int, name: str) -> None:
        operations, actor, reason = Operations.for_app(app), principal(f"actor.{name}", Role.ADMIN), f"reason {name}"
        queue, tenant = f"queue.{name}", f"tenant.{name}"
        for dead_letter, job_id in (("dead", "failed"), ("open", "broken")):
            failed: Job[None] = app.job(self.ids[f"{job_id}{number}"], queue)
            self.ids[f"{dead_letter}{number}"] = (await failed.info()).meta.dlq_id
        waiting = await app.job(self.ids[f"waiting{number}"], queue).info()
        assert waiting.meta.approval_request is not None
        self.ids[f"approval{number}"] = waiting.meta.approval_request.approval_id
        await operations.approvals.vote(actor, self.ids[f"approval{number}"], approve=True, reason=reason)
        await operations.dead_letters.discard(actor, self.ids[f"dead{number}"], reason)
        await operations.queues.update_tenant(actor, queue, tenant, reason=reason, weight=3)
        token, _ = await operations.tokens.create(
            actor, name=f"token.{name}", role=Role.ADMIN, tenants=[ALL_TENANTS], expires_in=None
        )
        self.ids[f"token{number}"] = token.token_id
        running = (
            await app.task(name=f"run.{name}")(self._succeed).options(**self._options("running", name)).submit(name)
        )
        (claim,) = await app.engine.claim(f"worker.{name}", [queue], 1, 10_000)
        assert claim.job_id == running.id
        await app.engine.renew([claim.lease], [claim.lease])
        self.ids[f"running{number}"] = running.id
        await self._record_trigger(app, operations, number, name)

    async def _record_trigger(self, app: Holdfast, operations: Operations, number: int, name: str) -> None:
        ledger = backend_of(app).ledger
        assert ledger is not None
        now_ms = await app.engine.now_ms()
        for prefix in ("", "sick."):
            heartbeat = TriggerHeartbeat(
                name=f"trigger.{prefix}{name}",
                process=f"process.{name}",
                queue_name=f"broker.{name}",
                adapter=f"adapter.{name}",
                health={"status": f"health {name}"},
                # On a slow machine it must not expire, either.
                seen_at_ms=now_ms + 86_400_000,
            )
            await ledger.triggers.heartbeat([heartbeat], expire_after_ms=600_000)
        actor = principal(f"actor.{name}", Role.ADMIN)
        await operations.triggers.pause(actor, f"trigger.{name}", reason=f"reason {name}")
        execution = Execution(
            tenant_id=f"tenant.{name}",
            id=str(number),
            message_id=f"message.{name}",
            queue_name=f"broker.{name}",
            event_name=f"event.{name}",
            status=ExecutionStatus.FAILED,
            started_at_ms=now_ms - 1500,
            completed_at_ms=now_ms,
            agent_run_id=f"run.{name}",
            error_message=f"error {name}",
            retry_count=3,
            trace_id=f"trace.{name}",
        )
        await ledger.triggers.record_executions([execution])

    def _add_outbox_events(self) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            for number, name in enumerate(NAMES):
                event = NewOutboxEvent(
                    topic=f"topic.{name}",
                    key=f"key.{name}",
                    payload={"what": name},
                    tenant_id=f"tenant.{name}",
                    destination=f"to.{name}",
                    headers={"x-note": name},
                )
                (event_id,) = Outbox(Settings(url="sqlite://")).add_many_sync(connection, [event])
                connection.execute(
                    "UPDATE outbox_events SET status = 'DEAD', last_error = ? WHERE id = ?",
                    [f"error {name}", event_id],
                )
                self.ids[f"event{number}"] = event_id
            connection.commit()

    def poison(self) -> None:
        """Replace the placeholders in every text, and append a hostile text to the ids of failed jobs."""
        for number in range(COUNT):
            self.ids[f"failed{number}"] += f"hostile{number}"
        with closing(sqlite3.connect(self.path)) as connection:
            tables = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
            ).fetchall()
            for (table,) in tables:
                self._poison_table(connection, table)
            connection.commit()
        self.ids = {name: poisoned(each) for name, each in self.ids.items()}

    def _poison_table(self, connection: sqlite3.Connection, table: str) -> None:
        # Not `*`, which includes generated columns.
        columns = ", ".join(f'"{row[1]}"' for row in connection.execute(f"PRAGMA table_info({table})"))
        rows = [
            [self._poison_value(value) if isinstance(value, str) else value for value in row]
            for row in connection.execute(f"SELECT {columns} FROM {table}")
        ]
        connection.execute(f"DELETE FROM {table}")
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)

    def _poison_value(self, value: str) -> str:
        for number in range(COUNT):
            whole = self.ids[f"failed{number}"]
            value = value.replace(whole.removesuffix(f"hostile{number}"), whole)
        if value[:1] in ("{", "[", '"'):
            return json.dumps(_poison_json(json.loads(value)), ensure_ascii=False)
        return poisoned(value)


def poisoned(text: str) -> str:
    """The text with hostile text for its placeholders."""
    # No column that a lookup compares has NUL.
    text = text.replace("hostile0long", "hostile0" + "x" * LONG).replace("hostile3NUL", f"hostile3{NUL}")
    return re.sub(r"hostile(\d)", lambda found: HOSTILE[int(found[1])], text)


def _poison_json(value: Any) -> Any:
    match value:
        case str():
            return poisoned(value)
        case dict():
            return {poisoned(name): _poison_json(inner) for name, inner in value.items()}
        case list():
            return [_poison_json(inner) for inner in value]
        case _:
            return value


# The program -----------------------------------------------------------------------------------------

_END: Final = b"\x00\x00end of this command\x00\x00"


@dataclass(frozen=True)
class Shown:
    """What a command wrote, and its exit code."""

    code: int
    raw: bytes

    @property
    def text(self) -> str:
        return self.raw.decode()


class Screen:
    """A pseudo-terminal for commands that run in this process, one after the other."""

    def __init__(self) -> None:
        self._screen, self._end = pty.openpty()
        # As written: the terminal would add a carriage return to each newline.
        tty.setraw(self._end)
        self._written = bytearray()
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        # Ends the reader, which then closes its end.
        os.close(self._end)

    def run(self, *words: str, errors: TextIO | None = None) -> Shown:
        """Run the program; stdout and, unless given, stderr are the terminal."""
        return self.call(partial(run_program, words), errors)

    def call(self, function: Callable[[], int | None], errors: TextIO | None = None) -> Shown:
        """Call a function; stdout and, unless given, stderr are the terminal."""
        with self._open() as out, self._open() as screen:
            code = run_on(function, out, errors or screen)
        os.write(self._end, _END)
        with self._changed:
            assert self._changed.wait_for(lambda: _END in self._written, 60)
            raw, _, _ = bytes(self._written).partition(_END)
            self._written.clear()
        return Shown(code, raw)

    def _open(self) -> TextIO:
        return open(os.dup(self._end), "w", encoding="utf-8")

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._screen, 65536)
            except OSError:  # Linux raises EIO when the other end is closed
                os.close(self._screen)
                return
            with self._changed:
                self._written += chunk
                self._changed.notify()


def run_in_pipe(*words: str) -> Shown:
    """Run the program with stdout and stderr in a pipe."""
    out = io.StringIO()
    code = run_on(partial(run_program, words), out, out)
    return Shown(code, out.getvalue().encode())


def run_on(function: Callable[[], int | None], out: TextIO, errors: TextIO) -> int:
    """Call a function that prints to these streams, and answer no to every prompt."""
    with (
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", errors),
        mock.patch.object(sys, "stdin", io.StringIO("n\n")),
    ):
        return function() or 0


def run_program(words: Sequence[str]) -> int:
    """Run the program in this process. Returns its exit code."""
    with mock.patch.object(sys, "argv", ["holdfast", *words]):
        try:
            main.main()
        except SystemExit as exc:
            return int(exc.code or 0)
    return 0
