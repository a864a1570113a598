"""Every table at a terminal of 80 columns and more: identifiers can be copied, headers are not broken."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from holdfast import Context, Fatal, Holdfast, Retry, State
from holdfast.cli.output import as_cards, as_table
from holdfast.cli.program import program
from holdfast.cli.session import local_principal
from holdfast.core.principal import ALL_TENANTS, Role
from holdfast.engine.port.operators import QueueControl
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat
from holdfast.operations.operations import Operations
from holdfast.outbox.writer import NewOutboxEvent
from holdfast.testing import drain
from tests import forked
from tests.cli.harness import Shell, environment
from tests.cli.test_outbox import mark_dead, write
from tests.cli.test_terminal import terminal

#: What must not be broken: ids, keys, names of workers. Instants have a colon, and ages are short.
_IDENTIFIER: Final = re.compile(r"[\w./-]{16,}")
JOB_ID: Final = re.compile(r"\b[0-9a-f]{32}\b")
_KEY: Final = "order-2026-11-16/line-7/refund-attempt"

LISTS: Final = {
    "jobs": ("jobs", "list"),
    "counts": ("jobs", "counts"),
    "queues": ("queues", "list"),
    "approvals": ("approvals", "list"),
    "dead letters": ("dlq", "list"),
    "kinds of errors": ("dlq", "groups"),
    "suspended": ("suspended", "list"),
    "effects": ("effects", "list"),
    "tokens": ("token", "list"),
    "outbox": ("outbox", "list"),
    "executions": ("trigger", "executions"),
    "triggers": ("trigger", "status"),
    "audit log": ("log",),
    "doctor": ("doctor",),
    "one job": ("jobs", "show", "{suspended}"),
    "one dead letter": ("dlq", "show", "{dead_letter}"),
    "one approval": ("approvals", "show", "{approval}"),
    "bulk": ("suspended", "resume", "{suspended}", "{suspended_too}"),
    "replays": ("dlq", "replay", "{dead_letter}", "{dead_letter_too}"),
}


class Filled:
    """A database with at least one row for every table."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app = Holdfast(f"sqlite:///{folder}/jobs.db", retry=Retry(max_retries=0))
        self.ids: dict[str, str] = {}
        self.all: set[str] = set()

        @self.app.task(name="shop.orders.charge")
        async def charge(amount: int) -> None:
            raise Fatal(f"the card of customer-4711-of-the-branch-in-bern refuses {amount}: try another one")

        @self.app.task(name="shop.orders.publish", on_exhausted="suspend")
        async def publish(ctx: Context) -> None:
            await ctx.effect(f"{_KEY}/{ctx.job_id}", self._lose)

        self.charge, self.publish = charge, publish

    async def _lose(self) -> None:
        raise ConnectionError("the answer was lost on its way from the warehouse to the shop")

    async def fill(self) -> None:
        async with self.app:
            dead = [await self.charge.submit(amount) for amount in (1, 2)]
            suspended = [await self.publish.submit() for _ in range(2)]
            await drain(self.app)
            self.ids = {"suspended": suspended[0].id, "suspended_too": suspended[1].id}
            self.ids["dead_letter"], self.ids["dead_letter_too"] = [(await job.info()).meta.dlq_id for job in dead]
            held = await self.charge.options(hold=True, tenant_id="a-tenant-with-a-name").submit(3)
            request = (await held.info()).meta.approval_request
            assert request is not None
            self.ids["approval"] = request.approval_id
            await self.charge.options(delay=3600, idempotency_key=_KEY).submit(4)
            await self._operate()
            ledger = backend_of(self.app).ledger
            assert ledger is not None
            jobs = [job.job_id for job in await ledger.queries.latest(100)]
        self.all = {*jobs, *self.ids.values()}
        event = NewOutboxEvent(
            topic="warehouse.orders.placed", key=_KEY, payload={"n": 1}, tenant_id="a-tenant-with-a-name"
        )
        (event_id,) = write(self.folder / "jobs.db", event)
        mark_dead(self.folder / "jobs.db", event_id)
        with closing(sqlite3.connect(self.folder / "jobs.db")) as connection:
            # On a slow machine the heartbeats must not expire, either.
            connection.execute("UPDATE trigger_presences SET seen_at = seen_at + 86400000")
            connection.commit()

    async def _operate(self) -> None:
        operations, principal = Operations.for_app(self.app), local_principal()
        change = {"paused": True, "backlog_alert": 5_000}
        control = await operations.queues.update_control(principal, "default", reason="moves", verb="pause", **change)
        assert isinstance(control, QueueControl)
        await operations.tokens.create(
            principal, name="deploy", role=Role.OPERATOR, tenants=[ALL_TENANTS], expires_in=None
        )
        ledger = backend_of(self.app).ledger
        assert ledger is not None
        now_ms = await self.app.engine.now_ms()
        health = {"status": "unhealthy", "running": True, "active_workers": 3, "paused": False}
        processes = [f"worker-{n}.warehouse.example.org-4711-0f{n}e2d3c" for n in range(4)]
        heartbeats = [
            TriggerHeartbeat(
                name="orders", process=one, queue_name="orders", adapter="kafka", health=health, seen_at_ms=now_ms
            )
            for one in processes
        ]
        await ledger.triggers.heartbeat(heartbeats, expire_after_ms=600_000)
        row = Execution(
            tenant_id="acme",
            id="1",
            message_id="warehouse.orders.placed/0/1234567890123",
            queue_name="warehouse.orders.placed",
            event_name="order.placed",
            status=ExecutionStatus.FAILED,
            started_at_ms=now_ms - 1500,
            completed_at_ms=now_ms,
            agent_run_id=self.ids["suspended"],
            error_message="ValueError: no such order",
            retry_count=3,
        )
        await ledger.triggers.record_executions([row])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    made = Filled(tmp_path_factory.mktemp("tables"))
    asyncio.run(made.fill())
    return made


@pytest.fixture
def shell(filled: Filled, tmp_path: Path) -> Shell:
    """A copy: some commands change what they show."""
    shutil.copy(filled.folder / "jobs.db", tmp_path / "jobs.db")
    return Shell(tmp_path, environment(tmp_path))


def show(shell: Shell, width: int, *words: str) -> list[str]:
    with terminal(shell, *words, width=width, start=forked.start) as screen:
        return screen.read_all().splitlines()


def identifiers(text: str) -> set[str]:
    return set(_IDENTIFIER.findall(text))


#: At 80 columns every table; wider ones break differently.
SCREENS: Final = [(name, 80) for name in LISTS] + [(name, 120) for name in ("jobs", "dead letters", "suspended")]


@pytest.mark.parametrize(("name", "width"), SCREENS)
def test_identifiers_are_whole(filled: Filled, shell: Shell, name: str, width: int) -> None:
    words = [word.format(**filled.ids) for word in LISTS[name]]
    variables = {"HOLDFAST_URL": shell.environment["HOLDFAST_URL"]}
    text = CliRunner().invoke(program(words[0]), words, env=variables).stdout
    expected = identifiers(text) - {job_id for job_id in JOB_ID.findall(text) if job_id not in filled.all}
    shutil.copy(filled.folder / "jobs.db", shell.folder / "jobs.db")
    lines = show(shell, width, *words)
    assert not {one for one in expected if not any(one in line for line in lines)}, "\n".join(lines)


@pytest.mark.parametrize("width", [80, 240])
def test_watch_shows_every_state(shell: Shell, width: int) -> None:
    lines = show(shell, width, "jobs", "watch", "--timeout", "0")
    words = " ".join(lines).split()
    for name in (*State, "workers", *(f"{rate}/s" for rate in ("created", "succeeded", "retried", "failed"))):
        assert str(name) in words, "\n".join(lines)


@pytest.mark.parametrize("width", [60, 80])
def test_an_identifier_that_is_wider_than_the_terminal_is_not_truncated(shell: Shell, width: int) -> None:
    key = "key-" + "x" * 150
    shell.run("submit", "--force", "add", "[1]", "--key", key, "--queue", "q" * 100)
    lines = show(shell, width, "jobs", "list", "--queue", "q" * 100)
    assert any("q" * 100 in line for line in lines), lines
    job_id = shell.json("jobs", "list", "--queue", "q" * 100)[0]["job_id"]
    assert any(key in line for line in show(shell, width, "jobs", "show", job_id))


def test_control_characters_are_escaped(shell: Shell) -> None:
    reason = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202edrow"
    job_id = shell.run("submit", "--force", "add", "[1]", "--delay", "1h").stdout.strip()
    shell.run("jobs", "cancel", job_id, "--reason", reason)
    for words in (("log",), ("jobs", "show", job_id), ("jobs", "list"), ("explain", job_id)):
        with terminal(shell, *words, width=120, start=forked.start) as screen:
            screen.read_all()
        for output in (screen.raw, shell.run(*words).stdout.encode()):
            assert b"\x1b]" not in output
            assert b"\x1b[2J" not in output
            assert "\x9b".encode() not in output
            assert "\u202e".encode() not in output
    assert "\\x1b" in shell.run("log").stdout


# The mechanism -------------------------------------------------------------------------------------

_WORDS: Final = st.text("ab7-_./[]:é漢", min_size=1, max_size=90)
_CELLS: Final = st.lists(_WORDS, max_size=5).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]], int]:
    count = draw(st.integers(1, 9))
    columns = [draw(_WORDS) for _ in range(count)]
    rows = draw(st.lists(st.lists(_CELLS, min_size=count, max_size=count), min_size=1, max_size=4))
    return columns, rows, draw(st.integers(0, count))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(
    (["a", "b"], [["", "77777777777漢漢漢 7777777777777漢漢漢漢 7"], ["7" * 39, ""]], 1),
    80,
)
@example((["a[b]", ":dog:"], [["[red]x", "[/] [bold]"]], 1), 80)
@example((["a", "b" * 48], [["", "words " * 20]], 0), 80)
@given(tables(), st.integers(80, 200))
def test_no_word_is_broken_and_no_line_is_too_long(table: tuple[list[str], list[list[str]], int], width: int) -> None:
    columns, rows, texts = table
    out = io.StringIO()
    screen = Console(file=out, width=width, force_terminal=True, no_color=True, highlight=False)
    drawn = as_table(columns, rows, width, texts=texts)
    screen.print(drawn or as_cards(columns, rows, width), soft_wrap=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    words = [word for row in (columns if drawn else (), *rows) for cell in row for word in cell.split()]
    assert not [word for word in words if not any(word in line for line in lines)]
    assert not [line for line in lines if cell_len(line.rstrip()) > width and len(line.split()) > 1]
