"""`holdfast outbox`: lists, retries and permissions, and the relay as a process."""

from __future__ import annotations

import json
import re
import sqlite3
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.command import ExitCode
from holdfast.outbox.writer import NewOutboxEvent, Outbox
from holdfast.settings import Settings
from tests.cli.harness import Shell, eventually
from tests.cli.test_operations import OperatorCli


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperatorCli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_URL", f"sqlite:///{tmp_path}/jobs.db")
    cli = OperatorCli(tmp_path, monkeypatch)
    # Creates the database file.
    cli.run("submit", "--force", "add", '{"a": 1}')
    return cli


def write(path: Path, *events: NewOutboxEvent) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        ids = Outbox(Settings(url="sqlite://")).add_many_sync(connection, events)
        connection.commit()
        return ids


def mark_dead(path: Path, *ids: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for event_id in ids:
            connection.execute(
                "UPDATE outbox_events SET status = 'DEAD', attempt_count = 10, last_error = 'no broker' WHERE id = ?",
                [event_id],
            )
        connection.commit()


def write_events(cli: OperatorCli) -> tuple[str, str, str]:
    """Write three events: dead of acme, dead of globex, new."""
    path = cli.folder / "jobs.db"
    one, two, three = write(
        path,
        NewOutboxEvent(topic="orders", key="o-1", payload={"n": 1}, tenant_id="acme", headers={"x-event-name": "paid"}),
        NewOutboxEvent(topic="orders", key="o-2", payload={"n": 2}, tenant_id="globex", destination="other"),
        NewOutboxEvent(topic="mails", payload=b"raw", tenant_id="acme"),
    )
    mark_dead(path, one, two)
    return one, two, three


def ids(events: list[dict[str, Any]]) -> list[str]:
    return [event["id"] for event in events]


def test_events_are_listed(cli: OperatorCli) -> None:
    assert cli.run("outbox", "list").stdout == ""
    one, two, three = write_events(cli)
    assert ids(cli.json("outbox", "list")) == [three, two, one]
    assert ids(cli.json("outbox", "list", "--status", "dead")) == [two, one]
    assert ids(cli.json("outbox", "list", "--destination", "other")) == [two]
    assert ids(cli.json("outbox", "list", "--topic", "mails")) == [three]
    assert ids(cli.json("outbox", "list", "--key", "o-1")) == [one]
    (first,) = cli.json("outbox", "list", "--key", "o-1")
    assert first["payload"] == {"n": 1}
    assert (first["status"], first["attempt_count"], first["last_error"]) == ("DEAD", 10, "no broker")
    assert first["headers"] == {"x-event-name": "paid"}
    answer = cli.run("outbox", "list", "--limit", "2")
    header, *rows = answer.stdout.splitlines()
    assert header.split("\t")[:3] == ["event", "destination", "topic"]
    assert [row.split("\t")[0] for row in rows] == [three, two]
    (after,) = re.findall(r"--after (\d+)", answer.stderr)
    assert ids(cli.json("outbox", "list", "--after", after)) == [one]


def test_retry_by_id_and_all(cli: OperatorCli) -> None:
    one, two, three = write_events(cli)
    assert cli.json("outbox", "retry", one, "--reason", "it is back") == {"revived": 1}
    assert ids(cli.json("outbox", "list", "--status", "NEW")) == [three, one]
    # Neither of these can be retried.
    answer = cli.run("outbox", "retry", three, "unknown", code=ExitCode.USAGE)
    assert "2 of the ids" in answer.stderr
    assert cli.json("outbox", "retry", "--all-dead", "--destination", "default") == {"revived": 0}
    assert cli.json("outbox", "retry", "--all-dead", "--reason", "all of them") == {"revived": 1}
    assert ids(cli.json("outbox", "list", "--status", "NEW")) == [three, two, one]
    log = cli.json("log", "--type", "operator.outbox_retry")
    assert [(entry["reason"], entry["tenant_id"]) for entry in log] == [
        ("all of them", "globex"),
        ("it is back", "acme"),
    ]


@pytest.mark.parametrize("words", [[], ["x", "--all-dead"], ["x", "--destination", "d"]])
def test_retry_needs_a_selection(cli: OperatorCli, words: list[str]) -> None:
    cli.run("outbox", "retry", *words, code=ExitCode.USAGE)


def test_a_token_limits_the_events_that_are_listed_and_retried(cli: OperatorCli) -> None:
    one, two, three = write_events(cli)
    cli.act_as("vic", "viewer", "acme")
    assert ids(cli.json("outbox", "list")) == [three, one]
    cli.run("outbox", "retry", one, code=ExitCode.REFUSED)
    cli.act_as(None)
    cli.act_as("olga", "operator", "acme")
    cli.run("outbox", "retry", two, code=ExitCode.USAGE)
    assert cli.json("outbox", "retry", "--all-dead") == {"revived": 1}
    cli.act_as(None)
    assert ids(cli.json("outbox", "list", "--status", "DEAD")) == [two]
    log = cli.json("log", "--type", "operator.outbox_retry")
    assert [(entry["actor"], entry["tenant_id"]) for entry in log] == [("olga", "acme")]


def test_without_an_outbox_the_error_names_the_setting(
    cli: OperatorCli, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    for words in (["list"], ["retry", "--all-dead"], ["relay"]):
        answer = cli.run("outbox", *words, code=ExitCode.USAGE)
        assert "HOLDFAST_OUTBOX_URL" in answer.stderr


def file_of(shell: Shell) -> Path:
    return Path(shell.environment["HOLDFAST_URL"].removeprefix("sqlite:///"))


def test_the_relay_as_a_process(shell: Shell, redis_url: str, namespace: str) -> None:
    shell.run("submit", "--force", "add", '{"a": 1}')
    path = file_of(shell)
    targets = {"default": {"type": "redis", "connection": {"url": redis_url}}}
    stream = f"{namespace}:orders"
    write(path, *[NewOutboxEvent(topic=stream, key="k", payload=number) for number in range(3)])
    environment = {"HOLDFAST_OUTBOX_TARGETS": json.dumps(targets)}
    with shell.start("outbox", "relay", "--metrics-port", "0", **environment) as relay:
        relay.wait_log("destinations default, holdfast")

        def all_sent() -> bool:
            return [event["status"] for event in shell.json("outbox", "list")] == ["SENT"] * 3

        eventually(all_sent, what="all events are sent")
        (port,) = re.findall(r"127\.0\.0\.1:(\d+)/metrics", relay.log.read_text())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        assert "\noutbox_backlog 0.0\n" in text
        assert '\noutbox_publish_total{result="success"} 3.0\n' in text
        assert '\noutbox_publish_total{result="dead"} 0.0\n' in text
        assert '\noutbox_publish_seconds_count{result="success"} 3.0\n' in text
        assert "\noutbox_publish_delay_seconds_count 3.0\n" in text
        assert relay.end() == 0
        assert relay.logged("relay ended")


def test_the_relay_uses_the_targets_of_an_app(shell: Shell, redis_url: str, namespace: str) -> None:
    shell.run("submit", "--force", "add", '{"a": 1}')
    write(file_of(shell), NewOutboxEvent(topic=f"{namespace}:orders", payload=1))
    targets = {"default": {"type": "redis", "connection": {"url": redis_url}}}
    (file_of(shell).parent / "targets.py").write_text(
        f"from holdfast import Holdfast\n\napp = Holdfast(outbox_targets={targets!r})\n"
    )
    with shell.start("outbox", "relay", "targets.py:app") as relay:
        relay.wait_log("destinations default, holdfast")
        eventually(lambda: [event["status"] for event in shell.json("outbox", "list")] == ["SENT"], what="it is sent")
        assert relay.end() == 0


@pytest.mark.parametrize("words", [("upkeep",), ("dev", "sample.py:app"), ("worker", "sample.py:app")])
def test_other_processes_relay_too(shell: Shell, redis_url: str, namespace: str, words: Any) -> None:
    shell.run("submit", "--force", "add", '{"a": 1}')
    targets = {"default": {"type": "redis", "connection": {"url": redis_url}}}
    write(file_of(shell), NewOutboxEvent(topic=f"{namespace}:orders", payload=1))
    environment = {"HOLDFAST_OUTBOX_TARGETS": json.dumps(targets), "HOLDFAST_OUTBOX_RELAY": str(words[0] == "worker")}
    with shell.start(*words, **environment) as process:
        eventually(lambda: [event["status"] for event in shell.json("outbox", "list")] == ["SENT"], what="it is sent")
        assert process.end() == 0
