"""With the wheel alone: what needs an extra says so in one line, with the command that installs it, and exit code 2."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.wheel.environments import PATIENCE_S, Environment, settings
from tests.wheel.programs import APP, TRIGGERS, write_app, write_trigger

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)

REDIS = "redis://127.0.0.1:9/0"
POSTGRES = "postgresql://ada:s3cret-word@127.0.0.1:9/ledger"
FILE = "sqlite:///shop.db"
ON_REDIS = 'Holdfast("redis://127.0.0.1:9/0")'
SECRET = "whsec_" + "A" * 44
TARGETS = '{"default": {"type": "kafka", "connection": {"bootstrap_servers": "127.0.0.1:9"}}}'


@dataclass(frozen=True)
class Call:
    """A call of the program, and the extras that it lacks."""

    words: str
    extras: str
    settings: dict[str, str] = field(default_factory=dict)
    app: str = APP

    def __str__(self) -> str:
        return f"{self.words} {' '.join(self.settings)}"


CALLS = [
    Call("worker shop.py:app", "redis", {"url": REDIS}),
    Call("worker shop.py:app", "redis", app=APP.replace("Holdfast()", ON_REDIS)),
    Call("worker shop.py:app --processes 2", "redis", {"url": REDIS}),
    Call("upkeep", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    Call("jobs list", "redis", {"url": "redis+sentinel://127.0.0.1:9/main"}),
    Call("submit add {}", "redis", {"url": "rediss+cluster://127.0.0.1:9"}),
    Call("doctor", "postgres,redis", {"url": REDIS, "ledger": POSTGRES}),
    Call("submit add {}", "postgres", {"url": FILE, "ledger": POSTGRES}),
    Call("outbox relay", "postgres", {"url": FILE, "outbox_url": POSTGRES}),
    Call("migrate up", "postgres", {"url": REDIS, "ledger": POSTGRES}),
    Call("migrate status --ledger sqlite:///ledger.db", "postgres", {"url": REDIS}),
    Call(f"effects create-table --database {POSTGRES}", "postgres"),
    Call("verify --deployment", "postgres,redis", {"url": REDIS, "ledger": POSTGRES}),
    Call("verify --deployment", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    Call("verify --ledger", "redis", {"url": REDIS, "ledger": "sqlite:///ledger.db"}),
    Call("chaos", "http,postgres,redis"),
    Call("serve shop.py:app --dev", "http"),
    Call("worker shop.py:app", "http", {"webhook_secret": SECRET}),
    Call("worker shop.py:app --processes 2", "http", {"webhook_secret": SECRET}),
    Call("upkeep", "http", {"webhook_secret": SECRET}),
    Call("dev shop.py:app", "tracing", {"tracing": "true"}),
    Call("outbox relay", "kafka", {"outbox_targets": TARGETS}),
    Call("worker shop.py:app", "mongo", app="import holdfast.mongo\n" + APP),
    Call("worker shop.py:app", "http", app="import holdfast.http\n" + APP),
]


def check(base: Environment, folder: Path, call: Call, code: str = "MISSING_EXTRA") -> None:
    done = base.run("-m", "holdfast", *call.words.split(), cwd=folder, **settings(**call.settings))
    assert done.returncode == 2, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stdout + done.stderr
    assert done.stderr.startswith(f"holdfast: {code}: ")
    assert done.stderr.endswith(f"run: pip install 'holdfast[{call.extras}]'\n")
    assert "s3cret-word" not in done.stderr


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_command_names_the_extra_that_it_needs(call: Call, base: Environment, tmp_path: Path) -> None:
    write_app(tmp_path, call.app)
    check(base, tmp_path, call)


@pytest.mark.parametrize("broker", TRIGGERS)
def test_a_trigger_names_the_extra_of_its_broker(broker: str, base: Environment, tmp_path: Path) -> None:
    write_trigger(tmp_path, broker)
    check(base, tmp_path, Call("trigger check triggers.yaml shop.py:app", broker))


def test_a_runtime_over_http_names_http(base: Environment, tmp_path: Path) -> None:
    write_trigger(tmp_path, "memory", runtime="{url: 'http://127.0.0.1:9/agent'}")
    # Mistakes of all triggers are reported together, as one wrong call.
    check(base, tmp_path, Call("trigger run triggers.yaml shop.py:app", "http"), "INVALID_OPTION")


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
