"""`holdfast migrate`, and what workers and `doctor` report about a ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdfast.cli.program import program
from holdfast.engine.sqlite.schema import SCHEMA_VERSION
from holdfast.schema.columns import HEAD
from holdfast.settings import Settings
from holdfast.verification.chaos.servers import free_port
from tests.cli.harness import Shell


def call(*words: str, code: int = 0) -> Result:
    """Call the program in this process, which is much quicker than a shell."""
    answer = CliRunner().invoke(program("migrate"), ["migrate", *words])
    assert answer.exit_code == code, answer.output
    return answer


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HOLDFAST_{name.upper()}", raising=False)


def test_up_status_and_down() -> None:
    ledger = ("--ledger", "sqlite:///ledger.db")
    found = json.loads(call("status", *ledger, "--json", code=1).stdout)
    titles = {
        "0001": "The ledger's tables",
        "0002": "Columns are named after what they hold",
        "0003": "Tasks that workers have announced",
        HEAD: "The epoch of the engine in which each feed is read",
    }
    assert found["pending"] == [{"version": version, "title": title} for version, title in titles.items()]
    done = json.loads(call("up", *ledger, "--json").stdout)
    assert (done["before"], done["after"]) == (None, HEAD)
    assert "nothing to do" in call("up", *ledger).stderr
    assert json.loads(call("status", *ledger, "--json").stdout)["ok"] is True
    assert "--yes" in call("down", *ledger, code=2).stderr
    assert json.loads(call("status", *ledger, "--json").stdout)["version"] == HEAD
    assert "dropped the ledger's tables" in call("down", "--yes", *ledger).stderr
    assert json.loads(call("status", *ledger, "--json", code=1).stdout)["version"] is None


@pytest.mark.postgres
def test_postgres_is_migrated_by_variable(empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LEDGER", empty_postgres_url)
    assert "has no holdfast tables" in call("status", code=1).stderr
    assert f"from nothing to {HEAD}" in call("up").stderr
    assert "as this release needs" in call("status").stderr


def test_an_embedded_ledger_is_migrated_in_the_engines_file() -> None:
    assert json.loads(call("up", "--json").stdout)["after"] == str(SCHEMA_VERSION)
    assert json.loads(call("status", "--json").stdout)["ok"] is True
    assert "cannot be migrated down" in call("down", code=2).stderr


def test_without_a_ledger_the_error_names_the_setting() -> None:
    assert "HOLDFAST_LEDGER" in call("up", "--url", "redis://127.0.0.1:1/0", code=2).stderr


def test_an_unreachable_database_is_exit_code_3() -> None:
    url = f"postgresql://me:secret@127.0.0.1:{free_port()}/db"
    done = call("up", "--debug", "--ledger", url, code=3)
    assert "nothing listens there" in done.stderr
    assert "secret" not in done.output


@pytest.mark.postgres
@pytest.mark.redis
def test_a_worker_on_an_old_ledger_ends_and_says_what_to_run(
    shell: Shell, redis_url: str, empty_postgres_url: str, namespace: str
) -> None:
    variables = {"HOLDFAST_URL": redis_url, "HOLDFAST_NAMESPACE": namespace, "HOLDFAST_LEDGER": empty_postgres_url}
    for words in (("worker", "sample:app"), ("upkeep",)):
        errors = shell.run(*words, code=2, **variables).stderr
        assert "SCHEMA_MISMATCH" in errors
        assert "run `holdfast migrate up`" in errors


@pytest.mark.postgres
@pytest.mark.redis
def test_doctor_checks_the_ledger(shell: Shell, redis_url: str, postgres_url: str, namespace: str) -> None:
    variables = {"HOLDFAST_URL": redis_url, "HOLDFAST_NAMESPACE": namespace}
    shell.run("submit", "--force", "add", '{"a": 1}', code=0, HOLDFAST_LEDGER=postgres_url, **variables)
    output = shell.run("doctor", code=None, HOLDFAST_LEDGER=postgres_url, **variables).stdout
    assert f"schema {HEAD}" in output
    assert "connections are left" in output
    # The tests' own server runs without fsync.
    assert "a crash loses data" in output
    assert "ledger of default" in output
    down = f"postgresql://me:secret@127.0.0.1:{free_port()}/db"
    done = shell.run("doctor", code=1, **variables, HOLDFAST_LEDGER=down)
    assert "nothing listens there" in done.stdout + done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert "none: finished jobs expire" in shell.run("doctor", code=None, **variables).stdout


def test_doctor_reports_an_embedded_ledger(shell: Shell) -> None:
    shell.run("submit", "--force", "add", '{"a": 1}')
    assert "embedded in" in shell.run("doctor").stdout
