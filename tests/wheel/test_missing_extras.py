"""With the wheel alone, a call that needs an extra fails with one line, the command to install it, and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.wheel.environments import TIMEOUT_S, Environment, settings
from tests.wheel.inside import Call, Plan, Result
from tests.wheel.programs import APP, TRIGGERS, write_app, write_trigger

pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)

REDIS = "redis://127.0.0.1:9/0"
POSTGRES = "postgresql://ada:s3cret-word@127.0.0.1:9/ledger"
FILE = "sqlite:///shop.db"
ON_REDIS = 'Holdfast("redis://127.0.0.1:9/0")'
SECRET = "whsec_" + "A" * 44
CHECK = "trigger check triggers.yaml shop.py:app"
TARGETS = '{"default": {"type": "kafka", "connection": {"bootstrap_servers": "127.0.0.1:9"}}}'


@dataclass(frozen=True)
class MissingExtraCase:
    """A call of the program and the extras that it needs."""

    words: str
    extras: str
    settings: dict[str, str] = field(default_factory=dict)
    app: str = APP
    #: The broker and the runtime of `triggers.yaml`.
    trigger: tuple[str, str] = ("memory", "{task: add}")
    code: str = "MISSING_EXTRA"


CASES = [
    MissingExtraCase("worker shop.py:app", "redis", {"url": REDIS}),
    MissingExtraCase("worker shop.py:app", "redis", app=APP.replace("Holdfast()", ON_REDIS)),
    MissingExtraCase("worker shop.py:app --processes 2", "redis", {"url": REDIS}),
    MissingExtraCase("upkeep", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    MissingExtraCase("jobs list", "redis", {"url": "redis+sentinel://127.0.0.1:9/main"}),
    MissingExtraCase("submit add {}", "redis", {"url": "rediss+cluster://127.0.0.1:9"}),
    MissingExtraCase("doctor", "postgres,redis", {"url": REDIS, "ledger": POSTGRES}),
    MissingExtraCase("submit add {}", "postgres", {"url": FILE, "ledger": POSTGRES}),
    MissingExtraCase("outbox relay", "postgres", {"url": FILE, "outbox_url": POSTGRES}),
    MissingExtraCase("migrate up", "postgres", {"url": REDIS, "ledger": POSTGRES}),
    MissingExtraCase("migrate status --ledger sqlite:///ledger.db", "postgres", {"url": REDIS}),
    MissingExtraCase(f"effects create-table --database {POSTGRES}", "postgres"),
    MissingExtraCase("verify --deployment", "postgres,redis", {"url": REDIS, "ledger": POSTGRES}),
    MissingExtraCase("verify --deployment", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    MissingExtraCase("verify --ledger", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    MissingExtraCase("chaos", "http,postgres,redis"),
    MissingExtraCase("serve shop.py:app --dev", "http"),
    MissingExtraCase("worker shop.py:app", "http", {"webhook_secret": SECRET}),
    MissingExtraCase("worker shop.py:app --processes 2", "http", {"webhook_secret": SECRET}),
    MissingExtraCase("upkeep", "http", {"webhook_secret": SECRET}),
    MissingExtraCase("dev shop.py:app", "tracing", {"tracing": "true"}),
    MissingExtraCase("outbox relay", "kafka", {"outbox_targets": TARGETS}),
    MissingExtraCase("worker shop.py:app", "mongo", app="import holdfast.mongo\n" + APP),
    MissingExtraCase("worker shop.py:app", "http", app="import holdfast.http\n" + APP),
    *(MissingExtraCase(CHECK, broker, trigger=(broker, "{task: add}")) for broker in TRIGGERS),
    # Errors of all triggers are reported together, as one invalid call.
    MissingExtraCase(CHECK, "http", trigger=("memory", "{url: 'http://127.0.0.1:9/agent'}"), code="INVALID_OPTION"),
]


def test_a_command_names_the_extra_that_it_needs(base: Environment, tmp_path: Path) -> None:
    calls = []
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_trigger(folder, *case.trigger)
        write_app(folder, case.app)
        calls.append(Call(case.words.split(), str(folder), dict(settings(**case.settings))))
    results = base.run_plan(Plan(calls=calls), tmp_path).calls
    assert [
        problem for case, result in zip(CASES, results, strict=True) for problem in find_problems(case, result)
    ] == []


def find_problems(case: MissingExtraCase, result: Result) -> Iterator[str]:
    """Yield a problem unless the output is one line with the install command and the exit code is 2."""
    start, end = f"holdfast: {case.code}: ", f"run: pip install 'holdfast[{case.extras}]'\n"
    one_line = result.errors.count("\n") == 1 and not result.out
    text_matches = (
        result.errors.startswith(start) and result.errors.endswith(end) and "s3cret-word" not in result.errors
    )
    if (result.code, one_line, text_matches) != (2, True, True):
        yield f"{case}: exit code {result.code}, {result.out!r}, {result.errors!r}"


def test_in_python_a_missing_extra_is_an_error_with_a_code(base: Environment, tmp_path: Path) -> None:
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
