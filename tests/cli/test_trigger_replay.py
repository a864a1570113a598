"""`holdfast trigger replay`, from the command line: count, replay, audit entries, and a kill in the middle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from redis import Redis

from holdfast.cli.command import ExitCode
from tests.cli.harness import Shell, eventually
from tests.cli.test_operations import OperatorCli, cli  # noqa: F401 - a fixture
from tests.cli.test_triggers import count_jobs, streams, write

#: `holdfast …`, but killed after a message is published and before its dead letter is acknowledged.
KILLED_BEFORE_ACK = """
import os, signal
from holdfast.brokers.redis_streams import RedisAdapter
from holdfast.cli.main import main

ack, calls = RedisAdapter.ack, []

async def killed(self, message):
    calls.append(message)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    await ack(self, message)

RedisAdapter.ack = killed
main()
"""


def add_dead_letters(redis_url: str, queue: str, *numbers: int) -> None:
    with Redis.from_url(redis_url) as redis:
        for number in numbers:
            dead = {"x-dead-reason": "no", "x-dead-source": queue, "x-dead-message-id": f"m-{number}"}
            redis.xadd(f"{queue}.dlq", {"body": str(number), **dead})


def read_replayed(redis_url: str, queue: str) -> list[tuple[int, str]]:
    with Redis.from_url(redis_url) as redis:
        entries: Any = redis.xrange(queue)
        return [(int(fields[b"body"]), fields[b"x-replay-of"].decode()) for _, fields in entries]


def pending(redis: Any, queue: str) -> list[Any]:
    rows: list[Any] = redis.xpending_range(f"{queue}.dlq", f"shop.{queue}.replay", "-", "+", 100)
    return rows


def test_replay_counts_confirms_and_writes_audit_entries(cli: OperatorCli, redis_url: str, namespace: str) -> None:  # noqa: F811
    queue = f"{namespace}:orders"
    file = write(cli.folder, streams(redis_url, queue_name=queue, name="orders"))
    add_dead_letters(redis_url, queue, 1, 2, 3)
    cli.act_as("ada")
    words = ("trigger", "replay", file, "orders")
    assert cli.run(*words, "--all", "--dry-run").stdout == "3\twould be changed\n"
    cli.run(*words, "--limit", "2", code=ExitCode.USAGE, stdin="")
    assert read_replayed(redis_url, queue) == []
    report = cli.json(*words, "--limit", "2", "--yes", "--reason", "the parser is fixed")
    assert (report["done"], [result["id"] for result in report["results"]]) == (2, ["m-1", "m-2"])
    assert cli.run(*words, "--all", stdin="y\n").stdout.splitlines()[1] == "m-3\tdone\t\t"
    assert read_replayed(redis_url, queue) == [(1, "m-1"), (2, "m-2"), (3, "m-3")]
    entries = [entry for entry in cli.json("log", "--target", "trigger") if entry["type"] == "operator.trigger_replay"]
    assert [(entry["actor"], entry["target_id"], entry["reason"], entry["after"]["status"]) for entry in entries] == [
        *(("ada", "orders", None, status) for status in ("ended", "started")),
        *(("ada", "orders", "the parser is fixed", status) for status in ("ended", "started")),
    ]
    assert [entry["after"].get("done") for entry in entries] == [1, None, 2, None]


def test_wrong_arguments_of_replay_are_reported(cli: OperatorCli, redis_url: str) -> None:  # noqa: F811
    file = write(cli.folder, streams(redis_url))
    assert "pass either --all or --limit N" in cli.run("trigger", "replay", file, "orders", code=ExitCode.USAGE).stderr
    both = cli.run("trigger", "replay", file, "orders", "--all", "--limit", "1", code=ExitCode.USAGE)
    assert "pass either --all or --limit N" in both.stderr
    unknown = cli.run("trigger", "replay", file, "bills", "--all", code=ExitCode.USAGE)
    assert "trigger 'bills' not found" in unknown.stderr
    cli.act_as("vic", "viewer")
    assert "FORBIDDEN" in cli.run("trigger", "replay", file, "orders", "--all", "-y", code=ExitCode.REFUSED).stderr


def test_a_replay_that_is_killed_loses_nothing(shell: Shell, redis_url: str, namespace: str) -> None:
    queue = f"{namespace}:orders"
    connection = {"url": redis_url, "visibility_timeout_s": 1}
    file = write(
        shell.folder,
        streams(redis_url, queue_name=queue, name="orders") | {"adapter": {"type": "redis", "connection": connection}},
    )
    add_dead_letters(redis_url, queue, *range(10))
    words = ("trigger", "replay", file, "orders", "--all", "--yes", "--rate", "1000/s")
    assert count_jobs(shell) == 0
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE_ACK, *words],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    some = read_replayed(redis_url, queue)
    assert 4 <= len(some) <= 10
    with Redis.from_url(redis_url) as redis:
        # What it had in flight is free after the visibility timeout.
        eventually(
            lambda: all(row["time_since_delivered"] > 1_000 for row in pending(redis, queue)), what="the timeout"
        )
        shell.run(*words)
        assert pending(redis, queue) == []
    both = read_replayed(redis_url, queue)
    assert len(both) > len(some)
    assert {number for number, _ in both} == set(range(10))
    assert all(original == f"m-{number}" for number, original in both)
