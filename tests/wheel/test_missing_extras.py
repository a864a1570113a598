"""With the wheel alone: what needs an extra says so in one line, with the command that installs it, and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.wheel.environments import PATIENCE_S, Environment, settings
from tests.wheel.inside import Call, Plan, Result
from tests.wheel.programs import APP, TRIGGERS, write_app, write_trigger

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)

REDIS = "redis://127.0.0.1:9/0"
POSTGRES = "postgresql://ada:s3cret-word@127.0.0.1:9/ledger"
FILE = "sqlite:///shop.db"
ON_REDIS = 'Holdfast("redis://127.0.0.1:9/0")'
SECRET = "whsec_" + "A" * 44
CHECK = "trigger check triggers.yaml shop.py:app"
TARGETS = '{"default": {"type": "kafka", "connection": {"bootstrap_servers": "127.0.0.1:9"}}}'


@dataclass(frozen=True)
class Lack:
    """A call of the program, and the extras that it lacks."""

    words: str
    extras: str
    settings: dict[str, str] = field(default_factory=dict)
    app: str = APP
    #: The broker and the runtime of `triggers.yaml`.
    trigger: tuple[str, str] = ("memory", "{task: add}")
    code: str = "MISSING_EXTRA"


LACKS = [
    Lack("worker shop.py:app", "redis", {"url": REDIS}),
    Lack("worker shop.py:app", "redis", app=APP.replace("Holdfast()", ON_REDIS)),
    Lack("worker shop.py:app --processes 2", "redis", {"url": REDIS}),
    Lack("upkeep", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    Lack("jobs list", "redis", {"url": "redis+sentinel://127.0.0.1:9/main"}),
    Lack("submit add {}", "redis", {"url": "rediss+cluster://127.0.0.1:9"}),
    Lack("doctor", "postgres,redis", {"url": REDIS, "ledger": POSTGRES}),
    Lack("submit add {}", "postgres", {"url": FILE, "ledger": POSTGRES}),
    Lack("outbox relay", "postgres", {"url": FILE, "outbox_url": POSTGRES}),
    Lack("migrate up", "postgres", {"url": REDIS, "ledger": POSTGRES}),
    Lack("migrate status --ledger sqlite:///ledger.db", "postgres", {"url": REDIS}),
    Lack(f"effects create-table --database {POSTGRES}", "postgres"),
    Lack("verify --deployment", "postgres,redis", {"url": REDIS, "ledger": POSTGRES}),
    Lack("verify --deployment", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    Lack("verify --ledger", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    Lack("chaos", "http,postgres,redis"),
    Lack("serve shop.py:app --dev", "http"),
    Lack("worker shop.py:app", "http", {"webhook_secret": SECRET}),
    Lack("worker shop.py:app --processes 2", "http", {"webhook_secret": SECRET}),
    Lack("upkeep", "http", {"webhook_secret": SECRET}),
    Lack("dev shop.py:app", "tracing", {"tracing": "true"}),
    Lack("outbox relay", "kafka", {"outbox_targets": TARGETS}),
    Lack("worker shop.py:app", "mongo", app="import holdfast.mongo\n" + APP),
    Lack("worker shop.py:app", "http", app="import holdfast.http\n" + APP),
    *(Lack(CHECK, broker, trigger=(broker, "{task: add}")) for broker in TRIGGERS),
    # Mistakes of all triggers are reported together, as one wrong call.
    Lack(CHECK, "http", trigger=("memory", "{url: 'http://127.0.0.1:9/agent'}"), code="INVALID_OPTION"),
]


def test_a_command_names_the_extra_that_it_needs(base: Environment, tmp_path: Path) -> None:
    calls = []
    for number, lack in enumerate(LACKS):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_trigger(folder, *lack.trigger)
        write_app(folder, lack.app)
        calls.append(Call(lack.words.split(), str(folder), dict(settings(**lack.settings))))
    results = base.carry_out(Plan(calls=calls), tmp_path).calls
    assert [problem for lack, result in zip(LACKS, results, strict=True) for problem in problems(lack, result)] == []


def problems(lack: Lack, result: Result) -> Iterator[str]:
    """What is wrong with the answer: it must be one line, with the command, and exit code 2."""
    begins, ends = f"holdfast: {lack.code}: ", f"run: pip install 'holdfast[{lack.extras}]'\n"
    one_line = result.errors.count("\n") == 1 and not result.out
    fits = result.errors.startswith(begins) and result.errors.endswith(ends) and "s3cret-word" not in result.errors
    if (result.code, one_line, fits) != (2, True, True):
        yield f"{lack}: exit code {result.code}, {result.out!r}, {result.errors!r}"


def test_in_python_it_is_an_error_with_a_code(base: Environment, tmp_path: Path) -> None:
    script = f"""
from holdfast import Holdfast, errors

for stores in ({{"url": "{REDIS}"}}, {{"url": "{FILE}", "ledger": "{POSTGRES}"}}):
    try:
        Holdfast(**stores)
    except errors.MissingExtra as exc:
        print(isinstance(exc, errors.UsageError), isinstance(exc, ImportError), exc.code, *exc.extras, exc.install)

app = Holdfast("{FILE}")
try:
    app.configure(url="{REDIS}")
except errors.MissingExtra:
    print(app.settings.url)
"""
    done = base.run("-c", script, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "True True MISSING_EXTRA redis pip install 'holdfast[redis]'",
        "True True MISSING_EXTRA postgres pip install 'holdfast[postgres]'",
        FILE,
    ], done.stderr
