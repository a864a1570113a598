"""Mistakes that commands report before they start: misspelt variables, unknown queues, a ledger that refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.cli.command import ExitCode
from holdfast.verification.chaos.servers import PostgresServer, free_port
from tests.cli.harness import Shell
from tests.cli.test_operations import OperatorCli, cli  # noqa: F401 - a fixture

SECRET = "hunter2-in-the-wrong-place"
TRIGGERS = "{queue_name: q, consumer_group: g, adapter: {type: memory}, runtime: {task: add}}"


def test_a_misspelt_variable_is_a_warning_on_stderr(shell: Shell) -> None:
    answer = shell.run("queues", "list", "--json", code=ExitCode.USAGE, HOLDFAST_CONCURENCY=SECRET)
    first, last = answer.stderr.splitlines()
    assert "HOLDFAST_CONCURENCY is not a setting" in first
    assert "did you mean HOLDFAST_CONCURRENCY?" in first
    assert "does not exist; submit a job first" in last
    assert SECRET not in answer.stdout + answer.stderr


# Queues ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("pause", "mial"),
        ("pause", "mail", "mial"),
        ("resume", "mial"),
        ("limit", "mial", "5"),
        ("concurrency", "mial", "5"),
        ("alert", "mial", "5"),
        ("tenant", "mial", "acme", "--weight", "2"),
    ],
)
def test_an_unknown_queue_is_an_error_and_changes_nothing(cli: OperatorCli, words: tuple[str, ...]) -> None:  # noqa: F811
    cli.submit("charge", "--arg", "amount=1", "--queue", "mail")
    answer = cli.run("queues", *words, code=ExitCode.USAGE)
    assert "queue 'mial' not found; did you mean 'mail'?" in answer.stderr
    assert "--new" in answer.stderr
    (queue,) = cli.json("queues", "list")
    assert (queue["queue"], queue["paused"]) == ("mail", False)


def test_a_future_queue_can_be_paused(cli: OperatorCli) -> None:  # noqa: F811
    cli.submit("charge", "--arg", "amount=1", "--queue", "mail")
    cli.run("queues", "pause", "later", "--new")
    # The queue is known by its control now.
    assert cli.run("queues", "resume", "later").stdout == "later\topen\n"
    cli.run("queues", "pause", "later", code=ExitCode.USAGE)


# The ledger ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a role, with a wrong password."""
    rules = postgres_server.data / "pg_hba.conf"
    before = rules.read_text()
    postgres_server.execute("CREATE ROLE locked LOGIN PASSWORD 'another'")
    rules.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{before}")
    postgres_server.execute("SELECT pg_reload_conf()")
    yield f"postgresql://locked:{SECRET}@127.0.0.1:{postgres_server.port}/postgres"
    rules.write_text(before)
    postgres_server.execute("SELECT pg_reload_conf()")
    postgres_server.execute("DROP ROLE locked")


@pytest.mark.parametrize(
    "words",
    [
        ("worker", "sample.py:app"),
        ("worker", "sample.py:app", "--processes", "2"),
        ("upkeep",),
        ("dev", "sample.py:app"),
        ("serve", "--port", "0"),
        ("serve", "--port", "0", "--dev"),
        ("trigger", "run", "triggers.yaml"),
        ("outbox", "relay"),
    ],
    ids=" ".join,
)
def test_a_wrong_password_of_the_ledger_ends_the_command(
    shell: Shell, redis_url: str, namespace: str, locked: str, words: tuple[str, ...]
) -> None:
    (shell.folder / "triggers.yaml").write_text(TRIGGERS)
    variables = {"HOLDFAST_URL": redis_url, "HOLDFAST_NAMESPACE": namespace, "HOLDFAST_LEDGER": locked}
    answer = shell.run(*words, code=ExitCode.USAGE, **variables)
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("holdfast: LEDGER_REFUSED: ")
    assert "user or password is wrong; check HOLDFAST_LEDGER" in last
    assert SECRET not in answer.stderr + answer.stdout


def test_a_missing_database_of_the_ledger_ends_the_command(
    shell: Shell, redis_url: str, namespace: str, postgres_server: PostgresServer
) -> None:
    ledger = postgres_server.url_of("nowhere")
    variables = {"HOLDFAST_URL": redis_url, "HOLDFAST_NAMESPACE": namespace, "HOLDFAST_LEDGER": ledger}
    answer = shell.run("worker", "sample.py:app", code=ExitCode.USAGE, **variables)
    assert "the database does not exist" in answer.stderr.splitlines()[-1]


def test_an_unreachable_ledger_is_only_a_warning(shell: Shell, redis_url: str, namespace: str) -> None:
    ledger = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
    variables = {"HOLDFAST_URL": redis_url, "HOLDFAST_NAMESPACE": namespace, "HOLDFAST_LEDGER": ledger}
    with shell.start("worker", "sample.py:app", **variables) as process:
        process.wait_log("continuing without it")
        process.wait_log("started on redis:")
        assert process.end() == 0


def test_a_wrong_password_of_the_outbox_ends_the_relay(
    shell: Shell, redis_url: str, namespace: str, locked: str
) -> None:
    variables = {"HOLDFAST_URL": redis_url, "HOLDFAST_NAMESPACE": namespace, "HOLDFAST_OUTBOX_URL": locked}
    answer = shell.run("outbox", "relay", code=ExitCode.USAGE, **variables)
    assert "LEDGER_REFUSED" in answer.stderr.splitlines()[-1]
